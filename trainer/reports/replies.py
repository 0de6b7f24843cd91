"""The replies of a report: what its browser (replies.js) shows, and before and after training.

Of the best, the median and the worst reply of an iteration the script shows every token with its KL
(background) and its advantage (underline); texts that were not sampled stay uncoloured.
However long the run, the page stays small: it holds the newest iteration and others evenly spaced,
as many as `MOST` bytes of transcripts.jsonl hold. Only what is shown is parsed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.runs.run_files import parse_line

MOST, MOST_HELD = 2**21, 2**20  # bytes of the file: replies in training, to held-out prompts
PAIRS = 6  # held-out prompts whose replies before and after training are shown
Reply = dict[str, Any]  # a row of transcripts.jsonl
Key = tuple[str, int]  # kind and iteration of a row
_SHOWN = ("reward", "parts", "advantage", "kl", "truncated", "rank", "pieces")
# Quotes within a text are escaped, so no reply can look like this.
_PLACE = re.compile(rb'"iteration": (\d+), "kind": "(\w+)"')


def shown_replies(path: Path) -> dict[str, Any]:
    """Return what the template shows of a transcripts.jsonl, {} without replies."""
    sizes: dict[Key, int] = {}
    for key, line in _lines(path):
        sizes[key] = sizes.get(key, 0) + len(line)
    train = sorted(key for key in sizes if key[0] == "train")
    held = [key for key in sizes if key[0] != "train"]  # in the order of the file
    shown, tried = thinned(train, sizes, MOST), [*held[:1], *thinned(held[1:], sizes, MOST_HELD)]
    rows: dict[Key, list[Reply]] = {key: [] for key in (*shown, *tried)}
    for key, line in _lines(path):
        if key in rows and (row := parse_line(line.decode())):
            rows[key].append(row)
    held_rows = [row for key in tried for row in rows[key]]
    if not rows:
        return {}
    parts = [f"{len(shown)} of {len(train)} iterations"] if len(shown) < len(train) else []
    parts += [f"{len(tried)} of {len(held)} evaluations"] if len(tried) < len(held) else []
    data = {
        "train": [{"iteration": key[1], "groups": _grouped(rows[key])} for key in shown],
        "held": _grouped({**row, "group": None, "name": _when(row)} for row in held_rows),
    }
    kinds = by_kind(held_rows)
    ends = {kind: kinds[kind] for kind in ("before", "after") if kind in kinds}
    left_out = f"Here are {' and '.join(parts)}; all are in transcripts.jsonl."
    return {
        "replies_data": data,
        "left_out": left_out if parts else "",
        "before_and_after": side_by_side(ends, PAIRS),
    }


def _lines(path: Path) -> Iterator[tuple[Key, bytes]]:
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                if found := _PLACE.search(line):
                    yield (found[2].decode(), int(found[1])), line


def thinned(keys: Sequence[Key], sizes: dict[Key, int], most: int) -> list[Key]:
    """Return the last and every n-th before it, as many as fit, at least one."""
    step, kept = 1, list(keys)
    while len(kept) > 1 and sum(sizes[key] for key in kept) > most:
        step += 1
        kept = list(keys[::-step])[::-1]
    return kept


def _when(row: Reply) -> str:
    kind = row["kind"]
    return f"iteration {row['iteration']}" if kind == "eval" else f"{kind} training"


def _grouped(rows: Iterable[Reply]) -> list[dict[str, Any]]:
    """Put replies to a prompt together, whole groups first."""
    groups: dict[Any, list[Reply]] = {}
    for row in rows:
        groups.setdefault((row.get("group"), row["prompt"]), []).append(row)
    out = []
    for group in sorted(groups.values(), key=len, reverse=True):
        first, kept = group[0], ("response", "name", *_SHOWN)
        system = [("system", first["system"])] if first.get("system") else []
        replies = [{k: row[k] for k in kept if row.get(k) not in (None, "", {})} for row in group]
        known = {"prompt": first["prompt"], "answer": first.get("answer")}
        out.append({**known, "messages": system, "replies": replies})
    return out


def by_kind(rows: Iterable[Reply]) -> dict[str, dict[str, Reply]]:
    """Return replies by kind and prompt, the last one of each."""
    kinds: dict[str, dict[str, Reply]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], {})[row["prompt"]] = row
    return kinds


def side_by_side(columns: dict[str, dict[str, Reply]], most: int) -> list[dict[str, Reply]]:
    """Return replies by column, to each of the first `most` prompts that all columns have."""
    first = next(iter(columns.values()), {})
    prompts = [prompt for prompt in first if all(prompt in found for found in columns.values())]
    return [{name: found[prompt] for name, found in columns.items()} for prompt in prompts[:most]]
