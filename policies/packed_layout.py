"""Whole sequences after each other in a forward pass, without padding; see layout.py."""

import torch
from torch import Tensor

from policies.layout import Layout, tree_mask
from policies.padding import pad, positions, unpad

PACKED = 2048  # tokens of a packed row; its mask takes the square of that in bytes


def packed(tokens: Tensor, attention: Tensor, keep: Tensor) -> Layout:
    """Lay out sequences after each other, in rows of PACKED tokens or the longest sequence."""
    rows, device = unpad(tokens, attention), tokens.device
    bins = _bins([len(row) for row in rows], PACKED)
    start = torch.zeros(len(rows), 2, dtype=torch.int64)  # row of the layout, first column
    segments, places = [], []
    for r, members in enumerate(bins):
        sizes = [len(rows[i]) for i in members]
        start[members, 0] = r
        start[members, 1] = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        segments.append(torch.repeat_interleave(torch.tensor(sizes)).to(device) + 1)
        places.append(torch.cat([torch.arange(n, device=device) for n in sizes]))
    input_ids = pad([torch.cat([rows[i] for i in members]) for members in bins])  # [R, L]
    tree, base = start.to(device).unbind(-1)
    column = base[:, None] + positions(attention) - 1  # [B, T] the state before predicts a token
    source = (tree[:, None] * input_ids.shape[1] + column)[keep]
    mask = tree_mask(pad(segments, -1))
    return Layout(input_ids, pad(places), mask, source, tokens[keep])


def _bins(sizes: list[int], limit: int) -> list[list[int]]:
    """Return rows that fit `limit` tokens together, the longest first; one alone always fits.

    >>> _bins([3, 9, 2, 1], 5)
    [[1], [0, 2], [3]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = next((b for b, free in enumerate(room) if free >= sizes[i]), None)
        if at is None:
            bins.append([i])
            room.append(limit - sizes[i])
        else:
            bins[at].append(i)
            room[at] -= sizes[i]
    return bins
