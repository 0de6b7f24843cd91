"""mode=chat: a terminal chat with the policy beside the reference.

Both answer the same message, each in a chat of its own. The policy's tokens are coloured by
log pi - log ref at the sampling temperature (greedy: 1), in the colours of report.html: orange
where training made a token likelier, blue where less likely. Lines come from stdin, or a pipe.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from policies import lora
from policies.random import fold
from policies.sampler import sample
from policies.scorer import Scorer, max_positions
from policies.support import Support, placed
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.modes.run_weights import reference_name, take_weights
from trainer.trainer import Trainer
from trainer.transcripts import token_texts

QUIT, RESET = "/quit", "/reset"
STEPS = ((2.0, "bold "), (0.5, ""), (0.1, "dim "))  # nats from which a colour is that strong
LIKELIER, LESS_LIKELY = "dark_orange", "dodger_blue1"  # as in trainer/reports/style.css


@dataclass
class Talk:
    """One side of the chat: its messages, and their exact ids once it has spoken."""

    policy: TransformersWrapper
    scorer: Scorer
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    support: Support | None = None  # of the last reply, where filters are on

    def reset(self) -> None:
        """Begin again, with the system prompt if there is one."""
        system = self.policy.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []
        self.ids = []

    def answer(self, text: str, stream: Tensor) -> Tensor:
        """Reply to a message; return the log-probs [n] of the reply's tokens.

        ValueError if the model has no room for the chat.
        """
        policy, new = self.policy, [{"role": "user", "content": text}]
        if self.ids:
            prompt = policy.renderer.extend(self.ids, self.messages, new)
        else:
            chat = [*self.messages, *new]
            prompt = policy.renderer.render(chat, add_generation_prompt=True).ids
        most, longest = max_positions(self.scorer.model), len(prompt) + policy.max_new_tokens
        if most is not None and longest > most:
            raise ValueError(f"the chat would have {longest} tokens, the model takes {most}; "
                             f"{RESET} begins a new one")  # fmt: skip
        own = nullcontext()
        if isinstance(self.scorer, lora.AdapterScorer):  # its model is the policy's too
            own = lora.using(self.scorer.model, self.scorer.adapter)
        with self.scorer.precision(), own:
            drawn = sample(
                self.scorer.model,
                torch.tensor([prompt], device=policy.device),
                streams=stream,
                stop=policy.stop,
                max_new_tokens=policy.max_new_tokens,
                temperature=policy.temperature,
                filters=policy.limits.filters,
            )
        self.support = drawn.support
        ids = drawn.ids[0].tolist()
        said = policy.tokenizer.decode(ids, skip_special_tokens=True)
        self.messages += [*new, {"role": "assistant", "content": said}]
        self.ids = prompt + ids
        return drawn.log_probs[0]


@torch.no_grad()
def log_ratio(talk: Talk, reference: Scorer, log_probs: Tensor) -> list[float]:
    """Return log pi - log ref of the tokens of the last reply, nats."""
    ids = torch.tensor([talk.ids], device=log_probs.device)  # [1, T]
    every = torch.ones_like(ids, dtype=torch.bool)
    keep = every.clone()
    keep[:, : -len(log_probs)] = False
    options: dict[str, Any] = {"temperature": talk.policy.temperature or 1.0}
    if talk.support is not None:
        options["support"] = placed(talk.support, ids.shape[1] - len(log_probs))
    theirs = reference(ids, every, keep, **options).log_probs
    return (log_probs - theirs[0, -len(log_probs) :]).tolist()


def style(ratio: float) -> str:
    """Return the colour of a log-ratio in nats; "" where both models are of one mind.

    >>> style(0.05), style(-0.7), style(3.0)
    ('', 'dodger_blue1', 'bold dark_orange')
    """
    hue = LIKELIER if ratio > 0 else LESS_LIKELY
    return next((f"{strength}{hue}" for least, strength in STEPS if abs(ratio) >= least), "")


def in_words(texts: list[str], ratios: list[float]) -> str:
    """Return the sum of the log-ratios and the token that moved most.

    >>> in_words(["Par", "is"], [0.5, -1.5])
    "log-ratio -1.00 nats over 2 tokens, most at 'is' -1.50"
    """
    most, text = max(zip(ratios, texts, strict=True), key=lambda pair: abs(pair[0]))
    out = f"log-ratio {sum(ratios):+z.2f} nats over {len(ratios)} tokens"
    return out if abs(most) < 0.005 else f"{out}, most at {text!r} {most:+.2f}"


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Chat until the input ends, /quit or Ctrl-C."""
    console = Console(highlight=False)
    told = {
        "policy": take_weights(loop, settings).what,
        "reference": reference_name(loop, settings),
    }
    for name, text in told.items():
        console.print(f"{name:<10} {text}", markup=False, soft_wrap=True)
    console.print(f"{RESET} begins again, {QUIT} ends", markup=False)
    assert loop.retrieve_kl.scorer is not None  # conf/preflight_and_modes.py asks for one
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
    log_probs = mine.answer(text, stream)
    texts = token_texts(mine.ids[-len(log_probs) :], mine.policy.tokenizer)
    ratios = log_ratio(mine, theirs.scorer, log_probs)
    said = Text().append("policy     ", style="bold")
    for part, ratio in zip(texts, ratios, strict=True):
        said.append(_plain(part), style=style(ratio))
    console.print(said)
    console.print(Text(f"           {in_words(texts, ratios)}", style="dim"))
    theirs.answer(text, stream)
    answer = _plain(theirs.messages[-1]["content"])
    console.print(Text().append("reference  ", style="bold").append(answer))


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
            return
        if not asks:
            console.print(Text(f"you        {_plain(line)}", style="bold"))
        yield line


def _plain(text: str) -> str:
    """Return a text without what would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text).rstrip("\n")
