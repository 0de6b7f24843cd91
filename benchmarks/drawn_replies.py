"""Replies of drawn lengths, for benchmarks/simulate_scale.py, and the micro-batches they make."""

import math
from functools import cache

import torch

from policies.packing import pack_rows

PROMPT, MEAN, MOST, GROUP = 200, 1000, 4096, 8  # tokens; lengths of replies are exponential, cut

Part = tuple[int, int, int]  # padded tokens, the longest row, tokens of replies


@cache
def micro_batches(prompts: int, ranks: int, limit: int, seed: int) -> list[list[Part]]:
    """Return the micro-batches of each rank in an iteration, as GRPO's `pack_rows` makes them."""
    drawn = replies(prompts, seed)
    ids = torch.arange(len(drawn)) // GROUP
    found = []
    for rank in torch.arange(len(drawn)).tensor_split(ranks):
        parts = pack_rows(PROMPT + drawn[rank][:, None], limit, group_id=ids[rank])
        lengths = drawn[rank].tolist()
        found.append([_part([lengths[i] for i in part]) for part in parts])
    return found


def _part(lengths: list[int]) -> Part:
    return len(lengths) * (PROMPT + max(lengths)), PROMPT + max(lengths), sum(lengths)


def replies(prompts: int, seed: int) -> torch.Tensor:
    """Return lengths of replies, those to a prompt one after the other."""
    lengths = torch.empty(prompts * GROUP, dtype=torch.float64)
    lengths.exponential_(1 / MEAN, generator=torch.Generator().manual_seed(seed))
    return lengths.ceil().clamp(max=MOST).long()


def mean_length() -> float:
    """Return the mean length of replies that are cut.

    >>> round(mean_length())
    983
    """
    return MEAN * -math.expm1(-MOST / MEAN)
