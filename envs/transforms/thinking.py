"""A second thought: ask the policy to think again where a condition says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from envs.chat_views import change_chats
from envs.tasks.math_words import ANSWER_TAG
from envs.transforms.transform import Transform

END = "<|im_end|>"
OWN_PROMPTS = (  # as the assistant says it to itself
    "Wait, let me check this step by step before I answer.",
    "Hold on, I may have made a mistake. Let me go through it again.",
    "Let me look at this from another side first.",
)
USER_PROMPTS = (  # as somebody else says it
    "Are you sure? Check it step by step before you answer.",
    "There may be a mistake in it. Go through it again.",
    "Look at it from another side first.",
)


class AddThinkingPrompt(Transform):
    """Where `cond(next_td)` of a row is true, take its answer back and ask for another thought.

    `edit_last_turn` (role "assistant" only): the last <answer> of the reply gives way to the
    prompt; a reply without one gets it at its end. Else the prompt is a message of its own, of
    `role`. `prompt` is the text, `random_prompt` draws from a few (with `seed`); `egocentric`
    (default: role "assistant") says "I". `zero_reward` (default: edit_last_turn) makes the rewards
    of that turn 0, `undo_done` goes on with the episode; a row that a limit has truncated is then
    left alone. Needs a ChatEnv in history mode.
    """

    def __init__(
        self,
        cond: Callable[[TensorDictBase], Any],
        prompt: str | None = None,
        random_prompt: bool = False,
        role: Literal["user", "assistant"] = "assistant",
        edit_last_turn: bool = True,
        zero_reward: bool | None = None,
        undo_done: bool = True,
        egocentric: bool | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if edit_last_turn and role != "assistant":
            raise ValueError(f"edit_last_turn expected role='assistant', got {role!r}")
        if prompt is not None and random_prompt:
            raise ValueError("expected a prompt or random_prompt=True, got both")
        self.cond, self.role, self.edit_last_turn = cond, role, edit_last_turn
        self.egocentric = role == "assistant" if egocentric is None else egocentric
        self.zero_reward = edit_last_turn if zero_reward is None else zero_reward
        self.undo_done, self.random_prompt = undo_done, random_prompt
        self._prompt, self._random = prompt, random.Random(seed)

    @property
    def prompt(self) -> str:
        """Return the prompt, another one each time with random_prompt."""
        choice = OWN_PROMPTS if self.egocentric else USER_PROMPTS
        if self.random_prompt:
            return self._random.choice(choice)
        return choice[0] if self._prompt is None else self._prompt

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        check_history_mode(self)
        rows = torch.tensor([bool(self.cond(row)) for row in next_td.unbind(0)])
        if self.undo_done and "truncated" in next_td:
            rows &= ~next_td.get("truncated").reshape(-1).cpu()
        change_chats(next_td, dict.fromkeys(rows.nonzero().flatten().tolist(), self._asked))
        if self.undo_done:
            clear(next_td, ["done", "terminated", "truncated"], rows)
        if self.zero_reward and self.parent is not None:
            clear(next_td, self.parent.full_reward_spec.keys(True, True), rows)
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset

    def _asked(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.edit_last_turn:
            return [*chat, {"role": self.role, "content": self.prompt}]
        last = max((i for i, m in enumerate(chat) if m["role"] == "assistant"), default=None)
        if last is None:
            raise ValueError(
                f"edit_last_turn expected an assistant's turn, got {[m['role'] for m in chat]}"
            )
        edited = chat[last] | {"content": self._edited(chat[last]["content"])}
        return [*chat[:last], edited, *chat[last + 1 :]]

    def _edited(self, text: str) -> str:
        """Return a reply with the prompt in place of its last answer, or at its end."""
        said, end = text.rstrip().removesuffix(END), END if text.rstrip().endswith(END) else ""
        found = list(ANSWER_TAG.finditer(said))
        if not found:
            return f"{said.rstrip()}\n\n{self.prompt}{end}"
        return f"{said[: found[-1].start()]}{self.prompt}{said[found[-1].end() :].rstrip()}{end}"


def check_history_mode(transform: Transform) -> None:
    """Raise a RuntimeError unless a transform is mounted on a ChatEnv in history mode."""
    base = None if transform.container is None else transform.container.base_env
    mode = getattr(base, "input_mode", None)
    if mode != "history":
        found = "no environment" if base is None else f"{type(base).__name__}, input_mode={mode!r}"
        raise RuntimeError(
            f"{type(transform).__name__} must be used with a ChatEnv in history mode, got {found}"
        )


def clear(td: TensorDictBase, keys: Any, rows: torch.Tensor) -> None:
    """Set the entries at the keys that there are to 0 (False) in the rows marked, bool [B]."""
    for key in keys:
        value = td.get(key, None)
        if value is not None:
            mask = rows.to(value.device).reshape(-1, *[1] * (value.ndim - 1))
            td.set(key, value.masked_fill(mask, 0))
