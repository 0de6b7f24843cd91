"""Optimisation, ranks and what users see: the top layer.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "AdaptiveKLController": "kl_control",
    "BetaAdvantage": "advantage",
    "CISPOLoss": "loss_modules",
    "Checkpoints": "checkpoint",
    "ConstantKLController": "kl_control",
    "DAPO": "loss_modules",
    "Demonstrations": "sources",
    "Display": "display",
    "DropTruncated": "shaping",
    "DynamicRollouts": "sources",
    "EntropyBonus": "entropy",
    "Evaluate": "evaluate",
    "GAE": "gae",
    "GAEAdvantage": "advantage",
    "GRPOLoss": "loss_modules",
    "GRPOObjective": "objectives",
    "GroupAdvantage": "advantage",
    "JsonlTracker": "tracker",
    "KLControllerBase": "kl_control",
    "LLMCollector": "collector",
    "LinearKLController": "kl_control",
    "MCAdvantage": "mc_advantage",
    "MinorSFTObjective": "objectives",
    "Mismatch": "mismatch",
    "NoAdvantage": "advantage",
    "NoReference": "reference",
    "OverlongPenalty": "shaping",
    "PPOLoss": "ppo_loss",
    "PPOObjective": "objectives",
    "PreferenceObjective": "preferences",
    "PreferencePairs": "preferences",
    "PromptData": "prompt_data",
    "Reference": "reference",
    "ReferenceLogProbs": "reference",
    "RolloutFromModel": "rollout_from_model",
    "Rollouts": "sources",
    "Runtime": "runtime",
    "SFTLoss": "sft_loss",
    "SFTObjective": "objectives",
    "Stopped": "runtime",
    "TargetKLController": "kl_control",
    "TensorboardTracker": "tracker_tensorboard",
    "TopKRewardSelector": "mc_advantage",
    "TrackioTracker": "tracker_trackio",
    "Trainer": "trainer",
    "Update": "update",
    "WandbTracker": "tracker_wandb",
    "get_dataloader": "prompt_data",
    "make_kl_controller": "kl_control",
    "make_optimizer": "optimizer",
    "make_schedule": "optimizer",
    "run_mode": "modes",
    "show_run": "display",
    "unchanged": "mismatch",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"trainer has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"trainer.{_HOME[name]}"), name)
