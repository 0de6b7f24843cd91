"""Write a wrapper's outputs into containers, dense or ragged.

The field prompt is padded left, response and assistant right, all others (full and the masks)
around the column where the prompt ends. Ids are padded with the pad token, the rest with 0.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from policies.chat_policy import Sequences
from policies.chats.containers import LogProbs, Masks, Tokens
from policies.padding import compact, inner, unpad


@dataclass(frozen=True)
class OutputFormat:
    """The format of one call's outputs: dense if `padded`, else ragged rows without padding.

    A field consists of values [B, T] and the mask [B, T] of real entries.
    """

    padded: bool
    layout: torch.layout | None = None  # layout of nested tensors; None stacks the rows lazily
    pad_token_id: int = 0
    _offsets: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def store(self, container: type, fields: dict[str, tuple[Tensor, Tensor]]) -> Any:
        """Return a `container` [B] of these fields."""
        size = len(next(iter(fields.values()))[0])
        if self.padded:
            dense = {name: values for name, (values, _) in fields.items()}
            return container(**dense, padded=True, batch_size=[size])
        ragged = {name: unpad(values, mask) for name, (values, mask) in fields.items()}
        if self.layout is not None:
            nested = {name: self._nested(rows) for name, rows in ragged.items()}
            return container(**nested, padded=False, batch_size=[size])
        rows = [{name: values[i] for name, values in ragged.items()} for i in range(size)]
        return lazy_stack([container(**row, padded=False) for row in rows])

    def part(self, container: type, name: str, full: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the field with the entries of `full` [B, T] inside a mask."""
        if not self.padded:
            return full, mask
        fill = self.pad_token_id if container is Tokens else 0
        side = "left" if name == "prompt" else "right"
        return compact(full, mask, fill, side=side), compact(mask, mask, side=side)

    def _nested(self, rows: list[Tensor]) -> Tensor:
        """Return rows as a nested tensor; equal lengths share offsets, so that tensors add up."""
        if self.layout is not torch.jagged:
            return torch.nested.as_nested_tensor(rows, layout=self.layout)
        sizes = tuple(len(row) for row in rows)
        if sizes not in self._offsets:
            ends = torch.tensor([0, *sizes], device=rows[0].device)
            self._offsets[sizes] = ends.cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), self._offsets[sizes])

    def generated(self, dense: dict[type, Any], real: dict[str, Tensor]) -> dict[type, Any]:
        """Return containers of prompts and responses; `real`: the masks of their fields' tokens."""
        if self.padded:
            return dense
        done = {}
        for kind, container in dense.items():
            names = [name for name in container.keys() if name != "padded"]  # noqa: SIM118
            values = {name: container.get(name) for name in names}
            fields = {name: (v, real.get(name, real["full"])) for name, v in values.items()}
            done[kind] = self.store(kind, fields)
        return done

    def scored(
        self, seq: Sequences, log_probs: Tensor, *, parts: dict[str, Tensor]
    ) -> dict[type, Any]:
        """Return Masks, Tokens and LogProbs of full sequences, without unknown fields.

        parts: masks of prompt, response and assistant, [B, T] each.
        """
        real = seq.attention
        if self.padded:  # the prompt may not be the first columns of `full` here
            parts = {name: mask for name, mask in parts.items() if name != "prompt"}
        masks = {
            "all_attention_mask": real,
            "all_assistant_mask": seq.assistant,
            "all_response_mask": seq.response,
        }
        known = {name: (mask, real) for name, mask in masks.items() if mask is not None}
        done = {Masks: self.store(Masks, known)}
        for kind, full in ((Tokens, seq.tokens), (LogProbs, log_probs)):
            inside = {name: self.part(kind, name, full, mask) for name, mask in parts.items()}
            done[kind] = self.store(kind, {"full": (full, real), **inside})
        return done


def input_device(td: TensorDictBase) -> torch.device:
    """Return the device of a td or, if it has none, of its first tensor, else the CPU."""
    return _device_of(td) or torch.device("cpu")


def _device_of(value: Any) -> torch.device | None:
    td = inner(value)
    if not isinstance(td, TensorDictBase) or td.device is not None:
        return getattr(td, "device", None)
    # A lazy stack of ragged rows has no values of its own, so look into its rows.
    parts = td.tensordicts if isinstance(td, LazyStackedTensorDict) else td.values()
    return next((d for d in map(_device_of, parts) if d is not None), None)
