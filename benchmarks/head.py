"""What log-prob, entropy and exact KL of tokens cost, against the matrix products that they need.

    python -m benchmarks.head [--tokens 1024] [--vocabulary 151936] [--width 896] [--repeats 3]

The floor is three products with the head (logits, gradient of states, gradient of weights), and
one more with the reference's for the exact KL, in the same precision. Prints seconds (median),
the ratio to the floor, and the peak of the memory allocated; nothing is asserted.
"""

import argparse

import torch

from benchmarks.measure import peak_bytes, seconds
from policies.token_distribution import Head, TokenDistribution


def main() -> None:
    """Measure both precisions, without and with a reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 1024), ("vocabulary", 151936), ("width", 896), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    n, v, h = args.tokens, args.vocabulary, args.width
    keep, ids = torch.ones(1, n, dtype=torch.bool), torch.randint(v, (1, n))
    weight, states = (0.05 * torch.randn(v, h)).requires_grad_(), torch.randn(n, h).requires_grad_()
    other, up = 0.05 * torch.randn(v, h), torch.randn(1, n)

    def scores(dtype: torch.dtype, exact: bool) -> None:
        dist = TokenDistribution(Head(weight, None, None, dtype), states, keep)
        frozen = TokenDistribution(Head(other, None, None, dtype), states.detach(), keep)
        out = dist.scores(ids, entropy=True, reference=frozen if exact else None)
        loss = out.log_probs if out.divergence is None else out.log_probs + out.divergence
        torch.autograd.grad((up * loss).sum(), (weight, states))

    def products(dtype: torch.dtype, exact: bool) -> None:
        a, b = states.detach().to(dtype), weight.detach().to(dtype)
        logits = a @ b.T
        logits @ b, logits.T @ a
        if exact:
            a @ other.to(dtype).T

    print(f"{n} tokens, {v} x {h}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for exact in (False, True):
            ours = seconds(lambda d=dtype, e=exact: scores(d, e), args.repeats)
            floor = seconds(lambda d=dtype, e=exact: products(d, e), args.repeats)
            peak = peak_bytes(lambda d=dtype, e=exact: scores(d, e)) / 2**20
            name = f"{str(dtype).removeprefix('torch.')}{', exact KL' if exact else ''}"
            print(f"{name:20} {ours:6.2f} s  ratio {ours / floor:4.2f}  peak {peak:5.0f} MiB")


if __name__ == "__main__":
    main()
