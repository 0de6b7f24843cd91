"""A chat as an environment: the prompt is the observation, the response is the action.

Each of P prompts is repeated G times, next to each other, so there are B = P * G chats. A task
defines the rows, the rewards and the next messages. Chats as texts or ids, chats without a task and
prompts from a data set are in envs/torchrl/chat_env.py, because no run needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from envs.env import Env
from envs.rewards.compute import compute_rewards
from envs.tasks.task import Response, Reward, Task
from policies.chats.containers import ChatHistory
from policies.chats.history import History
from policies.random import fold

POLICY_KEYS = ("history", "text", "tokens", "masks", "log_probs")  # written in every turn
REWARD_KEYS = ("reward", "reward_errors", "success", "dropped")

Chat = list[dict[str, Any]]


class ChatEnv(Env):
    """A single- or multi-turn chat with a task.

    `reset` reads `row` [P] (dicts with "messages") and writes `group_id`, `turn` [B] and the prompt
    `history.prompt`. Other input keys are copied to every turn. `step` reads the response from
    `history.full` [B] and writes under "next": `reward` [B, 1], `reward_part.*`, `reward_errors`,
    `dropped`, `success`, `terminated`, `truncated`, `done` [B, 1] and the next turn's prompt.

    `tools`: schemas that the template shows in chats of rows without "tools".

    >>> from envs.tasks.calculator import Calculator
    >>> task = Calculator()
    >>> row = NonTensorStack(NonTensorData(task.rows("train")[0]))
    >>> td = ChatEnv(task, system_prompt="Be brief.").reset(TensorDict({"row": row}, [1]))
    >>> [m["role"] for m in td["history"].prompt.chats()[0]]
    ['system', 'user']
    """

    system_role, user_role, policy_role = "system", "user", "assistant"

    def __init__(
        self,
        task: Task,
        *,
        group_size: int = 1,
        max_turns: int | None = 1,
        system_prompt: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        if min(group_size, 1 if max_turns is None else max_turns) < 1:
            raise ValueError(f"expected max_turns, group_size >= 1, got {max_turns}, {group_size}")
        self.task, self.group_size, self.max_turns = task, group_size, max_turns
        self.system_prompt, self.tools = system_prompt, list(tools)
        self._parts: list[str] | None = None  # reward parts, known after the first response

    def with_group_size(self, group_size: int) -> Any:
        """Return a copy with `group_size` samples per prompt."""
        env = copy(self)
        env.group_size = group_size
        return env

    def set_task(self, task: Task) -> None:
        """Play the chats of another task from now on."""
        self.task, self._parts = task, None

    def messages(self, row: dict) -> list[dict]:
        """Return the prompt of a row, with the env's system prompt if the row has none.

        The first message has the row's tools, or the env's, and the row's template variables.
        """
        messages = list(row["messages"])
        if self.system_prompt is not None and messages[0]["role"] != self.system_role:
            messages.insert(0, {"role": self.system_role, "content": self.system_prompt})
        if tools := row.get("tools") or self.tools:
            messages[0] = {**messages[0], "tools": tools}
        if variables := row.get("chat_template_kwargs"):
            messages[0] = {**messages[0], "chat_template_kwargs": [variables]}
        return messages

    @property
    def reward_keys(self) -> list[Any]:
        """Return the keys of a step's rewards."""
        return [*REWARD_KEYS, *(("reward_part", name) for name in self._parts or [])]

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            raise RuntimeError("reset expected a td with the rows to start from, got None")
        rows = self._rows(tensordict)
        num_prompts, num_samples = len(rows), self.group_size
        owner = torch.arange(num_prompts).repeat_interleave(num_samples)  # [B] index of the row
        td = tensordict.exclude("next", *POLICY_KEYS)[owner]
        td.set("group_id", tensordict.get("group_id", torch.arange(num_prompts))[owner])
        if "stream" in tensordict:
            sample = torch.arange(num_samples).repeat(num_prompts)  # [B]
            td.set("stream", fold(tensordict.get("stream")[owner], sample))
        if self.task is not None:
            td.set("row", NonTensorStack(*[NonTensorData(rows[i]) for i in owner.tolist()]))
        self._carried = list(td.keys())
        td.set("turn", torch.zeros(len(owner), dtype=torch.int64))
        prompts = [self.messages(row) for row in rows]
        for messages in prompts if self.task is not None else ():
            if messages[-1]["role"] == self.policy_role:
                raise ValueError(
                    "expected a prompt that ends with a message of the user or a tool, got the "
                    f"assistant's {messages[-1]['content']!r:.60}"
                )
        chats = History.from_chats(prompts).unbind(0)
        prompt = lazy_stack([chats[i] for i in owner.tolist()])  # samples share their prompt
        return self._with_prompt(td, prompt)

    def _rows(self, tensordict: TensorDictBase) -> list[dict]:
        return tensordict.get("row").tolist()

    def _with_prompt(self, td: TensorDictBase, prompt: History, *_: Any) -> TensorDictBase:
        """Return td with the prompts of its next turn."""
        return td.set("history", ChatHistory(prompt=prompt, batch_size=td.batch_size))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reward the last response of each chat and add the task's next messages."""
        full, responses = self._responses(tensordict)
        rows = self._rows_of_step(tensordict)
        turn = tensordict.get("turn", torch.zeros(len(rows), dtype=torch.int64)).cpu() + 1  # [B]
        rewards = self._rewards(rows, responses)
        new = self._new_messages(rows, responses)
        ended = torch.tensor([messages is not None and not messages for messages in new])  # [B]
        cut = torch.tensor([not r.complete for r in responses])  # [B] cut by the token limit
        at_limit = (turn >= (self.max_turns or torch.inf)) & ~ended  # [B]
        following = tensordict.select(*self._carried, strict=False).update(self._outcome(rewards))
        following.set("terminated", (ended & ~cut).unsqueeze(-1))
        following.set("truncated", ((ended & cut) | at_limit).unsqueeze(-1))
        following.set("done", (ended | at_limit).unsqueeze(-1))
        following.set("turn", turn)
        chats = [response.messages for response in responses]
        after = [[*chat, *(messages or [])] for chat, messages in zip(chats, new, strict=True)]
        history = History.from_chats(after) if any(new) else full
        return self._with_prompt(following, history, tensordict, chats, after)

    def _responses(self, tensordict: TensorDictBase) -> tuple[History, list[Response]]:
        """Return the chats with their responses, and each response."""
        full = read_history(tensordict, ("history", "full"))
        responses = [
            Response(text=chat[-1]["content"], complete=bool(flags[-1]), messages=chat)
            for chat, flags in zip(full.chats(), full.get("is_complete"), strict=True)
        ]
        return full, responses

    def _rows_of_step(self, tensordict: TensorDictBase) -> list[dict]:
        if "row" not in tensordict:
            raise ValueError("step expected 'row', a key that reset writes, found none")
        return tensordict.get("row").tolist()

    def _rewards(self, rows: list[dict], responses: list[Response]) -> Sequence[Reward]:
        return compute_rewards(self.task, rows, responses)

    def _new_messages(self, rows: list[dict], responses: list[Response]) -> Sequence[list | None]:
        """Return the task's next messages for each response: [] ends the chat, None does not."""
        return [self.task.respond(*pair) for pair in zip(rows, responses, strict=True)]

    def _outcome(self, rewards: Sequence[Reward]) -> TensorDict:
        """Return reward, its parts, errors and success of one turn, each [B, 1]."""
        out = TensorDict(batch_size=[len(rewards)])
        out.set("reward", _column([r.total for r in rewards]))
        out.set("reward_errors", _column([r.errors for r in rewards]))
        for name in ("success", "dropped"):
            out.set(name, _column([getattr(r, name) for r in rewards]).bool())
        if self._parts is None:
            self._parts = sorted(rewards[0].parts)
        for parts in (sorted(reward.parts) for reward in rewards):
            if parts != self._parts:
                raise ValueError(
                    f"expected the reward parts {self._parts} of every response, got {parts}; "
                    "return math.nan for a part that does not apply"
                )
        for name in self._parts:
            out.set(("reward_part", name), _column([r.parts[name] for r in rewards]))
        return out


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(-1)


def read_history(td: TensorDictBase, key: tuple[str, ...]) -> History:
    """Return the history at a key (container, field); the container may be a bare History."""
    owner = td.get(key[:-1], None)
    history = owner if isinstance(owner, History) else td.get(key, None)
    if history is None:
        raise ValueError(f"step expected {'.'.join(key)}, found none; let a policy write it")
    return history


def change_chats(td: TensorDictBase, changes: dict[int, Callable[[Chat], Chat]]) -> None:
    """Change the next prompt of some rows, and remove the ids of their old prompts."""
    if not changes:
        return
    chats = list(td.get(("history", "prompt")).unbind(0))
    for row, change in changes.items():
        chats[row] = History.from_chats(change(chats[row].messages()))
    td.set(("history", "prompt"), lazy_stack(chats))
    td.exclude("tokens", inplace=True)
