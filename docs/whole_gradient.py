"""Variance of the whole gradient, of reward and KL together: prints a table of docs/kl_sequence.md.

    PYTHONPATH=. python docs/whole_gradient.py

The model of docs/sequence_kl.py with a random reward for each response. The policy is the reference
times exp((part * reward + noise) / coeff): with part 1 and no noise it is the optimum. The variance
is that of one response, with exact means as baselines, relative to that of the reward's gradient.
"""

import torch
from torch import Tensor

from docs.sequence_kl import RESPONSES, STEPS, V, states, to_go

SEEDS, COEFF = 5, 0.5
# Part of the reward, and standard deviation of the noise, that of the reward being 1.
PLACES = ((0.1, 0.0), (0.25, 0.0), (0.5, 0.0), (1.0, 0.0), (0.5, 0.5), (1.0, 1.0), (0.0, 0.5))


def raised(reference: Tensor, exponent: Tensor) -> Tensor:
    """Return the log-probs [N, T, V] of the reference times exp(exponent [N])."""
    token = RESPONSES.unsqueeze(-1)  # [N, T, 1]
    whole = reference.gather(-1, token).sum((1, 2)) + exponent  # [N]
    each = []
    for t in range(STEPS):  # the responses with the same first tokens are neighbours
        share = whole.view(V**t, V, -1).logsumexp(-1).log_softmax(-1)  # [V^t, V]
        each.append(share.repeat_interleave(V ** (STEPS - t), 0))
    return torch.stack(each, 1)


def variances(seed: int, part: float, spread: float, coeff: float) -> dict[str, float]:
    """Return the variance of each way to charge the KL."""
    draw, reference = torch.Generator().manual_seed(seed), states(seed)  # [N, T, V]
    reward, noise = torch.randn(2, len(RESPONSES), generator=draw, dtype=torch.float64)  # [N] each
    policy = raised(reference, (part * reward + spread * noise) / coeff)  # [N, T, V]
    token, p = RESPONSES.unsqueeze(-1), policy.exp()  # [N, T, 1], [N, T, V]
    chance = policy.gather(-1, token).sum((1, 2)).exp().unsqueeze(-1)  # [N, 1]
    k1 = (policy - reference).gather(-1, token).squeeze(-1)  # [N, T]
    exact = (p * (policy - reference)).sum(-1)  # [N, T]
    local = p * (policy - reference - exact.unsqueeze(-1))  # [N, T, V] grad D_t of the logits
    score = torch.zeros_like(p).scatter_(-1, token, 1.0) - p  # [N, T, V] grad log policy

    def credited(values: Tensor, baseline: Tensor | None = None) -> Tensor:
        """Return the gradient of values [N, 1] or [N, T], by default minus their means."""
        base = (chance * (values if baseline is None else baseline)).sum(0)  # [1] or [T]
        return (values - base).unsqueeze(-1) * score  # [N, T, V]

    gain, total = credited(-reward.unsqueeze(-1)), k1.sum(-1, keepdim=True)  # [N, T, V], [N, 1]
    ways = {
        "reward alone": gain,
        "`full` in the loss": gain + coeff * local,
        "`kl=sequence`": gain + coeff * (local + credited(to_go(exact) - exact)),
        "k1 in the reward, `return_to_go`": gain + coeff * credited(to_go(k1)),
        "the same, minus the mean of totals": gain + coeff * credited(to_go(k1), total),
        "k1 in the reward": gain + coeff * credited(total),
    }
    out = {}
    for name, gradient in ways.items():
        square = (chance * gradient.square().sum((1, 2)).unsqueeze(-1)).sum()
        means = [(chance * gradient[:, t]).view(V**t, -1, V).sum(1) for t in range(STEPS)]
        out[name] = float(square - sum(mean.square().sum() for mean in means))
    return out


if __name__ == "__main__":
    print(f"| part, noise | {' | '.join(f'{part:g}, {noise:g}' for part, noise in PLACES)} |")
    print("|---|" + "---|" * len(PLACES))
    found = [[variances(seed, *place, COEFF) for seed in range(SEEDS)] for place in PLACES]
    for name in list(found[0][0])[1:]:
        ratios = [[each[name] / each["reward alone"] for each in seeds] for seeds in found]
        print(f"| {name} | {' | '.join(f'{sum(r) / len(r):.2f}' for r in ratios)} |")
