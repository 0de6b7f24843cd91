"""Rows that do not fit the model: found before the first iteration and left out.

A prompt fits below policy.max_prompt_tokens and, with policy.max_new_tokens, the model's positions;
a demonstration or preference fits the positions. A token has at least one byte of text, so that
most rows fit by their size alone; the others are rendered. What a transform or a later turn adds is
not known yet, nor are rows that a task makes up when they are asked for: the generator checks
those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from envs.tasks.task import Row, assistant
from policies.chats.chat_template import Renderer
from policies.scorer import max_positions
from trainer.trainer import Trainer


class Kept(Sequence[Row]):
    """Those of `rows` that are at `places`."""

    def __init__(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        self.rows, self.places = rows, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Kept(self.rows, self.places[index])
        return self.rows[self.places[index]]


@dataclass(frozen=True)
class Fit:
    """Where rows have to fit: `room` tokens of each of their chats, prompts if `prompt`."""

    renderer: Renderer
    room: int
    env: Any
    prompt: bool

    def too_long(self, rows: Sequence[Row]) -> dict[int, int]:
        """Return the size in tokens of each row that does not fit, by its place."""
        sizes = {i: self._size(row) for i, row in enumerate(rows)}
        return {i: size for i, size in sizes.items() if size > self.room}

    def _size(self, row: Row) -> int:
        """Return the tokens of a row's longest chat, 0 where its bytes alone say that it fits."""
        size = 0
        for chat in chats_of(self.env, self.prompt, row):
            if self.renderer.most_tokens(chat, prompt=self.prompt) > self.room:
                ids = self.renderer.render(chat, add_generation_prompt=self.prompt).ids
                size = max(size, len(ids))
        return size


def chats_of(env: Any, prompt: bool, row: Row) -> list[list[dict[str, Any]]]:
    """Return what is rendered of a row: its chat, or those of a preference's two replies."""
    chat = env.messages(row)
    if prompt or "rejected" not in row:
        return [chat]
    return [[*chat, assistant(row[name])] for name in ("chosen", "rejected")]


def fits(loop: Trainer) -> dict[str, Fit]:
    """Return where the "train" and "eval" rows of a run have to fit; {} if there is no bound."""
    env, positions = getattr(loop.source, "env", None), max_positions(loop.policy.model)
    limits = loop.generator.limits
    prompts = [positions and positions - limits.max_new_tokens, limits.max_prompt_tokens]
    prompt = min((n for n in prompts if n is not None), default=None)
    plays = hasattr(loop.source, "prompts")
    rooms = {"train": prompt if plays else positions}
    rooms |= {"eval": prompt} if loop.evaluate.plans else {}
    return {
        name: Fit(
            loop.policy.renderer, room, env, name == "eval" or hasattr(loop.source, "prompts")
        )
        for name, room in rooms.items()
        if env is not None and room is not None
    }


def fit_rows(loop: Trainer) -> list[str]:
    """Take the rows that do not fit out of a run; return what to say of it."""
    messages = []
    for name, fit in fits(loop).items():
        part = loop.source if name == "train" else loop.evaluate
        rows = getattr(part, "rows", ())
        listed = isinstance(rows, list | tuple) or getattr(rows, "listed", False)
        if not listed or not (sizes := fit.too_long(rows)):
            continue
        some = [f"row {rows[i].get('index', i)} ({n} tokens)" for i, n in islice(sizes.items(), 3)]
        text = f"{len(sizes)} of {len(rows)} {name} rows exceed {fit.room} tokens: "
        text += ", ".join([*some, "..."] if len(sizes) > 3 else some)
        kept = Kept(rows, [i for i in range(len(rows)) if i not in sizes])
        if not kept:
            raise ValueError(
                f"{text}, which leaves none; raise policy.max_prompt_tokens, lower "
                "policy.max_new_tokens, or give shorter rows"
            )
        messages.append(f"{text}; dropped")
        part.keep(kept) if name == "eval" else setattr(part, "rows", kept)
    return messages
