"""Settings of `accelerate launch` that would change the numbers, refused: leash has its own keys.

Flags, its default_config.yaml and the environment all end in variables, but for two flags that
Accelerate keeps to DeepSpeed. Torch-free: the parent refuses, and so does a Runtime by hand.
"""

import os

LAUNCHED = "ACCELERATE_DYNAMO_BACKEND"  # `accelerate launch` always sets it
NEUTRAL = {"", "no", "none", "auto", "false", "0"}
STEPS = "gradient_accumulation_steps"
SHARDS = "to spread weights, gradients and moments over the processes set launch=fsdp2"
INSTEAD = {
    "mixed_precision": "set policy.autocast=bfloat16 (or policy.dtype=bfloat16)",
    "downcast_bf16": "set policy.dtype=bfloat16",
    STEPS: "set trainer.micro_batch_tokens (memory) or algorithm.minibatches (steps)",
    "gradient_clipping": "set optimizer.max_grad_norm",
    "dynamo_backend": "no model is compiled",
} | dict.fromkeys(("fsdp", "deepspeed", "megatron_lm", "parallelism_config"), SHARDS)
VARIABLES = {f"ACCELERATE_{name.upper()}": name for name in INSTEAD}
VARIABLES |= {f"ACCELERATE_USE_{name.upper()}": name for name in INSTEAD}
VARIABLES |= {"XLA_USE_BF16": "mixed_precision", "XLA_DOWNCAST_BF16": "downcast_bf16"}


def check_accelerate() -> None:
    """Raise ValueError if Accelerate was told something that leash would not follow."""
    for variable, name in VARIABLES.items():
        _refuse(name, os.environ.get(variable, ""), variable)
    if LAUNCHED in os.environ:
        words = _launcher_words()
        for word, after in zip(words, [*words[1:], ""], strict=True):
            flag, _, value = word.partition("=")
            if (name := flag.lstrip("-").replace("-", "_")) in (STEPS, "gradient_clipping"):
                _refuse(name, value or after, flag)


def _refuse(name: str, value: str, given: str) -> None:
    if value.lower() not in NEUTRAL and (name, value) != (STEPS, "1"):
        what = f"Accelerate's {name} ({given}={value})"
        raise ValueError(f"{what} does not reach leash; leave it out: {INSTEAD[name]}")


def _launcher_words() -> list[str]:
    """Return the command line of the process that started this one."""
    import psutil  # here: most starts do not need it

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []
