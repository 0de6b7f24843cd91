"""What a preflight says of real rows: what is learnt of them, how long they are, what they earn."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text
from tensordict import TensorDictBase

from policies.packing import groups
from trainer.metrics import idle_groups
from trainer.modes.preflight.sums import idle_share
from trainer.transcripts import split

MOST = 1000  # rows that are rendered to learn their lengths
LONG = 60  # tokens of a row shown at each end


def marked(batch: TensorDictBase, i: int, tokenizer: Any, *, colour: bool) -> Text:
    """Return row i, the tokens that are learnt in green, without colours in [[ ]]."""
    size = int(batch.get(("masks", "all_attention_mask"))[i].sum())  # rows are right-padded
    ids = batch.get(("tokens", "full"))[i, :size].tolist()
    kept = batch.get("loss_mask")[i, :size].tolist()
    texts = split(ids, tokenizer)
    if size > 2 * LONG:
        middle = f" ... {size - 2 * LONG} tokens ... "
        texts = [*texts[:LONG], middle, *texts[-LONG:]]
        kept = [*kept[:LONG], False, *kept[-LONG:]]
    out = Text()
    for learnt, pairs in groupby(zip(kept, texts, strict=True), key=lambda pair: pair[0]):
        text = "".join(_visible(part) for _, part in pairs)
        if learnt:
            out.append(text if colour else f"[[{text}]]", style="green")
        else:
            out.append(text, style="dim")
    return out


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else "\\n" if c == "\n" else " " for c in text)


def learnt(batch: TensorDictBase, stop_ids: frozenset[int]) -> tuple[int, int]:
    """Return how many rows learn nothing, and how many end their learnt tokens with a stop id."""
    mask, ids = batch.get("loss_mask"), batch.get(("tokens", "full"))
    places = mask.int().cumsum(-1).argmax(-1)  # [B] the last kept token
    last = ids.gather(-1, places.unsqueeze(-1)).squeeze(-1).tolist()
    some = mask.any(-1).tolist()
    ended = sum(any_ and token in stop_ids for any_, token in zip(some, last, strict=True))
    return some.count(False), ended


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the rows that were rendered, sorted."""

    values: Sequence[int]
    rows: int  # of the split, also those not rendered

    def at(self, share: float) -> int:
        """Return a quantile."""
        return self.values[round(share * (len(self.values) - 1))]

    def above(self, limit: int | None) -> int:
        """Return how many are longer than a limit."""
        return 0 if limit is None else sum(value > limit for value in self.values)

    def __str__(self) -> str:
        few = "" if len(self.values) == self.rows else f" ({len(self.values)} of them rendered)"
        return (
            f"{self.rows} rows{few}, tokens: least {self.at(0)}, median {self.at(0.5)}, "
            f"95 % up to {self.at(0.95)}, most {self.at(1)}"
        )


def lengths(rows: Sequence[dict[str, Any]], env: Any, renderer: Any, *, prompts: bool) -> Lengths:
    """Return how long rows are, spread evenly over the split: as prompts, else as whole chats."""
    step = max(-(-len(rows) // MOST), 1)
    found = [
        len(renderer.render(env.messages(rows[i]), add_generation_prompt=prompts).ids)
        for i in range(0, len(rows), step)
    ]
    return Lengths(sorted(found), len(rows))


@dataclass
class Timed:
    """Seconds that a task's rewards took, and for how many replies."""

    seconds: float = 0.0
    replies: int = 0


@contextmanager
def timed_rewards(task: Any) -> Iterator[Timed]:
    """Time what a task rewards inside the block: real rows and real replies."""
    took, rewards = Timed(), task.rewards

    def measured(rows: Sequence[Any], replies: Sequence[Any]) -> Any:
        start = time.perf_counter()
        out = rewards(rows, replies)
        took.seconds += time.perf_counter() - start
        took.replies += len(replies)
        return out

    task.rewards = measured  # on this object only
    try:
        yield took
    finally:
        del task.rewards


@dataclass(frozen=True)
class Groups:
    """The groups of a batch: which share earned one reward all over, and how often each was right.

    `rates`: of each prompt the share of its replies that the task counts as right.
    """

    idle: float
    rates: list[float]

    def predicted(self, size: int) -> float:
        """Return the share of idle groups to expect with groups of another size."""
        return idle_share(self.rates, size)


def judged(batch: TensorDictBase) -> Groups:
    """Return what a batch of rollouts says about its groups."""
    right = batch.get("success").tolist()
    rates = [sum(right[i] for i in rows) / len(rows) for rows in groups(batch.get("group_id"))]
    return Groups(float(idle_groups(batch).float().mean()), rates)
