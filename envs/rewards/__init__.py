"""Rewards: read from replies, and summed from several. Loads names on first use, without torch."""

from policies.lazy import loader

_HOME = {
    "CountdownRewardParser": ".parsers",
    "Function": ".functions",
    "Given": ".given",
    "GSM8KRewardParser": ".parsers",
    "InProcess": ".workers",
    "Judge": ".judge",
    "MATHRewardParser": ".parsers",
    "RewardFunction": ".functions",
    "RewardModel": ".learnt",
    "RewardParser": ".parsers",
    "Rewarded": ".rewarded",
    "TRLFunction": ".trl_function",
    "Workers": ".workers",
    "same_mathematics": ".answers",
    "solves_countdown": ".answers",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
