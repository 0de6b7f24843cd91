"""Chats as environments, their tasks and transforms: the middle layer. It imports only policies.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ChatEnv": "envs.chat_env",
    "Compose": "envs.transforms.transform",
    "Composite": "policies.specs",
    "DatasetChatEnv": "envs.dataset_chat_env",
    "EnvBase": "envs.env",
    "GSM8KEnv": "envs.gsm8k",
    "NonTensor": "policies.specs",
    "Transform": "envs.transforms.transform",
    "TransformedEnv": "envs.env",
    "Unbounded": "policies.specs",
    "check_env_specs": "envs.check",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"envs has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
