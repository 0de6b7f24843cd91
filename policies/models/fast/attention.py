"""Attention on a CPU by plain matmuls for small inputs, for which torch's fused kernel is slower.

With 8 rows of 137 tokens in bfloat16, forward and backward take a quarter of the kernel's time.
In large rows of several responses each response is multiplied only with its prompt and itself.
Other layers get all tokens in one row without padding; a Grid puts them into rows for attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

NAME = "plain_on_cpu"
LARGEST = 2**21  # attention weights per layer; the backward keeps them: 12 MB


@dataclass(frozen=True)
class Grid:
    """The places of N tokens without padding in R rows of length L."""

    rows: int
    cells: Tensor  # [N] index in R * L

    def fill(self, x: Tensor, length: int) -> Tensor:
        """Return x [1, heads, N, D] in rows, [R, heads, L, D]."""
        flat = x.transpose(1, 2).flatten(0, 1)  # [N, heads, D]
        out = flat.new_zeros(self.rows * length, *flat.shape[1:]).index_copy_(0, self.cells, flat)
        return out.view(self.rows, length, *flat.shape[1:]).transpose(1, 2)

    def read(self, x: Tensor) -> Tensor:
        """Return x [R, L, heads, D] without padding, [1, N, heads, D]."""
        return x.flatten(0, 1).index_select(0, self.cells)[None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    trees: list[list[int]] | None = None,
    grid: Grid | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the outputs [B, L, heads, D]; query [B, heads, L, D], key and value [B, groups, S, D].

    mask [B, 1, L, S] bool: the keys of each query; `trees` [B] describes the same, see `Layout`.
    With a grid the inputs have all tokens in one row, and mask and trees belong to its rows. Large
    inputs without trees, and prompts without a mask, use SDPA.
    """
    if grid is not None:
        assert mask is not None
        inputs = (grid.fill(x, mask.shape[-1]) for x in (query, key, value))
        return grid.read(attend(module, *inputs, mask, trees=trees, **kwargs)[0]), None
    rows, heads, length, width = query.shape
    groups, size = key.shape[1:3]
    small = query.device.type == "cpu" and rows * heads * length * size <= LARGEST
    if trees is not None and query.device.type == "cpu" and not small:
        return _by_response(module, query, key, value, trees, **kwargs), None
    plain = length == 1 if mask is None else mask.dtype == torch.bool  # None: causal
    if not (small and plain):
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    scale = kwargs.get("scaling") or width**-0.5
    query = (query * scale).reshape(rows, groups, heads // groups * length, width)
    scores = (query @ key.transpose(2, 3)).view(rows, groups, -1, length, size)
    if mask is not None:
        # Finite, because a padded query may have no key; half, so that adding it to a score does
        # not overflow. Adding needs no backward, unlike a fill.
        lowest = torch.finfo(scores.dtype).min / 2
        scores += (~mask[:, :, None, :, :size]).to(scores.dtype) * lowest
    weights = scores.softmax(-1).view(rows, groups, -1, size)  # bfloat16: float32 sums inside
    return (weights @ value).view(rows, heads, length, -1).transpose(1, 2), None


def _by_response(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trees: list[list[int]],
    **kwargs: Any,
) -> Tensor:
    """Return the outputs [B, L, heads, D], computed one sequence at a time; padding gets zeros."""
    weights = sum(n * (n + (i and sizes[0])) for sizes in trees for i, n in enumerate(sizes[:-1]))
    compute = attend if query.shape[1] * weights <= LARGEST else sdpa_attention_forward
    rows = []
    for row, sizes in enumerate(trees):
        queries, keys, values = (x[row, None].split(sizes, 2) for x in (query, key, value))
        done = []
        for number, part in enumerate(queries[:-1]):
            seen = [0, number] if number else [0]  # the shared prompt and itself
            k, v = (torch.cat([parts[i] for i in seen], 2) for parts in (keys, values))
            count, size = part.shape[2], k.shape[2]
            causal = part.new_ones(count, size, dtype=torch.bool).tril(size - count)[None, None]
            if count:
                done.append(compute(module, part, k, v, causal, **kwargs)[0])
        done.append(torch.zeros_like(queries[-1]).transpose(1, 2))
        rows.append(torch.cat(done, 1))
    return torch.cat(rows)


AttentionInterface.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
