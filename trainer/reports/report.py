"""report.html: what a run did, in one page that opens anywhere; of a running one, what it does.

Built from the files of the folder alone, at any time (`python -m trainer.reports`), torch-free.
Charts of metrics that a run does not log are left out, so SFT and RL runs share it.
"""

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.metric_names import ACCURACY, HELD_KL
from trainer.reports import frontier, panels, replies, summary
from trainer.reports.chart import standalone
from trainer.reports.formats import duration
from trainer.reports.page import PATIENCE, write_page
from trainer.reports.sweep_jobs import known_limit
from trainer.runs.redact import redact
from trainer.runs.run_files import ITERATION, PLACES, Run, dig, load_run, number

PICTURE = ("Reward", "KL to the reference", "Accuracy on held-out prompts", "Loss")
PHASES = {  # of status.json
    "collect": "sampling replies",
    "score": "scoring with the reference",
    "update": "updating the weights",
    "save": "saving a checkpoint",
    "evaluate": "evaluating on held-out prompts",
    "end": "ending: the final model is saved",
}
MODEL = ("name", "origin", "sha256")  # of status.json
TIME = "time/iteration_s"
KILLED = "its process is gone and left no reason: killed, or out of memory"


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
    drawn = [panels.draw(p, run) for title in PICTURE for p in panels.MAIN if p.title == title]
    shown = [chart for chart in drawn if chart][:2]
    if not shown:
        raise ValueError(f"expected metrics in {run.folder}/metrics.jsonl, got none to draw")
    return standalone(shown, width=360, height=220)


def _values(run: Run, state: str) -> dict[str, Any]:
    """Return what the template shows."""
    told = replies.load_replies(run.folder / "transcripts.jsonl")
    shown = {}
    if told.train or told.held:
        shown = {"replies_data": replies.browser_data(told), "left_out": told.left_out}
        shown["held_out"] = replies.before_and_after(told.held)
    curves = [*_limit(run), *panels.figures(panels.MAIN, run)]
    changes, errors = _changes(run), run.folder / "errors"
    parts = {"Curves": curves, "Replies": shown, "Environment": True, "Configuration": changes}
    machine, alarms = run.status.get("machine"), panels.open_notes(run)
    return shown | {
        "title": run.experiment,
        "sections": [name for name, there in parts.items() if there],
        "reason": KILLED if state == "killed" else run.status.get("reason"),
        "error_files": sorted(f.name for f in errors.glob("rank*.txt")) * (state == "failed"),
        "ended": run.status.get("ended"),
        "resumed": run.status.get("resumed"),
        "now": _now(run),
        "rewrite": f"python -m trainer.reports {shlex.quote(str(run.folder.resolve()))}",
        "notes": _notes(run),
        "alarms": [
            (note.get("title"), f"since iteration {note.get('iteration')}: see above")
            for note in alarms
            if note["level"] == "error"
        ],
        "tiles": summary.tiles(run),
        "of_python": summary.of_python(run),
        "commands": _commands(run, state),
        "curves": curves,
        "more_curves": panels.figures([*panels.MORE, *panels.others(run)], run),
        "folder": str(run.folder.resolve()),
        "model": {key: dig(run.status, "model", key) or "?" for key in MODEL},
        "machine": machine if isinstance(machine, dict) else {},
        "changes": changes,
        "config": yaml.safe_dump(redact(run.config), sort_keys=False, width=100)
        if run.config
        else "",
    }


def _limit(run: Run) -> Iterator[panels.Figure]:
    """Draw what was reached below what can be, if the reference was sampled (mode=limit)."""
    limit = known_limit(run.folder)
    if limit is not None and (drawn := frontier.picture(run, limit)):
        yield panels.Figure(drawn, frontier.caption(run, limit), [ACCURACY, HELD_KL])


def _now(run: Run) -> dict[str, Any]:
    """Return which phase a run is in, since when (the script counts on), and what is left."""
    phase, since, share = (run.status.get(f"phase{end}") for end in ("", "_since", "_share"))
    since, share = number(since) if isinstance(phase, str) else None, number(share)
    named = PHASES.get(phase, phase) if isinstance(phase, str) else ""
    total, each = dig(run.config, "trainer", "num_iterations"), run.last_ten_mean(TIME)
    left = (number(total) or 0) - (run.metrics[-1][ITERATION] if run.metrics else 0)
    more = f"{left:g} iterations to go, about {duration(left * each)}" if each and left > 0 else ""
    return {
        "phase": f"{named}: {share:.0%} done" if named and share is not None else named,
        "since": since,
        "lasted": duration(max(time.time() - (since or 0.0), 0.0)),
        "left": more,
    }


def _notes(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Return what the run said about itself (diagnosis.py): what is wrong, what explains."""
    out: dict[str, list[dict[str, Any]]] = {"error": [], "warn": [], "info": []}
    for note in panels.notes_of(run):
        over, level = note.get("until"), str(note.get("level"))
        when = f"iteration {note.get('iteration')}" + (f" to {over}" if over is not None else "")
        level = level if level in out else "info"
        texts = {"title": note.get("title"), "text": note.get("text")}
        out[level].append({"level": level, "when": when, **texts})
    return {"wrong": out["error"] + out["warn"], "explained": out["info"]}


def _commands(run: Run, state: str) -> dict[str, str]:
    """Return how to repeat a run, to talk to a finished one, to go on with another."""
    out = {} if summary.of_python(run) else {"repeat": summary.repeat_command(run)}
    if state == "finished":
        out["chat"] = summary.chat_command(run.folder.resolve(), run) or ""
    elif state != "running":
        out["go on"] = summary.resume_command(run.folder.resolve())
    return {name: text for name, text in out.items() if text}


def _changes(run: Run) -> list[list[dict[str, Any]]]:
    """Return a table of what the run and its experiment changed, [] if nothing is known of it.

    Keys that follow another (`${kl.where}`) are left out: the other one is there.
    """
    theirs, leash = run.defaults.get("experiment"), run.defaults.get("leash")
    if not (run.config and isinstance(theirs, dict) and isinstance(leash, dict)):
        return []
    known = {**dict(_leaves(leash)), **dict(_leaves(theirs))}
    derived = tuple(f"{key}." for key, value in known.items() if str(value).startswith("${"))
    flat = [dict(_leaves(redact(node))) for node in (leash, theirs, run.config)]
    by_hand, by_experiment = [], []
    for key in dict.fromkeys(key for node in flat for key in node):
        # left out: another algorithm's keys, places, what follows another key
        if key not in flat[2] or key in PLACES or f"{key}.".startswith(derived):
            continue
        values = ["null" if node.get(key, "") is None else str(node.get(key, "")) for node in flat]
        if values[1].startswith("experiment:"):
            values[2] = values[1]  # its folder is above
        changed = values[2] != values[1]
        row = [{"text": text, "strong": changed} for text in (key, *values)]
        if changed:
            by_hand.append(row)
        elif values[1] != values[0]:
            by_experiment.append(row)
    return by_hand + by_experiment


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node
