"""Chat environments, their tasks and transforms: the middle layer. It imports only policies.

Names load on first use (PEP 562), so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from envs.torchrl.chat_env import ChatEnv as ChatEnv
    from envs.torchrl.chat_env import DatasetChatEnv as DatasetChatEnv
    from envs.torchrl.env import EnvBase as EnvBase
    from envs.torchrl.env import TransformedEnv as TransformedEnv
    from envs.torchrl.env import check_env_specs as check_env_specs
    from envs.torchrl.gsm8k import GSM8KEnv as GSM8KEnv
    from envs.transforms.transform import Compose as Compose
    from envs.transforms.transform import Transform as Transform
    from policies.torchrl.specs import Composite as Composite
    from policies.torchrl.specs import NonTensor as NonTensor
    from policies.torchrl.specs import Unbounded as Unbounded

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
