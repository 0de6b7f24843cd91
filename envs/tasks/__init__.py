"""What chats are about: rows, rewards and what comes after a reply. Torch-free, loaded on use."""

from policies.lazy import loader

_HOME = {
    "Answers": ".answers",
    "Arithmetic": ".arithmetic",
    "Calculator": ".calculator",
    "Chats": ".dataset",
    "Countdown": ".countdown",
    "DatasetTask": ".dataset",
    "Facts": ".facts",
    "Guess": ".guess",
    "LearntReward": ".learnt_reward",
    "MathProblems": ".math_problems",
    "MathWords": ".math_words",
    "Mix": ".mix",
    "OpenEnv": ".openenv",
    "Preferences": ".preferences",
    "Prompts": ".dataset",
    "ReasoningGym": ".reasoning_gym",
    "Reply": ".task",
    "Reviews": ".reviews",
    "Reward": ".task",
    "Row": ".task",
    "SortDigits": ".sort_digits",
    "Task": ".task",
    "Verifiers": ".verifiers_env",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
