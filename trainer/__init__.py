"""Optimisation, ranks and what users see: the top layer.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "AdaptiveKLController": "kl_control",
    "ConstantKLController": "kl_control",
    "KLControllerBase": "kl_control",
    "PreferenceObjective": "preferences",
    "PreferencePairs": "preferences",
    "PromptData": "prompt_data",
    "RolloutFromModel": "rollout_from_model",
    "TargetKLController": "kl_control",
    "get_dataloader": "prompt_data",
    "Demonstrations": "sources",
    "Display": "display",
    "GRPOLoss": "loss_modules",
    "GRPOObjective": "objectives",
    "GroupAdvantage": "advantage",
    "JsonlTracker": "tracker",
    "NoAdvantage": "advantage",
    "Rollouts": "sources",
    "Runtime": "runtime",
    "SFTLoss": "loss_modules",
    "SFTObjective": "objectives",
    "Checkpoints": "checkpoint",
    "Evaluate": "evaluate",
    "Stopped": "runtime",
    "Trainer": "trainer",
    "Update": "update",
    "make_optimizer": "optimizer",
    "make_schedule": "optimizer",
    "show_run": "display",
    "WandbTracker": "tracker",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"trainer has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"trainer.{_HOME[name]}"), name)
