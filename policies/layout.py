"""How sequences lie in a forward pass: one row each, or the prompt once for its whole group.

A layout says what the model is fed ([R, L]) and where the hidden state that predicts each kept
token comes out. Nothing outside the scorer sees it.

`shared` puts a group into one row, [prompt, reply 1, ..., reply G]: position ids restart after the
prompt for each reply and a [R, 1, L, L] mask lets a reply see the prompt and itself. It is exact
(the same sums in another order) and saves (G-1) prompts a group. `packed` puts whole
sequences after each other in the same way, without anything to share.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.attention import NAME
from policies.padding import pad, positions, unpad

# Families whose forward takes position ids and an explicit 4-D mask; checked in the tests.
SHARES_PROMPTS = frozenset({"llama", "qwen2", "qwen3", "gpt2", "gemma"})
PACKED = 2048  # tokens of a packed row; its mask takes the square of that in bytes
WIDEST = 4096  # tokens of a shared row


def takes_masks(config: Any) -> bool:
    """Return whether a model follows position ids and a 4-D mask, as `shared` and `packed` need."""
    family, kinds = getattr(config, "model_type", None), getattr(config, "layer_types", None)
    boolean = getattr(config, "_attn_implementation", None) in (None, "sdpa", NAME)  # eager adds it
    return boolean and family in SHARES_PROMPTS and "sliding_attention" not in (kinds or ())


@dataclass(frozen=True)
class Layout:
    """Inputs of one forward pass, and where its outputs belong."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64
    attention_mask: Tensor  # [R, L] bool, or [R, 1, L, L] bool
    source: Tensor  # [K] index into R*L of the hidden state that predicts each kept token


def plain(tokens: Tensor, attention: Tensor, keep: Tensor) -> Layout:
    """Lay out one row per sequence, right-padded; tokens, attention, keep [B, T]."""
    rows = unpad(tokens, attention)
    input_ids = pad(rows)  # [B, L]
    size = input_ids.shape[1]
    index = torch.arange(size, device=tokens.device)
    mask = index < attention.sum(-1, keepdim=True)  # [B, L]
    where = positions(attention)  # [B, T]
    row = torch.arange(len(rows), device=tokens.device).unsqueeze(1)
    source = (row * size + where - 1)[keep]  # [K] the state before the token predicts it
    return Layout(input_ids, index.expand_as(input_ids), mask, source)


def shared(tokens: Tensor, attention: Tensor, keep: Tensor, group_id: Tensor) -> Layout:
    """Lay out the rows of each `group_id` [B] in one row."""
    rows, trees = unpad(tokens, attention), groups(group_id)
    common = [_common_prefix([rows[i] for i in members]) for members in trees]
    return _trees(tokens, attention, keep, trees, common)


def packed(tokens: Tensor, attention: Tensor, keep: Tensor) -> Layout:
    """Lay out sequences after each other, in rows of PACKED tokens or the longest sequence."""
    bins = _bins(attention.sum(-1).tolist(), PACKED)
    return _trees(tokens, attention, keep, bins, [0] * len(bins))


def _trees(
    tokens: Tensor, attention: Tensor, keep: Tensor, trees: list[list[int]], common: list[int]
) -> Layout:
    """Lay out the rows of each tree in one row, behind so many tokens that they have in common."""
    rows = unpad(tokens, attention)
    device = tokens.device
    base = torch.zeros(len(rows), dtype=torch.int64)  # [B] first reply column of each row
    prefix = torch.zeros(len(rows), dtype=torch.int64)  # [B] tokens shared with the group
    tree = torch.zeros(len(rows), dtype=torch.int64)  # [B] row of the layout
    ids, places, segments = [], [], []
    for r, (members, same) in enumerate(zip(trees, common, strict=True)):
        parts, place = [rows[members[0]][:same]], [torch.arange(same, device=device)]
        segment = [torch.zeros(same, dtype=torch.int64, device=device)]
        column = same
        for s, i in enumerate(members, start=1):
            reply = rows[i][same:]
            base[i], prefix[i], tree[i] = column, same, r
            parts.append(reply)
            place.append(torch.arange(same, same + len(reply), device=device))
            segment.append(torch.full_like(reply, s))
            column += len(reply)
        ids.append(torch.cat(parts))
        places.append(torch.cat(place))
        segments.append(torch.cat(segment))
    input_ids, segment_ids = pad(ids), pad(segments, -1)  # [R, L]
    base, prefix, tree = (x.to(device)[:, None] for x in (base, prefix, tree))
    before = positions(attention) - 1  # [B, T] place of the state that predicts each token
    column = torch.where(before < prefix, before, base + before - prefix)
    source = (tree * input_ids.shape[1] + column)[keep]
    return Layout(input_ids, pad(places), tree_mask(segment_ids), source)


def choose(tokens: Tensor, attention: Tensor, keep: Tensor, group_id: Tensor | None) -> Layout:
    """Share the prompts when that makes the forward clearly smaller, else lay out plainly."""
    if group_id is not None and _saves(tokens, attention, group_id):
        return shared(tokens, attention, keep, group_id)
    return plain(tokens, attention, keep)


def _saves(tokens: Tensor, attention: Tensor, group_id: Tensor) -> bool:
    """Return whether the shared layout feeds less than 0.8 of the tokens, in rows that fit."""
    sizes, rows = attention.sum(-1), unpad(tokens, attention)
    trees, widest = groups(group_id), 0
    for members in trees:
        common = _common_prefix([rows[i] for i in members])
        widest = max(widest, int(sizes[members].sum()) - common * (len(members) - 1))
    return widest <= WIDEST and widest * len(trees) < 0.8 * int(sizes.max()) * len(rows)


def _common_prefix(rows: list[Tensor]) -> int:
    """Return how many leading tokens all rows share, leaving each at least one of its own."""
    size = min(len(r) for r in rows) - 1
    if len(rows) == 1 or size <= 0:
        return max(size, 0)
    same = torch.stack([r[:size] for r in rows])  # [G, size]
    differ = (same != same[0]).any(0).nonzero()
    return int(differ[0]) if len(differ) else size


def tree_mask(segment: Tensor) -> Tensor:
    """Return who sees whom, [R, 1, L, L]: causal, within the reply and the shared prompt."""
    size = segment.shape[1]
    key, query = segment[:, None, :], segment[:, :, None]
    seen = (key == 0) | (key == query)
    causal = torch.ones(size, size, dtype=torch.bool, device=segment.device).tril()
    diagonal = torch.eye(size, dtype=torch.bool, device=segment.device)
    # Padding sees itself: a row that sees nothing would be NaN under softmax.
    return ((seen & causal & (key >= 0)) | diagonal)[:, None]


def _bins(sizes: list[int], limit: int) -> list[list[int]]:
    """Return rows that fit `limit` tokens together, the longest first; one alone always fits.

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
    pieces = []
    for rows in parts:  # one group that alone exceeds the limit is split
        each = len(rows) if size(rows) <= limit else limit // max(sizes[i] for i in rows)
        pieces += [rows[i : i + max(each, 1)] for i in range(0, len(rows), max(each, 1))]
    return pieces
