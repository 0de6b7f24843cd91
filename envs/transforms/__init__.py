"""Transforms of environments.

Names load on first use (PEP 562), so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from envs.tools.parsers import JSONCallParser as JSONCallParser
    from envs.tools.parsers import ToolCall as ToolCall
    from envs.tools.parsers import XMLBlockParser as XMLBlockParser
    from envs.tools.python_tool import PythonTool as PythonTool
    from envs.tools.results import ToolTransformBase as ToolTransformBase
    from envs.torchrl.kl import KLComputation as KLComputation
    from envs.torchrl.log_probs import RetrieveLogProb as RetrieveLogProb
    from envs.torchrl.policy_version import PolicyVersion as PolicyVersion
    from envs.torchrl.python_interpreter import PythonInterpreter as PythonInterpreter
    from envs.torchrl.ray import KLRewardTransform as KLRewardTransform
    from envs.torchrl.ray import RayKLRewardTransform as RayKLRewardTransform
    from envs.torchrl.ray import RayRetrieveKL as RayRetrieveKL
    from envs.torchrl.ray import RayTransform as RayTransform
    from envs.torchrl.ray import RetrieveKL as RetrieveKL
    from envs.torchrl.step_counter import StepCounter as StepCounter
    from envs.torchrl.tokenizer import IncrementalTokenizer as IncrementalTokenizer
    from envs.torchrl.tools import ExecuteToolsInOrder as ExecuteToolsInOrder
    from envs.torchrl.tools import SimpleToolTransform as SimpleToolTransform
    from envs.torchrl.tools import Tool as Tool
    from envs.torchrl.tools import ToolRegistry as ToolRegistry
    from envs.transforms.transform import Compose as Compose
    from envs.transforms.transform import Transform as Transform

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
KL_TRANSFORMS = ("KLComputation", "KLRewardTransform", "RetrieveKL", "RetrieveLogProb")


def is_kl_transform(target: str) -> bool:
    """Return whether a class measures or penalises the KL; a run does both without it.

    >>> names = "envs.transforms.RayRetrieveKL", "envs.transforms.StepCounter"
    >>> [is_kl_transform(name) for name in names]
    [True, False]
    """
    return target.rpartition(".")[2].removeprefix("Ray") in KL_TRANSFORMS
