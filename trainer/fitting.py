"""Rows that do not fit the model: found before the first iteration and left out.

A prompt fits below policy.max_prompt_tokens and, with policy.max_new_tokens, the model's positions;
a demonstration or preference fits the positions. Most rows fit by their bytes alone; the others are
rendered. The generator checks what is not known yet: rows made on demand, and later turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from envs.data import LazyRows
from envs.tasks.task import Row, assistant
from policies.chats.chat_template import Renderer
from policies.scorer import max_positions
from trainer.trainer import Trainer

SAMPLE = 64  # rows, from all over the data: if none of them fits, the run ends


@dataclass(frozen=True)
class Fit:
    """Where rows have to fit: `room` tokens of each of their chats, prompts if `prompt`.

    `limit` names what bounds them, `remedy` what lets them fit.
    """

    renderer: Renderer
    room: int
    env: Any
    prompt: bool
    limit: str
    remedy: str

    def too_long(self, rows: Sequence[Row]) -> dict[int, int]:
        """Return the size in tokens of each row that does not fit, by its place."""
        sizes = {i: self._size(row) for i, row in enumerate(rows)}
        return {i: size for i, size in sizes.items() if size > self.room}

    def _size(self, row: Row) -> int:
        """Return the tokens of a row's longest chat, 0 where its bytes alone say that it fits."""
        size, chats = 0, [self.env.messages(row)]
        if "rejected" in row and not self.prompt:
            chats = [[*chats[0], assistant(row[name])] for name in ("chosen", "rejected")]
        for chat in chats:
            if self.renderer.most_tokens(chat, prompt=self.prompt) > self.room:
                ids = self.renderer.render(chat, add_generation_prompt=self.prompt).ids
                size = max(size, len(ids))
        return size


def fits(loop: Trainer) -> dict[str, Fit]:
    """Return where the "train" and "eval" rows of a run have to fit; {} if there is no bound."""
    env, positions = getattr(loop.source, "env", None), max_positions(loop.policy.model)
    limits, plays = loop.generator.limits, hasattr(loop.source, "prompts")
    own, new = limits.max_prompt_tokens, limits.max_new_tokens
    whole = positions, False, "max_position_embeddings of the model", "take another model"
    start = own, True, "policy.max_prompt_tokens", "raise it"
    if positions is not None and (own is None or positions - new < own):
        start = positions - new, True, f"{whole[2]} - policy.max_new_tokens", "lower the latter"
    rooms = {"train": start if plays else whole}
    if loop.evaluate.plans:
        rooms["eval"] = start
    return {
        name: Fit(loop.policy.renderer, room, env, *about)
        for name, (room, *about) in rooms.items()
        if env is not None and room is not None
    }


def fit_rows(loop: Trainer) -> list[str]:
    """Take the rows that do not fit out of a run; return what to say of it."""
    messages = []
    for name, fit in fits(loop).items():
        part = loop.source if name == "train" else loop.evaluate
        rows = getattr(part, "rows", ())
        listed = isinstance(rows, list | tuple) or getattr(rows, "listed", False)
        if not listed or not rows:
            continue
        some = Random(0).sample(range(len(rows)), min(SAMPLE, len(rows)))
        tried = [rows[i] for i in some]
        sizes = fit.too_long(tried)
        if len(sizes) < len(tried):  # else the others need not be rendered
            tried, sizes = rows, fit.too_long(rows)
        if not sizes:
            continue
        some = [f"row {tried[i].get('index', i)} ({n} tokens)" for i, n in islice(sizes.items(), 3)]
        text = f"{len(sizes)} of {len(tried)} {name} rows exceed {fit.room} tokens ({fit.limit}): "
        text += ", ".join([*some, "..."] if len(sizes) > 3 else some)
        if len(sizes) == len(tried):
            shorter = "or give shorter rows or a shorter policy.system_prompt"
            raise ValueError(f"{text}, which leaves none; {fit.remedy}, {shorter}")
        kept = LazyRows(rows.__getitem__, [i for i in range(len(rows)) if i not in sizes])
        messages.append(f"{text}; dropped")
        part.keep(kept) if name == "eval" else setattr(part, "rows", kept)
    return messages
