"""The table of KL estimators: value and gradient of a token, and where each may act. Torch-free.

All tensors are [B, T]; KL values are in nats. envs/transforms/kl.py measures k1, gen - ref, of each
batch. To add an estimator, add a row to ESTIMATORS: the keys, the checks, `Leash` and the tests
read it. Your own estimator is a function that returns an `Estimator`:
kl.estimator={_target_: my_kl.mine} (docs/kl_estimators.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainer.surrogates import MAX_LOG_RATIO, token_ratio

if TYPE_CHECKING:
    from torch import Tensor

PLACES = ("loss", "reward", "sequence")


@dataclass(frozen=True)
class TokenKL:
    """What an estimator may use of each sampled token.

    log_ratio: log policy - log reference. curr, gen: log-probs of the trained policy and of the
    sampling policy; in the reward they are equal. divergence: the exact divergence over the
    vocabulary, for an estimator that needs "vocabulary".
    """

    log_ratio: Tensor
    curr: Tensor
    gen: Tensor
    divergence: Tensor | None = None


@dataclass(frozen=True)
class Estimator:
    """An estimator of the KL of a token: `term` maps TokenKL to nats [B, T].

    In the loss autograd differentiates `term`; in the reward only its value counts; with
    where="sequence" autograd differentiates it, and its value also counts for earlier tokens.
    `needs`: "samples" (the log-ratio), "ratio" (curr and gen) or "vocabulary" (divergence). The
    reward allows only "samples", the sequence only "vocabulary". `refused`: place -> reason and
    remedy, where the expected gradient is not the gradient of a KL; kl.allow_biased=true overrides
    it if the place allows `needs`.
    `mixture` selects the divergence (`TokenDistribution.scores`), logged as kl/ref_<metric> or
    kl/teacher_<metric>.
    """

    term: Callable[[TokenKL], Tensor]
    needs: Literal["samples", "ratio", "vocabulary"] = "samples"
    refused: Mapping[str, str] = field(default_factory=dict)
    mixture: float = 1.0
    metric: str = "full"


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = -log_ratio, clamped to at most 20, because exp overflows.

    A clamped token has no gradient. Tokens that are unlikely under the reference are not clamped.
    Schulman 2020, and GRPO (arXiv 2402.03300 eq. 4). On fresh samples its expected gradient is the
    gradient of KL(reference || policy).

    >>> import torch
    >>> round(k3(torch.tensor(1.0)).item(), 4)
    0.3679
    """
    d = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return d.expm1() - d


def k3_ratio(token: TokenKL) -> Tensor:
    """Return r k3 with r = pi_curr / pi_gen: DeepSeek-V3.2 (arXiv 2512.02556) eq. 7.

    r is differentiated too, so the gradient is r * log_ratio * grad curr, for any sampler.
    """
    ratio = token_ratio(token.curr, token.gen)
    # d(r k3)/d(curr) = r k3 + r (1 - exp(-log_ratio)) = r log_ratio: large terms cancel.
    slope = (ratio * token.log_ratio).detach()
    value = (ratio * k3(token.log_ratio)).detach()
    return value + slope * (token.curr - token.curr.detach())


def exact_divergence(token: TokenKL) -> Tensor:
    """Return the exact divergence of each token's distribution."""
    assert token.divergence is not None
    return token.divergence


NO_PULL = "it has no KL gradient near the reference; use k1"
NO_GRADIENT = "its expected gradient in the loss is zero; use full, k3_ratio, k2 or k3"
OF_STATE = {"reward": "it does not depend on its own token; use k1"}
OF_STATES = OF_STATE | {
    "sequence": "summed over states it is not this divergence of whole responses; use full"
}
ESTIMATORS: dict[str, Estimator] = {  # k1, k2, k3: Schulman 2020, "Approximating KL divergence"
    "k1": Estimator(lambda token: token.log_ratio, refused={"loss": NO_GRADIENT}),
    "k2": Estimator(lambda token: 0.5 * token.log_ratio.square(), refused={"reward": NO_PULL}),
    "k3": Estimator(lambda token: k3(token.log_ratio), refused={"reward": NO_PULL}),
    "full": Estimator(exact_divergence, needs="vocabulary", refused=OF_STATE),
    "k3_ratio": Estimator(
        k3_ratio,
        needs="ratio",
        refused={"reward": "it is k3 there, at a ratio of 1; use k1"},
    ),
    "forward": Estimator(
        exact_divergence, needs="vocabulary", refused=OF_STATES, mixture=0.0, metric="forward"
    ),
    "jsd": Estimator(  # kl.jsd_weight is its mixture
        exact_divergence, needs="vocabulary", refused=OF_STATES, mixture=0.5, metric="jsd"
    ),
}


def find_estimator(estimator: str | Estimator) -> Estimator:
    """Return the estimator with this name; an `Estimator` is returned as it is.

    Raise ValueError for anything else.
    """
    found = estimator if isinstance(estimator, Estimator) else ESTIMATORS.get(estimator)
    if found is None:
        text = f"one of {', '.join(ESTIMATORS)} or a trainer.kl.estimators.Estimator"
        raise ValueError(f"expected kl.estimator to be {text}, got {estimator!r}")
    return found


def check_place(
    where: str, estimator: str | Estimator, *, allow_biased: bool = False, section: str = "kl"
) -> None:
    """Raise ValueError if the estimator's expected gradient here is not the gradient of a KL.

    `allow_biased` allows it if the estimator can be computed there. `section`: kl or teacher.
    """
    if where not in PLACES:
        one = ", ".join(PLACES)
        raise ValueError(f"expected {section}.where to be one of {one}, got {where!r}")
    row = find_estimator(estimator)
    missing = ""
    if where == "reward" and row.needs != "samples":
        missing = f"it needs the {row.needs}"
    if where == "sequence" and row.needs != "vocabulary":
        missing = "it is not the exact KL of a state; use full"
    reason = row.refused.get(where, missing)
    if not reason or (allow_biased and not missing):
        return
    name = estimator if isinstance(estimator, str) else "<your own>"
    remedy = "" if missing else f", or set {section}.allow_biased=true"
    raise ValueError(f"{section}.estimator={name} with {section}.where={where}: {reason}{remedy}")
