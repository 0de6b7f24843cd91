"""Which KL may act where: the table of docs/kl.md against enumeration, in float64.

A policy of two steps over a vocabulary of four is small enough to sum over all its sequences, so
the expected gradient of each pair (place, estimator) is exact. It is made by leash's own parts,
from the KL of a token to the terms of the loss; what it should be is autograd of a definition.
"""

import itertools
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from policies.scorer import Scores
from policies.token_distribution import full_kl
from trainer.gae import gae
from trainer.kl import Leash
from trainer.kl_control import BIASED, ConstantKLController
from trainer.losses import MAX_LOG_RATIO, kl_term
from trainer.objectives import GRPOObjective

V, STEPS = 4, 2
PAGE = Path(__file__).parents[1] / "docs" / "kl.md"
PLACES, ESTIMATORS = ("reward", "loss"), ("k1", "k2", "k3", "full")
PAIRS = list(itertools.product(PLACES, ESTIMATORS))
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=STEPS)))  # [N, 2]
COEFF = 0.7


class Table:
    """A policy as its logits: [1, V] for the first token, [V, V] for the second given the first."""

    def __init__(self, seed: int, *, near: "Table | None" = None, eps: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.logits = [eps * torch.randn(n, V, generator=draw, dtype=torch.float64) for n in (1, V)]
        if near is not None:
            self.logits = [a + b for a, b in zip(self.logits, near.logits, strict=True)]
        self.logits = [x.detach().requires_grad_() for x in self.logits]

    def states(self) -> Tensor:
        """Log-probs of every token in the states of each sequence, [N, 2, V]."""
        first, second = (x.log_softmax(-1) for x in self.logits)
        return torch.stack([first.expand(len(SEQUENCES), V), second[SEQUENCES[:, 0]]], 1)

    def log_probs(self) -> Tensor:
        """Log-probs of the tokens of each sequence, [N, 2]."""
        return self.states().gather(-1, SEQUENCES.unsqueeze(-1)).squeeze(-1)

    def chance(self) -> Tensor:
        """Probability of each sequence, [N, 1]."""
        return self.log_probs().sum(-1, keepdim=True).exp()

    def gradient(self, value: Tensor) -> Tensor:
        parts = torch.autograd.grad(value, self.logits, allow_unused=True, retain_graph=True)
        pairs = zip(parts, self.logits, strict=True)
        return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for g, x in pairs])


def estimate(policy: Table, ref: Table, estimator: str) -> Tensor:
    """Return leash's estimate of the KL of each token, [N, 2]."""
    if estimator == "full":
        return full_kl(policy.states(), ref.states().detach())
    return kl_term(policy.log_probs(), ref.log_probs().detach(), estimator)


def expected(policy: Table, ref: Table, place: str, estimator: str) -> Tensor:
    """Return the expected gradient of a loss with nothing but the KL, for a coefficient of 1."""
    penalty = estimate(policy, ref, estimator)
    curr = policy.log_probs()
    exact = estimator == "full"  # which leash does not charge in the reward: here as a kl_penalty
    measured = penalty if exact else estimate(policy, ref, "k1")
    batch = TensorDict({"kl_penalty": measured.detach()}, [len(SEQUENCES)])
    batch["log_probs", "full"] = curr.detach()
    batch["ref_log_probs", "full"] = ref.log_probs().detach()
    batch["loss_mask"] = torch.ones_like(SEQUENCES, dtype=torch.bool)
    batch["reward_raw"] = torch.zeros_like(curr.detach())
    kind = "k1" if exact and place == "reward" else estimator
    leash = Leash(ConstantKLController(kl_coef=COEFF), kind, place, allow_biased=True)
    leash.charge_reward(batch)
    value = torch.zeros_like(curr.detach())  # a critic that expects nothing
    batch["advantage"] = gae(batch["reward"], value, batch["loss_mask"], gamma=1.0, lmbda=1.0)
    full = penalty if exact else None
    made = GRPOObjective(leash=leash)
    terms = made(Scores(curr, full_kl=full), batch)
    loss = sum((policy.chance().detach() * term).sum() for term in terms.loss.values())
    return policy.gradient(loss) / COEFF


def truths(policy: Table, ref: Table) -> dict[str, Tensor]:
    """Return what the letters of the page's table stand for."""
    p, q = policy.states(), ref.states().detach()
    visits = policy.chance().detach()
    square = 0.5 * (policy.log_probs() - ref.log_probs().detach()) ** 2
    ratio = policy.log_probs().sum(-1) - ref.log_probs().detach().sum(-1)
    values = {
        "S": (policy.chance().squeeze(-1) * ratio).sum(),
        "R": (visits * (p.exp() * (p - q)).sum(-1)).sum(),
        "F": (visits * (q.exp() * (q - p)).sum(-1)).sum(),
        "Q": (policy.chance() * square).sum(),
    }
    out = {name: policy.gradient(value) for name, value in values.items()}
    return out | {"0": torch.zeros_like(out["S"])}


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the table of the page: (place, estimator) to its other cells."""
    lines = re.findall(r"^\| (reward|loss) \| (\w+) \| (.+) \|$", PAGE.read_text(), re.M)
    return {(place, name): rest.split(" | ") for place, name, rest in lines}


def test_the_page_has_all_pairs_and_refuses_those_that_the_program_refuses():
    assert set(rows()) == set(PAIRS)
    assert {pair for pair, cells in rows().items() if cells[1].startswith("refused")} == set(BIASED)


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_expected_gradient_is_what_the_page_says(place, estimator):
    policy, ref = Table(0), Table(1)
    terms = rows()[place, estimator][0].split(" - ")
    parts = truths(policy, ref)
    want = parts[terms[0]] - sum(parts[term] for term in terms[1:])
    got = expected(policy, ref, place, estimator)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)


def test_the_letters_of_the_table_are_different_gradients():
    parts = truths(Table(0), Table(1))
    for a, b in itertools.combinations(parts.values(), 2):
        assert (a - b).norm() > 0.05


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reward_and_loss_together_are_the_gradient_of_the_expected_estimate(estimator):
    policy, ref = Table(0), Table(1)
    want = policy.gradient((policy.chance() * estimate(policy, ref, estimator)).sum())
    got = sum(expected(policy, ref, place, estimator) for place in PLACES)
    assert torch.allclose(got, want)
    assert torch.allclose(want, truths(policy, ref)["Q" if estimator == "k2" else "S"])


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_only_refused_pairs_do_not_pull_near_the_reference(place, estimator):
    """Near the reference S, R and F are one gradient, to first order in the distance."""
    ref = Table(1)
    for eps in (1e-2, 1e-3):
        policy = Table(0, near=ref, eps=eps)
        want = truths(policy, ref)["S"]
        pull = float(expected(policy, ref, place, estimator) @ want / (want @ want))
        assert abs(pull - ((place, estimator) not in BIASED)) < 2 * eps


def test_no_estimate_or_gradient_overflows():
    far = torch.tensor([-1e4, -95.0, -0.0, -0.0], requires_grad=True)
    ref = torch.tensor([-0.0, -0.0, -95.0, -1e4])
    for estimator in ("k1", "k2", "k3"):
        value = kl_term(far, ref, estimator)
        (slope,) = torch.autograd.grad(value.sum(), far)
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope).all()
    assert kl_term(far, ref, "k3").max() < 1.01 * torch.tensor(MAX_LOG_RATIO).exp()
    shape = torch.tensor([[200.0, 0.0, -1e4]])
    value = full_kl(shape.log_softmax(-1), shape.flip(-1).log_softmax(-1))
    assert value.item() == pytest.approx(10200.0)  # 200 - (-1e4)
