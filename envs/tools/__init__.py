"""Tools of a chat in the model's own format: `env.tools`, docs/environments.md.

Names load on first use (PEP 562), so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from envs.tools.calling import CallTools as CallTools
    from envs.tools.functions import TypedTool as TypedTool
    from envs.tools.python_tool import PythonTool as PythonTool
    from envs.tools.reading import Call as Call
    from envs.tools.reading import CallReader as CallReader

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
