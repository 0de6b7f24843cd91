"""What differs from its page: how far it works, in which way, and the document that tells users."""

from dataclasses import dataclass

TORCHRL, SCALING = "docs/coming_from_torchrl.md", "docs/scaling.md"


@dataclass(frozen=True)
class Differs:
    """`works` is part or no; the words stand in the document."""

    evidence: str
    words: str
    works: str = "part"
    document: str = TORCHRL


IDS_WIN = Differs(
    "ids that stand beside it are read; prefer_tokens=False reads the history",
    "whatever the history or text beside them says",
)
DIFFERS = {
    "input_mode='history' reads the history: a second turn in place": IDS_WIN,
    "input_mode='history' reads the history: scoring another one": IDS_WIN,
    "mask as list of valid indices with sparse_mask=True": Differs(
        "TypeError; indices= does it", "There is no `sparse_mask`.", works="no"
    ),
    "Tokens.default_spec: float entries": Differs(
        "int64 as the ids are", "specs are int64, bool and float32, as the data."
    ),
    "arg device: a model object elsewhere is moved": Differs(
        "ValueError that asks to move it",
        "`device` loads a named model there and moves no model object",
    ),
    "arg tokenizer_kwargs: for histories": Differs(
        "ValueError for all but padding: ids come from the template",
        "`tokenizer_kwargs` of a wrapper are for texts",
    ),
    "forward is TensorDictSequential's: more keyword arguments": Differs(
        "TypeError", "`forward` takes no generation arguments (use `get_new_version`)"
    ),
    "log_prob_keys is ['log_probs']": Differs(
        "[('log_probs', 'full')]",
        "`log_prob_keys` and `dist_sample_keys` are the keys of tensors that are written",
    ),
    "dist_sample_keys is ['tokens_response']": Differs(
        "[('tokens', 'response')]",
        "`log_prob_keys` and `dist_sample_keys` are the keys of tensors that are written",
    ),
    "RetrieveLogProb padding_side: pads the masked rows": Differs(
        "leash's wrappers pad themselves",
        "`padding_side` of the KL transforms acts on ragged rows of other models",
    ),
    "RetrieveLogProb.transform_observation_spec adds kl_penalty": Differs(
        "it declares the key that it writes",
        '`RetrieveLogProb` declares "kl_penalty" instead of its key',
    ),
    "KLComputation prose: gen_log_probs_full_key is ('gen_log_probs', 'full')": Differs(
        "the signature's default, ('log_probs', 'full')",
        "Examples and prose of the KL transforms name arguments and defaults",
    ),
    "KLComputation example, as printed": Differs(
        "runs by the names of the signature",
        "| `KLComputation` | `gen_log_probs_key=`, `ref_log_probs_key=`, `coef=` |",
    ),
    "KLComputation: a reward [B, 1] is repeated over the tokens": Differs(
        "paid at the last kept token, its sum stays",
        "A reward per row is paid once, at the last kept token",
    ),
    "RetrieveKL is Compose(RetrieveLogProb, RetrieveLogProb, KLComputation)": Differs(
        "len 2; the generator's is .generator",
        "`RetrieveKL` holds the reference's transform and `KLComputation`",
    ),
    "RetrieveKL gen_model='from_collector' scores the generator": Differs(
        "only where the td has no generation log-probs",
        "KL transforms use the generation log-probs that are there",
    ),
    "container.empty_cache() and self.empty_cache()": Differs(
        "specs are not cached", "no spec is cached, so there is no `empty_cache`", works="no"
    ),
    "KLRewardTransform example: KLRewardTransform(gen_model, ref_model)": Differs(
        "TypeError that names RetrieveKL",
        "| `KLRewardTransform` | `KLRewardTransform(gen_model, ref_model)` |",
    ),
    "KLRewardTransform: no reward counts as 0": Differs(
        "it is skipped", "`KLRewardTransform`: no reward raises (read)"
    ),
    "KLRewardTransform: a reward per row is repeated over the tokens": Differs(
        "paid at the last kept token, its sum stays",
        "A reward per row is paid once, at the last kept token",
    ),
    "KLRewardTransform.action_key follows the env's input_mode": Differs(
        "('tokens', 'full') in every mode", "its `action_key` is ('tokens', 'full') in every mode"
    ),
    "Ray: attributes of the shared transform": Differs(
        "not delegated", "The attributes of a transform on Ray stay in its actor."
    ),
    "example: torchrl.data.rlhf, CarperAI/openai_summarize_tldr": Differs(
        "from trainer import ...; a local file in place of the download",
        "| `RolloutFromModel` | `torchrl.data.rlhf.*`, downloads |",
    ),
    "prompt_rindex: the right index of the prompt": Differs(
        "the place of its last token, which is kept",
        "`prompt_rindex` is the place of the prompt's last token, which is kept",
    ),
    "Accelerate: gather": Differs(
        "torch.distributed.all_gather_object",
        "Python objects are gathered by torch.distributed",
        document=SCALING,
    ),
    "Accelerate: launching": Differs(
        "a launcher of its own; torchrun and accelerate launch work too",
        "`launch.num_processes` starts the ranks itself",
        document=SCALING,
    ),
    "Accelerate: data, scheduler, checkpoint, trackers": Differs(
        "slices of prompts, safetensors and trackers are leash's own",
        "Rank 0 alone writes: metrics, report, checkpoints, tracker.",
        document=SCALING,
    ),
    "Accelerate: FSDP and DeepSpeed shard the model": Differs(
        "refused: shards are leash's own, launch=fsdp2 (torch's fully_shard)",
        "FSDP or DeepSpeed by Accelerate's settings",
        works="no",
        document=SCALING,
    ),
    "... across GPUs": Differs(
        "one GPU; several have not been tried",
        "NCCL, in training and for weights to a vLLM server; several ranks on GPUs at all",
        document=SCALING,
    ),
    "python train.py experiment=grpo_qwen": Differs(
        "composes; never run at length",
        "The qwen experiments at full length: they were run on small local checkpoints and data",
        document=SCALING,
    ),
    "W&B workspace": Differs(
        "--dry-run lists the panels; saving needs a login",
        "and a login). `--dry-run` prints them.",
        document="docs/tracking.md",
    ),
}
