"""Training loop, ranks and reports: the top layer.

Names load on first use (PEP 562), so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from trainer.advantage import BetaAdvantage as BetaAdvantage
    from trainer.advantage import DecoupledAdvantage as DecoupledAdvantage
    from trainer.advantage import GroupAdvantage as GroupAdvantage
    from trainer.advantage import MeasuredReward as MeasuredReward
    from trainer.advantage import NoAdvantage as NoAdvantage
    from trainer.checkpoint import Checkpoints as Checkpoints
    from trainer.demonstrations import Demonstrations as Demonstrations
    from trainer.demonstrations import ReferenceLogProbs as ReferenceLogProbs
    from trainer.evaluation import Evaluate as Evaluate
    from trainer.gae import GAEAdvantage as GAEAdvantage
    from trainer.importance_sampling import ImportanceSampling as ImportanceSampling
    from trainer.kl.controllers import AdaptiveKLController as AdaptiveKLController
    from trainer.kl.controllers import BudgetKLController as BudgetKLController
    from trainer.kl.controllers import ConstantKLController as ConstantKLController
    from trainer.kl.controllers import KLControllerBase as KLControllerBase
    from trainer.kl.controllers import LinearKLController as LinearKLController
    from trainer.kl.controllers import TargetKLController as TargetKLController
    from trainer.kl.leash import Leash as Leash
    from trainer.kl.reference import NoReference as NoReference
    from trainer.kl.reference import Reference as Reference
    from trainer.objectives import DistilObjective as DistilObjective
    from trainer.objectives import EntropyBonus as EntropyBonus
    from trainer.objectives import GRPOObjective as GRPOObjective
    from trainer.objectives import MinorSFTObjective as MinorSFTObjective
    from trainer.objectives import PPOObjective as PPOObjective
    from trainer.objectives import SFTObjective as SFTObjective
    from trainer.observer import Observer as Observer
    from trainer.observer import Observers as Observers
    from trainer.optimizer import MasterAdamW as MasterAdamW
    from trainer.optimizer import Muon as Muon
    from trainer.optimizer import make_optimizer as make_optimizer
    from trainer.optimizer import make_schedule as make_schedule
    from trainer.optimizer import parameter_groups as parameter_groups
    from trainer.pages.display import Display as Display
    from trainer.pages.trackers.accelerate import AccelerateTracker as AccelerateTracker
    from trainer.pages.trackers.jsonl import JsonlTracker as JsonlTracker
    from trainer.pages.trackers.wandb import WandbTracker as WandbTracker
    from trainer.preference_pairs import PreferenceObjective as PreferenceObjective
    from trainer.preference_pairs import PreferencePairs as PreferencePairs
    from trainer.runtime import Runtime as Runtime
    from trainer.sources import DropTruncated as DropTruncated
    from trainer.sources import DynamicRollouts as DynamicRollouts
    from trainer.sources import OverlongPenalty as OverlongPenalty
    from trainer.sources import Rollouts as Rollouts
    from trainer.stopping import Stopped as Stopped
    from trainer.torchrl.collector import LLMCollector as LLMCollector
    from trainer.torchrl.gae_module import GAE as GAE
    from trainer.torchrl.loss_modules import DAPO as DAPO
    from trainer.torchrl.loss_modules import CISPOLoss as CISPOLoss
    from trainer.torchrl.loss_modules import GRPOLoss as GRPOLoss
    from trainer.torchrl.mc_advantage import MCAdvantage as MCAdvantage
    from trainer.torchrl.ppo_loss import PPOLoss as PPOLoss
    from trainer.torchrl.prompt_data import PromptData as PromptData
    from trainer.torchrl.prompt_data import get_dataloader as get_dataloader
    from trainer.torchrl.rollout_from_model import RolloutFromModel as RolloutFromModel
    from trainer.torchrl.sft_loss import SFTLoss as SFTLoss
    from trainer.trainer import Trainer as Trainer
    from trainer.update import Update as Update

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
