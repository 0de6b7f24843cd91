"""Chats as environments, their tasks and transforms: the middle layer. It imports only policies.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ChatEnv": "chat_env",
    "EnvBase": "env",
    "TransformedEnv": "env",
    "Transform": "transforms.transform",
    "Compose": "transforms.transform",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"envs has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"envs.{_HOME[name]}"), name)
