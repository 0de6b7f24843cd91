"""Compare the time of an iteration on the embedded model with a plain implementation.

    python -m benchmarks.iteration [--prompts 8] [--group 8] [--tokens 16] [--repeats 3]

"plain": every sequence repeats its prompt; transformers' `generate`, and forwards over padded rows
with logits for every token. "leash": the sampler and the scorer as the trainer uses them. Prints
median seconds and the ratio plain / leash; nothing is asserted.
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks.measure import seconds
from policies import load_policy
from policies.padding import pad, pad_mask, unpad
from policies.random import fold
from policies.sampler import Stop, sample

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COUNTRIES = ["France", "Japan", "Germany", "Italy", "Spain", "Egypt", "Kenya", "Peru", "Chile"]


def main() -> None:
    """Measure rollout, reference pass and update of both implementations."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("prompts", 8), ("group", 8), ("tokens", 16), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    policy = load_policy(MODEL, max_new_tokens=args.tokens)
    model, render = policy.model, policy.renderer.render
    chats = [[{"role": "user", "content": f"What is the capital of {c}?"}] for c in COUNTRIES]
    ids = [render(c, add_generation_prompt=True).ids for c in chats[: args.prompts]]
    prompts = [torch.tensor(i) for i in ids for _ in range(args.group)]
    streams = fold(0, torch.arange(len(prompts)))
    stop = Stop(policy.stop_ids)
    left = pad(prompts, side="left"), pad_mask([len(p) for p in prompts], side="left")

    def roll():
        return sample(model, *left, streams=streams, stop=stop, max_new_tokens=args.tokens)

    def roll_plain():
        inputs = {"input_ids": left[0], "attention_mask": left[1].long()}
        return model.generate(**inputs, max_new_tokens=args.tokens, do_sample=True, top_k=0)

    sampled = roll()
    replies = unpad(sampled.ids, sampled.mask)
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    tokens, mask = pad(rows), pad_mask([len(r) for r in rows])
    starts = torch.tensor([len(p) for p in prompts])[:, None]
    keep = mask & (torch.arange(tokens.shape[1]) >= starts)
    group = torch.arange(args.prompts).repeat_interleave(args.group)

    def score():
        return policy.scorer(tokens, mask, keep, group_id=group).log_probs

    def score_plain():
        logits = model(input_ids=tokens, attention_mask=mask.long()).logits[:, :-1]
        picked = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return picked * keep[:, 1:]

    def update(scorer: Callable[[], torch.Tensor]) -> None:
        scorer().sum().backward()
        model.zero_grad()

    works = {
        "rollout": (roll_plain, roll),
        "reference": (torch.no_grad()(score_plain), torch.no_grad()(score)),
        "update": (lambda: update(score_plain), lambda: update(score)),
    }
    print(f"{MODEL}: {args.prompts} x {args.group}, {torch.get_num_threads()} threads")
    for name, (plain, ours) in works.items():
        a, b = seconds(plain, args.repeats), seconds(ours, args.repeats)
        print(f"{name:10} plain {a:6.2f} s   leash {b:6.2f} s   ratio {a / b:4.2f}")


if __name__ == "__main__":
    main()
