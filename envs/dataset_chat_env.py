"""Chats whose prompts come from a data set: `reset()` takes the next ones.

Left out on purpose: data loading in a Ray actor, and primers (the rows say what there is).
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

from envs.chat_env import ChatEnv
from envs.data import is_file, load_table
from envs.transformed_env import TransformedEnv
from envs.transforms.transform import Compose
from policies.specs import Composite, NonTensor, Unbounded


class DatasetChatEnv(TransformedEnv):
    """A `ChatEnv` that draws its prompts from a data set, in endless epochs.

    `dataset`: a .jsonl, .json, .csv or .parquet file, a folder or a hub id (`name`: its subset;
    `split`, default "train"; a file is one split). `shuffle` draws a new order each epoch, the same
    for the same `seed`. `collate_fn` gets lists of `batch_size_dl` rows (dicts) and returns rows, a
    dict of columns or a TensorDict; without one the column "text" becomes "query". `data_key` is
    the column with the prompt: texts, lists of messages or histories. The other columns stay beside
    the chat.

    A reset gives `num_envs` chats, each prompt `repeats` times in a row. The samples of a prompt
    never come from two resets: `num_envs` is a multiple of `repeats`, or with `group_repeats` a
    reset gives num_envs * repeats chats. `group_id` counts the prompts drawn.
    """

    SYSTEM_PROMPT: str | None = None
    RENAMED = ("text", "query")  # "text" is the name of a container here

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
            raise ValueError(
                "apply_template: texts and tokens are always those of the chat template; "
                "leave it out and set input_mode='text'"
            )
        if ray_backend or dataloader_actor_name:
            raise ValueError(
                "ray_backend, dataloader_actor_name: rows are read in this process; give each "
                "environment its own seed, or a dataloader with from_dataloader"
            )
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
        repeats: int | None = None,
        group_repeats: bool = False,
        batch_size: int | Sequence[int] | None = None,
        primers: Any = None,
        system_prompt: str | None = None,
        **chat: Any,
    ) -> DatasetChatEnv:
        """Return the env over any iterable of rows; `batch_size` is its num_envs, default 1.

        `chat`: tokenizer, template_kwargs, input_mode, data_key and device of `ChatEnv`.
        """
        self = cls.__new__(cls)
        self._generator = None
        size = (1,) if batch_size is None else batch_size
        size = (size,) if isinstance(size, int) else tuple(size)
        if len(size) != 1:
            raise ValueError(f"{cls.__name__} expected one batch dimension, got {size}")
        self._mount(
            dataloader,
            size[0],
            repeats=repeats,
            group_repeats=group_repeats,
            primers=primers,
            system_prompt=system_prompt,
            **chat,
        )
        return self

    def _mount(
        self,
        loader: Iterable[Any],
        num_envs: int,
        *,
        repeats: int | None,
        group_repeats: bool,
        primers: Any,
        system_prompt: str | None,
        **chat: Any,
    ) -> None:
        if primers is not None:
            raise ValueError("primers: the rows say what a reset reads; leave it out")
        times = max(1, repeats or 1)
        size = num_envs * times if group_repeats else num_envs
        if size % times:
            raise ValueError(
                f"expected num_envs to be a multiple of repeats={times}, so that the samples of a "
                f"prompt come from one reset, got {num_envs}; or set group_repeats=True"
            )
        prompt = self.SYSTEM_PROMPT if system_prompt is None else system_prompt
        env = ChatEnv(group_size=times, batch_size=(size,), system_prompt=prompt, **chat)
        super().__init__(env, Compose())
        self._loader, self._prompts, self._drawn = loader, size // times, 0
        self.reset_dataloader()

    def reset_dataloader(self) -> DatasetChatEnv:
        """Start over with the first row; returns the environment."""
        if self._generator is not None:
            self._generator.manual_seed(self._seed)
        self._rows = _endless(self._loader)
        return self

    @property
    def output_spec(self) -> Composite:
        """Return the specs of what comes out; the columns of the data are observations."""
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
        """Return the specs of what is read: the action; a reset needs nothing."""
        spec = super().input_spec
        spec["full_state_spec"] = Composite(shape=spec["full_state_spec"].shape)
        return spec

    def _peek(self) -> dict[str, Any]:
        """Return the next row, which stays the next one."""
        row = next(self._rows)
        self._rows = chain([row], self._rows)
        return row

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        if td is None or (self.base_env.data_key not in td and "row" not in td):
            td = self._next_prompts()
        return super()._reset(td)

    def _next_prompts(self) -> TensorDict:
        """Return the next prompts [P] with their other columns."""
        rows = [next(self._rows) for _ in range(self._prompts)]
        td = TensorDict(batch_size=[len(rows)])
        for name in rows[0]:
            td.set(name, _column([row[name] for row in rows]))
        td.set("group_id", torch.arange(self._drawn, self._drawn + len(rows)))
        self._drawn += len(rows)
        return td

    def _collate(self, rows: list[dict]) -> list[dict]:
        old, new = self.RENAMED
        return [{new if name == old else name: v for name, v in row.items()} for row in rows]


def _endless(loader: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a loader, epoch after epoch."""
    while True:
        count = 0
        for item in loader:
            for row in _rows(item):
                count += 1
                yield row
        if not count:
            raise ValueError(
                "expected a dataloader that can be read again and has rows, got no row; a "
                "generator is empty after one epoch"
            )


def _rows(item: Any) -> list[dict[str, Any]]:
    """Return the rows of what a dataloader gives: a TensorDict, a dict, or a list of dicts."""
    if isinstance(item, TensorDictBase):
        parts = [item] if item.ndim == 0 else item.unbind(0)
        return [{name: part[name] for name in part.keys()} for part in parts]  # noqa: SIM118
    if isinstance(item, Mapping):
        sizes = {len(v) if _is_column(v) else -1 for v in item.values()}
        if len(sizes) > 1:
            raise ValueError(f"expected columns of one length, got lengths {sorted(sizes)}")
        if sizes == {-1}:
            return [dict(item)]
        return [{name: v[i] for name, v in item.items()} for i in range(sizes.pop())]
    if isinstance(item, list) and all(isinstance(row, Mapping) for row in item):
        return [dict(row) for row in item]
    raise TypeError(
        "expected rows as a TensorDict, a dict of columns or a list of dicts, got "
        f"{type(item).__name__}; give a collate_fn that makes them"
    )


def _is_column(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)


def _column(values: list[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values)
    return NonTensorStack(*[NonTensorData(value) for value in values])
