"""Which rows of a batch go together: the samples of a prompt, and parts that fit a forward.

Rows are named by their index; the samples of a prompt share a `group_id`.
"""

from torch import Tensor


def groups(group_id: Tensor) -> list[list[int]]:
    """Return the rows of each id, in the order in which the ids first appear.

    >>> import torch
    >>> groups(torch.tensor([4, 4, 0, 4]))
    [[0, 1, 3], [2]]
    """
    found: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        found.setdefault(group, []).append(row)
    return list(found.values())


def pack_rows(attention: Tensor, limit: int, *, group_id: Tensor | None = None) -> list[list[int]]:
    """Return rows whose padded size stays within `limit` tokens; attention [B, T].

    Groups stay whole unless one alone exceeds the limit; a single row always fits.
    """
    sizes = attention.sum(-1).tolist()
    parts: list[list[int]] = []
    for group in [[i] for i in range(len(sizes))] if group_id is None else groups(group_id):
        both = [*parts[-1], *group] if parts else group
        if parts and max(sizes[i] for i in both) * len(both) <= limit:
            parts[-1] = both
        else:
            parts.append(list(group))
    return [piece for part in parts for piece in _fit(part, sizes, limit)]


def _fit(rows: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Split a group that alone exceeds the limit."""
    each = max(limit // max(sizes[i] for i in rows), 1)
    return [rows[i : i + each] for i in range(0, len(rows), each)]
