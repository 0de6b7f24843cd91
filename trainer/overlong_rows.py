"""Rows that do not fit, where there are some or where many have to be looked at; see fitting.py."""

import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.progress import track

from envs.mapped_rows import place_for
from envs.tasks.task import Row
from policies.cache import build_once
from trainer.fitting import MANY, Chat, Fit


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


def too_long_of_many(
    fit: Fit, rows: Sequence[Row], unsure: Sequence[int] | None, origin: Any, *, show: bool
) -> dict[int, int]:
    """Return what `Fit.too_long` does, found once per machine.

    `unsure`: the places that bytes do not decide; None for rows of `origin`, whose places they are
    found out with the rest.
    """
    bar = partial(track, description="rows too long?", transient=True, disable=not show)
    tokenizer = fit.renderer.tokenizer
    known = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    known.update(json.dumps([fit.renderer.template, fit.room, fit.prompt]).encode())
    known.update(json.dumps(tokenizer.special_tokens_map, default=str).encode())
    if unsure is not None:
        asked, left = unsure, bar(unsure)
    else:  # the same rows; what the run puts before them, a few of them show
        asked = range(0, len(rows), math.ceil(len(rows) / MANY))
        left = (i for i in bar(range(len(rows))) if not fit.surely(rows[i]))
    for i in asked:
        known.update(json.dumps([i, fit.chats(rows[i])], default=str).encode())
    folder = place_for("overlong", origin, known.hexdigest())
    about = build_once(folder, lambda _: {"long": [*fit.measure(rows, left).items()]})
    return dict(about["about"]["long"])


def shorten(fit: Fit, row: Row) -> Chat | None:
    """Return messages that fit: without the oldest turns, then the beginning of a text.

    System messages stay. None if that is not enough.
    """
    chat = list(row["messages"])
    while len(asked := [i for i, m in enumerate(chat) if m["role"] == "user"]) > 1:
        if fit.size({**row, "messages": chat}) <= fit.room:
            return chat
        chat = [m for m in chat[: asked[1]] if m["role"] == "system"] + chat[asked[1] :]
    if not asked:
        return None
    text = chat[asked[0]]["content"]
    fewest, most = 0, len(text)  # characters to leave out
    while fewest < most:  # the least that fits, up to how tokens merge at the cut
        middle = (fewest + most) // 2
        chat[asked[0]] = {**chat[asked[0]], "content": text[middle:]}
        if fit.size({**row, "messages": chat}) <= fit.room:
            most = middle
        else:
            fewest = middle + 1
    chat[asked[0]] = {**chat[asked[0]], "content": text[fewest:]}
    fits = bool(text[fewest:].strip()) and fit.size({**row, "messages": chat}) <= fit.room
    return chat if fits else None


def keep(
    fit: Fit, rows: Sequence[Row], sizes: dict[int, int], how: str
) -> tuple[Sequence[Row], int]:
    """Return the rows to go on with, and how many of those that are too long were shortened."""
    if not sizes:
        return rows, 0
    shorter = {i: shorten(fit, rows[i]) for i in sizes} if how == "truncate_left" else {}
    other = {i: chat for i, chat in shorter.items() if chat is not None}
    places = array("i", (i for i in range(len(rows)) if i not in sizes or i in other))
    return Kept(rows, places, other), len(other)
