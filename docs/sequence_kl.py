"""Bias and variance of the gradients of the KL of a whole response, for docs/kl_estimators.md.

    python docs/sequence_kl.py

A policy and a reference are tables of logits: four tokens, four steps, all 256 responses. With D_t
the exact KL of the state at token t, a response gives each of its states

    slope * grad D_t + credit_t * grad log policy(token t)

The bias is relative to the norm of the exact gradient, the variance is that of one response,
relative to the squared norm. Baselines are means over all responses.
"""

import itertools

import torch
from torch import Tensor

V, STEPS, SEEDS = 4, 4, 3
RESPONSES = torch.tensor(list(itertools.product(range(V), repeat=STEPS)))  # [N, T]


def states(seed: int) -> Tensor:
    """Return the log-probs of the tokens in the states of each response, [N, T, V]."""
    draw = torch.Generator().manual_seed(seed)
    each = []
    for t in range(STEPS):  # the response n is in the state n // V^(STEPS - t) at token t
        logits = torch.randn(V**t, V, generator=draw, dtype=torch.float64)  # [V^t, V]
        each.append(logits.log_softmax(-1).repeat_interleave(V ** (STEPS - t), 0))
    return torch.stack(each, 1)


def to_go(values: Tensor) -> Tensor:
    """Return the sums over each token and the later ones, [N, T]."""
    return values.flip(-1).cumsum(-1).flip(-1)


def rows(seed: int) -> dict[str, list[float]]:
    """Return bias and variance of each way to charge the KL."""
    policy, reference = states(2 * seed), states(2 * seed + 1)  # [N, T, V]
    token = RESPONSES.unsqueeze(-1)  # [N, T, 1]
    k1 = (policy - reference).gather(-1, token).squeeze(-1)  # [N, T]
    chance = policy.gather(-1, token).sum((1, 2)).exp().unsqueeze(-1)  # [N, 1]
    p = policy.exp()  # [N, T, V]
    exact = (p * (policy - reference)).sum(-1)  # [N, T]
    local = p * (policy - reference - exact.unsqueeze(-1))  # [N, T, V] grad D_t of the logits
    score = torch.zeros_like(p).scatter_(-1, token, 1.0) - p  # [N, T, V] grad log policy

    def mean(values: Tensor) -> Tensor:
        return (chance * values).sum(0, keepdim=True)

    def expected(gradient: Tensor) -> Tensor:
        parts = []  # of the logits at token t, which the responses with the same start share
        for t in range(STEPS):
            at = (chance * gradient[:, t]).view(V**t, -1, V).sum(1)  # [V^t, V]
            parts.append(at.flatten())
        return torch.cat(parts)

    total, later = k1.sum(-1, keepdim=True), to_go(exact) - exact  # [N, 1], [N, T]
    ways = {
        "`full` in the loss": local,
        "k1 in the reward": (total - mean(total)).unsqueeze(-1) * score,
        "the same, `return_to_go`, no baseline": to_go(k1).unsqueeze(-1) * score,
        "the same, minus the mean of totals": (to_go(k1) - mean(total)).unsqueeze(-1) * score,
        "the same, minus the mean at each place": (to_go(k1) - mean(to_go(k1))).unsqueeze(-1)
        * score,
        "`kl=sequence`, no baseline": local + later.unsqueeze(-1) * score,
        "`kl=sequence`": local + (later - mean(later)).unsqueeze(-1) * score,
    }
    truth = expected(to_go(k1).unsqueeze(-1) * score)  # REINFORCE without a baseline
    out = {}
    for name, gradient in ways.items():
        got, square = expected(gradient), (chance * gradient.square().sum((1, 2)).unsqueeze(-1))
        bias = float((got - truth).norm() / truth.norm())
        out[name] = [bias, float((square.sum() - got.square().sum()) / truth.square().sum())]
    return out


if __name__ == "__main__":
    found = [rows(seed) for seed in range(SEEDS)]
    print("| gradient | bias, three tables | variance |\n|---|---|---|")
    for name in found[0]:
        bias, variance = zip(*(each[name] for each in found), strict=True)
        cells = (" / ".join(f"{x:.2f}" for x in values) for values in (bias, variance))
        print(f"| {name} | {' | '.join(cells)} |")
