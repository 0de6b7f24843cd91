"""Rows that do not fit the model: found before the first iteration, dropped, shortened or refused.

A prompt fits below policy.max_prompt_tokens and, with policy.max_new_tokens, the model's positions;
a demonstration or preference fits the positions. A token has at least one byte of text, so that
most rows fit by their size alone; the others are rendered, once per machine where they are many.
What a transform or a later turn adds is not known yet, nor are rows that a task makes up when they
are asked for: the generator checks those.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.progress import track

from envs.tasks.task import Row, assistant
from policies.cache import build_once, cache_dir
from policies.chats.chat_template import Renderer
from policies.scorer import max_positions
from trainer.trainer import Trainer

MANY = 1000  # rendered rows that take seconds: with a bar, and kept
Chat = list[dict[str, Any]]
Chats = Callable[[Row], list[Chat]]  # what is rendered of a row


class Kept(Sequence[Row]):
    """Those of `rows` that are at `places`, some with other messages."""

    def __init__(self, rows: Sequence[Row], places: Sequence[int], other: Mapping[int, Chat]):
        self.rows, self.places, self.other = rows, places, other

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Kept(self.rows, self.places[index], self.other)
        row, other = self.rows[self.places[index]], self.other.get(self.places[index])
        return row if other is None else {**row, "messages": other}


@dataclass(frozen=True)
class Fit:
    """Where rows have to fit: `room` tokens of each of `chats(row)`, prompts if `prompt`."""

    renderer: Renderer
    room: int
    chats: Chats
    prompt: bool

    def size(self, row: Row) -> int:
        """Return the tokens of a row, of the longest of its chats."""
        rendered = partial(self.renderer.render, add_generation_prompt=self.prompt)
        return max(len(rendered(chat).ids) for chat in self.chats(row))

    def too_long(self, rows: Sequence[Row], *, show: bool = False) -> dict[int, int]:
        """Return the size in tokens of each row that does not fit, by its place.

        Of rows that are made when they are asked for none is looked at.
        """
        if not isinstance(rows, (list, tuple)) and not getattr(rows, "listed", False):
            return {}
        unsure = [i for i, row in enumerate(rows) if not self._surely(row)]
        if len(unsure) < MANY:
            return self._measure(rows, unsure)
        known = hashlib.sha256(self.renderer.tokenizer.backend_tokenizer.to_str().encode())
        known.update(json.dumps([self.renderer.template, self.room, self.prompt]).encode())
        known.update(json.dumps(self.renderer.tokenizer.special_tokens_map, default=str).encode())
        for i in unsure:
            known.update(json.dumps([i, self.chats(rows[i])], default=str).encode())
        bar = partial(track, description="rows too long?", transient=True, disable=not show)
        folder = cache_dir() / "overlong" / known.hexdigest()[:32]
        about = build_once(folder, lambda _: {"long": [*self._measure(rows, bar(unsure)).items()]})
        return dict(about["about"]["long"])

    def _measure(self, rows: Sequence[Row], places: Iterable[int]) -> dict[int, int]:
        sizes = {}
        for i in places:
            try:
                size = self.size(rows[i])
            except ValueError as error:
                raise ValueError(f"row {place(rows, i)}: {error}") from error
            if size > self.room:
                sizes[i] = size
        return sizes

    def _surely(self, row: Row) -> bool:
        """Return whether a row fits by its bytes alone."""
        return all(self.renderer.most_tokens(c, prompt=self.prompt) <= self.room
                   for c in self.chats(row))  # fmt: skip

    def shorten(self, row: Row) -> Chat | None:
        """Return messages that fit: without the oldest turns, then the beginning of a text.

        System messages stay. None if that is not enough.
        """
        chat = list(row["messages"])
        while len(asked := [i for i, m in enumerate(chat) if m["role"] == "user"]) > 1:
            if self.size({**row, "messages": chat}) <= self.room:
                return chat
            chat = [m for m in chat[: asked[1]] if m["role"] == "system"] + chat[asked[1] :]
        if not asked:
            return None
        text = chat[asked[0]]["content"]
        fewest, most = 0, len(text)  # characters to leave out
        while fewest < most:  # the least that fits, up to how tokens merge at the cut
            middle = (fewest + most) // 2
            chat[asked[0]] = {**chat[asked[0]], "content": text[middle:]}
            if self.size({**row, "messages": chat}) <= self.room:
                most = middle
            else:
                fewest = middle + 1
        chat[asked[0]] = {**chat[asked[0]], "content": text[fewest:]}
        fits = bool(text[fewest:].strip()) and self.size({**row, "messages": chat}) <= self.room
        return chat if fits else None

    def apply(
        self, rows: Sequence[Row], sizes: dict[int, int], how: str
    ) -> tuple[Sequence[Row], int]:
        """Return the rows to go on with, and how many of those that are too long were shortened."""
        if not sizes:
            return rows, 0
        shorter = {i: self.shorten(rows[i]) for i in sizes} if how == "truncate_left" else {}
        other = {i: chat for i, chat in shorter.items() if chat is not None}
        places = [i for i in range(len(rows)) if i not in sizes or i in other]
        return Kept(rows, places, other), len(other)


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
        kept, shortened = fit.apply(rows, sizes, how)
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
        (loop.runtime.folder / "overlong.jsonl").write_text(text)
    return said
