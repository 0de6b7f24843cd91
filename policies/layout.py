"""How sequences lie in a forward pass: one row each, or the prompt once for its whole group.

A layout says what the model is fed ([R, L]) and where the hidden state that predicts each kept
token comes out. Nothing outside the scorer sees it.

`shared` puts a group into one row, [prompt, reply 1, ..., reply G]: position ids restart after the
prompt for each reply and a [R, 1, L, L] mask lets a reply see the prompt and itself. It is exact
(the same sums in another order) and saves (G-1) prompts a group. packed_layout.py puts whole
sequences after each other in the same way, without anything to share.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.packing import groups
from policies.padding import pad, positions, unpad

# Families whose forward takes position ids and an explicit 4-D mask; checked in the tests.
SHARES_PROMPTS = frozenset({"llama", "qwen2", "qwen3", "gpt2", "gemma"})


def takes_masks(config: Any) -> bool:
    """Return whether a model follows position ids and a 4-D mask, as `shared` and `packed` need."""
    family, kinds = getattr(config, "model_type", None), getattr(config, "layer_types", None)
    return family in SHARES_PROMPTS and "sliding_attention" not in (kinds or ())


@dataclass(frozen=True)
class Layout:
    """Inputs of one forward pass, and where its outputs belong."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64
    attention_mask: Tensor  # [R, L] bool, or [R, 1, L, L] bool
    source: Tensor  # [K] index into R*L of the hidden state that predicts each kept token
    target: Tensor  # [K] the kept tokens


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
    return Layout(input_ids, index.expand_as(input_ids), mask, source, tokens[keep])


def shared(tokens: Tensor, attention: Tensor, keep: Tensor, group_id: Tensor) -> Layout:
    """Lay out the rows of each `group_id` [B] in one row."""
    rows = unpad(tokens, attention)
    device = tokens.device
    base = torch.zeros(len(rows), dtype=torch.int64)  # [B] first reply column of each row
    prefix = torch.zeros(len(rows), dtype=torch.int64)  # [B] tokens shared with the group
    tree = torch.zeros(len(rows), dtype=torch.int64)  # [B] row of the layout
    ids, places, segments = [], [], []
    for r, members in enumerate(groups(group_id)):
        common = _common_prefix([rows[i] for i in members])
        first = rows[members[0]][:common]
        parts, place = [first], [torch.arange(common, device=device)]
        segment = [torch.zeros(common, dtype=torch.int64, device=device)]
        column = common
        for s, i in enumerate(members, start=1):
            reply = rows[i][common:]
            base[i], prefix[i], tree[i] = column, common, r
            parts.append(reply)
            place.append(torch.arange(common, common + len(reply), device=device))
            segment.append(torch.full_like(reply, s))
            column += len(reply)
        ids.append(torch.cat(parts))
        places.append(torch.cat(place))
        segments.append(torch.cat(segment))
    input_ids, segment_ids = pad(ids), pad(segments, -1)  # [R, L]
    base, prefix, tree = (
        base.to(device)[:, None],
        prefix.to(device)[:, None],
        tree.to(device)[:, None],
    )
    before = positions(attention) - 1  # [B, T] place of the state that predicts each token
    column = torch.where(before < prefix, before, base + before - prefix)
    source = (tree * input_ids.shape[1] + column)[keep]
    return Layout(input_ids, pad(places), tree_mask(segment_ids), source, tokens[keep])


def choose(tokens: Tensor, attention: Tensor, keep: Tensor, group_id: Tensor | None) -> Layout:
    """Share the prompts when that makes the forward clearly smaller, else lay out plainly."""
    if group_id is not None and _saves(tokens, attention, group_id):
        return shared(tokens, attention, keep, group_id)
    return plain(tokens, attention, keep)


def _saves(tokens: Tensor, attention: Tensor, group_id: Tensor, longest: int = 4096) -> bool:
    """Return whether the shared layout feeds less than 0.8 of the tokens, in rows that fit."""
    sizes = attention.sum(-1)
    rows = unpad(tokens, attention)
    total, widest = 0, 0
    trees = groups(group_id)
    for members in trees:
        common = _common_prefix([rows[i] for i in members])
        width = int(sizes[members].sum()) - common * (len(members) - 1)
        total, widest = total + width, max(widest, width)
    plain_area = int(sizes.max()) * len(rows)
    return widest <= longest and widest * len(trees) < 0.8 * plain_area


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
