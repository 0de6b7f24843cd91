"""Chats as environments, their tasks and transforms: the middle layer. It imports only policies.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from policies.lazy import loader

_HOME = {
    "ChatEnv": ".chat_env",
    "Compose": ".transforms.transform",
    "Composite": "policies.specs",
    "DatasetChatEnv": ".dataset_chat_env",
    "EnvBase": ".env",
    "GSM8KEnv": ".gsm8k",
    "NonTensor": "policies.specs",
    "Transform": ".transforms.transform",
    "TransformedEnv": ".transformed_env",
    "Unbounded": "policies.specs",
    "check_env_specs": ".spec_check",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
