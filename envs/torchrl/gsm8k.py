"""GSM8K as an environment: word problems whose answer is a number (Cobbe et al. 2021)."""

from __future__ import annotations

from typing import Any, Literal

from envs.torchrl.chat_env import DatasetChatEnv
from envs.torchrl.reward_parsers import GSM8KRewardParser
from envs.torchrl.step_counter import StepCounter


class GSM8KEnv(DatasetChatEnv):
    """Chats about GSM8K problems, rewarded by `GSM8KRewardParser` unless compute_reward=False.

    Takes the arguments of `DatasetChatEnv`; rows have the columns question (or query) and answer.
    The episode is truncated after `max_steps` responses (None: never) and ends with a right answer;
    with `set_done_if_answer=True` any answer ends it, with False none.
    """

    SYSTEM_PROMPT = (
        "Solve the problem of the user. Think first, inside <think> and </think>. Then give the "
        "number that is asked for, and nothing else, inside <answer> and </answer>, like this: "
        "<think>how you find it</think> <answer>the number</answer>"
    )
    RENAMED = ("question", "query")

    def __init__(
        self,
        *,
        dataset: str = "openai/gsm8k",
        name: str | None = "main",
        compute_reward: bool = True,
        max_steps: int | None = 1,
        set_done_if_answer: bool | Literal["right"] = "right",
        tokenizer: Any = None,
        **chats: Any,
    ) -> None:
        super().__init__(dataset=dataset, name=name, tokenizer=tokenizer, **chats)
        self.append_transform(StepCounter(max_steps or None))
        if compute_reward:
            parser = GSM8KRewardParser(tokenizer, set_done_if_answer=set_done_if_answer)
            self.append_transform(parser)
