"""What is computed on the way through an environment.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "AddThinkingPrompt": "thinking",
    "Compose": "transform",
    "ExecuteToolsInOrder": "tools",
    "IncrementalTokenizer": "tokenizer",
    "JSONCallParser": "tool_parsers",
    "KLComputation": "kl",
    "KLRewardTransform": "kl_reward",
    "MCPServer": "mcp",
    "PolicyVersion": "policy_version",
    "PythonInterpreter": "python_interpreter",
    "PythonTool": "python_interpreter",
    "RayKLRewardTransform": "ray_kl",
    "RayRetrieveKL": "ray_kl",
    "RayTransform": "ray",
    "RetrieveKL": "kl",
    "RetrieveLogProb": "log_probs",
    "SimpleToolTransform": "tools",
    "StepCounter": "step_counter",
    "Tool": "tool_registry",
    "ToolCall": "tool_parsers",
    "ToolRegistry": "tool_registry",
    "ToolTransformBase": "tools",
    "Transform": "transform",
    "XMLBlockParser": "tool_parsers",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"envs.transforms has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"envs.transforms.{_HOME[name]}"), name)
