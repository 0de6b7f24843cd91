"""A policy of two steps over a vocabulary of four: all its sequences, and gradients over them.

float64. What leash's own parts make of a KL, and what it should be by autograd of a definition;
`sampler` is who sampled, by default the policy itself.
"""

import itertools

import torch
from tensordict import TensorDict
from torch import Tensor

from policies.scorer import Scores
from policies.token_distribution import Head, TokenDistribution
from trainer.gae import gae
from trainer.kl.controllers import ConstantKLController
from trainer.kl.estimators import ESTIMATORS, TokenKL
from trainer.kl.leash import Leash, later_kl
from trainer.objectives import GRPOObjective

V, STEPS = 4, 2
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

    def step(self, gradient: Tensor, *, rate: float) -> None:
        """Go down a gradient."""
        with torch.no_grad():
            for logits, part in zip(self.logits, gradient.split([V, V * V]), strict=True):
                logits -= rate * part.view_as(logits)


def estimate(policy: Table, ref: Table, estimator: str) -> Tensor:
    """Return leash's estimate of the KL of each token, [N, 2]; of what the policy itself says."""
    row = ESTIMATORS[estimator]
    if row.needs == "vocabulary":
        states, others = policy.states().flatten(0, 1), ref.states().detach().flatten(0, 1)
        head, every = Head(torch.eye(V, dtype=torch.float64), None, None), SEQUENCES >= 0
        reference = TokenDistribution(head, others, every)
        options = {"reference": reference, "mixture": row.mixture}
        return TokenDistribution(head, states, every).scores(SEQUENCES, **options).divergence
    curr = policy.log_probs()  # [N, 2]; the ratio is 1
    log_ratio = curr - ref.log_probs().detach()  # [N, 2]
    return row.term(TokenKL(log_ratio, curr, curr.detach()))


def expected(
    policy: Table,
    ref: Table,
    place: str,
    estimator: str,
    *,
    sampler: Table | None = None,
    old: Table | None = None,
) -> Tensor:
    """Return the expected gradient of a loss with nothing but the KL, for a coefficient of 1.

    No ratio is clipped. `old`: what the trainer says of the weights with which `sampler`, another
    engine, has sampled.
    """
    who = sampler or policy
    curr = policy.log_probs()
    needs = ESTIMATORS[estimator].needs
    never = needs != "samples" and place == "reward"  # leash refuses: as a kl_penalty
    ahead = place == "sequence"  # the sampler's own KL of its states, as before the first step
    batch = TensorDict({"log_probs": {"full": who.log_probs().detach()}}, [len(SEQUENCES)])
    batch["kl_penalty"] = estimate(who, ref, estimator if never or ahead else "k1").detach()
    batch["ref_log_probs", "full"] = ref.log_probs().detach()
    if old is not None:
        batch["old_log_probs", "full"] = old.log_probs().detach()
    batch["loss_mask"] = torch.ones_like(SEQUENCES, dtype=torch.bool)
    batch["reward_raw"] = torch.zeros_like(curr.detach())
    kind = "k1" if never else estimator
    leash = Leash(ConstantKLController(kl_coef=COEFF), kind, place, allow_biased=True)
    leash.charge_reward(batch)
    value = torch.zeros_like(curr.detach())  # a critic that expects nothing
    batch["advantage"] = gae(batch["reward"], value, batch["loss_mask"], gamma=1.0, lmbda=1.0)
    full = estimate(policy, ref, estimator) if needs == "vocabulary" else None
    if ahead:  # every response is alone, so it has no baseline
        alone = torch.arange(len(SEQUENCES))
        batch["later_kl"] = later_kl(batch["kl_penalty"], batch["loss_mask"], alone)
    made = GRPOObjective(clip_low=1.0, clip_high=1e9, leash=leash)
    terms = made(Scores(curr, divergence=full), batch)
    loss = sum((who.chance().detach() * term).sum() for term in terms.loss.values())
    return policy.gradient(loss) / COEFF


def truths(policy: Table, ref: Table, sampler: Table | None = None) -> dict[str, Tensor]:
    """Return what the letters of the table of docs/kl_estimators.md stand for."""
    who = sampler or policy
    p, q, o = policy.states(), ref.states().detach(), who.states().detach()
    m = ((p.exp() + q.exp()) / 2).log()
    visits = who.chance().detach()
    square = 0.5 * (policy.log_probs() - ref.log_probs().detach()) ** 2
    ratio = policy.log_probs().sum(-1) - ref.log_probs().detach().sum(-1)

    def weighed(token: Tensor) -> Tensor:  # a sum over the tokens of all visited states
        return (visits * (token.detach() * p).sum(-1)).sum()

    values = {
        "S": (policy.chance().squeeze(-1) * ratio).sum(),
        "R": (visits * (p.exp() * (p - q)).sum(-1)).sum(),
        "F": (visits * (q.exp() * (q - p)).sum(-1)).sum(),
        "J": (visits * (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1)).sum() / 2,
        "Q": (policy.chance() * square).sum(),
        "B": (visits * (o.exp() * (o - p)).sum(-1)).sum(),
        "R/r": weighed(o.exp() * (p - q)),  # of R a token has p (p - q), and r = p / o
        "F/r": weighed(-q.exp() * (o - p).exp()),
    }
    values |= {f"L({kind})": surrogate(policy, ref, who, kind) for kind in OF_A_TOKEN}
    out = {name: policy.gradient(value) for name, value in values.items()}
    return out | {"0": torch.zeros_like(out["S"])}


OF_A_TOKEN = {  # an estimate of each token of a state, [..., V], of x = log sampler - log reference
    "k1": lambda x, chance: x,
    "k2": lambda x, chance: x**2 / 2,
    "k3": lambda x, chance: torch.exp(-x) - 1 + x,
    "full": lambda x, chance: (chance * x).sum(-1, keepdim=True).expand_as(x),
    "forward": lambda x, chance: -(chance * torch.exp(-x) * x).sum(-1, keepdim=True).expand_as(x),
    "jsd": lambda x, chance: _half_divergences(x, chance).sum(-1, keepdim=True).expand_as(x),
}


def _half_divergences(x: Tensor, chance: Tensor) -> Tensor:
    """Return what each token adds to the Jensen-Shannon divergence."""
    other = chance * torch.exp(-x)
    middle = (chance + other) / 2
    return (chance * (chance / middle).log() + other * (other / middle).log()) / 2


def surrogate(policy: Table, ref: Table, who: Table, kind: str) -> Tensor:
    """Return TRPO's surrogate of the sampler's estimates, by its Q of each token in each state."""
    p, q, o = ([x.log_softmax(-1) for x in table.logits] for table in (policy, ref, who))
    o, q = ([x.detach() for x in table] for table in (o, q))
    first, second = (
        OF_A_TOKEN[kind](a - b, a.exp()) for a, b in zip(o, q, strict=True)
    )  # [1, V] and [V, V]
    to_go = first[0] + (o[1].exp() * second).sum(-1)  # [V]
    later = (o[0][0].exp() * (p[1].exp() * second).sum(-1)).sum()
    return (p[0][0].exp() * to_go).sum() + later


def the_weighed_kl_is_the_reverse_one_whoever_sampled() -> None:
    """Raise AssertionError unless k3_ratio is R over epochs, also where another engine sampled."""
    start, ref = Table(0), Table(1)
    engine = Table(5, near=start, eps=0.3)  # far more than rounding
    for sampler, old in ((start, None), (engine, start)):
        policy = Table(0)
        for _ in range(5):
            got = expected(policy, ref, "loss", "k3_ratio", sampler=sampler, old=old)
            want = truths(policy, ref, sampler)["R"]
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
            policy.step(got, rate=0.5)
        moved = (start.chance() - policy.chance()).detach().abs().sum()
        assert moved > 0.1
