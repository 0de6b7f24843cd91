"""The update: epochs x minibatches x micro-batches. Only this file of the loop computes gradients.

`token_weights` sets `weight` [B, T] from totals of the minibatch on all ranks, before it is split
into micro-batches. So the gradient does not depend on micro-batches, padding, order or ranks.

An iteration is planned from one copy of the masks on the CPU. The GPU is synchronised only for this
copy, for kl_coeff_in_loss, for the gradient norm of each optimiser step (with `target_kl` also for
its metrics), and for the metrics at the end.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.host import OnHost, send
from policies.layout import groups, pack_rows
from policies.precision import in_float64
from policies.scorer import Scorer, Scores
from trainer.batch import batch_keys
from trainer.kl.leash import Leash, charged_in_reward, check_charged, later_kl
from trainer.losses import token_weights
from trainer.objectives import EntropyBonus, Objective, Terms
from trainer.runtime import Runtime

# Keys that the update plans by; the scorer reads them on the CPU.
PLANNED = batch_keys(
    ("tokens", "full"), ("masks", "all_attention_mask"), "loss_mask", "temperature", "group_id"
)


@dataclass(frozen=True)
class Minibatch:
    """An optimiser step as planned on the CPU."""

    tokens: float  # loss tokens on all ranks
    rows: Tensor  # [n] int64, rows of the batch, one micro-batch after another
    plans: list["MicroBatch"]  # every rank has the same number for each reference

    def parts(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, "MicroBatch"]]:
        """Yield the rows of each micro-batch, and their plan; all indices are sent in one copy."""
        indices = send(self.rows, _device(batch)).split([len(plan.keys) for plan in self.plans])
        for index, plan in zip(indices, self.plans, strict=True):
            yield batch[index], plan


class MicroBatch(NamedTuple):
    """A backward pass as planned on the CPU."""

    keys: TensorDictBase  # PLANNED and "weight"
    reference: Scorer | None  # for an exact divergence


class Update:
    """Optimise the policy on a batch.

    `scorer` is the module that `accelerator.prepare` returned; `lr` maps the optimiser step
    (0-based) to a learning rate; `micro_batch_tokens` bounds the tokens of a backward pass,
    padding included. `packing` removes the padding: it concatenates the rows.
    `leash` is the run's Leash: raise ValueError unless each KL with a coefficient above 0, also the
    teacher's, counts once, in the reward or in the objective. `reference` is the scorer of the
    reference of `leash.exact_leash`. With several teachers it is a dict: each scores its rows
    (teachers.<name> of the batch) in micro-batches of their own. A parameter group may have
    "scale", a factor of its learning rate, and "since", the first iteration in which it is trained.
    `entropy_*` configure `EntropyBonus`; `router_coeff` weighs the load-balancing loss of a mixture
    of experts. If the kl/behaviour_k3 of a minibatch, over all ranks, is above `target_kl` (nats
    per token), the iteration ends without this optimiser step.
    """

    def __init__(
        self,
        scorer: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        runtime: Runtime,
        *,
        leash: Leash,
        lr: Callable[[int], float],
        epochs: int = 1,
        minibatches: int = 1,
        micro_batch_tokens: int = 8192,
        aggregation: str = "token_mean",
        max_tokens: int = 1,
        max_grad_norm: float = 1.0,
        reference: Scorer | dict[str, Scorer] | None = None,
        entropy_coeff: float = 0.0,
        entropy_target: float | None = None,
        router_coeff: float = 0.0,
        target_kl: float | None = None,
        packing: bool = False,
    ) -> None:
        self.scorer, self.optimizer = scorer, optimizer
        self.objective, self.runtime = objective, runtime
        self.lr, self.epochs, self.minibatches = lr, epochs, minibatches
        self.aggregation, self.max_tokens = aggregation, max_tokens
        self.micro_batch_tokens, self.max_grad_norm = micro_batch_tokens, max_grad_norm
        if getattr(objective, "leash", None) not in (None, leash):
            raise ValueError("expected one Leash, got two: give the objective's Leash to Update")
        self.leash, self.in_reward = leash, set[str]()
        by_name = reference if isinstance(reference, dict) else {None: reference}
        self.references = by_name if leash.exact_leash else {None: None}
        self.entropy = EntropyBonus(entropy_coeff, target=entropy_target)
        self.router_coeff, self.target_kl, self.packing = router_coeff, target_kl, packing
        if router_coeff:
            ids = torch.zeros(1, 2, dtype=torch.int64, device=runtime.device)
            with torch.no_grad():
                scorer(ids, ids == 0, balance=True)  # raises ValueError if there are no routers
        self.step = 0
        self.skipped = 0

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Take the optimiser steps of one iteration; return the metrics of its last epoch."""
        self.in_reward = charged_in_reward(self.leash, batch)
        planned = batch.select(*PLANNED, "teachers", strict=False).to("cpu")
        once = self._plan(planned)
        plan = once * self.epochs
        reads = (*PLANNED, "ref_states", *Leash.loss_reads, *self.objective.reads)
        batch = batch.select(*reads, strict=False)
        self.scorer.train()
        exact = self.leash.exact_leash
        if exact is not None and exact.where == "sequence" and exact.coeff != 0:
            ids = planned.get("group_id", torch.arange(batch.batch_size[0]))
            kl = self._kl(exact, batch, once)  # [B, T]
            batch.set("later_kl", later_kl(kl, batch["loss_mask"], ids))
        log, first = _Log(), _Log()
        start, not_taken = self.step, 0
        for number, minibatch in enumerate(plan):
            log = log if number % self.minibatches else _Log()  # one per epoch
            if not self._step(batch, minibatch, log):
                not_taken = len(plan) - number
                break
            # `first`: the first minibatch with loss tokens, for kl/mismatch: no step was taken yet.
            if not first.sums:
                first.join(log)
        self.step = start + len(plan)  # the schedule also counts steps that target_kl skipped
        self.scorer.eval()
        metrics = log.result(self.runtime)
        if "kl/mismatch" in first.sums:
            metrics["kl/mismatch"] = first.result(self.runtime)["kl/mismatch"]
        metrics["optim/skipped_steps"] = float(self.skipped)
        if self.target_kl is not None:
            metrics["optim/early_stopped"] = not_taken / len(plan)
        metrics["policy/entropy_coeff"] = self.entropy.coeff
        if "policy/entropy" in metrics:
            self.entropy.update(metrics["policy/entropy"])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in addition to weights and optimiser."""
        return {"step": self.step, "skipped": self.skipped, "entropy": self.entropy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.step, self.skipped = state["step"], state["skipped"]
        self.entropy.load_state_dict(state["entropy"])

    def _plan(self, batch: TensorDictBase) -> list[Minibatch]:
        """Return the minibatches of a batch on the CPU; their totals are over all ranks."""
        rows, totals = split_rows(batch, self.minibatches), dict[str, float]()
        minibatches = [select_rows(batch, each) for each in rows]
        parts = [self._micro_batches(minibatch) for minibatch in minibatches]  # by reference
        for i, minibatch in enumerate(minibatches):
            mask = minibatch.get("loss_mask")  # [B, T] of the minibatch
            totals |= {f"tokens {i}": float(mask.sum()), f"rows {i}": float(mask.any(-1).sum())}
        totals = self.runtime.all_reduce_sum(totals)
        counts = {
            f"{i} {n}": float(len(part)) for i, each in enumerate(parts) for n, part in each.items()
        }
        counts = self.runtime.all_reduce_max(counts)
        plan = []
        for i, minibatch in enumerate(minibatches):
            tokens = totals[f"tokens {i}"]
            weight = token_weights(  # [B, T]
                minibatch.get("loss_mask"),
                self.aggregation,
                total_tokens=tokens,
                total_rows=totals[f"rows {i}"],
                max_tokens=self.max_tokens,
            )
            minibatch.set("weight", weight)
            order, plans = list[int](), list[MicroBatch]()
            for name, each in parts[i].items():
                # Each rank gets the same number of micro-batches, some empty.
                for part in each + [[]] * (int(counts[f"{i} {name}"]) - len(each)):
                    order += [rows[i][row] for row in part]
                    plans.append(MicroBatch(select_rows(minibatch, part), self.references[name]))
            plan.append(Minibatch(tokens, torch.tensor(order, dtype=torch.int64), plans))
        return plan

    def _micro_batches(self, batch: TensorDictBase) -> dict[str | None, list[list[int]]]:
        """Return lists of rows within the token bound, by reference; None: one for all rows."""
        out, every = {}, torch.ones(len(batch), dtype=torch.bool)  # [B]
        for name in self.references:
            chosen = every if name is None else batch.get(("teachers", name))  # [B]
            mine = chosen.nonzero().squeeze(-1)  # [b]
            part = batch[mine]
            options = {"group_id": part.get("group_id", None), "padded": not self.packing}
            attention = part.get(("masks", "all_attention_mask"))
            lists = pack_rows(attention, self.micro_batch_tokens, **options)
            out[name] = [mine[each].tolist() for each in lists]
        return out

    def _step(self, batch: TensorDictBase, minibatch: Minibatch, log: "_Log") -> bool:
        """Take one optimiser step, unless the minibatch is empty or its gradient is not finite.

        Return False, without a step, if the policy has moved further than `target_kl`.
        """
        rate = self.lr(self.step)
        iteration = self.step // (self.epochs * self.minibatches)
        self.step += 1
        if minibatch.tokens == 0:
            self.skipped += 1
            return True
        step_log = _Log()
        for number, (part, plan) in enumerate(minibatch.parts(batch), 1):
            self._backward(part, plan, step_log, last=number == len(minibatch.plans))
        limit = self.max_grad_norm or math.inf
        norm = self.runtime.clip(self.scorer.parameters(), limit)
        step_log.notes = {"optim/lr": [rate], "optim/grad_norm": [norm]}
        log.join(step_log)
        too_far = self.target_kl is not None and (  # a mean over all ranks, so all ranks agree
            step_log.result(self.runtime)["kl/behaviour_k3"] > self.target_kl
        )
        for group in self.optimizer.param_groups:
            waits = iteration < group.get("since", 0)
            group["lr"] = 0.0 if waits else rate * group.get("scale", 1.0)
        if math.isfinite(norm) and not too_far:  # gradients are reduced, so all ranks agree
            self.optimizer.step()
        self.skipped += not math.isfinite(norm)
        self.optimizer.zero_grad(set_to_none=True)
        return not too_far

    @torch.no_grad()
    def _kl(self, leash: Leash, batch: TensorDictBase, plan: list[Minibatch]) -> Tensor:
        """Return the exact KL of each token by the weights before the first step, [B, T]."""
        found = [  # [b, T] of each micro-batch
            leash.kl(self._scores(part, planned), part)
            for minibatch in plan
            for part, planned in minibatch.parts(batch)
        ]
        order = torch.cat([minibatch.rows for minibatch in plan]).argsort()  # [B]
        return torch.cat(found)[send(order, _device(batch))]

    def _scores(self, batch: TensorDictBase, plan: MicroBatch, **options: Any) -> Scores:
        """Return the scores of a micro-batch."""
        where = {key: OnHost(plan.keys.get(key)) for key in PLANNED if key in plan.keys}
        return self.scorer(
            where["tokens", "full"],
            where["masks", "all_attention_mask"],
            where["loss_mask"],
            temperature=where["temperature"],
            group_id=where.get("group_id"),
            reference=plan.reference,
            ref_states=batch.get("ref_states", None),
            mixture=self.leash.mixture,
            pack=self.packing,
            **options,
        )

    def _backward(
        self, batch: TensorDictBase, plan: MicroBatch, log: "_Log", *, last: bool
    ) -> None:
        """Add the gradient of a micro-batch."""
        accelerator = self.runtime.accelerator
        weight = send(plan.keys.get("weight"), _device(batch))  # [b, T]
        batch.set("weight", weight)
        with nullcontext() if last else accelerator.no_sync(self.scorer):
            scores = self._scores(
                batch,
                plan,
                entropy=True,
                learn_entropy=self.entropy.coeff > 0,
                balance=self.router_coeff > 0,
            )
            terms = self.objective(scores, batch)  # [B, T] each
            check_charged(self.leash, in_reward=self.in_reward, in_loss=terms.loss.keys())
            loss = terms.loss | self.entropy(scores)
            if self.router_coeff:
                loss["router"] = self.router_coeff * scores.imbalance
            losses = {name: (weight * term).sum() for name, term in loss.items()}  # scalars
            # DDP averages over ranks; weight is already global.
            accelerator.backward(sum(losses.values()) * self.runtime.ranks)
        log.add(terms, losses, batch.get("loss_mask"))


def select_rows(batch: TensorDictBase, rows: list[int]) -> TensorDictBase:
    """Return these rows of a batch on the CPU; `rows` may be empty."""
    return batch[torch.tensor(rows, dtype=torch.int64)]


def split_rows(batch: TensorDictBase, count: int) -> list[list[int]]:
    """Return `count` minibatches of rows; the samples of a prompt stay together.

    Minibatch i: prompts i, i + count, ... The number of ranks does not change its set of prompts.
    """
    rows = groups(batch.get("group_id", torch.arange(batch.batch_size[0])))
    if len(rows) % count:
        prompts = f"the {len(rows)} prompts of a rank"
        raise ValueError(f"expected algorithm.minibatches={count} to divide {prompts}")
    return [list(chain(*rows[i::count])) for i in range(count)]


def _device(batch: TensorDictBase) -> torch.device:
    return batch.get("loss_mask").device


class _Log:
    """Sums over the micro-batches of an epoch; only `result` copies them from the GPU."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}  # sums of losses, means and token counts
        self.maxima: dict[str, Tensor] = {}
        self.notes: dict[str, list[float]] = {}  # one value per optimiser step

    @torch.no_grad()
    def add(self, terms: Terms, losses: dict[str, Tensor], mask: Tensor) -> None:
        """Add a micro-batch without synchronising the GPU."""
        parts = {f"loss/{name}": value for name, value in losses.items()}
        parts |= {name: (value * mask).sum() for name, value in terms.means.items()}
        parts["tokens"] = mask.sum()
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + in_float64(value.detach())
        for name, value in terms.maxima.items():
            if value.numel():  # an empty micro-batch has no values
                largest = value.max()
                self.maxima[name] = torch.maximum(self.maxima.get(name, largest), largest)

    def join(self, other: "_Log") -> None:
        """Add the sums, maxima and notes of another log."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)
        for name, values in other.notes.items():
            self.notes[name] = self.notes.get(name, []) + values

    def result(self, runtime: Runtime) -> dict[str, float]:
        """Return the metrics of all ranks."""
        values = [in_float64(v) for v in (*self.sums.values(), *self.maxima.values())]
        numbers = torch.stack(values).tolist() if values else []  # one copy from the device
        sums = runtime.all_reduce_sum(dict(zip(self.sums, numbers, strict=False)))
        tokens = max(sums.pop("tokens", 0.0), 1.0)
        steps = max(len(self.notes.get("optim/lr", [])), 1)
        out = {k: v / (steps if k.startswith("loss/") else tokens) for k, v in sums.items()}
        out["loss/total"] = sum(v for k, v in out.items() if k.startswith("loss/"))
        largest = zip(self.maxima, numbers[len(self.sums) :], strict=True)
        out |= runtime.all_reduce_max(dict(largest))
        return out | {name: sum(v) / len(v) for name, v in self.notes.items()}
