"""Counter-based uniforms: a draw depends on its stream and position, not on the batch.

A stream is an int64 folded from (seed, iteration, prompt, sample). So the same stream gives the
same sample, for any batch and any number of ranks.
The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), on wrapping int64.
"""

import torch
from torch import Tensor

from policies.precision import in_float64

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Scramble int64 values; a bijection, so distinct inputs stay distinct."""
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


def fold(*parts: int | Tensor) -> Tensor:
    """Fold integers or int64 tensors (broadcast together) into one int64 stream.

    >>> bool(fold(1, 2) == fold(2, 1))
    False
    """
    stream = torch.zeros((), dtype=torch.int64)
    for part in parts:
        value = torch.as_tensor(part, dtype=torch.int64)
        stream = mix(stream.to(value.device) + value * _GOLDEN + 1)
    return stream


def uniforms(stream: Tensor, position: Tensor) -> Tensor:
    """Return float64 uniforms in [0, 1) for each (stream, position), broadcast together.

    They have 52 bits, so that u * total < total in float64 and `inverse_cdf` stays within V.
    """
    bits = mix(mix(stream) + (position + 1) * _GOLDEN)
    return in_float64(_shift(bits, 12)) / 2.0**52


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Return the index where the cumulative sum of `probs` [B, V] passes u [B]; int64 [B].

    An entry of probability 0 is never chosen.

    >>> inverse_cdf(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([0.5])).tolist()
    [2]
    """
    total = in_float64(probs).cumsum(-1)  # [B, V]
    threshold = u.to(total).unsqueeze(-1) * total[:, -1:]  # [B, 1]
    return torch.searchsorted(total, threshold, right=True).squeeze(-1).to(probs.device)
