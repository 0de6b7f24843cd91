"""The KL penalty, to the reference and to a teacher: each counts once, in the loss or reward."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.host import send
from policies.layout import groups
from policies.scorer import Scores
from trainer.baselines import compare_places, leave_one_out, to_go
from trainer.batch import LEASHES, LeashNames, batch_keys
from trainer.kl.controllers import KLControllerBase
from trainer.kl.estimators import Estimator, TokenKL, check_place, find_estimator
from trainer.surrogates import token_ratio


@dataclass(frozen=True)
class Leash:
    """Apply the penalty coeff * KL of each sampled token, in one place.

    The advantage calls `charge_reward` and the objective `loss_term`, on the same Leash; `where`
    selects which of them applies the penalty. With "sequence" it is `loss_term`, with the KL after
    each token (`later_kl`), which the update adds to the batch. `controller` sets the
    coefficient; `estimator` is a name in trainer/kl/estimators.py or an `Estimator`. Raise
    ValueError if `estimator`, in the place `where`, does not have the expected gradient of a KL,
    unless `allow_biased`. `jsd_weight` is the weight of the reference in the mixture of "jsd". A
    token whose KL in the loss is above `cap` nats counts as `cap`, without a gradient.
    `teacher` is a second Leash, named "teacher": the same calls apply both penalties. At most one
    of the two may be exact, because the update evaluates one reference only.

    >>> from trainer.kl.controllers import ConstantKLController
    >>> Leash(ConstantKLController(kl_coef=0.1), estimator="k1", where="reward").coeff
    0.1
    """

    reward_reads: ClassVar = batch_keys(
        "reward_raw", "loss_mask", "kl_penalty", ("log_probs", "full"), ("ref_log_probs", "full")
    )
    loss_reads: ClassVar = batch_keys(
        ("log_probs", "full"), ("ref_log_probs", "full"), ("teacher_log_probs", "full"), "later_kl"
    )

    controller: KLControllerBase
    estimator: str | Estimator = "k3_ratio"
    where: str = "loss"
    allow_biased: bool = False
    jsd_weight: float = 0.5
    cap: float | None = None
    name: str = "ref"  # a key of LEASHES
    teacher: "Leash | None" = None

    def __post_init__(self) -> None:
        options = {"allow_biased": self.allow_biased, "section": self.names.section}
        check_place(self.where, self.estimator, **options)
        if self.teacher is not None and (self.name, self.teacher.name) != ("ref", "teacher"):
            got = f"{self.name!r} and {self.teacher.name!r}"
            raise ValueError(f'expected the names "ref" and, of its teacher, "teacher", got {got}')
        exact = [f"{each.names.section}.estimator" for each in self.each if each.needs_reference]
        if len(exact) > 1:
            text = "expected one exact divergence, because the update reads one reference"
            raise ValueError(f"{text}, got two: set {' or '.join(exact)} to k3_ratio")

    @property
    def names(self) -> LeashNames:
        """Return the names of this leash."""
        return LEASHES[self.name]

    @property
    def each(self) -> list["Leash"]:
        """Return this leash, and the teacher's if there is one."""
        return [self] if self.teacher is None else [self, self.teacher]

    @property
    def exact_leash(self) -> "Leash | None":
        """Return the leash with an exact divergence: the update evaluates its reference."""
        return next((each for each in self.each if each.needs_reference), None)

    @property
    def coeff(self) -> float:
        """Return the coefficient of the KL, reward per nat."""
        return self.controller.coeff

    @property
    def needs_reference(self) -> bool:
        """Return whether the update evaluates this leash's reference."""
        return self.where != "reward" and self._estimator.needs == "vocabulary"

    @property
    def mixture(self) -> float:
        """Return the mixture of the exact divergence (`TokenDistribution.scores`)."""
        exact = self.exact_leash
        return 1.0 if exact is None else exact._estimator.mixture

    def exact(self, scores: Scores) -> dict[str, Tensor]:
        """Return the exact divergence [B, T] by the name of its metric, or {} if not computed."""
        kl, exact = scores.divergence, self.exact_leash
        if kl is None or exact is None:
            return {}
        return {f"kl/{exact.name}_{exact._estimator.metric}": kl.detach()}

    @property
    def _estimator(self) -> Estimator:
        row = find_estimator(self.estimator)
        return replace(row, mixture=self.jsd_weight) if self.estimator == "jsd" else row

    def charge_reward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write reward_kl and reward = reward_raw + reward_kl.

        reward_kl [B, T] is -coeff * KL at the tokens of the loss mask, or 0 if the KL is in the
        loss. kl_coeff_in_loss [B], the coefficient or 0, tells `check_charged` whether the loss
        charges the KL.
        """
        raw = batch.get("reward_raw")  # [B, T]
        first, *more = [each._reward_part(batch) for each in self.each]  # [B, T] each
        charged = sum(more, start=first)  # [B, T]
        for each in self.each:
            in_loss = 0.0 if each.where == "reward" else each.coeff
            batch.set(each.names.coeff_in_loss, torch.full_like(raw[:, 0], in_loss))
        batch.set("reward_kl", charged)
        return batch.set("reward", raw + charged)

    def _reward_part(self, batch: TensorDictBase) -> Tensor:
        if self.where != "reward" or self.coeff == 0:
            return torch.zeros_like(batch.get("reward_raw"))  # [B, T]
        log_ratio = batch.get(self.names.penalty, None)  # [B, T]
        if log_ratio is None:
            raise ValueError(self._missing(self.names.penalty))
        gen = batch.get(("log_probs", "full"))  # [B, T]
        kl = self._estimator.term(TokenKL(log_ratio, gen, gen))  # [B, T]
        return -self.coeff * kl * batch.get("loss_mask")  # [B, T]

    def loss_term(self, scores: Scores, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return {"kl": coeff * KL [B, T]}, and for a teacher "kl_teacher".

        A leash that acts in the reward has no entry.
        """
        charging = [each for each in self.each if each.where != "reward" and each.coeff != 0]
        return {each.names.loss: each._loss_part(scores, batch) for each in charging}

    def _loss_part(self, scores: Scores, batch: TensorDictBase) -> Tensor:
        kl = self.kl(scores, batch)  # [B, T]
        # Score-function gradient: the token also leads to later states. The value stays the KL.
        if self.where == "sequence":
            ratio = token_ratio(scores.log_probs, batch.get(("log_probs", "full")))  # [B, T]
            kl = kl + (ratio - ratio.detach()) * batch.get("later_kl")
        return self.coeff * kl

    def kl(self, scores: Scores, batch: TensorDictBase) -> Tensor:
        """Return the KL of each token, [B, T], nats."""
        curr, gen = scores.log_probs, batch.get(("log_probs", "full"), None)  # [B, T]
        ref = batch.get(self.names.log_probs, None)  # [B, T]
        if gen is None and self.needs_reference:  # demonstrations have no log-probs of a sampler
            gen = ref = curr  # any value will do: an exact estimator reads neither
        if ref is None:
            raise ValueError(self._missing(".".join(self.names.log_probs)))
        kl = self._estimator.term(TokenKL(curr - ref, curr, gen, scores.divergence))  # [B, T]
        if kl.shape != curr.shape or kl.requires_grad != curr.requires_grad:
            name = f"{self.names.section}.estimator"
            text = f"expected the term of {name} to be {[*curr.shape]} with a gradient"
            raise ValueError(f"{text}, got {[*kl.shape]}, requires_grad={kl.requires_grad}")
        return kl if self.cap is None else kl.clamp(max=self.cap)

    def _missing(self, key: str) -> str:
        return f"{self.names.section}.where={self.where} needs {key}, got none; use RetrieveKL"

    def follow(self, metrics: Mapping[str, float], *, responses: int) -> None:
        """Update the coefficients from the KLs of an iteration.

        `responses`: number on all ranks, with the dropped ones, whose KL does not count.
        """
        valid = 1 - metrics.get("reward/dropped_fraction", 0.0)
        for each in self.each:
            kl, weight = f"kl/{each.name}", each.controller.k3_weight
            measured = metrics.get(f"{kl}_sequence")
            if measured and weight:
                # tokens per response = KL per response / KL per token
                length = measured / metrics[kl]
                measured += weight * (metrics[f"{kl}_k3"] * length - measured)
            each.controller.follow(measured, sequences=round(responses * valid))


def later_kl(kl: Tensor, mask: Tensor, group_id: Tensor) -> Tensor:
    """Return the sum of the KL after each token minus a baseline, [B, T].

    kl and the loss mask are [B, T], group_id [B] is on the CPU; each id has the same number of
    rows. The baseline is the mean of the group's other rows at the same place (`compare_places`),
    0 if there are none.

    >>> kl, ids = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 5.0]]), torch.tensor([7, 7])
    >>> later_kl(kl, kl > 0, ids).tolist()
    [[-2.0, -2.0, 0.0], [2.0, 2.0, 0.0]]
    """
    kl = kl * mask  # [B, T]
    members = groups(group_id)  # P lists of G row indices
    if len(sizes := {*map(len, members)}) > 1:
        raise ValueError(f"expected groups of one size, got groups of {sorted(sizes)} rows")
    order = send(torch.tensor([*chain(*members)], dtype=torch.int64), kl.device)  # [B]
    later, mask = (to_go(kl) - kl)[order], mask[order]  # [B, T]
    rows = mask.any(-1).view(len(members), -1)  # [P, G]
    out = torch.empty_like(kl)  # [B, T]
    out[order] = compare_places(later, mask, rows, _mean_of_others) * mask
    return out


def _mean_of_others(values: Tensor, rows: Tensor) -> Tensor:
    return leave_one_out(values, rows).where(rows.sum(-1, keepdim=True) > 1, 0.0)


def charged_in_reward(leash: Leash, batch: TensorDictBase) -> set[str]:
    """Return the loss names of the KLs that the reward contains, so that the loss must not."""
    charged = set()
    for each in leash.each:
        in_loss = batch.get(each.names.coeff_in_loss, None)  # [B]
        if in_loss is not None and not bool(in_loss.any()):  # synchronises the GPU
            charged.add(each.names.loss)
    return charged


def check_charged(leash: Leash, *, in_reward: Collection[str], in_loss: Collection[str]) -> None:
    """Raise ValueError unless each KL with a coefficient above 0 counts in exactly one place.

    in_reward, in_loss: the loss names of the KLs that are in the reward and in the loss.
    """
    for each in leash.each:
        name = each.names.loss
        if each.coeff == 0 or (name in in_reward) != (name in in_loss):
            continue
        how = "twice" if name in in_loss else "never"
        calls = "call leash.charge_reward in the advantage and leash.loss_term in the objective"
        text = f"the KL of {each.names.section}.coeff is charged {how} in this batch"
        raise ValueError(f"{text}; {calls}, of the same Leash")
