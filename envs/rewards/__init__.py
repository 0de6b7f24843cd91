"""Reward functions, parsers and weighted sums. Names load on first use, without torch."""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from envs.answers.comparison import same_mathematics as same_mathematics
    from envs.rewards.functions import Function as Function
    from envs.rewards.functions import Registered as Registered
    from envs.rewards.functions import RewardFunction as RewardFunction
    from envs.rewards.judge import Judge as Judge
    from envs.rewards.learnt_score import RewardModel as RewardModel
    from envs.rewards.rewarded import Rewarded as Rewarded
    from envs.rewards.trl_function import TRLFunction as TRLFunction
    from envs.rewards.workers import SubprocessReward as SubprocessReward
    from envs.rewards.workers import Workers as Workers
    from envs.torchrl.reward_parsers import GSM8KRewardParser as GSM8KRewardParser
    from envs.torchrl.reward_parsers import MATHRewardParser as MATHRewardParser
    from envs.torchrl.reward_parsers import RewardParser as RewardParser

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
