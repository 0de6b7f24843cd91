"""What the jobs of a sweep say to the same held-out prompts, side by side."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.reports.browser import Reply
from trainer.reports.chart import escape
from trainer.reports.replies import numbers
from trainer.reports.sweep_jobs import Setting
from trainer.runs.run_files import read_lines

PROMPTS, COLUMNS = 8, 6  # at most so many; of more settings both ends and some between
READ = 2**20  # bytes of a file: replies before training stand at its start, those after at its end


def side_by_side(settings: Sequence[Setting], *, same_start: bool) -> Iterator[str]:
    """Draw a row of replies per prompt: before training, then by coefficient."""
    said: dict[str, dict[str, Reply]] = {}
    before: dict[str, Reply] = {}
    for setting in sorted(settings, key=lambda s: s.mean("kl/coeff") or 0.0):
        for row in _rows(setting.jobs[0].run.folder):
            if row.get("kind") == "after":
                said.setdefault(setting.name, {})[str(row.get("prompt"))] = row
            elif row.get("kind") == "before" and same_start:
                before.setdefault(str(row.get("prompt")), row)
    shown = {name: said[name] for name in _spread([*said])}
    first = next(iter(shown.values()), {})
    prompts = [prompt for prompt in first if all(prompt in found for found in shown.values())]
    if prompts:
        columns = {"before training": before, **shown}
        yield '<h2 id="replies">Replies to held-out prompts</h2>'
        yield "".join(_card(prompt, columns) for prompt in prompts[:PROMPTS])


def _card(prompt: str, said: dict[str, dict[str, Reply]]) -> str:
    held = {name: found[prompt] for name, found in said.items() if prompt in found}
    replies = (
        f'<div class="said"><h3>{escape(name)}</h3>'
        f'<div class="reply">{escape(row.get("response"))}</div>'
        f'<div class="facts">{escape(numbers(row, ""))}</div></div>'
        for name, row in held.items()
    )
    answers = [row.get("answer") for row in held.values() if row.get("answer")]
    right = f'<div class="facts">right answer: <b>{escape(answers[0])}</b></div>' if answers else ""
    row = f'<div class="scroll row">{"".join(replies)}</div>'
    return f'<div class="card group"><div class="prompt">{escape(prompt)}</div>{right}{row}</div>'


def _rows(folder: Path) -> list[Reply]:
    return read_lines(folder / "transcripts.jsonl", most=READ)


def _spread(names: Sequence[str]) -> list[str]:
    """Return at most COLUMNS of them: the first, the last, and others evenly between."""
    places = {round(k * (len(names) - 1) / (COLUMNS - 1)) for k in range(COLUMNS)} if names else {}
    return [names[i] for i in sorted(places)]
