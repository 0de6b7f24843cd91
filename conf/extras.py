"""Which optional packages the parts of a configuration need, looked for before a worker starts.

None of them is imported. What is said of a missing one: policies/optional_packages.py. Torch-free.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from conf.nodes import PACKAGES, walk
from policies.optional_packages import EXTRAS

# A class of leash by its name: the package, and the argument that asks for it with its default;
# None: the class itself asks.
ASKING: dict[str, tuple[str, str | None, Any]] = {
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


def needed(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the optional packages that a resolved configuration asks for.

    >>> list(needed({"env": {"_target_": "envs.tasks.Reviews"}, "policy": {"lora": {"r": 8}}}))
    ['peft', 'vaderSentiment']
    >>> list(needed({"env": {"_target_": "my_tasks.Reviews"}, "policy": {"lora": {"r": 0}}}))
    []
    """
    if cfg["policy"]["lora"]["r"]:
        yield "peft"
    for _, node in walk(cfg):
        home, _, name = node["_target_"].rpartition(".")
        if home.partition(".")[0] in PACKAGES and name in ASKING:
            package, argument, default = ASKING[name]
            if argument is None or node.get(argument, default):
                yield package


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield one line on all optional packages that a configuration needs and that are not there.

    A tracker is for training only.
    """
    if cfg["mode"] != "train":
        cfg = {key: value for key, value in cfg.items() if key != "tracker"}
    packages = dict.fromkeys(needed(cfg))
    if missing := [EXTRAS[package] for package in packages if find_spec(package) is None]:
        yield "; ".join(missing)
