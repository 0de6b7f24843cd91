"""What differs from its page: how far it works, and the words of the document that tell users."""

from dataclasses import dataclass

TORCHRL, SCALING = "docs/coming_from_torchrl.md", "docs/scaling.md"


@dataclass(frozen=True)
class Differs:
    """`works` is part or no; the words stand in the document."""

    words: str
    works: str = "part"
    document: str = TORCHRL


IDS_WIN = Differs("whatever the history or text beside them says")
TENSOR_KEYS = Differs("`log_prob_keys` and `dist_sample_keys` are the keys of tensors")
PAID_ONCE = Differs("A reward per row is paid once, at the last kept token")
SETTINGS = Differs("FSDP and DeepSpeed settings are refused in one line", "no", SCALING)
SPARSE = "mask as list of valid indices with sparse_mask=True"
GENERATOR = "RetrieveKL gen_model='from_collector' scores the generator"
NO_SPECS = "container.empty_cache() and self.empty_cache()"
OLD_EXAMPLE = "KLRewardTransform example: KLRewardTransform(gen_model, ref_model)"
TWO_PARTS = "RetrieveKL is Compose(RetrieveLogProb, RetrieveLogProb, KLComputation)"
GEN_KEY = "KLComputation prose: gen_log_probs_full_key is ('gen_log_probs', 'full')"
DIFFERS = {
    "input_mode='history' reads the history: a second turn in place": IDS_WIN,
    "input_mode='history' reads the history: scoring another one": IDS_WIN,
    SPARSE: Differs("There is no `sparse_mask`.", "no"),
    "Tokens.default_spec: float entries": Differs("specs are int64, bool and float32"),
    "arg device: a model object elsewhere is moved": Differs("and moves no model object"),
    "arg tokenizer_kwargs: for histories": Differs("of a wrapper are for texts"),
    "forward is TensorDictSequential's: more keyword arguments": Differs(
        "`forward` takes no generation arguments (use `get_new_version`)"
    ),
    "log_prob_keys is ['log_probs']": TENSOR_KEYS,
    "dist_sample_keys is ['tokens_response']": TENSOR_KEYS,
    "RetrieveLogProb padding_side: pads the masked rows": Differs(
        "`padding_side` of the KL transforms acts on ragged rows of other models"
    ),
    "RetrieveLogProb.transform_observation_spec adds kl_penalty": Differs(
        '`RetrieveLogProb` declares "kl_penalty" instead of its key'
    ),
    GEN_KEY: Differs("Examples and prose of the KL transforms name arguments and defaults"),
    "KLComputation example, as printed": Differs("| `gen_log_probs_key=`, `ref_log_probs_key=`,"),
    "KLComputation: a reward [B, 1] is repeated over the tokens": PAID_ONCE,
    "KLRewardTransform: a reward per row is repeated over the tokens": PAID_ONCE,
    TWO_PARTS: Differs("`RetrieveKL` holds the reference's transform and `KLComputation`"),
    GENERATOR: Differs("KL transforms use the generation log-probs that are there"),
    NO_SPECS: Differs("no spec is cached, so there is no `empty_cache`", "no"),
    OLD_EXAMPLE: Differs("| `KLRewardTransform` | `KLRewardTransform(gen_model, ref_model)` |"),
    "KLRewardTransform: no reward counts as 0": Differs("no reward raises (read)"),
    "KLRewardTransform.action_key follows the env's input_mode": Differs(
        "its `action_key` is ('tokens', 'full') in every mode"
    ),
    "Ray: attributes of the shared transform": Differs("stay in its actor."),
    "example: torchrl.data.rlhf, CarperAI/openai_summarize_tldr": Differs(
        "| `RolloutFromModel` | `torchrl.data.rlhf.*`, downloads |"
    ),
    "prompt_rindex: the right index of the prompt": Differs(
        "`prompt_rindex` is the place of the prompt's last token, which is kept"
    ),
    "Accelerate: gather": Differs("gathered by torch.distributed", document=SCALING),
    "Accelerate: launching": Differs("The three commands do the same", document=SCALING),
    "Accelerate: data, scheduler, checkpoint, trackers": Differs(
        "rank 0 writes ordinary files", document=SCALING
    ),
    "Accelerate: FSDP and DeepSpeed shard the model": SETTINGS,
    "... across GPUs": Differs("several ranks on GPUs", document=SCALING),
    "python train.py experiment=grpo_qwen": Differs(
        "The qwen experiments at full length", document=SCALING
    ),
    "W&B": Differs("the run goes offline", document="docs/tracking.md"),
}
