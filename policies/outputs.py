"""How a wrapper writes ragged rows into the containers, padded or lazily stacked.

Fields named prompt are padded left, response right, everything else (full and the masks) around the
column where the prompt ends.
"""

from collections.abc import Sequence
from typing import Any

from tensordict import lazy_stack
from torch import Tensor

from policies.padding import pad, pad_around, unpad


def store(
    container: type, fields: dict[str, list[Tensor]], *, padded: bool, cuts: Sequence[int]
) -> Any:
    """Return `container` [B] of the rows in `fields`; cuts [B] are the prompt lengths."""
    size = len(cuts)
    if not padded:
        rows = [{name: values[i] for name, values in fields.items()} for i in range(size)]
        return lazy_stack([container(**row, padded=False) for row in rows])
    dense = {name: _dense(name, values, cuts) for name, values in fields.items()}
    return container(**dense, padded=True, batch_size=[size])


def _dense(name: str, values: list[Tensor], cuts: Sequence[int]) -> Tensor:
    if name == "prompt":
        return pad(values, side="left")
    if name == "response":
        return pad(values)
    return pad_around(values, cuts)


def store_padded(
    container: type, fields: dict[str, Tensor], attention: Tensor, *, padded: bool
) -> Any:
    """Return `container` [B] of dense fields [B, T], unpadded into a lazy stack unless `padded`."""
    if padded:
        return container(**fields, padded=True, batch_size=[len(attention)])
    ragged = {name: unpad(value, attention) for name, value in fields.items()}
    return store(container, ragged, padded=False, cuts=[0] * len(attention))
