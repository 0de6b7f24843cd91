"""The replies of a report: what its browser (replies.js) shows, and before and after training.

Of the best, the median and the worst reply of an iteration the script shows every token with its KL
(background) and its advantage (underline); texts that were not sampled stay uncoloured.
However long the run, the page stays small: it holds the newest iteration and others evenly spaced,
as many as `MOST` bytes of transcripts.jsonl hold; of an iteration that is larger alone, every so
many groups. The file is walked through once and only what is shown is parsed.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.reports.formats import nats, short
from trainer.runs.run_files import number, parse_line

MOST, MOST_HELD = 2**21, 2**20  # bytes of the file: replies in training, to held-out prompts
PAIRS = 6  # held-out prompts whose replies before and after training are shown
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


def load_replies(path: Path) -> Replies:
    """Read as much of a transcripts.jsonl as a page holds; torn lines are left out."""
    lines: dict[tuple[str, int], list[tuple[int, int]]] = {}  # kind, iteration: starts and sizes
    if not path.is_file():  # a pipe would be waited for
        return Replies()
    with open(path, "rb") as file:
        start = 0
        for line in file:
            if found := _PLACE.search(line):
                key = (found[2].decode(), int(found[1]))
                lines.setdefault(key, []).append((start, len(line)))
            start += len(line)

        def read(key: tuple[str, int], most: int) -> list[Reply]:
            rows, sizes = [], dict[Any, int]()
            for place, size in lines[key]:
                file.seek(place)
                if row := parse_line(file.read(size).decode("utf-8", "replace")):
                    rows.append(row)
                    sizes[_group(row)] = sizes.get(_group(row), 0) + size
            kept = {[*sizes][i] for i in thinned([*sizes.values()], most)}
            return [row for row in rows if _group(row) in kept]

        size = {key: sum(size for _, size in places) for key, places in lines.items()}
        train = sorted(key for key in lines if key[0] == "train")
        held = [key for key in lines if key[0] != "train"]  # in the order of the file
        shown = [train[i] for i in thinned([size[key] for key in train], MOST)]
        later = thinned([size[key] for key in held[1:]], MOST_HELD // 2)
        tried = [*held[:1], *(held[1 + i] for i in later)]
        parts = [f"{len(shown)} of {len(train)} iterations"] * (len(shown) < len(train))
        parts += [f"{len(tried)} of {len(held)} evaluations"] * (len(tried) < len(held))
        return Replies(
            {key[1]: rows for key in shown if (rows := read(key, MOST))},
            [row for key in tried for row in read(key, MOST_HELD // len(tried))],
            f"Here are {' and '.join(parts)}; all are in transcripts.jsonl." if parts else "",
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


def browser_data(found: Replies) -> dict[str, Any]:
    """Return what the script (replies.js) shows."""
    train = [{"iteration": i, "groups": _grouped(rows)} for i, rows in found.train.items()]
    return {"train": train, "held": _grouped(found.held, named=True)}


def _group(row: Reply) -> tuple[int | None, str]:
    group = row.get("group")
    return (group if isinstance(group, int) else None, str(row.get("prompt")))


def _grouped(rows: Iterable[Reply], *, named: bool = False) -> list[dict[str, Any]]:
    """Put replies to a prompt together, whole groups first; `named`: with the time of each."""
    groups: dict[Any, list[Reply]] = {}
    for row in rows:
        groups.setdefault(_group(row)[named:], []).append(row)
    out = []
    for group in sorted(groups.values(), key=len, reverse=True):
        replies = []
        for row in group:
            reply = {key: row[key] for key in _KEYS if row.get(key) not in (None, "", {})}
            reply["response"] = str(row.get("response"))
            if not _has_tokens(row):
                reply.pop("pieces", None)
            if named:
                kind, iteration = row.get("kind"), row.get("iteration")
                reply["name"] = f"iteration {iteration}" if kind == "eval" else f"{kind} training"
            replies.append(reply)
        first = group[0]
        known = {"prompt": str(first.get("prompt")), "answer": first.get("answer")}
        out.append({**known, "messages": _context(first), "replies": replies})
    return out


def _has_tokens(row: Reply) -> bool:
    pieces = row.get("pieces")
    return isinstance(pieces, dict) and isinstance(pieces.get("text"), list)


def _context(row: Reply) -> list[tuple[str, str]]:
    """List role and text of what stood before the prompt: the system message."""
    before = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = row.get("messages")
    before += messages[:-1] if isinstance(messages, list) else []
    return [(str(m.get("role")), str(m.get("content"))) for m in before if isinstance(m, dict)]


def before_and_after(rows: Sequence[Reply]) -> dict[str, Any]:
    """Return replies to some held-out prompts at the `ends` of training that there are."""
    found = {
        kind: {str(row.get("prompt")): row for row in rows if row.get("kind") == kind}
        for kind in ("before", "after")
    }
    ends = [kind for kind, held in found.items() if held]
    first, last = (found[ends[0]], found[ends[-1]]) if ends else ({}, {})
    prompts = [prompt for prompt in first if prompt in last] or [*first]
    return {
        "ends": ends,
        "cards": [
            {
                "prompt": prompt,
                "replies": [
                    {"text": str(row.get("response")), "facts": facts(row, kind)}
                    for kind in ends
                    if (row := found[kind].get(prompt))
                ],
            }
            for prompt in prompts[:PAIRS]
        ],
    }


def facts(row: Reply, name: str = "") -> str:
    """Return the line below a reply."""
    forms = {"reward": ("reward {}", short), "kl": ("log-ratio {} nats", nats)}
    forms["advantage"] = ("advantage {}", short)
    values = [(number(row.get(key)), *form) for key, form in forms.items()]
    texts = [text.format(form(value)) for value, text, form in values if value is not None]
    return " \u00b7 ".join([*[name] * bool(name), *texts, *["cut"] * bool(row.get("truncated"))])
