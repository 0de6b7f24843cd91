"""What is computed on the way through an environment.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from policies.lazy import loader

_HOME = {
    "AddThinkingPrompt": ".thinking",
    "Compose": ".transform",
    "ExecuteToolsInOrder": ".tools",
    "IncrementalTokenizer": ".tokenizer",
    "JSONCallParser": ".tool_parsers",
    "KLComputation": ".kl",
    "KLRewardTransform": ".kl_reward",
    "MCPServer": ".mcp",
    "PolicyVersion": ".policy_version",
    "PythonInterpreter": ".python_interpreter",
    "PythonTool": ".python_interpreter",
    "RayKLRewardTransform": ".ray_kl",
    "RayRetrieveKL": ".ray_kl",
    "RayTransform": ".ray",
    "RetrieveKL": ".kl",
    "RetrieveLogProb": ".log_probs",
    "SimpleToolTransform": ".tools",
    "StepCounter": ".step_counter",
    "Tool": ".tool_registry",
    "ToolCall": ".tool_parsers",
    "ToolRegistry": ".tool_registry",
    "ToolTransformBase": ".tools",
    "Transform": ".transform",
    "XMLBlockParser": ".tool_parsers",
}
LEASHES = ("KLComputation", "KLRewardTransform", "RetrieveKL", "RetrieveLogProb")
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)


def is_leash(target: str) -> bool:
    """Return whether a class scores or charges the KL, which a run does by itself.

    >>> is_leash("envs.transforms.RayRetrieveKL"), is_leash("envs.transforms.StepCounter")
    (True, False)
    """
    return target.rpartition(".")[2].removeprefix("Ray") in LEASHES
