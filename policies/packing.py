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


def pack_rows(
    attention: Tensor, limit: int, *, group_id: Tensor | None = None, padded: bool = True
) -> list[list[int]]:
    """Return rows whose size stays within `limit` tokens; attention [B, T].

    The size is that of the longest row for each, or with `padded=False` the sum of the rows'.
    Groups stay whole unless one alone exceeds the limit; a single row always fits.
    """
    sizes = attention.sum(-1).tolist()

    def size(rows: list[int]) -> int:
        each = [sizes[i] for i in rows]
        return max(each) * len(each) if padded else sum(each)

    parts: list[list[int]] = []
    for group in [[i] for i in range(len(sizes))] if group_id is None else groups(group_id):
        if parts and size(parts[-1] + group) <= limit:
            parts[-1] += group
        else:
            parts.append(list(group))
    fitting = ([p] if size(p) <= limit else _fit(p, sizes, limit) for p in parts)
    return [piece for pieces in fitting for piece in pieces]


def _fit(rows: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Split a group that alone exceeds the limit."""
    each = max(limit // max(sizes[i] for i in rows), 1)
    return [rows[i : i + each] for i in range(0, len(rows), each)]
