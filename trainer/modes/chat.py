"""mode=chat: a terminal chat with the policy beside the reference.

Both answer the same message, each in a chat of its own. The policy's tokens are coloured by
log pi - log ref at the sampling temperature (greedy: 1), in the colours of report.html: orange
where training made a token likelier, blue where less likely. Lines come from stdin, or a pipe.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from policies import lora
from policies.random import fold
from policies.sampler import sample
from policies.scorer import Scorer, max_positions
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.modes import weights
from trainer.trainer import Trainer
from trainer.transcripts import split

QUIT, RESET = "/quit", "/reset"
STEPS = ((2.0, "bold "), (0.5, ""), (0.1, "dim "))  # nats from which a colour is that strong
LIKELIER, LESS_LIKELY = (
    "dark_orange",
    "dodger_blue1",
)  # --more and --less of trainer/reports/style.css


class Reply(NamedTuple):
    """What one side said: its ids, their log-probs [n] and its text."""

    ids: list[int]
    log_probs: Tensor
    text: str


@dataclass
class Talk:
    """One side of the chat: its messages, and their exact ids once it has spoken."""

    policy: TransformersWrapper
    scorer: Scorer
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Begin again, with the system prompt if there is one."""
        system = self.policy.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []
        self.ids = []

    def answer(self, text: str, stream: Tensor) -> Reply:
        """Return the reply to a message; a chat that the model has no room for is a ValueError."""
        renderer, new = self.policy.renderer, [{"role": "user", "content": text}]
        if self.ids:
            prompt = renderer.extend(self.ids, self.messages, new)
        else:
            prompt = renderer.render([*self.messages, *new], add_generation_prompt=True).ids
        most, longest = max_positions(self.scorer.model), len(prompt) + self.policy.max_new_tokens
        if most is not None and longest > most:
            raise ValueError(f"the chat would have {longest} tokens, the model takes {most}; "
                             f"{RESET} begins a new one")  # fmt: skip
        with self.scorer.precision(), _switched(self.scorer):
            drawn = sample(
                self.scorer.model,
                [torch.tensor(prompt, device=self.policy.device)],
                streams=stream,
                stop=self.policy.stop,
                max_new_tokens=self.policy.max_new_tokens,
                temperature=self.policy.temperature,
            )
        ids = drawn.ids[0].tolist()
        said = self.policy.tokenizer.decode(ids, skip_special_tokens=True)
        self.messages += [*new, {"role": "assistant", "content": said}]
        self.ids = prompt + ids
        return Reply(ids, drawn.log_probs[0], said)


def _switched(scorer: Scorer) -> AbstractContextManager[None]:
    """Let a reference by adapter generate with its own one: its model is the policy's too."""
    if isinstance(scorer, lora.AdapterScorer):
        return lora.using(scorer.model, scorer.adapter)
    return nullcontext()


@torch.no_grad()
def log_ratio(talk: Talk, reference: Scorer, log_probs: Tensor) -> list[float]:
    """Return log pi - log ref of the tokens of the last reply, nats."""
    ids = torch.tensor([talk.ids], device=log_probs.device)
    every = torch.ones_like(ids, dtype=torch.bool)
    keep = every.clone()
    keep[:, : -len(log_probs)] = False
    theirs = reference(ids, every, keep, temperature=talk.policy.temperature or 1.0).log_probs
    return (log_probs - theirs[0, -len(log_probs) :]).tolist()


def style(ratio: float) -> str:
    """Return the colour of a log-ratio in nats; "" where both models are of one mind.

    >>> style(0.05), style(-0.7), style(3.0)
    ('', 'dodger_blue1', 'bold dark_orange')
    """
    hue = LIKELIER if ratio > 0 else LESS_LIKELY
    return next((f"{strength}{hue}" for least, strength in STEPS if abs(ratio) >= least), "")


def coloured(texts: Iterable[str], ratios: Iterable[float]) -> Text:
    """Return a reply with each token in its colour."""
    out = Text()
    for text, ratio in zip(texts, ratios, strict=True):
        out.append(_plain(text), style=style(ratio))
    return out


def told(texts: list[str], ratios: list[float]) -> str:
    """Return the same in words: the sum, and the token that moved most.

    >>> told(["Par", "is"], [0.5, -1.5])
    "log-ratio -1.00 nats over 2 tokens, most at 'is' -1.50"
    """
    place = max(range(len(ratios)), key=lambda i: abs(ratios[i]))
    out = f"log-ratio {sum(ratios):+z.2f} nats over {len(ratios)} tokens"
    if abs(ratios[place]) < 0.005:
        return out
    return f"{out}, most at {texts[place]!r} {ratios[place]:+.2f}"


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Chat until the input ends, /quit or Ctrl-C."""
    what = weights.take(loop, settings).what
    console = Console(highlight=False)
    heat = loop.policy.temperature
    how = f"at temperature {heat:g}" if heat else "greedily"
    console.print(f"policy     {what}", markup=False, soft_wrap=True)
    against = weights.reference_name(loop, settings)
    console.print(f"reference  {against}", markup=False, soft_wrap=True)
    console.print(f"both reply {how}; {RESET} begins again, {QUIT} ends", markup=False)
    assert loop.retrieve_kl.scorer is not None  # conf/modes.py asks for one
    scorer = loop.retrieve_kl.scorer
    chat(loop.policy, scorer, console, _lines(console), seed=settings["seed"])
    return 0.0


def chat(
    policy: TransformersWrapper,
    reference: Scorer,
    console: Console,
    lines: Iterable[str],
    *,
    seed: int = 0,
) -> None:
    """Answer each line by both models; a line that cannot be answered says why."""
    both = [Talk(policy, policy.scorer), Talk(policy, reference)]
    for talk in both:
        talk.reset()
    for turn, line in enumerate(lines):
        text = line.strip()
        if text == QUIT:
            return
        if text == RESET:
            for talk in both:
                talk.reset()
            console.print("a new chat")
        elif text.startswith("/"):
            console.print(f"there is no {text.split()[0]}; {RESET} and {QUIT} are", markup=False)
        elif text:
            # One stream: models that agree say the same.
            stream = fold(seed, torch.tensor([turn]))
            try:
                _reply(both, text, stream, console)
            except ValueError as error:
                console.print(str(error), markup=False)


def _reply(both: list[Talk], text: str, stream: Tensor, console: Console) -> None:
    mine, theirs = both
    reply = mine.answer(text, stream)
    texts = split(reply.ids, mine.policy.tokenizer)
    ratios = log_ratio(mine, theirs.scorer, reply.log_probs)
    console.print(Text().append("policy     ", style="bold").append_text(coloured(texts, ratios)))
    console.print(Text(f"           {told(texts, ratios)}", style="dim"))
    said = theirs.answer(text, stream).text
    console.print(Text().append("reference  ", style="bold").append(_plain(said)))


def _lines(console: Console) -> Iterator[str]:
    """Yield lines of stdin, asking for each where a person sits there."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    asks = sys.stdin.isatty()
    while True:
        if asks:
            console.print("you        ", end="", style="bold")
        line = sys.stdin.readline()
        if not line:
            if asks:
                console.print()
            return
        if not asks:
            console.print(Text(f"you        {_plain(line)}", style="bold"))
        yield line


def _plain(text: str) -> str:
    """Return a text without what would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).rstrip("\n")
