"""A chat as an environment: the prompt is the observation, the reply is the action.

P prompts are repeated G times in a row into B = P*G chats. A task says what the rows are, what a
reply earns and what comes next; without a task the env only keeps the conversation, and transforms
(rewards, tools, step limits) do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from envs.chat_views import MODES, POLICY_KEYS, read_action, write_prompt
from envs.earned import rewards_of
from envs.env import EnvBase
from envs.tasks.task import Reply, Reward, Task
from policies.chats.history import History
from policies.random import fold


class ChatEnv(EnvBase):
    """A single- or multi-turn chat, over a task or over any texts.

    `reset` reads `row` [P] (dicts with "messages") or `data_key` [P] (texts, lists of messages or
    histories) and writes `history.prompt`, in the other input modes also `tokens.prompt`, in text
    mode `text.prompt` too, and `group_id`, `turn` [B]; other entries of its input are kept from
    turn to turn. `step` reads the action, `history.full`, `text.full` or `tokens.full` [B], and
    writes under "next": `reward` [B, 1], `reward_part.*`, `reward_errors`, `dropped`, `success`,
    `terminated`, `truncated`, `done` [B, 1] and the next turn's prompt.

    `batch_size`: (B,), checked, and an unbatched query is repeated to it; None takes what comes.
    `max_turns`: default 1 with a task; without a task None never ends an episode.
    `template_kwargs`: chat_template or chat_template_name, for the text and tokens modes.
    `with_tokenizer=True` gives the env with an `IncrementalTokenizer`.

    >>> env = ChatEnv(batch_size=(1,), system_prompt="Be brief.")
    >>> td = env.reset(TensorDict({"query": "Hello?"}, batch_size=(1,)))
    >>> [m["role"] for m in td["history"].prompt.chats()[0]]
    ['system', 'user']
    """

    def __new__(cls, *args: Any, with_tokenizer: bool = False, **kwargs: Any) -> Any:
        """Return the env, or with_tokenizer=True its TransformedEnv."""
        if not with_tokenizer:
            return super().__new__(cls)
        return cls.with_tokenizer(kwargs.pop("tokenizer", None), *args, **kwargs)

    def __init__(
        self,
        task: Task | None = None,
        *,
        group_size: int = 1,
        max_turns: int | None = None,
        input_mode: str = "history",
        batch_size: int | Sequence[int] | None = None,
        system_prompt: str | None = None,
        tokenizer: Any = None,
        template_kwargs: dict[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        data_key: str | None = None,
        device: torch.device | str | None = None,
        with_tokenizer: bool = False,
    ) -> None:
        if group_size < 1 or (max_turns is not None and max_turns < 1):
            raise ValueError(
                f"expected max_turns and group_size >= 1, got {max_turns} and {group_size}"
            )
        if input_mode not in MODES:
            raise ValueError(f"expected input_mode in {list(MODES)}, got {input_mode!r}")
        self.task, self.group_size, self.input_mode = task, group_size, input_mode
        self.max_turns = 1 if max_turns is None and task is not None else max_turns
        self.batch_size = _batch_size(batch_size, group_size)
        self.system_prompt, self.data_key = system_prompt, data_key or "query"
        self.system_role, self.user_role, self.policy_role = system_role, user_role, policy_role
        self.tokenizer, self.device = tokenizer, device
        self.renderer = None
        if tokenizer is not None or template_kwargs or input_mode != "history":
            from envs.chat_modes import make_renderer

            self.renderer = make_renderer(tokenizer, template_kwargs, input_mode)
        self._parts: list[str] | None = None  # names of the reward parts, from the first reply on
        self._kept: list[str] = []  # entries that go on from turn to turn, from the last reset

    @classmethod
    def with_tokenizer(cls, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the env behind an `IncrementalTokenizer`, which keeps tokens.prompt up to date."""
        from envs.transforms.tokenizer import IncrementalTokenizer

        template = (kwargs.get("template_kwargs") or {}).get("chat_template")
        env = cls(*args, tokenizer=tokenizer, **kwargs)
        return env.append_transform(IncrementalTokenizer(tokenizer, chat_template=template))

    @classmethod
    def from_dataloader(cls, dataloader: Any, **kwargs: Any) -> Any:
        """Return a `DatasetChatEnv` over a dataloader; arguments as there."""
        from envs.dataset_chat_env import DatasetChatEnv

        return DatasetChatEnv.from_dataloader(dataloader, **kwargs)

    def regrouped(self, group_size: int) -> ChatEnv:
        """Return the same environment, with so many samples of each prompt and any batch size."""
        env = copy(self)
        env.group_size, env.batch_size = group_size, _batch_size(None, group_size)
        return env

    def messages(self, row: dict) -> list[dict]:
        """Return the prompt of a row, the system prompt in front where there is none yet."""
        messages = list(row["messages"])
        if self.system_prompt is not None and messages[0]["role"] != self.system_role:
            messages.insert(0, {"role": self.system_role, "content": self.system_prompt})
        return messages

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        """Write the reply "a string" to every chat."""
        from envs.chat_modes import write_action

        return write_action(td, self.input_mode, self.renderer, self.policy_role)

    def _specs(self) -> dict[str, Any]:
        from envs.chat_modes import chat_specs

        if self.task is not None and self._parts is None:
            self._parts = self.task.part_names()
        source = "row" if self.task is not None else self.data_key
        return chat_specs(self.batch_size, self.input_mode, source, self._parts or [])

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            raise RuntimeError("reset expected a td with the rows to start from, got None")
        tensordict = self._fitted(tensordict)
        rows = self._rows(tensordict)
        size, times = len(rows), self.group_size
        owner = torch.arange(size).repeat_interleave(times)  # [B]
        td = tensordict.exclude("next", *POLICY_KEYS)[owner]
        td.set("group_id", tensordict.get("group_id", torch.arange(size))[owner])
        if "stream" in tensordict:
            sample = torch.arange(times).repeat(size)
            td.set("stream", fold(tensordict.get("stream")[owner], sample))
        if self.task is not None:
            td.set("row", NonTensorStack(*[NonTensorData(rows[i]) for i in owner.tolist()]))
        self._kept = list(td.keys())
        td.set("turn", torch.zeros(size * times, dtype=torch.int64))
        asked = [self.messages(row) for row in rows]
        for messages in asked if self.task is not None else ():
            if messages[-1]["role"] == self.policy_role:
                raise ValueError(
                    "expected a prompt that ends in a message to reply to, got one that ends in "
                    f"the assistant's {messages[-1]['content']!r:.60}; let a user's be the last"
                )
        chats = History.from_chats(asked).unbind(0)
        prompt = lazy_stack([chats[i] for i in owner.tolist()])  # samples share their prompt
        return self._placed(write_prompt(td, self.input_mode, self.renderer, prompt))

    def _fitted(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the data with one batch dimension, of P rows where the env has a batch size."""
        prompts = self.batch_size[0] // self.group_size if self.batch_size[0] > 0 else None
        if tensordict.ndim == 0 and prompts is not None:
            return tensordict.expand(prompts)
        if tensordict.ndim != 1:
            raise ValueError(f"reset expected one batch dimension, got {tensordict.batch_size}")
        if prompts not in (None, tensordict.batch_size[0]):
            raise ValueError(
                f"reset expected {prompts} rows (batch_size / group_size), got "
                f"{tensordict.batch_size[0]}; give the env the batch_size of the data"
            )
        return tensordict

    def _rows(self, tensordict: TensorDictBase) -> list[dict]:
        if "row" in tensordict:
            return tensordict.get("row").tolist()
        found = tensordict.get(self.data_key, None)
        if found is None:
            raise RuntimeError(
                f"reset expected 'row' or {self.data_key!r}, got {sorted(tensordict.keys())}"
            )
        from envs.chat_modes import messages_of

        return [{"messages": chat} for chat in messages_of(found, self.user_role)]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reward the last reply of each chat and ask the task what comes next."""
        views = (self.input_mode, self.renderer, self.policy_role)
        full, chats, said = read_action(tensordict, *views)
        size = len(said)
        if self.task is not None and "row" not in tensordict:
            raise ValueError("step expected 'row', as reset and step give it, found none")
        rows = tensordict.get("row").tolist() if self.task is not None else [{}] * size
        turn = tensordict.get("turn", torch.zeros(size, dtype=torch.int64)).cpu() + 1  # [B]
        replies = [
            Reply(text=text, complete=complete, messages=chat)
            for (text, complete), chat in zip(said, chats, strict=True)
        ]
        rewards = self._rewards(rows, replies)
        more = [self._respond(row, reply) for row, reply in zip(rows, replies, strict=True)]
        ended = torch.tensor([self.task is not None and not m for m in more])
        cut = torch.tensor([not r.complete for r in replies])
        limit = (turn >= (self.max_turns or torch.inf)) & ~ended
        following = tensordict.select(*self._kept, strict=False).update(self._outcome(rewards))
        following.set("terminated", (ended & ~cut).unsqueeze(-1))
        following.set("truncated", ((ended & cut) | limit).unsqueeze(-1))
        following.set("done", (ended | limit).unsqueeze(-1))
        following.set("turn", turn)
        after = [[*c, *m] for c, m in zip(chats, more, strict=True)]
        history = History.from_chats(after) if any(more) else full
        ids = None
        if self.input_mode == "tokens":
            from envs.chat_modes import full_ids, next_ids

            triples = zip(full_ids(tensordict), chats, after, strict=True)
            ids = [next_ids(self.renderer, *triple) for triple in triples]
        done = write_prompt(following, self.input_mode, self.renderer, history, ids)
        return self._placed(done)

    def _placed(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.device is None else td.to(self.device)

    def _rewards(self, rows: list[dict], replies: list[Reply]) -> Sequence[Reward]:
        if self.task is None:
            return [Reward(total=0.0, parts={}, success=False)] * len(rows)
        return rewards_of(self.task, rows, replies)

    def _respond(self, row: dict, reply: Reply) -> list[dict]:
        return [] if self.task is None else self.task.respond(row, reply)

    def _outcome(self, rewards: Sequence[Reward]) -> TensorDict:
        """Return reward, its parts, errors and success of one turn, each [B, 1]."""
        out = TensorDict(batch_size=[len(rewards)])
        out.set("reward", _column([r.total for r in rewards]))
        out.set("reward_errors", _column([r.errors for r in rewards]))
        for name in ("success", "dropped"):
            flags = torch.tensor([bool(getattr(r, name)) for r in rewards])
            out.set(name, flags.unsqueeze(-1))
        if self._parts is None:
            self._parts = sorted(rewards[0].parts)
        for reward in rewards:
            if sorted(reward.parts) != self._parts:
                raise ValueError(
                    f"expected the reward parts {self._parts} of every reply, got "
                    f"{sorted(reward.parts)}; let the task give math.nan where one does not apply"
                )
        for name in self._parts:
            out.set(("reward_part", name), _column([r.parts[name] for r in rewards]))
        return out


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(-1)


def _batch_size(batch_size: int | Sequence[int] | None, group_size: int) -> torch.Size:
    """Return the batch size, [-1] for any; ValueError unless it is one dimension of groups."""
    if batch_size is None:
        return torch.Size([-1])
    size = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
    if len(size) != 1 or size[0] < 1 or size[0] % group_size:
        raise ValueError(
            f"ChatEnv must have one batch dimension, a multiple of group_size={group_size}, got "
            f"{tuple(size)}; flatten more dimensions"
        )
    return size
