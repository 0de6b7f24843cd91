"""report.html: one page about a finished or running run, from the files of its folder. Torch-free.

`python -m trainer.pages` rewrites it at any time. SFT and RL runs share the template: charts of
metrics that a run does not log are left out.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.kl import FRONTIER_FILE
from trainer.pages import panels, summary
from trainer.pages.chart import standalone
from trainer.pages.formats import duration
from trainer.pages.page import PATIENCE, write_page
from trainer.pages.responses import select_responses
from trainer.runs.redact import redact
from trainer.runs.run_files import ITERATION, PLACES, PREFIX, Run, dig, flatten, load_run, number

PICTURE = ("Reward", "KL to the reference", "Accuracy on held-out prompts", "Loss")
TIME = "time/iteration_s"


def write_report(folder: str | Path) -> Path:
    """Write <folder>/report.html from the files there and return its path."""
    run = load_run(folder)
    path, state = run.folder / "report.html", run.state
    patience = max(PATIENCE, 5 * (run.last_ten_mean(TIME) or 0.0)) if state == "running" else None
    write_page(path, "report.html.j2", patience=patience, state=state, **_values(run, state))
    return path


def run_svg(folder: str | Path) -> str:
    """Draw a run's reward (or loss) and KL curves as a standalone SVG document."""
    run = load_run(folder)
    charts = [panels.draw(p, run) for title in PICTURE for p in panels.MAIN if p.title == title]
    shown = [chart for chart in charts if chart][:2]
    if not shown:
        raise ValueError(f"expected metrics in {run.folder}/metrics.jsonl, got none to draw")
    return standalone([shown])


def _values(run: Run, state: str) -> dict[str, Any]:
    """Return the values of the template."""
    responses = select_responses(run.folder / "transcripts.jsonl")
    first, more, always_zero = panels.shown(run)
    return responses | {
        "title": run.experiment,
        "status": run.status,
        "errors": sorted(f.name for f in (run.folder / "errors").glob("rank*.txt")),
        "left": _left(run),
        "rewrite": f"python -m trainer.pages {shlex.quote(str(run.folder.resolve()))}",
        "notes": panels.notes_of(run),
        "tiles": summary.tiles(run),
        "commands": _commands(run, state),
        "curves": [*_frontier(run), *first],
        "more_curves": more,
        "always_zero": ", ".join(always_zero),
        "folder": str(run.folder.resolve()),
        "changes": _changes(run),
        "config": run.config and yaml.safe_dump(redact(run.config), sort_keys=False, width=100),
    }


def _frontier(run: Run) -> Iterator[panels.Figure]:
    """Draw the run below the optimal frontier, if the reference was sampled (mode=frontier)."""
    places = (run.folder, *run.folder.resolve().parents[:3])
    if not any((place / FRONTIER_FILE).is_file() for place in places):
        return
    from trainer.kl.frontier import ACCURACY, EVAL_KL  # few runs have a frontier
    from trainer.pages import frontier_chart
    from trainer.pages.sweep_jobs import find_frontier

    frontier = find_frontier(run.folder)
    if frontier is not None and (picture := frontier_chart.draw_run(run, frontier)):
        yield panels.Figure(picture, frontier_chart.caption(run, frontier), [ACCURACY, EVAL_KL])


def _left(run: Run) -> str:
    """Return the iterations and time left of a run, "" if unknown."""
    total, each = number(dig(run.config, "trainer", "num_iterations")), run.last_ten_mean(TIME)
    left = (total or 0) - (run.metrics[-1][ITERATION] if run.metrics else 0)
    return f"{left} iterations to go, about {duration(left * each)}" if each and left > 0 else ""


def _commands(run: Run, state: str) -> dict[str, str | None]:
    """Return the commands that repeat a run, chat with a finished one, or resume it."""
    folder = run.folder.resolve()
    out: dict[str, str | None] = {"repeat": summary.repeat_command(run)}
    if state == "finished":
        out["chat"] = summary.chat_command(folder, run)
    elif state != "running" and not summary.has_python_reward(run):
        saved = any((folder / "checkpoints").glob("iteration_*"))
        out["go on" if saved else "begin again"] = summary.resume_command(folder)
    return out


def _changes(run: Run) -> list[list[str]]:
    """Return a table of the keys that the run and its experiment changed, [] if unknown.

    Keys that interpolate another (`${kl.where}`) are left out: the other key is listed.
    """
    if not (run.config and run.defaults):
        return []
    nodes = (run.defaults["leash"], run.defaults["experiment"], run.config)
    leash, theirs, ours = (
        {k: v if isinstance(v, str) else json.dumps(v) for k, v in flatten(redact(node))}
        for node in nodes
    )
    follows = tuple(f"{k}." for k, value in (leash | theirs).items() if value.startswith("${"))
    by_hand, by_experiment = [], []
    for key in leash | theirs | ours:
        if key not in ours or key in (*PLACES, "date") or f"{key}.".startswith(follows):
            continue
        first, second, value = leash.get(key, ""), theirs.get(key, ""), ours[key]
        # The run has the folder of a model that an experiment trained.
        if value != second and (key in run.overrides or not second.startswith(PREFIX)):
            by_hand.append([key, first, second, value])
        elif second != first:
            by_experiment.append([key, first, second, second])
    return by_hand + by_experiment
