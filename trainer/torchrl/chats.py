"""Chats that run beside each other, turn by turn; one that ends makes room for the next prompt.

Each turn of a chat is a row: a TensorDict without padding, the policy's outputs at the root, the
environment's under "next". The exact ids of a chat go from turn to turn.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from envs.env import EnvBase
from policies.chats.containers import Tokens
from policies.padding import rows
from policies.wrappers.wrapper import LLMWrapperBase
from trainer.collect import carry, prolong, ready


@dataclass(eq=False)
class Chat:
    """One chat as it grows: what its next turn starts from, and the turns so far."""

    number: int
    state: TensorDictBase
    assistant: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    rows: list[TensorDictBase] = field(default_factory=list)


class Chats:
    """Play `policy` in `env`: the chats of one reset beside each other.

    `data` gives what `env.reset` takes; without it the environment has its own data.
    `tracker`, a PolicyVersion, writes the version of the policy.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Any,
        *,
        data: Iterator[TensorDictBase] | None = None,
        tracker: Any = None,
    ) -> None:
        self.env, self.policy, self.data, self.tracker = env, policy, data, tracker
        self.player = policy
        if isinstance(policy, LLMWrapperBase):  # turns differ in length: rows without padding
            ids = {"prefer_tokens": policy.prefer_tokens and "always"}  # they go from turn to turn
            self.player = ready(policy, input_mode=policy.input_mode, pad_output=False, **ids)
        self.places: list[Chat | None] = []
        self.finished: deque[Chat] = deque()
        self._waiting: deque[Chat] = deque()
        self._state: list[str] = []  # the keys that a reset gives
        self._drawn = 0

    def turn(self) -> list[TensorDictBase]:
        """Play one turn of every chat and return their rows; none when the data have ended."""
        self._seat()
        playing = [chat for chat in self.places if chat is not None]
        if not playing:
            return []
        if self.player is not self.policy:  # made before the syncs that the policy counts since
            self.player.version = self.policy.version
        td = self.player(lazy_stack([chat.state for chat in playing]))
        self._mark_assistant(td, playing)
        if self.tracker is not None:  # in place of what the wrapper counts
            td = self.tracker._step(td, td)
        turn = list(self.env.step(td).unbind(0))
        for chat, row in zip(playing, turn, strict=True):
            row.set(("collector", "traj_ids"), torch.tensor(chat.number))
            chat.rows.append(row)
            if row.get(("next", "done")).any():
                self.places[self.places.index(chat)] = None
                self.finished.append(chat)
            else:
                chat.state = carry(row, self._state)
                self._prolong(chat, row)
        return turn

    def give_up(self) -> None:
        """Stop the running chats; the next turn begins new ones at their places."""
        self.places = [None] * len(self.places)

    def _seat(self) -> None:
        """Give each free place the next prompt, as long as there are any."""
        if not self.places and self._draw():
            self.places = [None] * len(self._waiting)
        for place, chat in enumerate(self.places):
            if chat is None and (self._waiting or self._draw()):
                self.places[place] = self._waiting.popleft()

    def _draw(self) -> bool:
        """Reset the environment for more chats; False when the data have ended."""
        start = None if self.data is None else next(self.data, None)
        if self.data is not None and start is None:
            return False
        td = self.env.reset(start)
        if td.ndim != 1:
            raise ValueError(
                "expected an environment with one batch dimension, got one of batch size "
                f"{tuple(td.batch_size)}"
            )
        self._state = list(td.keys())
        for state in td.unbind(0):
            chat = Chat(self._drawn, state)
            if self._exact:
                self._render(chat, _messages(state))
            self._waiting.append(chat)
            self._drawn += 1
        return True

    @property
    def _exact(self) -> bool:
        """Whether the ids are kept here: not for other modes, nor where the environment does it."""
        known = getattr(self.player, "input_mode", None) == "history"
        able = getattr(self.player, "renderer", None) is not None
        return known and able and "tokens" not in self._state

    def _prolong(self, chat: Chat, row: TensorDictBase) -> None:
        """Give the chat's next prompt the ids so far and those of the new messages."""
        if not self._exact:
            return
        before, after = _messages(row, "full"), _messages(chat.state)
        if after[: len(before)] != before:  # the environment rewrote what was said
            return self._render(chat, after)
        ids = row.get((self.player.tokens_key, "full"))
        marks = row.get((self.player.masks_key, "all_assistant_mask"))
        new, more = prolong(self.player, int(ids[-1]), before, after)
        self._set_prompt(chat, torch.cat([ids.cpu(), new]), torch.cat([marks.cpu(), more]))

    def _render(self, chat: Chat, messages: list[dict]) -> None:
        done = self.player.renderer.render(messages, add_generation_prompt=True)
        marks = torch.tensor(done.assistant, dtype=torch.bool)
        self._set_prompt(chat, torch.tensor(done.ids), marks)

    def _set_prompt(self, chat: Chat, ids: Tensor, assistant: Tensor) -> None:
        chat.state.set(self.player.tokens_key, Tokens(prompt=ids, batch_size=[]))
        chat.assistant = assistant

    def _mark_assistant(self, td: TensorDictBase, playing: list[Chat]) -> None:
        """Mark what the assistant said before: the policy only marks the reply that it adds."""
        if self._exact:
            masks = rows(td, (self.player.masks_key, "all_assistant_mask"))
            for mask, chat in zip(masks or (), playing, strict=True):
                mask[: len(chat.assistant)] |= chat.assistant.to(mask.device)


def _messages(td: TensorDictBase, field: str = "prompt") -> list[dict]:
    return td.get(("history", field)).messages()
