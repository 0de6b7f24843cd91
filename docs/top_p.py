"""Train with the whole vocabulary and with top-p, exactly: prints a table of docs/kl_estimators.md.

    PYTHONPATH=. python docs/top_p.py

Random tasks of 36 responses: two of six tokens, and a reward for each response. A policy is a table
of logits. Each update is the expected one, over all responses, so nothing is sampled. What top-p
keeps is found again in every step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policies.sampler import Filters

TASKS, V = 20, 6
STEPS, RATE = 600, 0.1
NEVER = -1e9  # the logit of a removed token; differences of -inf would be NaN
EVERY, TOP_P = Filters(), Filters(top_p=0.9)
Tables = Sequence[Tensor]  # of the first token [N, V], of the second given the first [N, V, V]


@dataclass(frozen=True)
class Way:
    """What samples in training, and which tokens the log-probs in the update are over."""

    title: str
    sampler: Filters
    policy: Filters
    reference: Filters


WAYS = (
    Way("(a) all tokens", EVERY, EVERY, EVERY),
    Way("(b) top-p, log-probs over all tokens", TOP_P, EVERY, EVERY),
    Way("(c) replay, the reference restricted", TOP_P, TOP_P, TOP_P),
    Way("(d) replay, the reference over all tokens", TOP_P, TOP_P, EVERY),
)


def tasks(count: int = TASKS) -> tuple[Tables, Tensor]:
    """Return the logits of the reference and the reward of each response [N, V, V]."""
    draw = torch.Generator().manual_seed(0)
    options = {"generator": draw, "dtype": torch.float64}
    first = torch.randn(count, V, **options)  # [N, V]
    second = torch.randn(count, V, V, **options)  # [N, V, V]
    return (first, second), torch.randn(count, V, V, **options)


def kept(filters: Filters, logits: Tables) -> Tables:
    """Return which tokens the filters keep in each state."""
    return [filters.cut(each.detach()).isfinite() for each in logits]


def responses(logits: Tables, tokens: Tables) -> Tensor:
    """Return log-probs of all responses [N, V, V], renormalised over `tokens`."""
    pairs = zip(logits, tokens, strict=True)
    first, second = (each.where(keep, NEVER).log_softmax(-1) for each, keep in pairs)
    return first.unsqueeze(-1) + second  # [N, V, V]


def mean(log_probs: Tensor, values: Tensor) -> Tensor:
    """Return the mean of values over responses, both [N, V, V], as [N, 1, 1]."""
    return (log_probs.exp() * values).sum((-1, -2), keepdim=True)  # [N, 1, 1]


def train(way: Way, reference: Tables, reward: Tensor, coeff: float) -> tuple[Tables, float]:
    """Return the logits at the end of training, and the KL that the update counts there."""
    logits = [each.clone().requires_grad_() for each in reference]
    optimizer = torch.optim.Adam(logits, lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        sampler = responses(logits, kept(way.sampler, logits)).detach()
        policy = responses(logits, kept(way.policy, logits))
        log_ratio = policy.detach() - responses(reference, kept(way.reference, logits))
        value = reward - coeff * log_ratio
        advantage = value - mean(sampler, value)
        optimizer.zero_grad()
        (-mean(sampler, advantage * policy).sum()).backward()
        optimizer.step()
        schedule.step()
    return [each.detach() for each in logits], float(mean(sampler, log_ratio).mean())


def best(reference: Tensor, reward: Tensor, coeff: float) -> Tensor:
    """Return the log-probs [N, V, V] of the best policy, the reference reweighted."""
    raised = reference + reward / coeff  # [N, V, V]
    return raised - raised.logsumexp((-1, -2), keepdim=True)  # [N, V, V]


class Judge:
    """Measure policies: mean reward, mean KL to the reference, KL efficiency."""

    def __init__(self, reference: Tensor, reward: Tensor) -> None:
        self.reference, self.reward = reference, reward
        optima = [best(reference, reward, coeff) for coeff in np.geomspace(100, 0.01, 400)]
        self.rewards, self.kls = zip(*map(self.measure, optima), strict=True)

    def measure(self, policy: Tensor) -> tuple[float, float]:
        """Return the reward and KL(policy || reference)."""
        kl = mean(policy, policy - self.reference)  # [N, 1, 1]
        return float(mean(policy, self.reward).mean()), float(kl.mean())

    def cell(self, logits: Tables, filters: Filters) -> str:
        """Return "reward, KL, efficiency" of responses that are sampled with these filters."""
        reward, kl = self.measure(responses(logits, kept(filters, logits)))
        efficiency = f"{np.interp(reward, self.rewards, self.kls) / kl:.2f}" if kl > 1e-3 else "-"
        return f"{reward:.2f}, {kl:.2f}, {efficiency}"


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    reference, reward = tasks()
    judge = Judge(responses(reference, kept(EVERY, reference)), reward)
    columns = "`kl.coeff` | training | KL it counts | sampled from all tokens | sampled with top-p"
    yield f"| {columns} |"
    yield "|---|---|---:|---|---|"
    yield _row("", "before training", "", *(judge.cell(reference, f) for f in (EVERY, TOP_P)))
    for coeff in (0.3, 1.0):
        for way in WAYS:
            logits, counted = train(way, reference, reward, coeff)
            cells = (judge.cell(logits, filters) for filters in (EVERY, TOP_P))
            yield _row(f"{coeff:g}", way.title, f"{counted:.2f}", *cells)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in rows():
        print(line)
