"""Write metrics.jsonl and transcripts.jsonl; a `Mirror` (mirror.py) sends them elsewhere too.

`metrics.jsonl` has one line per iteration, under the names of docs/metrics.md; line 0 is the
evaluation before training. Every line is flushed immediately, with sorted keys, so a killed run
loses nothing. A value that is not finite is written as null (JSON has no NaN) and not charted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.observer import Observer
from trainer.runs.redact import hide_values
from trainer.runs.run_files import ITERATION, json_line, number, read_lines, write_lines


class JsonlTracker(Observer):
    """Write metrics.jsonl and transcripts.jsonl into a run folder.

    Raise ValueError if a new run gets a folder that holds metrics; `resume=True` appends to them.
    Only a `Mirror` uses `about`.

    >>> import tempfile
    >>> tracker = JsonlTracker(tempfile.mkdtemp())
    >>> tracker.log({"reward/mean": 0.5}, 1)
    >>> print((tracker.folder / "metrics.jsonl").read_text(), end="")
    {"progress/iteration": 1, "reward/mean": 0.5}
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        resume: bool = False,
        keep_transcripts: bool = True,
        **about: Any,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keep_transcripts = keep_transcripts
        self.metrics = self.folder / "metrics.jsonl"
        self.transcripts = self.folder / "transcripts.jsonl"
        if not resume and self.metrics.exists():
            raise ValueError(
                f"expected a folder without a run, got {self.folder}, which holds metrics.jsonl: "
                f"give another output_dir, or go on with resume={self.folder}"
            )

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        """Drop the lines after `iteration`, which a resumed run writes again."""
        _drop_after(self.metrics, ITERATION, iteration - again)
        # A resume at 0 also drops the responses before training.
        _drop_after(self.transcripts, "iteration", iteration or -1)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Append the metrics of one iteration to the file."""
        _append(self.metrics, [{**metrics, ITERATION: iteration}])

    def responses(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        """Append prompts and responses; keys as in docs/metrics.md."""
        if self.keep_transcripts:
            _append(self.transcripts, lines_of(rows, iteration))


def lines_of(rows: Sequence[Mapping[str, Any]], iteration: int) -> list[dict[str, Any]]:
    """Return responses as lines without secrets; tokens of a text with a secret are left out."""
    lines = []
    for row in rows:
        text = "".join(row.get("pieces", {}).get("text", ()))
        shown = {k: v for k, v in row.items() if k != "pieces" or hide_values(text) == text}
        lines.append(hide_values({**shown, "iteration": iteration}))
    return lines


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json_line(finite(line)) for line in lines)


def _drop_after(path: Path, key: str, last: float) -> None:
    """Drop the lines after `last`, and those without a number there."""
    if path.exists():
        pairs = ((number(line.get(key)), line) for line in read_lines(path))
        write_lines(path, (line for at, line in pairs if at is not None and at <= last))


def finite(item: Any) -> Any:
    """Replace every float that is not finite by None, at any depth; a 0-d tensor is a float."""
    if isinstance(item, dict):
        return {key: finite(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [finite(value) for value in item]
    value = item.item() if hasattr(item, "item") else item
    return number(value) if isinstance(value, float) else value
