"""Tasks: rows, rewards and messages after a response. Torch-free; names load on first use."""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from envs.adapters.reasoning_gym import ReasoningGym as ReasoningGym
    from envs.adapters.reviews import Reviews as Reviews
    from envs.adapters.verifiers_env import Verifiers as Verifiers
    from envs.tasks.calculator import Calculator as Calculator
    from envs.tasks.calculator import multiply as multiply
    from envs.tasks.dataset import Chats as Chats
    from envs.tasks.dataset import DatasetTask as DatasetTask
    from envs.tasks.dataset import Preferences as Preferences
    from envs.tasks.dataset import Prompts as Prompts
    from envs.tasks.facts import Facts as Facts
    from envs.tasks.learnt_reward import LearntReward as LearntReward
    from envs.tasks.math_problems import MathProblems as MathProblems
    from envs.tasks.math_words import MathWords as MathWords
    from envs.tasks.mix import Mix as Mix
    from envs.tasks.short_answers import Answers as Answers
    from envs.tasks.sort_digits import SortDigits as SortDigits
    from envs.tasks.task import Response as Response
    from envs.tasks.task import Reward as Reward
    from envs.tasks.task import Row as Row
    from envs.tasks.task import Task as Task

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
