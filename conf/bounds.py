"""Which values a key may have by itself, for conf/checks.py and for docs/configuration.md."""

from typing import Any

CHOICES = {
    "mode": ("train", "chat", "evaluate", "export"),
    "policy.source": ("auto", "hub"),
    "policy.dtype": ("float32", "bfloat16"),
    "policy.autocast": (None, "bfloat16"),
    "kl.estimator": ("k1", "k2", "k3", "full"),
    "kl.where": ("loss", "reward"),
    "kl.controller": ("constant", "adaptive", "linear"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "constant"),
    "algorithm.baseline": ("group_mean", "leave_one_out", "none"),
    "algorithm.surrogate": ("clip", "cispo", "reinforce"),
    "algorithm.ratio": ("token", "sequence"),
    "algorithm.credit": ("trajectory", "return_to_go"),
    "algorithm.critic.kind": ("head", "separate"),
    "algorithm.mask": ("assistant", "prompt"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "tracker.mode": (None, "online", "offline", "disabled"),
}
RANGES = {  # all of them finite
    ">= 0": lambda x: x >= 0,
    ">= 1": lambda x: x >= 1,
    "> 0": lambda x: x > 0,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "from 0 to below 1": lambda x: 0 <= x < 1,
}
NUMBERS = {  # null is none, where a key may be null
    "policy.temperature": ">= 0",
    "policy.max_new_tokens": ">= 1",
    "policy.max_prompt_tokens": ">= 1",
    "policy.lora.r": ">= 0",
    "policy.lora.alpha": ">= 0",
    "env.max_turns": ">= 1",
    "kl.coeff": ">= 0",
    "kl.target": "> 0",
    "kl.end": ">= 0",
    "kl.refresh_every": ">= 0",
    "kl.refresh_decay": "from 0 to below 1",
    "algorithm.group_size": ">= 1",
    "algorithm.epochs": ">= 1",
    "algorithm.minibatches": ">= 1",
    "algorithm.clip_low": "from 0 to 1",
    "algorithm.clip_high": ">= 0",
    "algorithm.clip_advantage": "> 0",
    "algorithm.target_kl": ">= 0",
    "algorithm.entropy_coeff": ">= 0",
    "algorithm.entropy_target": ">= 0",
    "algorithm.gamma": "from 0 to 1",
    "algorithm.lmbda": "from 0 to 1",
    "algorithm.value_clip": ">= 0",
    "algorithm.value_coeff": ">= 0",
    "algorithm.critic.lr_scale": ">= 0",
    "algorithm.critic.warmup": ">= 0",
    "algorithm.beta": "> 0",
    "optimizer.lr": ">= 0",
    "optimizer.weight_decay": ">= 0",
    "optimizer.eps": ">= 0",
    "optimizer.max_grad_norm": ">= 0",
    "optimizer.warmup": ">= 0",
    "trainer.num_iterations": ">= 1",
    "trainer.prompts_per_iteration": ">= 1",
    "trainer.micro_batch_tokens": ">= 1",
    "trainer.show_every": ">= 0",
    "eval.every": ">= 0",
    "eval.num_samples": ">= 0",
    "eval.temperature": ">= 0",
    "eval.max_rows": ">= 1",
    "eval.prompts_per_batch": ">= 1",
    "tracker.init_timeout": ">= 0",
    "tracker.finish_timeout": ">= 0",
    "tracker.table_every": ">= 0",
    "tracker.flush_s": ">= 1",
    "checkpoint.every": ">= 0",
    "checkpoint.keep_last": ">= 1",
    "launch.num_processes": ">= 1",
    "launch.threads": ">= 1",
}
RELATED = {  # to other keys, or no plain range: conf/checks.py and conf/control.py look
    "seed": "to be of 64 bits",
    "policy.device": "to be cpu, cuda, cuda:<number> or null",
    "policy.lora.dropout": "to be 0",
    "optimizer.betas": "to be two numbers from 0 to below 1",
    "algorithm.dual_clip": "> 1 + clip_high",
    "kl.horizon": "> a fifth of an iteration's replies",
}
SILENT = ("Demonstrations", "PreferencePairs")  # sources that sample no replies


def is_silent(cfg: Any) -> bool:
    """Return whether a run samples no replies."""
    return cfg["algorithm"]["source"]["_target_"].rpartition(".")[2] in SILENT


def choices(cfg: Any) -> dict[str, tuple[str | None, ...]]:
    """Return the values that each key with named values may have in this configuration."""
    means = CHOICES["algorithm.aggregation"][:2]  # "constant" divides by the longest reply
    return CHOICES | ({"algorithm.aggregation": means} if is_silent(cfg) else {})
