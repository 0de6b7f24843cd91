"""TorchRL's ChatEnv and DatasetChatEnv: chats as messages, texts or ids, with or without a task.

Without a task the env only appends messages; rewards, tools and limits must come from transforms.
`DatasetChatEnv` takes its prompts from a data set, which it reads in this process, without a Ray
actor. Not supported: primers, because reset keys come from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import DataLoader

from envs import chat_env
from envs.data import load_table
from envs.rows import is_file
from envs.tasks.task import Response, Reward, Task
from envs.torchrl.chat_io import (
    MODES,
    chat_specs,
    full_ids,
    make_renderer,
    messages_of,
    next_ids,
    read_action,
    write_action,
    write_prompt,
)
from envs.torchrl.env import EnvBase, TransformedEnv
from envs.torchrl.tokenizer import IncrementalTokenizer
from envs.transforms.transform import Compose
from policies.chats.history import History
from policies.torchrl.specs import Composite, NonTensor, Unbounded


class ChatEnv(EnvBase, chat_env.ChatEnv):
    """A single- or multi-turn chat, with or without a task.

    Keys as in envs/chat_env.py. `reset` also reads `data_key` [P] (texts, lists of messages or
    histories). In tokens and text mode it writes `tokens.prompt`, in text mode also `text.prompt`,
    and `step` reads the response from `tokens.full` or `text.full` [B].

    `batch_size`: (B,) is the number of chats of a reset, None any number; an unbatched query is
    repeated. `max_turns`: None means 1 with a task, and no limit without a task.
    `template_kwargs`: chat_template or chat_template_name, for the text and tokens modes.
    `with_tokenizer=True` returns a TransformedEnv of the env with an `IncrementalTokenizer`.

    >>> env = ChatEnv(batch_size=(1,), system_prompt="Be brief.")
    >>> td = env.reset(TensorDict({"query": "Hello?"}, batch_size=(1,)))
    >>> [m["role"] for m in td["history"].prompt.chats()[0]]
    ['system', 'user']
    """

    def __new__(cls, *args: Any, with_tokenizer: bool = False, **kwargs: Any) -> Any:
        """Return the env; if with_tokenizer, a TransformedEnv of it."""
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
        tools: Sequence[dict[str, Any]] = (),
        tokenizer: Any = None,
        template_kwargs: dict[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        data_key: str | None = None,
        device: torch.device | str | None = None,
        with_tokenizer: bool = False,
    ) -> None:
        if input_mode not in MODES:
            raise ValueError(f"expected input_mode in {list(MODES)}, got {input_mode!r}")
        max_turns = 1 if max_turns is None and task is not None else max_turns
        chat: dict[str, Any] = {"system_prompt": system_prompt, "tools": tools}
        chat_env.ChatEnv.__init__(self, task, group_size=group_size, max_turns=max_turns, **chat)  # type: ignore[arg-type]
        self.input_mode, self.data_key = input_mode, data_key or "query"
        self.batch_size = _batch_size(batch_size, group_size)
        self.system_role, self.user_role, self.policy_role = system_role, user_role, policy_role
        self.tokenizer, self.device = tokenizer, device
        self.renderer = None
        if tokenizer is not None or template_kwargs or input_mode != "history":
            self.renderer = make_renderer(tokenizer, template_kwargs, input_mode)
        self._carried: list[str] = []  # entries of the last reset that are copied to each turn

    @classmethod
    def with_tokenizer(cls, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the env with an `IncrementalTokenizer`, which keeps tokens.prompt up to date."""
        template = (kwargs.get("template_kwargs") or {}).get("chat_template")
        env = cls(*args, tokenizer=tokenizer, **kwargs)
        return env.append_transform(IncrementalTokenizer(tokenizer, chat_template=template))

    @classmethod
    def from_dataloader(cls, dataloader: Any, **kwargs: Any) -> Any:
        """Return `DatasetChatEnv.from_dataloader` with these arguments."""
        return DatasetChatEnv.from_dataloader(dataloader, **kwargs)

    def with_group_size(self, group_size: int) -> ChatEnv:
        """Return a copy with `group_size` samples per prompt and any batch size."""
        env = super().with_group_size(group_size)
        env.batch_size = _batch_size(None, group_size)
        return env

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        """Write the response "a string" to every chat."""
        return write_action(td, self.input_mode, self.renderer, self.policy_role)

    def _specs(self) -> dict[str, Any]:
        if self.task is not None and self._parts is None:
            self._parts = self.task.part_names()
        source = "row" if self.task is not None else self.data_key
        return chat_specs(self.batch_size, self.input_mode, source, self._parts or [])

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is not None:
            tensordict = self._with_batch_size(tensordict)
        return self._to_device(chat_env.ChatEnv._reset(self, tensordict))

    def _with_batch_size(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the data as P rows; repeat unbatched data, check the size of batched data."""
        prompts = self.batch_size[0] // self.group_size if self.batch_size[0] > 0 else None
        if tensordict.ndim == 0 and prompts is not None:
            return tensordict.expand(prompts)
        if tensordict.ndim != 1:
            raise ValueError(f"reset expected one batch dimension, got {tensordict.batch_size}")
        if prompts not in (None, tensordict.batch_size[0]):
            got = tensordict.batch_size[0]
            raise ValueError(f"reset expected {prompts} rows (batch_size / group_size), got {got}")
        return tensordict

    def _rows(self, tensordict: TensorDictBase) -> list[dict]:
        if "row" in tensordict:
            return tensordict.get("row").tolist()
        values = tensordict.get(self.data_key, None)
        if values is None:
            raise RuntimeError(
                f"reset expected 'row' or {self.data_key!r}, got {sorted(tensordict.keys())}"
            )
        return [{"messages": chat} for chat in messages_of(values, self.user_role)]

    def _with_prompt(
        self,
        td: TensorDictBase,
        prompt: History,
        action: TensorDictBase | None = None,
        before: Sequence[list[dict]] = (),
        after: Sequence[list[dict]] = (),
    ) -> TensorDictBase:
        """Return td with the prompts of its next turn, as the input mode needs them.

        action: the td of the step, with the sampled ids of the chats `before`, to which the step
        added messages.
        """
        ids = None
        if self.input_mode == "tokens" and action is not None:
            triples = zip(full_ids(action), before, after, strict=True)
            ids = [next_ids(self.renderer, *triple) for triple in triples]
        return write_prompt(td, self.input_mode, self.renderer, prompt, ids)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._to_device(chat_env.ChatEnv._step(self, tensordict))

    def _responses(self, tensordict: TensorDictBase) -> tuple[History, list[Response]]:
        """Return the chats with their responses, and each response."""
        views = (self.input_mode, self.renderer, self.policy_role)
        full, chats, parsed = read_action(tensordict, *views)
        responses = [
            Response(text=text, complete=complete, messages=chat)
            for (text, complete), chat in zip(parsed, chats, strict=True)
        ]
        return full, responses

    def _rows_of_step(self, tensordict: TensorDictBase) -> list[dict]:
        if self.task is None:
            return [{}] * tensordict.batch_size[0]
        return super()._rows_of_step(tensordict)

    def _to_device(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.device is None else td.to(self.device)

    def _rewards(self, rows: list[dict], responses: list[Response]) -> Sequence[Reward]:
        if self.task is None:
            return [Reward(total=0.0, parts={}, success=False)] * len(rows)
        return super()._rewards(rows, responses)

    def _new_messages(self, rows: list[dict], responses: list[Response]) -> Sequence[list | None]:
        if self.task is None:
            return [None] * len(rows)  # no chat ends by itself
        return super()._new_messages(rows, responses)


class DatasetChatEnv(TransformedEnv):
    """A `ChatEnv` with prompts from a data set, epoch after epoch without end.

    `dataset`: a .jsonl, .json, .csv or .parquet file, a folder or a hub id; `name`: hub subset.
    `split`: default "train", ignored for a file. `shuffle`: a new order in each epoch, which
    depends only on `seed`. `collate_fn` turns lists of `batch_size_dl` rows (dicts) into rows, a
    dict of columns or a TensorDict; the default renames the column "text" to "query". `data_key`:
    column of prompts: texts, lists of messages or histories. Other columns are copied to the td.

    A reset returns `num_envs` chats, each prompt `repeats` times in a row, so `num_envs` must be a
    multiple of `repeats`. With `group_repeats` a reset returns num_envs * repeats chats.
    `group_id` counts prompts.
    """

    SYSTEM_PROMPT: str | None = None
    RENAMED = ("text", "query")  # the key "text" of the td holds a `Text`

    def __init__(
        self,
        *,
        dataset: str,
        shuffle: bool = True,
        name: str | None = None,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        batch_size_dl: int = 1,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        apply_template: bool | None = False,
        collate_fn: Callable[[list[dict]], Any] | None = None,
        input_mode: str = "history",
        data_key: str | None = None,
        primers: Any = None,
        system_prompt: str | None = None,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
    ) -> None:
        if apply_template:
            raise ValueError("remove apply_template and set input_mode='text'")
        if ray_backend or dataloader_actor_name:
            raise ValueError("remove ray_backend and dataloader_actor_name: no actor reads rows")
        local = is_file(dataset) or Path(dataset).is_dir()
        rows = load_table(
            dataset if local or not name else f"{dataset}:{name}", split=split or "train"
        )
        self._seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._generator = torch.Generator()
        loader = DataLoader(
            rows.rows,  # pyright: ignore[reportArgumentType]
            batch_size=batch_size_dl,
            shuffle=shuffle,
            collate_fn=collate_fn or self._collate,
            generator=self._generator,
        )
        self._mount(
            loader,
            num_envs,
            repeats=repeats,
            group_repeats=group_repeats,
            primers=primers,
            system_prompt=system_prompt,
            tokenizer=tokenizer,
            device=device,
            template_kwargs=template_kwargs,
            input_mode=input_mode,
            data_key=data_key,
        )

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        batch_size: int | Sequence[int] | None = None,
        **options: Any,
    ) -> DatasetChatEnv:
        """Return an env with the rows of any iterable; `batch_size` is num_envs, default 1.

        `options`: repeats, group_repeats, system_prompt, tokenizer, template_kwargs, input_mode,
        data_key and device, as in the constructor.
        """
        self = cls.__new__(cls)
        self._generator = None
        (size,) = _batch_size(batch_size or 1, 1)
        self._mount(dataloader, size, **options)
        return self

    def _mount(
        self,
        loader: Iterable[Any],
        num_envs: int,
        *,
        repeats: int | None = None,
        group_repeats: bool = False,
        primers: Any = None,
        system_prompt: str | None = None,
        **chat: Any,
    ) -> None:
        if primers is not None:
            raise ValueError("remove primers: the rows define the keys of a reset")
        repeats = max(1, repeats or 1)
        size = num_envs * repeats if group_repeats else num_envs
        if size % repeats:
            raise ValueError(
                f"expected num_envs to be a multiple of {repeats=}, because all samples of a "
                f"prompt come from one reset, got {num_envs}; or set group_repeats=True"
            )
        prompt = self.SYSTEM_PROMPT if system_prompt is None else system_prompt
        env = ChatEnv(group_size=repeats, batch_size=(size,), system_prompt=prompt, **chat)
        super().__init__(env, Compose())
        self._loader, self._num_prompts, self._num_read = loader, size // repeats, 0
        self.reset_dataloader()

    def reset_dataloader(self) -> DatasetChatEnv:
        """Restart at the first row; return the environment."""
        if self._generator is not None:
            self._generator.manual_seed(self._seed)
        self._rows = endless(self._loader)
        return self

    @property
    def output_spec(self) -> Composite:
        """Return the specs of outputs; the columns of the data are observations."""
        spec = super().output_spec
        observed, row = spec["full_observation_spec"], self._peek()
        for name, value in row.items():
            if isinstance(value, Tensor):
                observed[name] = Unbounded((*observed.shape, *value.shape), dtype=value.dtype)
            else:
                observed[name] = NonTensor(observed.shape, example_data=value)
        return spec

    @property
    def input_spec(self) -> Composite:
        """Return the specs of inputs: only the action, because a reset needs no input."""
        spec = super().input_spec
        spec["full_state_spec"] = Composite(shape=spec["full_state_spec"].shape)
        return spec

    def _peek(self) -> dict[str, Any]:
        """Return the next row without consuming it."""
        row = next(self._rows)
        self._rows = chain([row], self._rows)
        return row

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        if td is None or (self.base_env.data_key not in td and "row" not in td):
            td = self._next_prompts()
        return super()._reset(td)

    def _next_prompts(self) -> TensorDict:
        """Return the next prompts [P] with their other columns."""
        rows = [next(self._rows) for _ in range(self._num_prompts)]
        td = TensorDict(batch_size=[len(rows)])
        for name in rows[0]:
            td.set(name, _stacked([row[name] for row in rows]))
        td.set("group_id", torch.arange(self._num_read, self._num_read + len(rows)))
        self._num_read += len(rows)
        return td

    def _collate(self, rows: list[dict]) -> list[dict]:
        old, new = self.RENAMED
        return [{new if name == old else name: v for name, v in row.items()} for row in rows]


def _stacked(values: list[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values)
    return NonTensorStack(*[NonTensorData(value) for value in values])


def _batch_size(batch_size: int | Sequence[int] | None, group_size: int) -> torch.Size:
    """Return the batch size, [-1] if None; raise ValueError unless group_size divides it."""
    if batch_size is None:
        return torch.Size([-1])
    size = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
    if len(size) != 1 or size[0] < 1 or size[0] % group_size:
        raise ValueError(
            f"expected batch_size=(B,) with B a multiple of group_size={group_size}, got "
            f"{tuple(size)}"
        )
    return size


def endless(loader: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a loader, epoch after epoch."""
    while True:
        count = 0
        for item in loader:
            for row in _rows(item):
                count += 1
                yield row
        if not count:
            raise ValueError(
                "expected a dataloader that can be read again in each epoch, got no rows; pass a "
                "list or a DataLoader, because a generator is empty after one epoch"
            )


def _rows(item: Any) -> list[dict[str, Any]]:
    """Return the rows of a dataloader's item: a TensorDict, a dict, or a list of dicts."""
    if isinstance(item, TensorDictBase):
        parts = [item] if item.ndim == 0 else item.unbind(0)
        return [{name: part[name] for name in part.keys()} for part in parts]  # noqa: SIM118
    if isinstance(item, Mapping):
        if not all(map(_is_column, item.values())):
            return [dict(item)]
        columns = zip(*item.values(), strict=True)
        return [dict(zip(item, values, strict=True)) for values in columns]
    if isinstance(item, list) and all(isinstance(row, Mapping) for row in item):
        return [dict(row) for row in item]
    raise TypeError(
        "expected rows as a TensorDict, a dict of columns or a list of dicts, got "
        f"{type(item).__name__}; pass a collate_fn that returns such rows"
    )


def _is_column(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)
