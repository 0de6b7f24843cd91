"""Reward parsers: transforms that reward the answer in a response's <answer> tags.

They read only the response, never the prompt, in every input mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from envs.answers.comparison import same_answer, same_mathematics
from envs.answers.extraction import final_answer, tagged
from envs.torchrl.chat_io import make_renderer, read_responses
from envs.torchrl.hooks import SpecHooks
from envs.torchrl.ragged import get_values
from policies.torchrl.specs import Composite, Unbounded

NAMES = ("reward_answer", "reward_think", "reward_right", "reward", "success")


class RewardParser(SpecHooks):
    """Write the rewards of responses, each [B, 1]; a subclass decides which answers are right.

    `reward_right` is `correct_reward` for a right answer, `format_reward` for a wrong answer in
    <answer> tags, else 0; it is added to an existing `reward` [B, 1]. `reward_answer` and
    `reward_think` mark responses with <answer> and <think> tags, `success` marks right answers.
    `out_keys` renames these five keys. `in_keys`: the action and the ground truth, "answer".

    `set_done_if_answer`: any answer ends the episode (True), no answer (False), or only a right
    answer ("right"). `input_mode` and the template are the env's; outside an env, texts and tokens
    need a `tokenizer`. `eos_token` (default: the tokenizer's) is removed from a response's end.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        eos_token: str | None = None,
        set_done_if_answer: bool | Literal["right"] = True,
        input_mode: str | None = None,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
    ) -> None:
        super().__init__(in_keys or (("history", "full"), "answer"), out_keys or NAMES)
        self.tokenizer, self._mode = tokenizer, input_mode
        self.eos_token = eos_token or getattr(tokenizer, "eos_token", None)
        self.set_done_if_answer = set_done_if_answer
        self.format_reward, self.correct_reward = format_reward, correct_reward

    def is_right(self, answer: str, solution: str) -> bool:
        """Return whether an answer is right; subclasses override it."""
        raise NotImplementedError(f"{type(self).__name__} has no is_right(answer, solution)")

    @property
    def input_mode(self) -> str:
        """Return the mode of the constructor, else the environment's, else history."""
        base = None if self.container is None else self.container.base_env
        return self._mode or getattr(base, "input_mode", "history")

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        solutions = get_values(self.in_keys[1], next_td, tensordict)
        if solutions is None:
            raise ValueError(f"expected the right answers at {self.in_keys[1]!r}, found none")
        solutions = [solutions] * len(next_td) if isinstance(solutions, str) else solutions
        parts = [tagged(self._trimmed(text)) for text, _ in self._responses(tensordict)]
        pairs = zip(parts, solutions, strict=True)
        right = torch.tensor([bool(a) and self.is_right(a, s) for (_, a), s in pairs])
        answered = torch.tensor([bool(a) for _, a in parts])
        earned = right * self.correct_reward + (answered & ~right) * self.format_reward
        thought = torch.tensor([bool(t) for t, _ in parts])
        values = (answered.float(), thought.float(), earned.float(), earned.float(), right)
        device = next_td.device
        for key, value in zip(self.out_keys, values, strict=True):
            next_td.set(key, _added(next_td.get(key, None), value.unsqueeze(-1).to(device)))
        if self.set_done_if_answer:
            ends = (right if self.set_done_if_answer == "right" else answered).unsqueeze(-1)
            for key in ("terminated", "done"):
                if key in next_td:
                    next_td.set(key, next_td.get(key) | ends.to(device))
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset  # there are no responses yet

    def _responses(self, tensordict: TensorDictBase) -> list[tuple[str, bool]]:
        renderer = None if self.container is None else self.container.base_env.renderer
        if renderer is None and self.input_mode != "history":
            renderer = make_renderer(self.tokenizer, None, self.input_mode)
        return read_responses(tensordict, self.input_mode, renderer)

    def _trimmed(self, text: str) -> str:
        for end in ("<|im_end|>", self.eos_token or ""):
            text = text.rstrip().removesuffix(end)
        return text

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the five keys, [..., 1]."""
        for key in self.out_keys[:-1]:
            reward_spec[key] = Unbounded((*reward_spec.shape, 1))
        reward_spec[self.out_keys[-1]] = Unbounded((*reward_spec.shape, 1), dtype=torch.bool)
        return reward_spec


class GSM8KRewardParser(RewardParser):
    """Reward the number after #### in a GSM8K solution.

    >>> from tensordict import TensorDict
    >>> from policies.chats.containers import ChatHistory
    >>> from policies.chats.history import History
    >>> response = {"role": "assistant", "content": "<answer>$72</answer>"}
    >>> full = History.from_chats([[{"role": "user", "content": "48 + 24?"}, response]])
    >>> td = TensorDict({"answer": ["#### 72"]}, batch_size=[1])
    >>> td["history"] = ChatHistory(full=full, batch_size=[1])
    >>> GSM8KRewardParser()(td)["reward"].tolist()
    [[1.0]]
    """

    def is_right(self, answer: str, solution: str) -> bool:
        """Return whether it is the solution's number."""
        return same_answer(answer, final_answer(solution))


class MATHRewardParser(RewardParser):
    """Reward the answer in the \\boxed of a MATH solution; `symbolic` uses math-verify."""

    def __init__(self, *args: Any, symbolic: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.symbolic = symbolic

    def is_right(self, answer: str, solution: str) -> bool:
        """Return whether it is the boxed answer."""
        return same_mathematics(answer, solution, symbolic=self.symbolic)


def _added(old: Tensor | None, new: Tensor) -> Tensor:
    if old is None:
        return new
    if old.shape != new.shape:  # a sum would add it to each token of a reward per token
        raise ValueError(f"expected a reward of shape {[*new.shape]}, got {[*old.shape]}")
    return old | new if new.dtype == torch.bool else old + new
