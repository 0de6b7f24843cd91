"""LLMCollector: run chats continuously and yield them turn by turn, with TorchRL's interface.

A row is one turn of one chat: the policy's outputs at the root, the environment's under "next".
Rows are ragged, so batches are lazy stacks: [B, T] for B parallel chats and T turns. The next
prompt replaces a finished chat. Training uses trainer/collect.py instead (one dense row per full
chat); both extend chats with the same functions. Not supported, because no run uses this class:
replay buffers, queues, environment pools, remote workers and weight updaters.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn

from envs.torchrl.env import EnvBase, TransformedEnv
from envs.torchrl.policy_version import PolicyVersion
from policies.chats.containers import Tokens
from policies.padding import rows
from policies.torchrl.wrapper import LLMWrapperBase, as_generator
from trainer.collect import check_scored, next_state, tokens_between

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(eq=False)
class Chat:
    """A growing chat: the state of its next turn, and its turns so far."""

    number: int
    state: TensorDictBase
    assistant: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    rows: list[TensorDictBase] = field(default_factory=list)


class LLMCollector:
    """Iterate over the turns of `policy` in `env`.

    Default: `dialog_turns_per_batch` turns of the B chats of `env.reset`, [B, T] with
    B * T >= dialog_turns_per_batch, or [B * T] with `flatten_data`. `yield_completed_trajectories`:
    full chats, concatenated in one dimension, at least `dialog_turns_per_batch` (default 1) turns;
    `yield_only_last_steps`: only the last turn of each. All turns count towards
    `total_dialog_turns` (-1: unlimited). `reset_at_each_iter` drops running chats between batches.

    `dataloader` yields the data for `env.reset`: TensorDicts, rows (dicts with "messages", or with
    the environment's `data_key`), texts, or lists of these; by default the environment has data.
    Collection ends with an iterator and repeats other data; an incomplete last batch is dropped.
    `postproc` maps each batch; returning None skips it. `track_policy_version` (True or a
    PolicyVersion) writes "policy_version", which `update_policy_weights_` increases by 1.
    ("collector", "traj_ids") numbers the chats. Rows hold the exact ids and no padding.

    >>> from envs import ChatEnv
    >>> from policies import load_policy
    >>> policy = load_policy("tiny", max_new_tokens=4)
    >>> env, prompts = ChatEnv(max_turns=2), [["Hi", "Ho"]]
    >>> data = LLMCollector(env, policy=policy, dataloader=prompts, dialog_turns_per_batch=4)
    >>> next(iter(data))["next", "done"].squeeze(-1).tolist()
    [[False, True], [False, True]]
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Policy | None = None,
        policy_factory: Callable[[], Policy] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None,
        total_dialog_turns: int = -1,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        track_policy_version: Any = False,
        dataloader: Iterable[Any] | None = None,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise TypeError("expected exactly one of policy and policy_factory")
        only_last, completed = bool(yield_only_last_steps), yield_completed_trajectories
        completed = only_last if completed is None else completed
        if only_last and not completed:
            raise TypeError("yield_only_last_steps=True requires yield_completed_trajectories=True")
        if only_last and reset_at_each_iter:
            raise TypeError("yield_only_last_steps=True excludes reset_at_each_iter=True")
        if completed and flatten_data is not None:
            raise TypeError("expected no flatten_data: batches of full chats have one dimension")
        if dialog_turns_per_batch is None and completed:
            dialog_turns_per_batch = 1
        if dialog_turns_per_batch is None or dialog_turns_per_batch < 1:
            raise ValueError(f"expected dialog_turns_per_batch >= 1, got {dialog_turns_per_batch}")
        self.policy: Any = policy if policy_factory is None else policy_factory()
        self.env = env if isinstance(env, EnvBase) else env()
        tracker = PolicyVersion() if track_policy_version is True else track_policy_version or None
        self.policy_version_tracker = tracker
        if tracker is not None:
            self.env = TransformedEnv(self.env, tracker)
        self._register()  # before specs are read: transforms may need the policy
        self._player = self.policy
        if isinstance(self.policy, LLMWrapperBase):  # no padding: turns differ in length
            mode = self.policy.input_mode
            check_scored(self.policy)
            self._player = as_generator(self.policy, input_mode=mode, pad_output=False)
        self.dialog_turns_per_batch = dialog_turns_per_batch
        self.total_dialog_turns = total_dialog_turns
        self.yield_completed_trajectories, self.yield_only_last_steps = completed, only_last
        self.reset_at_each_iter, self.flatten_data = reset_at_each_iter, bool(flatten_data)
        self.postproc = postproc
        text_key = getattr(self.env, "data_key", "query")
        self._data = None if dataloader is None else _reset_data(dataloader, text_key)
        self._turns = 0  # turns yielded so far, also dropped ones
        self._num_chats = 0  # chats started so far
        self._places: list[Chat | None] = []  # parallel chats, as many as a reset returns
        self._waiting: deque[Chat] = deque()
        self._finished: deque[Chat] = deque()
        self._state: list[str] = []  # keys that a reset returns

    def _register(self) -> None:
        """Register with the policy, the environment and its transforms."""
        users: list[Any] = [self.policy, self.env]
        while isinstance(users[-1], TransformedEnv):
            users.append(users[-1].env)
        for user in users:
            if hasattr(user, "register_collector"):
                user.register_collector(self)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until `total_dialog_turns` or the end of the data."""
        while self.total_dialog_turns < 0 or self._turns < self.total_dialog_turns:
            batch = self.rollout()
            if batch is None:
                return
            batch = batch if self.postproc is None else self.postproc(batch)
            if batch is not None:
                yield batch

    def rollout(self) -> TensorDictBase | None:
        """Return the next batch, before `postproc`; None when the data have ended."""
        if self.reset_at_each_iter:
            self._places = [None] * len(self._places)
        return self._full_chats() if self.yield_completed_trajectories else self._side_by_side()

    def _side_by_side(self) -> TensorDictBase | None:
        """Return [B, T]: T turns of the chats at each place."""
        turns: list[list[TensorDictBase]] = []
        while not turns or len(turns) * len(turns[0]) < self.dialog_turns_per_batch:
            turns.append(self._turn())
            if not turns[-1] or len(turns[-1]) < len(self._places):
                return None
        self._finished.clear()  # their rows are in this batch or earlier ones
        batch = lazy_stack([lazy_stack(list(rows)) for rows in zip(*turns, strict=True)])
        self._turns += batch.numel()
        return batch.view(-1) if self.flatten_data else batch

    def _full_chats(self) -> TensorDictBase | None:
        """Return [N]: the turns of finished chats, concatenated."""
        out: list[TensorDictBase] = []
        while len(out) < self.dialog_turns_per_batch:
            while not self._finished:
                if not self._turn():
                    return lazy_stack(out) if out else None
            chat = self._finished.popleft()
            out += chat.rows[-1:] if self.yield_only_last_steps else chat.rows
            self._turns += len(chat.rows)
        return lazy_stack(out)

    def _turn(self) -> list[TensorDictBase]:
        """Run one turn of every chat; return an unpadded row of each, or [] without more data."""
        if not self._places and self._draw():
            self._places = [None] * len(self._waiting)
        for place, chat in enumerate(self._places):
            if chat is None and (self._waiting or self._draw()):
                self._places[place] = self._waiting.popleft()
        playing = [chat for chat in self._places if chat is not None]
        if not playing:
            return []
        if self._player is not self.policy:  # a copy, whose version does not follow syncs
            self._player.version = self.policy.version
        td = self._player(lazy_stack([chat.state for chat in playing]))
        if self._exact:  # the policy marks only its new response
            masks = rows(td, (self._player.masks_key, "all_assistant_mask"))
            for mask, chat in zip(masks or (), playing, strict=True):
                mask[: len(chat.assistant)] |= chat.assistant.to(mask.device)
        if self.policy_version_tracker is not None:  # replaces the version of the wrapper
            td = self.policy_version_tracker._step(td, td)
        turn = list(self.env.step(td).unbind(0))
        for chat, row in zip(playing, turn, strict=True):
            row.set(("collector", "traj_ids"), torch.tensor(chat.number))
            chat.rows.append(row)
            if row.get(("next", "done")).any():
                self._places[self._places.index(chat)] = None
                self._finished.append(chat)
            else:
                chat.state = next_state(row, self._state)
                if self._exact:
                    self._extend(chat, row)
        return turn

    def _draw(self) -> bool:
        """Reset the environment for more chats; False when the data have ended."""
        start = None if self._data is None else next(self._data, None)
        if self._data is not None and start is None:
            return False
        td = self.env.reset(start)
        self._state = list(td.keys())
        for state in td.unbind(0):
            chat = Chat(self._num_chats, state)
            if self._exact:
                self._render(chat, _messages(state))
            self._waiting.append(chat)
            self._num_chats += 1
        return True

    @property
    def _exact(self) -> bool:
        """Whether the collector keeps the ids: in history mode, unless the environment does."""
        known = getattr(self._player, "input_mode", None) == "history"
        able = getattr(self._player, "renderer", None) is not None
        return known and able and "tokens" not in self._state

    def _extend(self, chat: Chat, row: TensorDictBase) -> None:
        """Set the chat's next prompt: the ids so far and the ids of the new messages."""
        before, after = _messages(row, "full"), _messages(chat.state)
        if after[: len(before)] != before:  # the environment rewrote earlier messages
            return self._render(chat, after)
        ids = row.get((self._player.tokens_key, "full"))
        marks = row.get((self._player.masks_key, "all_assistant_mask"))
        new, more = tokens_between(self._player, int(ids[-1]), before, after)
        self._set_prompt(chat, torch.cat([ids.cpu(), new]), torch.cat([marks.cpu(), more]))

    def _render(self, chat: Chat, messages: list[dict]) -> None:
        done = self._player.renderer.render(messages, add_generation_prompt=True)
        marks = torch.tensor(done.assistant, dtype=torch.bool)
        self._set_prompt(chat, torch.tensor(done.ids), marks)

    def _set_prompt(self, chat: Chat, ids: Tensor, assistant: Tensor) -> None:
        chat.state.set(self._player.tokens_key, Tokens(prompt=ids, batch_size=[]))
        chat.assistant = assistant

    def update_policy_weights_(
        self, policy_or_weights: nn.Module | Mapping[str, Any] | TensorDictBase | None = None
    ) -> None:
        """Load weights (a policy, a model, its state dict or a TensorDict) and count a version.

        Without an argument, for a policy trained in place, only the version increases.
        """
        if policy_or_weights is not None:
            state = _state_dict(policy_or_weights)
            if hasattr(self.policy, "load_weights"):
                self.policy.load_weights(state.items())
            else:
                getattr(self.policy, "model", self.policy).load_state_dict(state)
        if hasattr(self.policy, "version"):
            self.policy.version += 1
        self.increment_version()

    def increment_version(self) -> None:
        """Count a new version of the policy, if versions are tracked."""
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.increment_version()

    @property
    def policy_version(self) -> int | str | None:
        """Return the version of the policy, None if it is not tracked."""
        return getattr(self.policy_version_tracker, "version", None)


def _reset_data(loader: Iterable[Any], text_key: str) -> Iterator[TensorDictBase]:
    """Yield data for `env.reset` repeatedly; an iterator has one pass.

    Prompts without a group_id get a unique one.
    """
    groups = 0
    while True:
        before = groups
        for data in loader:
            td = _as_td(data, text_key)
            if "group_id" not in td:
                number = torch.arange(groups, groups + td.numel()).view(td.batch_size)
                td = td.copy().set("group_id", number)
            groups += td.numel()
            yield td
        if groups == before:
            return


def _as_td(data: Any, text_key: str) -> TensorDictBase:
    """Return the data of a reset as a TensorDict of texts, of rows, or of columns."""
    if isinstance(data, TensorDictBase):
        return data if data.ndim else data.unsqueeze(0)
    items = data if isinstance(data, list | tuple) else [data]
    td = TensorDict(batch_size=[len(items)])
    if all(isinstance(item, str) for item in items):
        return td.set(text_key, NonTensorStack(*items))
    if all(isinstance(item, Mapping) and "messages" in item for item in items):
        return td.set("row", NonTensorStack(*[NonTensorData(dict(item)) for item in items]))
    if not all(isinstance(item, Mapping) and text_key in item for item in items):
        raise TypeError(f"expected TensorDicts, texts or dicts with {text_key!r}, got {items[0]!r}")
    for name in sorted(set(items[0]).intersection(*items)):
        td.set(name, NonTensorStack(*[NonTensorData(item[name]) for item in items]))
    return td


def _state_dict(source: Any) -> dict[str, Tensor]:
    """Return the weights of a policy, a model or a mapping, by name."""
    if isinstance(source, nn.Module):
        return getattr(source, "model", source).state_dict()
    if isinstance(source, TensorDictBase):
        return dict(source.flatten_keys(".").items())
    return dict(source)


def _messages(td: TensorDictBase, field: str = "prompt") -> list[dict]:
    return td.get(("history", field)).messages()
