"""A chat as an environment: the prompt is the observation, the reply is the action.

P prompts are repeated G times in a row into B = P*G chats. A task says what the rows are, what a
reply earns and what comes next; without a task the env only keeps the conversation.
"""

from collections.abc import Sequence

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from envs.env import EnvBase
from envs.tasks.task import Reply, Reward, Task
from policies.containers import ChatHistory
from policies.history import History
from policies.random import fold


class ChatEnv(EnvBase):
    """A single- or multi-turn chat over a task.

    `reset` reads `row` [P] (dicts with "messages"; without a task also `query` [P], plain texts)
    and writes `history.prompt`, `group_id`, `stream` [B]. `step` reads `history.full` [B] and
    writes under "next": `reward` [B, 1], `reward_part.*`, `success`, `terminated`, `truncated`,
    `done` [B, 1] and the next turn's `history.prompt`.
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        group_size: int = 1,
        max_turns: int = 1,
        system_prompt: str | None = None,
        data_key: str = "query",
    ) -> None:
        if max_turns < 1 or group_size < 1:
            raise ValueError(
                f"expected max_turns and group_size >= 1, got {max_turns} and {group_size}"
            )
        self.task = task
        self.group_size = group_size
        self.max_turns = max_turns
        self.system_prompt = system_prompt
        self.data_key = data_key
        self._parts: list[str] | None = None  # names of the reward parts, from the first reply on

    def messages(self, row: dict) -> list[dict]:
        """Return the prompt of a row, the system prompt in front where there is none yet."""
        messages = list(row["messages"])
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            raise RuntimeError("reset expected a td with the rows to start from, got None")
        if tensordict.ndim != 1:
            raise ValueError(f"reset expected one batch dimension, got {tensordict.batch_size}")
        rows = self._rows(tensordict)
        size, times = len(rows), self.group_size
        owner = torch.arange(size).repeat_interleave(times)  # [B]
        td = TensorDict(batch_size=[size * times])
        td.set("group_id", tensordict.get("group_id", torch.arange(size))[owner])
        if "stream" in tensordict:
            sample = torch.arange(times).repeat(size)
            td.set("stream", fold(tensordict.get("stream")[owner], sample))
        td.set("row", NonTensorStack(*[NonTensorData(rows[i]) for i in owner.tolist()]))
        td.set("turn", torch.zeros(size * times, dtype=torch.int64))
        chats = History.from_chats([self.messages(row) for row in rows]).unbind(0)
        prompt = lazy_stack([chats[i] for i in owner.tolist()])  # samples share their prompt
        td.set("history", ChatHistory(prompt=prompt, batch_size=td.batch_size))
        return td

    def _rows(self, tensordict: TensorDictBase) -> list[dict]:
        if "row" in tensordict:
            return tensordict.get("row").tolist()
        texts = tensordict.get(self.data_key, None)
        if texts is None:
            raise RuntimeError(
                f"reset expected 'row' or {self.data_key!r}, got {sorted(tensordict.keys())}"
            )
        return [{"messages": [{"role": "user", "content": text}]} for text in texts.tolist()]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reward the last reply of each chat and ask the task what comes next."""
        full = tensordict.get(("history", "full"), None)
        if full is None:
            raise ValueError(
                "step expected history.full, found none; let a policy in history mode write it, or "
                "set it to the prompt extended by the reply"
            )
        chats = full.chats()
        complete = full.get("is_complete")
        rows = tensordict.get("row").tolist()
        turn = tensordict.get("turn") + 1  # [B]
        replies = [
            Reply(text=chat[-1]["content"], complete=bool(flags[-1]), messages=chat)
            for chat, flags in zip(chats, complete, strict=True)
        ]
        rewards = [self._reward(row, reply) for row, reply in zip(rows, replies, strict=True)]
        more = [self._respond(row, reply) for row, reply in zip(rows, replies, strict=True)]
        ended = torch.tensor([not m for m in more])
        cut = torch.tensor([not r.complete for r in replies])
        limit = (turn >= self.max_turns) & ~ended
        following = self._outcome(rewards)
        following.set("terminated", (ended & ~cut).unsqueeze(-1))
        following.set("truncated", ((ended & cut) | limit).unsqueeze(-1))
        following.set("done", (ended | limit).unsqueeze(-1))
        following.set("turn", turn)
        if any(more):
            full = History.from_chats([[*c, *m] for c, m in zip(chats, more, strict=True)])
        following.set("history", ChatHistory(prompt=full, batch_size=turn.shape))
        return following

    def _reward(self, row: dict, reply: Reply) -> Reward:
        if self.task is None:
            return Reward(total=0.0, parts={}, success=False)
        return self.task.reward(row, reply)

    def _respond(self, row: dict, reply: Reply) -> list[dict]:
        return [] if self.task is None else self.task.respond(row, reply)

    def _outcome(self, rewards: Sequence[Reward]) -> TensorDict:
        """Return reward, its parts and success of one turn, each [B, 1]."""
        out = TensorDict(batch_size=[len(rewards)])
        out.set("reward", _column([r.total for r in rewards]))
        out.set("success", torch.tensor([r.success for r in rewards]).unsqueeze(-1))
        if self._parts is None:
            self._parts = sorted(rewards[0].parts)
        for reward in rewards:
            if sorted(reward.parts) != self._parts:
                raise ValueError(
                    f"expected the reward parts {self._parts} of every reply, got "
                    f"{sorted(reward.parts)}; let the task give 0.0 for a part that does not apply"
                )
        for name in self._parts:
            out.set(("reward_part", name), _column([r.parts[name] for r in rewards]))
        return out


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(-1)
