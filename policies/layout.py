"""Layouts of sequences in a forward pass: one row per sequence, or several sequences in a row.

A layout has the inputs of the model, R rows of length L, and for each kept token the position of
the hidden state that predicts the token. Only the scorer uses layouts.

`shared` puts a group into one row, [prompt, reply 1, ..., reply G]. For each reply the position ids
restart after the prompt, and a [R, 1, L, L] mask lets the reply attend to the prompt and itself.
The result is exact (the same sums in another order), and the row has one prompt instead of G.
`packed` puts whole sequences into one row in the same way, without a shared prompt.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.attention import NAME
from policies.padding import pad, positions, unpad

# Families whose forward takes position ids and an explicit 4-D mask; checked in the tests.
SHARES_PROMPTS = frozenset({"llama", "qwen2", "qwen3", "gpt2", "gemma"})
PACKED = 2048  # tokens of a packed row; the mask of the row takes PACKED**2 bytes
WIDEST = 4096  # maximal number of tokens in a shared row


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
    source: Tensor  # [K] index, in R*L, of the hidden state that predicts each kept token
    trees: list[list[int]] | None = None  # [R] tokens of a shared prompt, its replies, the padding


def plain(tokens: Tensor, attention: Tensor, keep: Tensor) -> Layout:
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
    rows, trees = unpad(tokens, attention), groups(group_id)
    lengths = [_common_prefix([rows[i] for i in members]) for members in trees]
    return _trees(tokens, attention, keep, trees, lengths)


def packed(tokens: Tensor, attention: Tensor, keep: Tensor) -> Layout:
    """Lay out several sequences per row of PACKED tokens; a longer sequence has its own row."""
    bins = _bins(attention.sum(-1).tolist(), PACKED)
    return _trees(tokens, attention, keep, bins, [0] * len(bins))


def _trees(
    tokens: Tensor, attention: Tensor, keep: Tensor, trees: list[list[int]], lengths: list[int]
) -> Layout:
    """Lay out each tree of sequences in one row; `lengths`: shared prompt tokens of each tree."""
    rows = unpad(tokens, attention)
    device = tokens.device
    base = torch.zeros(len(rows), dtype=torch.int64)  # [B] first reply column of each row
    prefix = torch.zeros(len(rows), dtype=torch.int64)  # [B] length of the shared prefix
    tree = torch.zeros(len(rows), dtype=torch.int64)  # [B] row in the layout
    ids, position_ids, segments, sizes = [], [], [], []
    for r, (members, length) in enumerate(zip(trees, lengths, strict=True)):
        parts, position = [rows[members[0]][:length]], [torch.arange(length, device=device)]
        segment = [torch.zeros(length, dtype=torch.int64, device=device)]
        column = length
        for s, i in enumerate(members, start=1):
            reply = rows[i][length:]
            base[i], prefix[i], tree[i] = column, length, r
            parts.append(reply)
            position.append(torch.arange(length, length + len(reply), device=device))
            segment.append(torch.full_like(reply, s))
            column += len(reply)
        ids.append(torch.cat(parts))
        sizes.append([len(part) for part in parts])
        position_ids.append(torch.cat(position))
        segments.append(torch.cat(segment))
    input_ids, segment_ids = pad(ids), pad(segments, -1)  # [R, L]
    base, prefix, tree = (x.to(device)[:, None] for x in (base, prefix, tree))
    before = positions(attention) - 1  # [B, T] position of the state that predicts each token
    column = torch.where(before < prefix, before, base + before - prefix)
    source = (tree * input_ids.shape[1] + column)[keep]
    sizes = [[*row, input_ids.shape[1] - sum(row)] for row in sizes]
    return Layout(input_ids, pad(position_ids), tree_mask(segment_ids), source, sizes)


def choose(tokens: Tensor, attention: Tensor, keep: Tensor, group_id: Tensor | None) -> Layout:
    """Share the prompts if this saves more than 20 % of the tokens; else one row per sequence."""
    if group_id is not None and _saves(tokens, attention, group_id):
        return shared(tokens, attention, keep, group_id)
    return plain(tokens, attention, keep)


def _saves(tokens: Tensor, attention: Tensor, group_id: Tensor) -> bool:
    """Return whether sharing saves more than 20 % of the tokens, in rows of at most WIDEST."""
    sizes, rows = attention.sum(-1), unpad(tokens, attention)
    trees, widest = groups(group_id), 0
    for members in trees:
        common = _common_prefix([rows[i] for i in members])
        widest = max(widest, int(sizes[members].sum()) - common * (len(members) - 1))
    return widest <= WIDEST and widest * len(trees) < 0.8 * int(sizes.max()) * len(rows)


def _common_prefix(rows: list[Tensor]) -> int:
    """Return the length of the common prefix; each row keeps at least one token after it."""
    size = min(len(r) for r in rows) - 1
    if len(rows) == 1 or size <= 0:
        return max(size, 0)
    starts = torch.stack([r[:size] for r in rows])  # [G, size]
    differ = (starts != starts[0]).any(0).nonzero()
    return int(differ[0]) if len(differ) else size


def tree_mask(segment: Tensor) -> Tensor:
    """Return the mask [R, 1, L, L]: causal attention to the own reply and the shared prompt."""
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
    """Return parts of the rows, each of at most `limit` tokens; attention [B, T].

    The size of a part is number of rows * longest row, with `padded=False` the sum of the rows.
    Only a group above the limit is split; a row above the limit is a part by itself.
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
