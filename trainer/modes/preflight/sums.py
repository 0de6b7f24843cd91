"""The arithmetic of a run before it is one: batches, idle groups, memory, disk, time.

Every formula is in docs/preflight.md. Bytes and seconds throughout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from policies.scorer import SLICE


@dataclass(frozen=True)
class Batches:
    """How an iteration is cut up: prompts x group -> sequences -> minibatches -> micro-batches.

    >>> cut = Batches(prompts=8, group=4, ranks=2, minibatches=2, epochs=1, iterations=10)
    >>> cut.sequences, cut.per_step, cut.steps, cut.backwards(limit=100, longest=30)
    (32, 16, 20, 4)
    """

    prompts: int
    group: int
    ranks: int
    minibatches: int
    epochs: int
    iterations: int

    @property
    def sequences(self) -> int:
        """Return the sequences of an iteration, on all ranks."""
        return self.prompts * self.group

    @property
    def per_rank(self) -> int:
        """Return the sequences of an iteration that a rank plays."""
        return self.sequences // self.ranks

    @property
    def per_step(self) -> int:
        """Return the sequences of an optimiser step, on all ranks."""
        return self.sequences // self.minibatches

    @property
    def steps(self) -> int:
        """Return the optimiser steps of the run."""
        return self.iterations * self.epochs * self.minibatches

    def backwards(self, *, limit: int, longest: int) -> int:
        """Return the micro-batches of a step and rank if all sequences have `longest` tokens.

        As `policies.packing.pack_rows` cuts: whole groups of at most `limit` tokens together, a
        group above the limit by itself into parts, of one sequence at least.
        """
        groups = self.prompts // (self.ranks * self.minibatches)
        together = limit // (longest * self.group)
        if together:
            return math.ceil(groups / together)
        return groups * math.ceil(self.group / max(limit // longest, 1))


def idle_share(rates: Sequence[float], group: int) -> float:
    """Return the expected share of groups whose replies are all right or all wrong.

    The mean of p^G + (1 - p)^G over the prompts' pass rates: such a group has no advantage.

    >>> round(idle_share([0.18], 4), 3), idle_share([0.0, 0.5], 2)
    (0.453, 0.75)
    """
    return sum(p**group + (1 - p) ** group for p in rates) / len(rates)


@dataclass(frozen=True)
class Sizes:
    """What a model and its training hold; bytes, but for the counts of the shape."""

    weights: int  # of the policy and its critic
    reference: int  # those that are not the policy's own
    trained: int  # number of weights that get a gradient
    gradient: int  # bytes of their gradients
    half: bool  # trained weights in half precision: masters in float32
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    width: int  # bytes of an activation
    checkpointing: bool = False

    @property
    def moments(self) -> int:
        """Return what AdamW holds: two float32 moments a weight, and a master of a half one."""
        return self.trained * (12 if self.half else 8)

    def cache(self, rows: int, tokens: int) -> int:
        """Return the keys and values of `rows` sequences of `tokens`."""
        return rows * tokens * self.layers * 2 * self.kv_heads * self.head_dim * self.width

    def activations(self, tokens: int) -> int:
        """Return what a forward of `tokens` keeps for its backward, attention scores apart.

        Of a layer: norms, projections, rotations and residuals (12 of hidden size, 4 of the keys'),
        and the gated MLP (4 of intermediate size). With checkpointing: every layer's input and one
        layer.
        """
        keys = self.kv_heads * self.head_dim
        layer = 12 * self.hidden + 4 * keys + 4 * self.intermediate
        kept = self.layers * self.hidden + layer if self.checkpointing else self.layers * layer
        return tokens * kept * self.width

    def logits(self, tokens: int) -> int:
        """Return a slice of float32 logits over `tokens`, the most that is held at a time."""
        return 4 * min(max(tokens, 1) * self.vocabulary, max(SLICE, self.vocabulary))


@dataclass(frozen=True)
class Rows:
    """The longest sequences that a rank may have: `count` of `prompt` + `new` tokens.

    `shared`: how many of them have their prompt once in a forward (1 = each its own).
    """

    count: int
    prompt: int
    new: int
    shared: int = 1

    def forward(self, limit: int) -> tuple[int, int]:
        """Return the tokens of a forward of at most `limit` padded ones, and those kept of it.

        >>> Rows(64, prompt=40, new=10, shared=8).forward(limit=800)
        (240, 160)
        """
        size = min(max(limit // (self.prompt + self.new), 1), self.count)
        return math.ceil(size / self.shared) * self.prompt + size * self.new, size * self.new


def memory(sizes: Sizes, rows: Rows, *, limit: int) -> dict[str, int]:
    """Return the most that each phase holds on a rank, if all sequences are the longest.

    `limit` is trainer.micro_batch_tokens. The moments are there from the first step on.
    """
    held = sizes.weights + sizes.reference + sizes.moments
    cache = sizes.cache(rows.count, rows.prompt + rows.new)
    tokens, kept = rows.forward(limit)
    layer = 12 * tokens * sizes.hidden * sizes.width  # one layer's: no backward follows
    logits = sizes.logits(kept)
    return {
        "loaded": sizes.weights + sizes.reference,
        "generate": held + cache + 3 * 4 * rows.count * sizes.vocabulary,
        "score": held + layer + 2 * logits,
        "update": held + sizes.gradient + sizes.activations(tokens) + 4 * logits,
    }


def whole(times: Sequence[float], iterations: int) -> float:
    """Return the seconds of a run by those of a first iteration and of some after it.

    >>> whole([3.0, 1.0, 9.0, 1.0], iterations=10), whole([3.0, 1.0], iterations=1)
    (12.0, 3.0)
    """
    return times[0] + (iterations - 1) * median(times[1:])


def saves(iterations: int, every: int) -> int:
    """Return how many times something happens every so many iterations and at the last; 0 = never.

    >>> saves(10, 4), saves(8, 4), saves(8, 0)
    (3, 2, 0)
    """
    return math.ceil(iterations / every) if every else 0


def evaluations(iterations: int, every: int) -> int:
    """Return how many evaluations a run has: before it, every so often, and after it.

    >>> evaluations(10, 4), evaluations(8, 4), evaluations(8, 0)
    (4, 3, 2)
    """
    return 1 + (saves(iterations, every) or 1)


def disk(
    sizes: Sizes, *, adapter: bool, moves: bool, saved: int, keep_last: int, keep_best: bool
) -> dict[str, int]:
    """Return the bytes of a checkpoint, of those there at a time, and of the final model.

    One more than is kept is there while it is written.
    """
    policy = sizes.gradient if adapter else sizes.weights
    one = policy + sizes.moments + (sizes.gradient if moves else 0)
    most = min(saved, keep_last + int(keep_best) + 1)
    final = sizes.weights + (sizes.gradient if adapter else 0)
    return {"checkpoint": one, "checkpoints": most * one, "model": final}


def gib(size: float) -> str:
    """Return bytes for people.

    >>> gib(3 * 2**30), gib(5 * 2**20), gib(2000)
    ('3.0 GiB', '5 MiB', '0 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
