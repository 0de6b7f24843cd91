"""Select the responses of a report, for its browser (responses.js) and before and after training.

For the best, the median and the worst response of an iteration the script shows every token with
its KL (background) and its advantage (underline); text that was not sampled is uncoloured. To bound
the page, it has the newest iteration and others evenly spaced, within `MOST` bytes of
transcripts.jsonl. Only selected lines are parsed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.runs.run_files import parse_line

MOST, MOST_EVAL = 2**21, 2**20  # bytes of the file to show, of training and of evaluations
PAIRS = 6  # held-out prompts whose responses before and after training are shown
TranscriptRow = dict[str, Any]  # a row of transcripts.jsonl
Key = tuple[str, int]  # kind and iteration of a row
_SHOWN = ("messages", "reward", "parts", "advantage", "kl", "truncated", "rank", "pieces")
# Quotes within a text are escaped, so no response matches this.
_PLACE = re.compile(rb'"iteration": (\d+), "kind": "(\w+)"')


def select_responses(path: Path) -> dict[str, Any]:
    """Return the template values from a transcripts.jsonl, or {} without responses."""
    sizes: dict[Key, int] = {}
    for key, line in _lines(path):
        sizes[key] = sizes.get(key, 0) + len(line)
    train = sorted(key for key in sizes if key[0] == "train")
    evals = [key for key in sizes if key[0] != "train"]  # in the order of the file
    shown, tried = thin(train, sizes, MOST), [*evals[:1], *thin(evals[1:], sizes, MOST_EVAL)]
    rows: dict[Key, list[TranscriptRow]] = {key: [] for key in (*shown, *tried)}
    for key, line in _lines(path):
        if key in rows and (row := parse_line(line.decode())):
            rows[key].append(row)
    eval_rows = [row for key in tried for row in rows[key]]
    if not rows:
        return {}
    parts = [f"{len(shown)} of {len(train)} iterations"] if len(shown) < len(train) else []
    parts += [f"{len(tried)} of {len(evals)} evaluations"] if len(tried) < len(evals) else []
    data = {
        "train": [{"iteration": key[1], "groups": _grouped(rows[key])} for key in shown],
        "held": _grouped({**row, "group": None, "name": _when(row)} for row in eval_rows),
    }
    kinds = by_kind(eval_rows)
    ends = {kind: kinds[kind] for kind in ("before", "after") if kind in kinds}
    left_out = f"Here are {' and '.join(parts)}; all are in transcripts.jsonl."
    return {
        "responses_data": data,
        "left_out": left_out if parts else "",
        "before_and_after": side_by_side(ends, PAIRS),
    }


def _lines(path: Path) -> Iterator[tuple[Key, bytes]]:
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                if match := _PLACE.search(line):
                    yield (match[2].decode(), int(match[1])), line


def thin(keys: Sequence[Key], sizes: dict[Key, int], most: int) -> list[Key]:
    """Return the last key and every n-th before it within `most` bytes, at least one."""
    step, chosen = 1, list(keys)
    while len(chosen) > 1 and sum(sizes[key] for key in chosen) > most:
        step += 1
        chosen = list(keys[::-step])[::-1]
    return chosen


def _when(row: TranscriptRow) -> str:
    kind = row["kind"]
    return f"iteration {row['iteration']}" if kind == "eval" else f"{kind} training"


def _grouped(rows: Iterable[TranscriptRow]) -> list[dict[str, Any]]:
    """Group responses by prompt, largest groups first."""
    groups: dict[Any, list[TranscriptRow]] = {}
    for row in rows:
        groups.setdefault((row.get("group"), row["prompt"]), []).append(row)
    out = []
    for group in sorted(groups.values(), key=len, reverse=True):
        first, keys = group[0], ("response", "name", *_SHOWN)
        system = [("system", first["system"])] if first.get("system") else []
        responses = [
            {"response": ""} | {k: row[k] for k in keys if row.get(k) not in (None, "", {})}
            for row in group
        ]
        known = {"prompt": first["prompt"], "answer": first.get("answer")}
        out.append({**known, "messages": system, "responses": responses})
    return out


def by_kind(rows: Iterable[TranscriptRow]) -> dict[str, dict[str, TranscriptRow]]:
    """Return the last response per kind and prompt."""
    kinds: dict[str, dict[str, TranscriptRow]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], {})[row["prompt"]] = row
    return kinds


def side_by_side(
    columns: dict[str, dict[str, TranscriptRow]], most: int
) -> list[dict[str, TranscriptRow]]:
    """Return the responses of all columns to each of the first `most` shared prompts."""
    first = next(iter(columns.values()), {})
    prompts = [prompt for prompt in first if all(prompt in column for column in columns.values())]
    return [{name: column[prompt] for name, column in columns.items()} for prompt in prompts[:most]]
