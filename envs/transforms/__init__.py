"""Transforms of environments.

Names load on first use (PEP 562), so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from envs.transforms.kl import KLComputation as KLComputation
    from envs.transforms.kl import RetrieveKL as RetrieveKL
    from envs.transforms.kl_reward import KLRewardTransform as KLRewardTransform
    from envs.transforms.log_probs import RetrieveLogProb as RetrieveLogProb
    from envs.transforms.policy_version import PolicyVersion as PolicyVersion
    from envs.transforms.python_interpreter import PythonInterpreter as PythonInterpreter
    from envs.transforms.python_interpreter import PythonTool as PythonTool
    from envs.transforms.ray import RayKLRewardTransform as RayKLRewardTransform
    from envs.transforms.ray import RayRetrieveKL as RayRetrieveKL
    from envs.transforms.ray import RayTransform as RayTransform
    from envs.transforms.step_counter import StepCounter as StepCounter
    from envs.transforms.tokenizer import IncrementalTokenizer as IncrementalTokenizer
    from envs.transforms.tool_parsers import JSONCallParser as JSONCallParser
    from envs.transforms.tool_parsers import ToolCall as ToolCall
    from envs.transforms.tool_parsers import XMLBlockParser as XMLBlockParser
    from envs.transforms.tools import ExecuteToolsInOrder as ExecuteToolsInOrder
    from envs.transforms.tools import SimpleToolTransform as SimpleToolTransform
    from envs.transforms.tools import Tool as Tool
    from envs.transforms.tools import ToolRegistry as ToolRegistry
    from envs.transforms.tools import ToolTransformBase as ToolTransformBase
    from envs.transforms.transform import Compose as Compose
    from envs.transforms.transform import Transform as Transform

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
KL_TRANSFORMS = ("KLComputation", "KLRewardTransform", "RetrieveKL", "RetrieveLogProb")


def is_kl_transform(target: str) -> bool:
    """Return whether a class scores or charges the KL; a run does both without it.

    >>> names = "envs.transforms.RayRetrieveKL", "envs.transforms.StepCounter"
    >>> [is_kl_transform(name) for name in names]
    [True, False]
    """
    return target.rpartition(".")[2].removeprefix("Ray") in KL_TRANSFORMS
