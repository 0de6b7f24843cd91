"""How a wrapper writes ragged rows into the containers: padded, lazily stacked or nested.

Fields named prompt are padded left, response and assistant right, everything else (full and the
masks) around the column where the prompt ends. Padding of ids is the pad token, of the rest 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from policies.chats.containers import LogProbs, Masks, Tokens
from policies.padding import inner, is_ragged, pad, pad_around, unpad
from policies.sampler import Sampled


@dataclass(frozen=True)
class Form:
    """The form of one call's outputs; `layout` is that of nested tensors, None a lazy stack."""

    padded: bool
    layout: torch.layout | None = None
    pad_token_id: int = 0
    _offsets: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def store(self, container: type, fields: dict[str, list[Tensor]], cuts: Sequence[int]) -> Any:
        """Return `container` [B] of the rows in `fields`; cuts [B] are the prompt lengths."""
        size = len(cuts)
        if self.padded:
            dense = {k: self._dense(container, k, rows, cuts) for k, rows in fields.items()}
            return container(**dense, padded=True, batch_size=[size])
        if self.layout is not None:
            nested = {k: self._nested(rows) for k, rows in fields.items()}
            return container(**nested, padded=False, batch_size=[size])
        rows = [{name: values[i] for name, values in fields.items()} for i in range(size)]
        return lazy_stack([container(**row, padded=False) for row in rows])

    def store_aligned(
        self,
        container: type,
        fields: dict[str, Tensor],
        attention: Tensor,
        parts: dict[str, Tensor] | None = None,
    ) -> Any:
        """Return `container` [B] of dense fields [B, T], without their padding unless `padded`.

        `parts` are masks [B, T]: each names a field that holds the entries of `full` inside it.
        """
        cuts = [0] * len(attention)
        inside = {name: unpad(fields["full"], mask) for name, mask in (parts or {}).items()}
        if not self.padded:
            ragged = {name: unpad(value, attention) for name, value in fields.items()}
            return self.store(container, ragged | inside, cuts)
        dense = {k: self._dense(container, k, rows, cuts) for k, rows in inside.items()}
        return container(**fields, **dense, padded=True, batch_size=[len(attention)])

    def _dense(self, container, name: str, rows: list[Tensor], cuts: Sequence[int]) -> Tensor:
        fill = self.pad_token_id if container is Tokens else 0
        if name in ("prompt", "response", "assistant"):
            return pad(rows, fill, side="left" if name == "prompt" else "right")
        return pad_around(rows, cuts, fill)

    def _nested(self, rows: list[Tensor]) -> Tensor:
        """Return rows as a nested tensor; rows of equal lengths share offsets, so they add up."""
        if self.layout is not torch.jagged:
            return torch.nested.as_nested_tensor(rows, layout=self.layout)
        sizes = tuple(len(row) for row in rows)
        if sizes not in self._offsets:
            ends = torch.tensor([0, *sizes], device=rows[0].device)
            self._offsets[sizes] = ends.cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), self._offsets[sizes])


def generated(prompts: list[Tensor], assistant: list[Tensor], drawn: Sampled) -> dict[type, dict]:
    """Return the rows of prompts and replies: container -> field -> B rows.

    `assistant` are the assistant masks of the prompts; log-probs of prompt tokens read 0.
    """
    pairs = list(zip(prompts, drawn.ids, strict=True))
    full = [torch.cat(pair) for pair in pairs]
    reply = [torch.arange(len(p) + len(r), device=p.device) >= len(p) for p, r in pairs]
    zeros = [torch.zeros(len(p), device=p.device) for p in prompts]
    values = [torch.cat(pair) for pair in zip(zeros, drawn.log_probs, strict=True)]
    marks = [torch.cat([a, m[len(a) :]]) for a, m in zip(assistant, reply, strict=True)]
    masks = {
        "all_attention_mask": [torch.ones_like(m) for m in reply],
        "all_assistant_mask": marks,
        "all_response_mask": reply,
    }
    return {
        Tokens: {"prompt": prompts, "response": drawn.ids, "full": full},
        Masks: masks,
        LogProbs: {"prompt": zeros, "response": drawn.log_probs, "full": values},
    }


def put(out: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
    """Write outputs into a td; other entries of its containers stay."""
    for key, value in out.items():
        old = target.get(key, None)
        if old is None or isinstance(old, Tensor) or isinstance(value, Tensor):
            continue
        if is_ragged(value) != is_ragged(old):  # these do not share a container
            target.set(key, value)
    return target.update(out)


def home(td: TensorDictBase) -> torch.device:
    """Return the device of a td: its own, else that of its first tensor, else the CPU."""
    return _device_of(td) or torch.device("cpu")


def _device_of(value: Any) -> torch.device | None:
    td = inner(value)
    if not isinstance(td, TensorDictBase) or td.device is not None:
        return getattr(td, "device", None)
    # The rows of a lazy stack, for ragged ones have no values of their own.
    parts = td.tensordicts if isinstance(td, LazyStackedTensorDict) else td.values()
    return next((d for d in map(_device_of, parts) if d is not None), None)


def shown(
    rows: list[Tensor],
    batch_size: Sequence[int],
    *,
    as_list: bool = False,
    as_padded_tensor: bool = False,
    as_nested_tensor: bool = False,
    layout: torch.layout | None = None,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor | list[Tensor]:
    """Return ragged rows as a list, a nested tensor, or dense in a batch shape.

    Without `as_padded_tensor`, dense rows must be of one length.
    """
    if as_list:
        return rows
    if as_nested_tensor:
        return torch.nested.as_nested_tensor(rows, layout=layout or torch.strided)
    sizes = [len(row) for row in rows]
    if not as_padded_tensor and len(set(sizes)) > 1:
        raise ValueError(
            f"expected rows of one length to stack, got {sizes}; ask as_list=True or "
            "as_padded_tensor=True"
        )
    return pad(rows, padding_value, side=padding_side).reshape(*batch_size, -1)
