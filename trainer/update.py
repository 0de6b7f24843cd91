"""The update: epochs x minibatches x micro-batches. Gradients live only here.

`weight` [B, T] sums to 1 over an optimiser step on all ranks and is set before any split, so the
gradient depends neither on micro-batches nor on padding, order or ranks; nobody divides again.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scorer
from trainer.losses import weights
from trainer.objectives import Terms
from trainer.runtime import Runtime

TENSORS = (
    "tokens",
    "masks",
    "log_probs",
    "ref_log_probs",
    "loss_mask",
    "advantage",
    "weight",
    "temperature",
    "group_id",
)


class Update:
    """Optimise the policy on a batch.

    `scorer` is the module that `accelerator.prepare` returned; `lr` maps the optimiser step
    (0-based) to a learning rate; `micro_batch_tokens` bounds the padded tokens of one backward.
    """

    def __init__(
        self,
        scorer: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Callable[..., Terms],
        runtime: Runtime,
        *,
        lr: Callable[[int], float],
        epochs: int = 1,
        minibatches: int = 1,
        micro_batch_tokens: int = 8192,
        aggregation: str = "token_mean",
        max_tokens: int = 1,
        max_grad_norm: float = 1.0,
        reference: Scorer | None = None,
    ) -> None:
        self.scorer, self.optimizer, self.objective, self.runtime = (
            scorer,
            optimizer,
            objective,
            runtime,
        )
        self.lr, self.epochs, self.minibatches = lr, epochs, minibatches
        self.micro_batch_tokens = micro_batch_tokens
        self.aggregation, self.max_tokens = aggregation, max_tokens
        self.max_grad_norm = max_grad_norm
        self.reference = reference if objective.needs_reference else None
        self.step = 0
        self.skipped = 0

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Take the optimiser steps of one iteration; return the metrics of its last epoch."""
        self.scorer.train()
        log, first = _Log(), dict[str, float]()
        for _ in range(self.epochs):
            log = _Log()
            for rows in split_rows(batch, self.minibatches):
                self._step(take(batch, rows), log)
                # Before the first step the weights are still those that sampled.
                first = first or log.result(self.runtime)
        self.scorer.eval()
        metrics = log.result(self.runtime)
        if "kl/mismatch" in first:
            metrics["kl/mismatch"] = first["kl/mismatch"]
        metrics["optim/skipped_steps"] = float(self.skipped)
        return metrics

    def _step(self, batch: TensorDictBase, log: "_Log") -> None:
        """Take one optimiser step on a minibatch; an empty or non-finite one is skipped."""
        mask = batch.get("loss_mask")
        totals = {"tokens": float(mask.sum()), "rows": float(mask.any(-1).sum())}
        totals = self.runtime.sums(totals)
        rate = self.lr(self.step)
        self.step += 1
        if totals["tokens"] == 0:
            self.skipped += 1
            return
        weight = weights(
            mask,
            self.aggregation,
            total_tokens=totals["tokens"],
            total_rows=totals["rows"],
            max_tokens=self.max_tokens,
        )
        batch.set("weight", weight)
        parts = self._micro_batches(batch)
        for number, rows in enumerate(parts):
            self._backward(take(batch, rows), log, last=number + 1 == len(parts))
        limit = self.max_grad_norm or math.inf
        norm = float(self.runtime.accelerator.clip_grad_norm_(self.scorer.parameters(), limit))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):  # gradients are reduced, so all ranks agree
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        log.note("optim/lr", rate)
        log.note("optim/grad_norm", norm)

    def _backward(self, batch: TensorDictBase, log: "_Log", *, last: bool) -> None:
        accelerator = self.runtime.accelerator
        with nullcontext() if last else accelerator.no_sync(self.scorer):
            scores = self.scorer(
                batch.get(("tokens", "full")),
                batch.get(("masks", "all_attention_mask")),
                batch.get("loss_mask"),
                temperature=batch.get("temperature"),
                group_id=batch.get("group_id", None),
                entropy=True,
                reference=self.reference,
            )
            terms = self.objective(scores, batch)
            weight = batch.get("weight")
            losses = {name: (weight * term).sum() for name, term in terms.loss.items()}
            # DDP averages over ranks; weight is already global.
            accelerator.backward(sum(losses.values()) * self.runtime.ranks)
        log.add(terms, {k: float(v.detach()) for k, v in losses.items()}, batch.get("loss_mask"))

    def _micro_batches(self, batch: TensorDictBase) -> list[list[int]]:
        """Return row lists within the token bound; every rank gets the same number of them."""
        parts = pack_rows(batch, self.micro_batch_tokens)
        most = int(self.runtime.maxima({"n": float(len(parts))})["n"])
        while len(parts) < most:  # split the largest; with nothing left to split, repeat nothing
            parts.sort(key=len)
            largest = parts.pop()
            half = max(len(largest) // 2, 1)
            parts += [largest[:half], largest[half:]]
        return parts


def take(batch: TensorDictBase, rows: list[int]) -> TensorDictBase:
    """Return the tensors of some rows, possibly none."""
    return batch.select(*TENSORS, strict=False)[torch.tensor(rows, dtype=torch.int64)]


def _groups(batch: TensorDictBase) -> list[list[int]]:
    """Return the rows of each prompt; without group ids each row is its own group."""
    ids = batch.get("group_id", None)
    if ids is None:
        return [[i] for i in range(batch.batch_size[0])]
    groups: dict[int, list[int]] = {}
    for i, g in enumerate(ids.tolist()):
        groups.setdefault(g, []).append(i)
    return list(groups.values())


def split_rows(batch: TensorDictBase, count: int) -> list[list[int]]:
    """Return `count` minibatches of rows; the samples of a prompt stay together."""
    groups = _groups(batch)
    if len(groups) % count:
        raise ValueError(
            f"expected the {len(groups)} prompts of a rank to split into algorithm.minibatches="
            f"{count} equal parts; change trainer.prompts_per_iteration or algorithm.minibatches"
        )
    each = len(groups) // count
    return [list(chain(*groups[i : i + each])) for i in range(0, len(groups), each)]


def pack_rows(batch: TensorDictBase, limit: int) -> list[list[int]]:
    """Return consecutive rows whose padded size stays within `limit` tokens; groups stay whole."""
    sizes = batch.get(("masks", "all_attention_mask")).sum(-1).tolist()
    parts: list[list[int]] = []
    for group in _groups(batch):
        both = [*parts[-1], *group] if parts else group
        if parts and max(sizes[i] for i in both) * len(both) <= limit:
            parts[-1] = both
        else:
            parts.append(list(group))
    return [piece for part in parts for piece in _fit(part, sizes, limit)]


def _fit(rows: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Split a group that alone exceeds the limit; a single row always fits."""
    each = max(limit // max(sizes[i] for i in rows), 1)
    return [rows[i : i + each] for i in range(0, len(rows), each)]


class _Log:
    """Sums over the micro-batches of an epoch, reduced over ranks once."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}
        self.means: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.notes: dict[str, list[float]] = {}
        self.tokens = 0.0

    def add(self, terms: Terms, losses: dict[str, float], mask: Tensor) -> None:
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + value
        for name, value in terms.means.items():
            self.means[name] = self.means.get(name, 0.0) + float((value * mask).sum())
        for name, value in terms.maxima.items():
            if value.numel():  # a rank that has run out of rows takes part without any
                self.maxima[name] = max(self.maxima.get(name, 0.0), float(value.max()))
        self.tokens += float(mask.sum())

    def note(self, name: str, value: float) -> None:
        self.notes.setdefault(name, []).append(value)

    def result(self, runtime: Runtime) -> dict[str, float]:
        sums = runtime.sums({**self.means, "tokens": self.tokens})
        tokens = max(sums.pop("tokens"), 1.0)
        steps = max(len(self.notes.get("optim/lr", [])), 1)
        losses = {k: v / steps for k, v in runtime.sums(self.losses).items()}
        out = {f"loss/{name}": value for name, value in losses.items()}
        out["loss/total"] = sum(losses.values())
        out |= {name: value / tokens for name, value in sums.items()}
        out |= runtime.maxima(self.maxima)
        return out | {name: sum(v) / len(v) for name, v in self.notes.items()}
