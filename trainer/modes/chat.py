"""mode=chat: a terminal chat with the policy and the reference, which respond separately.

The policy's tokens are coloured by log pi - log ref at the sampling temperature (greedy: 1), as in
report.html: orange where training made a token likelier, blue where less likely. Messages are read
from stdin.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from policies.random import fold
from policies.scorer import Scorer
from policies.transformers_policy import TransformersPolicy
from trainer.modes.run_weights import reference_name, take_weights
from trainer.trainer import Trainer
from trainer.transcripts import token_texts

QUIT, RESET = "/quit", "/reset"
STEPS = ((2.0, "bold "), (0.5, ""), (0.1, "dim "))  # smallest |log-ratio| in nats of each style
LIKELIER, LESS_LIKELY = "dark_orange", "dodger_blue1"  # as in trainer/pages/style.css


@dataclass
class Talk:
    """The chat of one model: its messages, and their exact ids after the first response."""

    policy: TransformersPolicy
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Start a new chat, with the system prompt if the policy has one."""
        system = self.policy.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []
        self.ids = []

    def answer(self, text: str, stream: Tensor) -> int:
        """Respond to a message; return the number of tokens of the response."""
        policy, new = self.policy, [{"role": "user", "content": text}]
        if self.ids:
            prompt = policy.renderer.extend(self.ids, self.messages, new)
        else:
            every = [*self.messages, *new]
            prompt = policy.renderer.render(every, add_generation_prompt=True).ids
        ids = torch.tensor([prompt], device=policy.device)  # [1, T]
        sampled = policy._draw(ids, torch.ones_like(ids, dtype=torch.bool), stream)
        new_ids = sampled.ids[0].tolist()
        response = policy.tokenizer.decode(new_ids, skip_special_tokens=True)
        self.messages += [*new, {"role": "assistant", "content": response}]
        self.ids = prompt + new_ids
        return len(new_ids)


@torch.no_grad()
def log_ratio(talk: Talk, reference: Scorer, length: int) -> list[float]:
    """Return log pi - log ref of the last `length` tokens of a chat, nats."""
    ids = torch.tensor([talk.ids], device=talk.policy.device)  # [1, T]
    every = torch.ones_like(ids, dtype=torch.bool)
    keep = torch.arange(ids.shape[1], device=ids.device)[None] >= ids.shape[1] - length
    score = {"temperature": talk.policy.temperature or 1.0}
    ours, theirs = (scorer(ids, every, keep, **score) for scorer in (talk.policy.scorer, reference))
    return (ours.log_probs - theirs.log_probs)[0, -length:].tolist()


def style(ratio: float) -> str:
    """Return the colour of a log-ratio in nats; "" where both models agree.

    >>> style(0.05), style(-0.7), style(3.0)
    ('', 'dodger_blue1', 'bold dark_orange')
    """
    hue = LIKELIER if ratio > 0 else LESS_LIKELY
    return next((f"{strength}{hue}" for least, strength in STEPS if abs(ratio) >= least), "")


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Chat until the input ends, /quit or Ctrl-C."""
    console = Console(highlight=False)
    names = [take_weights(loop, settings).label, reference_name(loop, settings)]
    for side, name in zip(("policy", "reference"), names, strict=True):
        console.print(f"{side:<10} {name}", markup=False, soft_wrap=True)
    console.print(f"{RESET} begins a new chat, {QUIT} ends", markup=False)
    scorer: Any = loop.retrieve_kl.scorer  # conf/modes.py sets kl.measure=true, so there is one
    chat(loop.policy, scorer, console, _lines(console), seed=settings["seed"])
    return 0.0


def chat(
    policy: Any, reference: Scorer, console: Console, lines: Iterable[str], *, seed: int = 0
) -> None:
    """Respond to each line with both models; if that fails, print the error."""
    talks = [Talk(policy), Talk(policy.get_new_version(model=reference))]
    for talk in talks:
        talk.reset()
    for turn, line in enumerate(lines):
        text = line.strip()
        if text == QUIT:
            return
        if text == RESET:
            for talk in talks:
                talk.reset()
            console.print("a new chat")
        elif text:
            try:  # the same stream: equal models give equal responses
                _respond(*talks, text, fold(seed, torch.tensor([turn])), console)
            except ValueError as error:
                console.print(str(error), markup=False)


def _respond(ours: Talk, theirs: Talk, text: str, stream: Tensor, console: Console) -> None:
    """Print the responses of both models to a message."""
    length = ours.answer(text, stream)
    ratios = log_ratio(ours, theirs.policy.scorer, length)
    shown = Text().append("policy     ", style="bold")
    texts = token_texts(ours.ids[-length:], ours.policy.tokenizer)
    for part, ratio in zip(texts, ratios, strict=True):
        shown.append(_plain(part), style=style(ratio))
    console.print(shown)
    ratio = f"log-ratio {sum(ratios):+z.2f} nats over {length} tokens"
    console.print(f"{'':11}{ratio}", style="dim")
    theirs.answer(text, stream)
    answer = _plain(theirs.messages[-1]["content"])
    console.print(Text().append("reference  ", style="bold").append(answer))


def _lines(console: Console) -> Iterator[str]:
    """Yield lines of stdin; print a prompt before each at a terminal."""
    while True:
        if sys.stdin.isatty():
            console.print("you        ", end="", style="bold")
        if not (line := sys.stdin.readline()):
            return
        yield line


def _plain(text: str) -> str:
    """Return a text without control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).rstrip("\n")
