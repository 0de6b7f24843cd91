"""Rows that do not fit the model: found before the first iteration, dropped, shortened or refused.

A prompt fits below policy.max_prompt_tokens and, with policy.max_new_tokens, the model's positions;
a demonstration or preference fits the positions. A token has at least one byte of text, so that
most rows fit by their size alone; the others are rendered, once per machine where they are many.
What a transform or a later turn adds is not known yet, nor are rows that a task makes up when they
are asked for: the generator checks those.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from envs.tasks.task import Row, assistant
from policies.cache import write_text
from policies.chats.chat_template import Renderer
from policies.scorer import max_positions
from trainer.trainer import Trainer

MANY = 1000  # rendered rows that take seconds: with a bar, and kept
TOGETHER = 256  # rows that are encoded at a time
Chat = list[dict[str, Any]]
Chats = Callable[[Row], list[Chat]]  # what is rendered of a row


@dataclass(frozen=True)
class Fit:
    """Where rows have to fit: `room` tokens of each of `chats(row)`, prompts if `prompt`."""

    renderer: Renderer
    room: int
    chats: Chats
    prompt: bool

    def sizes(self, rows: Sequence[Row]) -> list[int]:
        """Return the tokens of each row, of the longest of its chats."""
        chats = [self.chats(row) for row in rows]
        found = iter(self.renderer.sizes([*chain(*chats)], prompt=self.prompt))
        return [max(islice(found, len(several))) for several in chats]

    def size(self, row: Row) -> int:
        """Return the tokens of a row."""
        return self.sizes([row])[0]

    def too_long(self, rows: Sequence[Row], *, show: bool = False) -> dict[int, int]:
        """Return the size in tokens of each row that does not fit, by its place.

        Of rows that are made when they are asked for none is looked at.
        """
        if not isinstance(rows, (list, tuple)) and not getattr(rows, "listed", False):
            return {}
        if (origin := getattr(rows, "origin", None)) is None:
            unsure = [i for i, row in enumerate(rows) if not self.surely(row)]
            if len(unsure) < MANY:
                return self.measure(rows, unsure)
        else:
            unsure = None
        from trainer.overlong_rows import too_long_of_many

        return too_long_of_many(self, rows, unsure, origin, show=show)

    def measure(self, rows: Sequence[Row], places: Iterable[int]) -> dict[int, int]:
        """Return the size of each row at `places` that does not fit."""
        long, left = {}, iter(places)
        while some := list(islice(left, TOGETHER)):
            try:
                sizes = self.sizes([rows[i] for i in some])
            except ValueError:
                sizes = [self._told(rows, i) for i in some]
            long |= {i: n for i, n in zip(some, sizes, strict=True) if n > self.room}
        return long

    def _told(self, rows: Sequence[Row], i: int) -> int:
        """Return the tokens of a row; an error names it."""
        try:
            return self.size(rows[i])
        except ValueError as error:
            raise ValueError(f"row {place(rows, i)}: {error}") from error

    def surely(self, row: Row) -> bool:
        """Return whether a row fits by its bytes alone."""
        return all(self.renderer.most_tokens(c, prompt=self.prompt) <= self.room
                   for c in self.chats(row))  # fmt: skip


def place(rows: Sequence[Row], i: int) -> int:
    """Return the number of a row in its data set, which error messages name."""
    return rows[i].get("index", i)


def fits(loop: Trainer) -> dict[str, Fit]:
    """Return where the "train" and "eval" rows of a run have to fit; {} if there is no bound."""
    env, renderer = getattr(loop.source, "env", None), loop.policy.renderer
    positions, limits = max_positions(loop.policy.model), loop.generator.limits
    prompts = [n for n in (positions and positions - limits.max_new_tokens,
                           limits.max_prompt_tokens) if n is not None]  # fmt: skip
    out = {}
    for name, source in (("train", loop.source), ("eval", loop.evaluate)):
        if (
            env is None
            or not hasattr(source, "rows")
            or (name == "eval" and not loop.evaluate.plans)
        ):
            continue
        samples = name == "eval" or hasattr(source, "prompts")
        room = min(prompts, default=None) if samples else positions
        if room is not None:
            out[name] = Fit(renderer, room, partial(chats_of, env, samples), samples)
    return out


def chats_of(env: Any, prompt: bool, row: Row) -> list[Chat]:
    """Return what is rendered of a row: its chat, or those of a preference's two replies."""
    chat = env.messages(row)
    if prompt or "rejected" not in row:
        return [chat]
    return [[*chat, assistant(row[name])] for name in ("chosen", "rejected")]


def fit_rows(loop: Trainer, how: str) -> list[str]:
    """Take the rows that do not fit out of a run, or shorten them; return what to say of it.

    `how`: drop, truncate_left, or error, a ValueError.
    """
    said, counts, lines = [], {}, []
    for name, fit in fits(loop).items():
        part = loop.source if name == "train" else loop.evaluate
        sizes = fit.too_long(rows := part.rows, show=loop.runtime.is_main)
        if not sizes:
            continue
        some = ", ".join(f"row {place(rows, i)} ({n} tokens)" for i, n in list(sizes.items())[:3])
        fault = f"{len(sizes)} of {len(rows)} {name} rows exceed {fit.room} tokens: {some}"
        fault += ", ..." if len(sizes) > 3 else ""
        if how == "error":
            raise ValueError(
                f"{fault}; set env.overlong=drop or truncate_left, raise policy.max_prompt_tokens, "
                "or remove the rows"
            )
        from trainer.overlong_rows import keep  # few runs have such rows

        kept, shortened = keep(fit, rows, sizes, how)
        if not len(kept):
            raise ValueError(
                f"{fault}, which leaves none; raise policy.max_prompt_tokens, lower "
                "policy.max_new_tokens, or give shorter rows"
            )
        done = [f"{len(sizes) - shortened} dropped"] if len(sizes) > shortened else []
        done += [f"{shortened} cut on the left"] if shortened else []
        said.append(f"{fault}; {', '.join(done)} (env.overlong={how}, overlong.jsonl)")
        counts[name] = len(sizes)
        lines += [{"split": name, "row": place(rows, i), "tokens": n} for i, n in sizes.items()]
        part.keep(kept) if name == "eval" else setattr(part, "rows", kept)
    if counts:
        loop.runtime.write_status(overlong=counts)
    if lines and loop.runtime.is_main:
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_text(loop.runtime.folder / "overlong.jsonl", text)
    return said
