"""What differs from its page: how far it works, in which way, and the document that tells users."""

from dataclasses import dataclass

TORCHRL, SCALING = "docs/coming_from_torchrl.md", "docs/scaling.md"


@dataclass(frozen=True)
class Differs:
    """`works` is part or no; the words stand in the document."""

    works: str
    evidence: str
    document: str
    words: str


IDS_WIN = Differs(
    "part",
    "ids that stand beside it are read; prefer_tokens=False reads the history",
    TORCHRL,
    "whatever the history or text beside them says",
)
DIFFERS = {
    "input_mode='history' reads the history: a second turn in place": IDS_WIN,
    "input_mode='history' reads the history: scoring another one": IDS_WIN,
    "mask as list of valid indices with sparse_mask=True": Differs(
        "no", "TypeError; indices= does it", TORCHRL, "There is no `sparse_mask`."
    ),
    "Tokens.default_spec: float entries": Differs(
        "part", "int64 as the ids are", TORCHRL, "specs are int64, bool and float32, as the data."
    ),
    "arg device: a model object elsewhere is moved": Differs(
        "part",
        "ValueError that asks to move it",
        TORCHRL,
        "`device` loads a named model there and moves no model object",
    ),
    "arg tokenizer_kwargs: for histories": Differs(
        "part",
        "ValueError for all but padding: ids come from the template",
        TORCHRL,
        "`tokenizer_kwargs` of a wrapper are for texts",
    ),
    "forward is TensorDictSequential's: more keyword arguments": Differs(
        "part",
        "TypeError",
        TORCHRL,
        "`forward` takes no generation arguments (use `get_new_version`)",
    ),
    "log_prob_keys is ['log_probs']": Differs(
        "part",
        "[('log_probs', 'full')]",
        TORCHRL,
        "`log_prob_keys` and `dist_sample_keys` are the keys of tensors that are written",
    ),
    "dist_sample_keys is ['tokens_response']": Differs(
        "part",
        "[('tokens', 'response')]",
        TORCHRL,
        "`log_prob_keys` and `dist_sample_keys` are the keys of tensors that are written",
    ),
    "RetrieveLogProb padding_side: pads the masked rows": Differs(
        "part",
        "leash's wrappers pad themselves",
        TORCHRL,
        "`padding_side` of the KL transforms acts on ragged rows of other models",
    ),
    "RetrieveLogProb.transform_observation_spec adds kl_penalty": Differs(
        "part",
        "it declares the key that it writes",
        TORCHRL,
        '`RetrieveLogProb` declares "kl_penalty" instead of its key',
    ),
    "KLComputation prose: gen_log_probs_full_key is ('gen_log_probs', 'full')": Differs(
        "part",
        "the signature's default, ('log_probs', 'full')",
        TORCHRL,
        "Examples and prose of the KL transforms name arguments and defaults",
    ),
    "KLComputation example, as printed": Differs(
        "part",
        "runs by the names of the signature",
        TORCHRL,
        "| `KLComputation` | `gen_log_probs_key=`, `ref_log_probs_key=`, `coef=` |",
    ),
    "KLComputation: a reward [B, 1] is repeated over the tokens": Differs(
        "part",
        "paid at the last kept token, its sum stays",
        TORCHRL,
        "A reward per row is paid once, at the last kept token",
    ),
    "RetrieveKL is Compose(RetrieveLogProb, RetrieveLogProb, KLComputation)": Differs(
        "part",
        "len 2; the generator's is .generator",
        TORCHRL,
        "`RetrieveKL` holds the reference's transform and `KLComputation`",
    ),
    "RetrieveKL gen_model='from_collector' scores the generator": Differs(
        "part",
        "only where the td has no generation log-probs",
        TORCHRL,
        "KL transforms use the generation log-probs that are there",
    ),
    "container.empty_cache() and self.empty_cache()": Differs(
        "no", "specs are not cached", TORCHRL, "no spec is cached, so there is no `empty_cache`"
    ),
    "KLRewardTransform example: KLRewardTransform(gen_model, ref_model)": Differs(
        "part",
        "TypeError that names RetrieveKL",
        TORCHRL,
        "| `KLRewardTransform` | `KLRewardTransform(gen_model, ref_model)` |",
    ),
    "KLRewardTransform: no reward counts as 0": Differs(
        "part", "it is skipped", TORCHRL, "`KLRewardTransform`: no reward raises (read)"
    ),
    "KLRewardTransform: a reward per row is repeated over the tokens": Differs(
        "part",
        "paid at the last kept token, its sum stays",
        TORCHRL,
        "A reward per row is paid once, at the last kept token",
    ),
    "KLRewardTransform.action_key follows the env's input_mode": Differs(
        "part",
        "('tokens', 'full') in every mode",
        TORCHRL,
        "its `action_key` is ('tokens', 'full') in every mode",
    ),
    "Ray: attributes of the shared transform": Differs(
        "part",
        "not delegated",
        TORCHRL,
        "The attributes of a transform on Ray stay in its actor.",
    ),
    "example: torchrl.data.rlhf, CarperAI/openai_summarize_tldr": Differs(
        "part",
        "from trainer import ...; a local file in place of the download",
        TORCHRL,
        "| `RolloutFromModel` | `torchrl.data.rlhf.*`, downloads |",
    ),
    "prompt_rindex: the right index of the prompt": Differs(
        "part",
        "the place of its last token, which is kept",
        TORCHRL,
        "`prompt_rindex` is the place of the prompt's last token, which is kept",
    ),
    "Accelerate: gather": Differs(
        "part",
        "torch.distributed.all_gather_object",
        SCALING,
        "Python objects are gathered by torch.distributed",
    ),
    "Accelerate: launching": Differs(
        "part",
        "a launcher of its own; torchrun and accelerate launch work too",
        SCALING,
        "`launch.num_processes` starts the ranks itself",
    ),
    "Accelerate: data, scheduler, checkpoint, trackers": Differs(
        "part",
        "slices of prompts, safetensors and trackers are leash's own",
        SCALING,
        "Rank 0 alone writes: metrics, report, checkpoints, tracker.",
    ),
    "Accelerate: FSDP and DeepSpeed shard the model": Differs(
        "no",
        "refused: shards are leash's own, launch=fsdp2 (torch's fully_shard)",
        SCALING,
        "FSDP or DeepSpeed by Accelerate's settings",
    ),
    "... across GPUs": Differs(
        "part",
        "one GPU; several have not been tried",
        SCALING,
        "NCCL, in training and for weights to a vLLM server; several ranks on GPUs at all",
    ),
    "python train.py experiment=grpo_qwen": Differs(
        "part",
        "composes; never run at length",
        SCALING,
        "The qwen experiments at full length: they were run on small local checkpoints and data",
    ),
    "W&B workspace": Differs(
        "part",
        "--dry-run lists the panels; saving needs a login",
        "docs/tracking.md",
        "and a login). `--dry-run` prints them.",
    ),
}
