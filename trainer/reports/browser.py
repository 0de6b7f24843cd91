"""Which replies of transcripts.jsonl a page holds, whole iterations, as data for its script.

However long the run, the page stays small: the newest iteration and others evenly spaced, as many
as `MOST` bytes of the file hold; of an iteration that is larger alone, every so many groups. The
file is walked through once and only what is shown is parsed.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.reports.chart import escape
from trainer.runs.run_files import parse_line

MOST, MOST_HELD = 2**21, 2**20  # bytes of the file: replies in training, to held-out prompts
Reply = dict[str, Any]  # a row of transcripts.jsonl
_KEYS = ("response", "reward", "parts", "advantage", "kl", "truncated", "rank", "pieces")
# Quotes within a text are escaped, so no reply can look like this.
_PLACE = re.compile(rb'"iteration": (\d+), "kind": "(\w+)"')


@dataclass(frozen=True)
class Replies:
    """Replies by iteration, those to held-out prompts by evaluation, and what was left out."""

    train: dict[int, list[Reply]] = field(default_factory=dict)
    held: list[Reply] = field(default_factory=list)
    left_out: str = ""

    @property
    def latest(self) -> int:
        return max(self.train, default=0)


def load_replies(path: Path) -> Replies:
    """Read as much of a transcripts.jsonl as a page holds; torn lines are left out."""
    places: dict[tuple[bool, str, int], list[tuple[int, int]]] = {}  # start and size of lines
    if not path.is_file():  # a pipe would be waited for
        return Replies()
    with open(path, "rb") as file:
        start = 0
        for line in file:
            if found := _PLACE.search(line):
                kind = found[2].decode()
                key = (kind == "train", kind, int(found[1]))
                places.setdefault(key, []).append((start, len(line)))
            start += len(line)

        def read(key: tuple[bool, str, int], most: int) -> list[Reply]:
            rows = []
            for place, size in places[key]:
                file.seek(place)
                row = parse_line(file.read(size).decode("utf-8", "replace"))
                sound = row and all(
                    isinstance(row.get(k), str | None) for k in ("prompt", "response")
                )
                rows += [(size, row)] if row and sound else []
            groups: dict[Any, list[tuple[int, Reply]]] = {}
            for size, row in rows:
                groups.setdefault(_group(row), []).append((size, row))
            sizes = [sum(size for size, _ in group) for group in groups.values()]
            kept = {list(groups)[i] for i in thinned(sizes, most)}
            return [row for _, row in rows if _group(row) in kept]

        train = sorted(key for key in places if key[0])
        held = sorted((key for key in places if not key[0]), key=lambda key: places[key])
        size = {key: sum(size for _, size in lines) for key, lines in places.items()}
        shown = [train[i] for i in thinned([size[key] for key in train], MOST)]
        later = [size[key] for key in held[1:]]
        tried = [*held[:1], *(held[1 + i] for i in thinned(later, MOST_HELD // 2))]
        each = MOST_HELD // max(len(tried), 1)
        out = {key[2]: read(key, MOST) for key in shown}
        return Replies(
            {iteration: rows for iteration, rows in out.items() if rows},
            [row for key in tried for row in read(key, each)],
            _left_out(len(shown), len(train), len(tried), len(held)),
        )


def thinned(sizes: Sequence[int], most: int) -> list[int]:
    """Return which items to keep: the last and every n-th before it, as many as fit, at least one.

    >>> thinned([4, 4, 4, 4, 4], 12), thinned([1, 1], 5), thinned([9], 5)
    ([0, 2, 4], [0, 1], [0])
    """
    step, kept = 1, list(range(len(sizes)))
    while len(kept) > 1 and sum(sizes[i] for i in kept) > most:
        step += 1
        kept = list(range(len(sizes) - 1, -1, -step))[::-1]
    return kept


def as_data(found: Replies) -> str:
    """Return the replies as JSON that a <script> may hold: no text of a model can close it."""
    train = [
        {"iteration": iteration, "groups": _grouped(rows)}
        for iteration, rows in found.train.items()
    ]
    held = _grouped(found.held, named=True)
    text = json.dumps({"train": train, "held": held}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def draw(found: Replies, plain: str, legend: str) -> str:
    """Draw the browser of replies around what a page without its script shows."""
    if not found.train and not found.held:
        return ""
    note = f'<p class="muted">{escape(found.left_out)}</p>' if found.left_out else ""
    data = f'<script type="application/json" id="replies-data">{as_data(found)}</script>'
    return f'{data}<div id="browser">{note}{legend}<div class="plain">{plain}</div></div>'


def _group(row: Reply) -> Any:
    group = row.get("group")
    return (group if isinstance(group, int) else None, str(row.get("prompt")))


def _grouped(rows: Iterable[Reply], *, named: bool = False) -> list[dict[str, Any]]:
    """Put replies to a prompt together, whole groups first; `named`: say when each was given."""
    groups: dict[Any, list[Reply]] = {}
    for row in rows:
        groups.setdefault(_group(row)[named:], []).append(row)
    out = []
    for group in sorted(groups.values(), key=len, reverse=True):
        first, said = group[0], []
        for row in group:
            name = {"name": _when(row)} if named else {}
            said.append({**{k: row[k] for k in _KEYS if row.get(k) not in (None, "", {})}, **name})
            said[-1]["response"] = str(row.get("response"))
            if not has_tokens(row):
                said[-1].pop("pieces", None)
        known = {"prompt": str(first.get("prompt")), "answer": first.get("answer")}
        out.append({**known, "messages": context(first), "replies": said})
    return out


def has_tokens(row: Reply) -> bool:
    """Say whether a reply is kept token by token."""
    pieces = row.get("pieces")
    return isinstance(pieces, dict) and isinstance(pieces.get("text"), list)


def context(row: Reply) -> list[tuple[str, str]]:
    """List role and text of what stood before the prompt: the system message."""
    before = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = row.get("messages")
    before += messages[:-1] if isinstance(messages, list) else []
    named = [message for message in before if isinstance(message, dict)]
    return [(str(m.get("role")), str(m.get("content"))) for m in named]


def _when(row: Reply) -> str:
    kind = row.get("kind")
    return f"iteration {row.get('iteration')}" if kind == "eval" else f"{kind} training"


def _left_out(shown: int, train: int, tried: int, held: int) -> str:
    """Say what the page does not hold."""
    parts = [f"{shown} of {train} iterations"] * (shown < train)
    parts += [f"{tried} of {held} evaluations"] * (tried < held)
    return f"Here are {' and '.join(parts)}; all are in transcripts.jsonl." if parts else ""
