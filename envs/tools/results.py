"""Append the results of a response's tools to the chat.

Results are messages of role "tool" at the end of the next prompt; the policy then responds again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envs.chat_env import change_chats, read_history
from envs.transforms.transform import Transform

LONGEST = 4000  # characters of a result that the policy gets
Results = Sequence[str | dict[str, Any]] | None  # texts, or messages without a role


class ToolTransformBase(Transform):
    """Append the results of a response's tools to the next prompt, one message per result.

    Subclasses implement `_process_batch_item(content, index)`, which returns the results of a
    response, None or [] without calls. A chat with calls continues, even if its task had ended it,
    without reward and without the task's next messages. In a chat at a limit no call is executed.
    Raise RuntimeError unless the environment is a ChatEnv in history mode.
    """

    tool_role = "tool"
    chats: Sequence[list[dict[str, Any]]] = ()  # chats of this step, each ends with its response

    def _process_batch_item(self, content: str, index: int) -> Results:
        raise NotImplementedError(f"{type(self).__name__} has no _process_batch_item")

    def _process_batch(self, contents: dict[int, str]) -> dict[int, Results]:
        """Return the results of each open row, one row after the other."""
        return {i: self._process_batch_item(text, i) for i, text in contents.items()}

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        base = None if self.container is None else self.container.base_env
        if getattr(base, "input_mode", "history") != "history" or base is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} must be used with a ChatEnv in history mode, got {base!r}")
        chats = self.chats = read_history(tensordict, ("history", "full")).chats()
        results = self._process_batch(
            {i: chats[i][-1]["content"] for i in self._open_rows(next_td)}
        )
        called = {i: texts for i, texts in results.items() if texts}
        new = {i: [self._message(text) for text in texts] for i, texts in called.items()}
        change_chats(next_td, {i: lambda _, i=i: [*chats[i], *new[i]] for i in new})
        goes_on = torch.zeros(len(chats), dtype=torch.bool)  # [B]
        goes_on[list(called)] = True
        if "done" in next_td:
            _clear(next_td, self.parent.reward_keys, goes_on)
            _clear(next_td, ["done", "terminated"], goes_on)
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset

    def _open_rows(self, next_td: TensorDictBase) -> list[int]:
        """Return the rows that have a turn left."""
        closed = torch.zeros(len(next_td), dtype=torch.bool)
        if "truncated" in next_td:
            closed |= next_td.get("truncated").reshape(-1).cpu()
        limit = getattr(self.container.base_env, "max_turns", None)
        if limit is not None and "turn" in next_td:
            closed |= next_td.get("turn").reshape(-1).cpu() >= limit
        return (~closed).nonzero().flatten().tolist()

    def _message(self, result: str | dict[str, Any]) -> dict[str, Any]:
        """Return a result, a text or a message, as a message, cut to `LONGEST` characters."""
        message = {"content": result} if isinstance(result, str) else result
        text = message["content"]
        more = len(text) - LONGEST
        text = text if more <= 0 else f"{text[:LONGEST]}\n[{more} more characters]"
        # JSON may contain lone surrogates
        content = text.encode(errors="replace").decode()
        return {**message, "role": self.tool_role, "content": content}


def _clear(td: TensorDictBase, keys: Any, rows: torch.Tensor) -> None:
    """Set existing entries at the keys to 0 (False) in the marked rows, bool [B]."""
    for key in keys:
        value = td.get(key, None)
        if value is not None:
            mask = rows.to(value.device).reshape(-1, *[1] * (value.ndim - 1))
            td.set(key, value.masked_fill(mask, 0))
