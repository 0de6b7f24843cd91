"""Layouts of sequences in a forward pass: one row per sequence, or several sequences in a row.

A layout has the inputs of the model, R rows of length L, and for each kept token the position of
the hidden state that predicts the token. Only the scorer uses layouts.

`shared` puts a group into one row, [prompt, response 1, ..., response G], with one prompt instead
of G. For each response the position ids restart after the prompt, and a [R, 1, L, L] mask lets the
response attend to the prompt and itself, so the result is exact up to the order of sums. `packed`
puts whole sequences into one row in the same way, without a shared prompt.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from policies.host import send
from policies.models.fast.attention import NAME, Grid
from policies.padding import pad, positions, unpad

# Families whose forward takes position ids and an explicit 4-D mask; checked in the tests.
SHARES_PROMPTS = frozenset({"llama", "qwen2", "qwen3", "gpt2", "gemma"})
PACKED = 2048  # tokens of a packed row; the mask of the row takes PACKED**2 bytes
WIDEST = 4096  # largest number of tokens in a shared row


def takes_masks(config: Any) -> bool:
    """Return whether `shared` and `packed` work: the model uses position ids and a 4-D mask."""
    family, kinds = getattr(config, "model_type", None), getattr(config, "layer_types", None)
    boolean = getattr(config, "_attn_implementation", None) in (None, "sdpa", NAME)  # eager adds it
    return boolean and family in SHARES_PROMPTS and "sliding_attention" not in (kinds or ())


@dataclass(frozen=True)
class Layout:
    """Inputs of one forward pass and the positions of the used outputs."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64
    attention_mask: Tensor  # [R, L] bool, or [R, 1, L, L] bool
    source: Tensor  # [K] index, in the inputs, of the hidden state that predicts each kept token
    # per row [R]: number of tokens of the shared prompt, of each response, and of padding
    trees: list[list[int]] | None = None
    grid: Grid | None = None  # set by `unpadded`: inputs are [1, N], mask and trees stay by row

    def to(self, device: torch.device) -> "Layout":
        """Return the layout on a device."""
        if self.source.device == device:
            return self
        names = ("input_ids", "position_ids", "attention_mask", "source")
        return replace(self, **{name: send(getattr(self, name), device) for name in names})

    def unpadded(self) -> "Layout":
        """Return the layout without padding, all tokens in one row, for layers that work by token.

        Attention restores the rows. If there is little padding, return the layout itself.
        """
        rows, length = self.input_ids.shape
        index = torch.arange(length, device=self.input_ids.device)
        if self.trees is None:
            real = self.attention_mask  # [R, L]; padding is on the right
            mask = (index <= index[:, None])[None, None]  # [1, 1, L, L]
        else:
            ends = torch.tensor([length - sizes[-1] for sizes in self.trees], device=index.device)
            real, mask = index < ends[:, None], self.attention_mask
        if real.sum() > 0.95 * real.numel():
            return self
        ids, position = (x[real][None] for x in (self.input_ids, self.position_ids))
        place = real.flatten().cumsum(0) - 1  # [R * L] place in the row
        grid = Grid(rows, real.flatten().nonzero().squeeze(-1))
        return Layout(ids, position, mask, place[self.source], self.trees, grid)


def full_rows(tokens: Tensor, attention: Tensor, keep: Tensor) -> Layout:
    """Lay out one row per sequence, right-padded; tokens, attention, keep [B, T]."""
    rows = unpad(tokens, attention)
    input_ids = pad(rows)  # [B, L]
    size = input_ids.shape[1]
    index = torch.arange(size, device=tokens.device)
    mask = index < attention.sum(-1, keepdim=True)  # [B, L]
    place = positions(attention)  # [B, T]
    row = torch.arange(len(rows), device=tokens.device).unsqueeze(1)
    source = (row * size + place - 1)[keep]  # [K] the state at t - 1 predicts token t
    return Layout(input_ids, index.expand_as(input_ids), mask, source)


def shared(tokens: Tensor, attention: Tensor, keep: Tensor, group_id: Tensor) -> Layout:
    """Lay out the sequences of each group in one row, with their prompt once; group_id [B]."""
    trees = groups(group_id)
    return _trees(tokens, attention, keep, trees, _common_prefixes(tokens, attention, trees))


def packed(
    tokens: Tensor, attention: Tensor, keep: Tensor, device: torch.device | None = None
) -> Layout:
    """Lay out several sequences per row of PACKED tokens; a longer sequence has its own row."""
    bins = _bins(attention.sum(-1).tolist(), PACKED)
    return _trees(tokens, attention, keep, bins, [0] * len(bins), device)


def _trees(
    tokens: Tensor,
    attention: Tensor,
    keep: Tensor,
    trees: list[list[int]],
    lengths: list[int],
    device: torch.device | None = None,
) -> Layout:
    """Lay out each tree of sequences in one row; `lengths`: shared prompt tokens of each tree.

    The mask, which is large, is computed on `device` (None: the device of the tokens).
    """
    rows = unpad(tokens, attention)
    ids, position_ids, segments = [], [], []  # a tensor per tree
    sizes: list[list[int]] = []  # per tree: tokens of the prompt and of each response
    places = [(0, 0, 0)] * len(tokens)  # per sequence: tree, prompt tokens, column of its response
    for tree, (members, length) in enumerate(zip(trees, lengths, strict=True)):
        responses = [rows[i][length:] for i in members]
        size = [length, *map(len, responses)]
        columns = [*accumulate(size)][:-1]  # first column of each response
        for i, column in zip(members, columns, strict=True):
            places[i] = tree, length, column
        sizes.append(size)
        ids.append(torch.cat([rows[members[0]][:length], *responses]))
        # Each response continues the prompt's positions. Segment 0 is the prompt, s the s-th
        # response.
        starts = [0, *[length] * len(members)]
        spans = [range(start, start + n) for start, n in zip(starts, size, strict=True)]
        position_ids.append(torch.tensor([*chain(*spans)]))
        segments.append(torch.arange(len(size)).repeat_interleave(torch.tensor(size)))
    input_ids = pad(ids)  # [R, L]
    position = pad(position_ids).to(tokens.device)  # [R, L]
    segment = send(pad(segments, -1), device or tokens.device)  # [R, L], -1 for padding
    width = input_ids.shape[1]
    row, prefix, column = torch.tensor(places, device=tokens.device).T.unsqueeze(-1)  # [B, 1] each
    # The state at t - 1 predicts token t; it is in the shared prompt or in the response's columns.
    before = positions(attention) - 1  # [B, T]
    source = row * width + torch.where(before < prefix, before, column + before - prefix)  # [B, T]
    with_padding = [[*size, width - sum(size)] for size in sizes]
    return Layout(input_ids, position, tree_mask(segment), source[keep], with_padding)


def choose(
    tokens: Tensor,
    attention: Tensor,
    keep: Tensor,
    group_id: Tensor | None,
    device: torch.device | None = None,
) -> Layout:
    """Share the prompts if this saves more than 20 % of the tokens; else one row per sequence.

    A shared row has at most WIDEST tokens.
    """
    if group_id is not None:
        trees = groups(group_id)
        sizes = attention.sum(-1).tolist()
        lengths = _common_prefixes(tokens, attention, trees)
        pairs = zip(trees, lengths, strict=True)
        widest = max(sum(sizes[i] for i in tree) - n * (len(tree) - 1) for tree, n in pairs)
        unshared = max(sizes) * len(sizes)  # tokens of one row per sequence, with padding
        if widest <= WIDEST and widest * len(trees) < 0.8 * unshared:
            return _trees(tokens, attention, keep, trees, lengths, device)
    return full_rows(tokens, attention, keep)


def _common_prefixes(tokens: Tensor, attention: Tensor, trees: list[list[int]]) -> list[int]:
    """Return how many tokens the rows of each tree share; each row keeps at least one after it."""
    rows = unpad(tokens, attention)
    return [_common_prefix([rows[i] for i in members]) for members in trees]


def _common_prefix(rows: list[Tensor]) -> int:
    size = min(len(r) for r in rows) - 1
    if len(rows) == 1 or size <= 0:
        return max(size, 0)
    starts = torch.stack([r[:size] for r in rows])  # [G, size]
    differ = (starts != starts[0]).any(0).nonzero()
    return int(differ[0]) if len(differ) else size


def tree_mask(segment: Tensor) -> Tensor:
    """Return the mask [R, 1, L, L]: causal attention to the token's response and its prompt."""
    size = segment.shape[1]
    key, query = segment[:, None, :], segment[:, :, None]
    related = (key == 0) | (key == query)
    causal = torch.ones(size, size, dtype=torch.bool, device=segment.device).tril()
    diagonal = torch.eye(size, dtype=torch.bool, device=segment.device)
    # Padding attends to itself: the softmax of an empty row would be NaN.
    return ((related & causal & (key >= 0)) | diagonal)[:, None]


def _bins(sizes: list[int], limit: int) -> list[list[int]]:
    """Return bins of at most `limit` tokens, longest rows first; a longer row has its own bin.

    >>> _bins([3, 9, 2, 1], 5)
    [[1], [0, 2], [3]]
    """
    bins: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = (rows for rows in bins if sum(sizes[j] for j in rows) + sizes[i] <= limit)
        if (rows := next(fits, None)) is not None:
            rows.append(i)
        else:
            bins.append([i])
    return bins


def groups(group_id: Tensor) -> list[list[int]]:
    """Return the rows of each id, in the order in which the ids first appear.

    >>> groups(torch.tensor([4, 4, 0, 4]))
    [[0, 1, 3], [2]]
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        rows_of.setdefault(group, []).append(row)
    return list(rows_of.values())


def pack_rows(
    attention: Tensor, limit: int, *, group_id: Tensor | None = None, padded: bool = True
) -> list[list[int]]:
    """Split the rows into parts of at most `limit` tokens; attention [B, T].

    The size of a part is number of rows * longest row, or if not `padded` the sum of the rows. A
    group is split only if it exceeds the limit; a row above the limit is a part by itself.
    """
    sizes = attention.sum(-1).tolist()

    def size(rows: list[int]) -> int:
        tokens = [sizes[i] for i in rows]
        return max(tokens) * len(rows) if padded else sum(tokens)

    parts: list[list[int]] = []
    for group in [[i] for i in range(len(sizes))] if group_id is None else groups(group_id):
        if parts and size(parts[-1] + group) <= limit:
            parts[-1] += group
        else:
            parts.append(list(group))
    pieces = []
    for rows in parts:  # split the groups that exceed the limit
        count = len(rows) if size(rows) <= limit else limit // max(sizes[i] for i in rows)
        pieces += [rows[i : i + max(count, 1)] for i in range(0, len(rows), max(count, 1))]
    return pieces
