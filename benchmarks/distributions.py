"""Peak memory and time of LLMMaskedCategorical, as ratios to the logits and to one log_softmax.

    python -m benchmarks.distributions [--batch 2] [--tokens 64] [--vocabulary 50000]

"memory 1.00" is one copy of the logits; every call uses a new distribution. Nothing is asserted.
"""

import argparse

import torch

from benchmarks.measure import peak_bytes, seconds
from policies import LLMMaskedCategorical

WORKS = {
    "log_prob": lambda dist, tokens: dist.log_prob(tokens),
    "entropy": lambda dist, tokens: dist.entropy(),
    "sample": lambda dist, tokens: dist.sample(),
    "mode": lambda dist, tokens: dist.mode,
    "log_prob, backward": lambda dist, tokens: dist.log_prob(tokens).sum().backward(),
    "entropy, backward": lambda dist, tokens: dist.entropy().sum().backward(),
}


def main() -> None:
    """Print a line per method and kind of mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("batch", 2), ("tokens", 64), ("vocabulary", 50_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    shape = (args.batch, args.tokens, args.vocabulary)
    logits = torch.randn(shape)
    tokens = torch.randint(0, args.vocabulary, shape[:2])
    masks = {"positions": torch.rand(shape[:2]) < 0.9, "tokens": torch.rand(shape) < 0.9}
    floor = seconds(lambda: logits.log_softmax(-1), 3)
    print(f"logits {shape}: {logits.nbytes / 2**20:.0f} MiB, log_softmax {floor * 1e3:.0f} ms")
    for kind, mask in masks.items():
        print(f"a mask of {kind}: {mask.nbytes / logits.nbytes:.2f} of the logits by itself")
        for name, work in WORKS.items():
            x = logits.clone().requires_grad_("backward" in name)

            def once(x=x, mask=mask, work=work):
                x.grad = None
                return work(LLMMaskedCategorical(x, mask), tokens)

            memory, time = peak_bytes(once) / x.nbytes, seconds(once, 3) / floor
            print(f"  {name:19} memory {memory:5.2f}   time {time:5.2f}")


if __name__ == "__main__":
    main()
