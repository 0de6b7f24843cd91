"""report.html: what a run did, in one page that opens anywhere; of a running one, what it does.

Built from the files of the folder alone, at any time (`python -m trainer.reports`), torch-free.
Charts of metrics that a run does not log are left out, so SFT and RL runs share it.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from policies.cache import write_text
from trainer.reports import markup, panels, summary
from trainer.reports.chart import escape, standalone
from trainer.reports.formats import duration
from trainer.reports.known_limit import known_limit
from trainer.reports.replies import sections
from trainer.runs.redact import redact
from trainer.runs.run_files import ITERATION, PLACES, Run, dig, load_run, number, read_status

PICTURE = ("Reward", "KL to the reference", "Accuracy on held-out prompts", "Loss")
PHASES = {  # of status.json
    "collect": "sampling replies",
    "score": "scoring with the reference",
    "update": "updating the weights",
    "save": "saving a checkpoint",
    "evaluate": "evaluating on held-out prompts",
    "end": "ending: the final model is saved",
}
TIME = "time/iteration_s"
LEVELS = ("error", "warn", "info")


def write_report(folder: str | Path) -> Path:
    """Write <folder>/report.html from the files there and return its path."""
    while True:
        run = load_run(folder)
        path, state = run.folder / "report.html", run.state
        patience = max(120.0, 5 * (run.last_ten_mean(TIME) or 0.0))
        live = patience if state == "running" else None
        write_text(path, markup.page(run.experiment, _body(run), patience=live))
        # A run that ended meanwhile: whoever writes last must have seen it.
        now = replace(run, status=read_status(run.folder))
        if (state, run.status.get("reason")) == (now.state, now.status.get("reason")):
            return path


def run_svg(folder: str | Path) -> str:
    """Draw a run's reward (or loss) and KL curves as a standalone SVG document."""
    run = load_run(folder)
    drawn = [panels.draw(p, run) for title in PICTURE for p in panels.MAIN if p.title == title]
    shown = [chart for chart in drawn if chart][:2]
    if not shown:
        raise ValueError(f"expected metrics in {run.folder}/metrics.jsonl, got none to draw")
    return standalone(shown, width=360, height=220)


def _body(run: Run) -> list[str]:
    more = panels.figures([*panels.MORE, *panels.others(run)], run)
    config = yaml.safe_dump(redact(run.config), sort_keys=False, width=100) if run.config else ""
    changes = _changes(run)
    wrong, explained = _notes(run)
    curves = markup.charts([*_limit(run), *panels.figures(panels.MAIN, run)], title="Curves")
    replies = sections(run.folder)
    early = (
        '<p class="muted">The first curves come after iteration 1; this page reloads itself.</p>'
    )
    return [
        f"<h1>{escape(run.experiment)}{markup.badge(run.state)}</h1>",
        markup.jumps(_sections(curves, replies, changes)),
        *_notices(run),
        wrong,
        markup.tiles(summary.tiles(run), alarms=_alarms(run)),
        explained,
        markup.facts(_commands(run)),
        curves or early * (run.state == "running"),
        markup.folded("More curves", markup.charts(more)),
        *replies,
        f'<h2 id="environment">Environment</h2>{markup.facts(_environment(run))}',
        f'<h2 id="configuration">Configuration</h2>{changes}' if changes else "",
        markup.folded("Whole configuration", f"<pre>{escape(config)}</pre>" if config else ""),
    ]


def _limit(run: Run) -> Iterator[str]:
    """Draw what was reached below what can be, if the reference was sampled (mode=limit)."""
    if (limit := known_limit(run.folder)) is None:
        return
    from trainer.reports import limits  # here: numpy, for those that have a limit

    if drawn := limits.picture(run, limit):
        yield panels.figure(drawn, limits.caption(run, limit), [limits.ACCURACY, limits.HELD_KL])


def _sections(curves: str, replies: list[str], changes: str) -> list[str]:
    there = {"Curves": curves, "Replies": replies, "Environment": True, "Configuration": changes}
    return [name for name, found in there.items() if found]


def _alarms(run: Run) -> dict[str, str]:
    """Return the errors that a run has said and not taken back, as tiles."""
    errors = [note for note in panels.open_notes(run) if note["level"] == "error"]
    return {str(n.get("title")): f"since iteration {n.get('iteration')}: see above" for n in errors}


def _notices(run: Run) -> Iterator[str]:
    """Say why a run ended, or what to do about one that seems to have."""
    reason, state = run.status.get("reason"), run.state
    if state == "killed":
        reason = "its process is gone and left no reason: killed, or out of memory"
    if reason:  # the files of the ranks that failed lie beside the page
        files = sorted((run.folder / "errors").glob("rank*.txt")) if state == "failed" else []
        links = "".join(f' <a href="errors/{f.name}">errors/{f.name}</a>' for f in files)
        yield f'<p class="{markup.look(state)}"><b>{escape(reason)}</b>{links}</p>'
    if ended := run.status.get("ended"):
        yield f'<p class="muted">ended early: {escape(ended)}</p>'
    if resumed := run.status.get("resumed"):
        yield f'<p class="muted">resumed {escape(resumed)}</p>'
    if state == "running":
        yield _going_on(run)
        yield markup.stale(run.folder)


def _going_on(run: Run) -> str:
    """Say which phase a run is in, since when (the script counts on), and how long it may take."""
    phase, since, share = (run.status.get(f"phase{end}") for end in ("", "_since", "_share"))
    told, since, share = [], number(since), number(share)
    if isinstance(phase, str):
        done = "" if share is None else f": {share:.0%} done"
        told.append(f"{escape(PHASES.get(phase, phase))}{done}")
    if told and since is not None:
        seconds = duration(max(time.time() - since, 0.0))
        told[0] += f', for <span data-since="{since:.0f}">{seconds}</span>'
    total, each = dig(run.config, "trainer", "num_iterations"), run.last_ten_mean(TIME)
    left = (number(total) or 0) - (run.metrics[-1][ITERATION] if run.metrics else 0)
    if each and left > 0:
        told.append(f"{left:g} iterations to go, about {duration(left * each)}")
    return f'<p id="now">{"; ".join(told)}</p>' if told else ""


def _notes(run: Run) -> tuple[str, str]:
    """Draw what the run said about itself (diagnosis.py): what is wrong, what explains.

    What explains is folded once the run is over.
    """
    found = run.status.get("notes")
    notes = [note for note in found if isinstance(note, dict)] if isinstance(found, list) else []
    by_level = dict.fromkeys(LEVELS, "")
    for note in notes:
        over, level = note.get("until"), str(note.get("level"))
        when = f"iteration {note.get('iteration')}" + (f" to {over}" if over is not None else "")
        level = level if level in LEVELS else "info"
        by_level[level] += (
            f'<p class="note {level}"><b>{escape(note.get("title"))}</b> '
            f'<span class="muted">{escape(when)}</span><br>{escape(note.get("text"))}</p>'
        )
    explained = by_level["info"]
    if run.state != "running":
        explained = markup.folded("What the run explained", explained)
    return by_level["error"] + by_level["warn"], explained


def _commands(run: Run) -> dict[str, str]:
    """Return how to repeat a run, to talk to a finished one, to go on with another; HTML."""
    told, python = {"repeat": markup.repeat_command(run)}, {}
    if markup.of_python(run):
        note = "by the Python code that called trainer.train: its reward is a function there"
        told, python = {}, {"repeat": escape(note)}
    if run.state == "finished":
        told |= {"chat": chat} if (chat := summary.chat_command(run.folder.resolve(), run)) else {}
    elif run.state != "running":
        told["go on"] = summary.resume_command(run.folder.resolve())
    return python | {name: markup.command(text, copy=True) for name, text in told.items() if text}


def _environment(run: Run) -> dict[str, str]:
    """Return the folder, the model and the machine; HTML."""
    out = {"folder": f"<code>{escape(run.folder.resolve())}</code>"}
    if run.status.get("model"):
        keys = ("name", "origin", "sha256")
        name, origin, sha = (escape(dig(run.status, "model", key) or "?") for key in keys)
        out["model"] = f"{name} <span class=muted>from {origin}</span>"
        out["sha256"] = f"<code>{sha}</code>"
    machine = run.status.get("machine")
    if isinstance(machine, dict):
        out["machine"] = escape(", ".join(f"{name} {value}" for name, value in machine.items()))
    return out


def _changes(run: Run) -> str:
    """Draw a table of what the run and its experiment changed, "" if nothing is known of it.

    Keys that follow another (`${kl.where}`) are left out: the other one is there.
    """
    theirs, leash = run.defaults.get("experiment"), run.defaults.get("leash")
    if not (run.config and isinstance(theirs, dict) and isinstance(leash, dict)):
        return ""
    known = {**dict(_leaves(leash)), **dict(_leaves(theirs))}
    derived = tuple(f"{key}." for key, value in known.items() if str(value).startswith("${"))
    flat = [dict(_leaves(redact(node))) for node in (leash, theirs, run.config)]
    asked_by_hand, by_experiment = [], []
    for key in dict.fromkeys(key for node in flat for key in node):
        # left out: another algorithm's keys, places, what follows another key
        if key not in flat[2] or key in PLACES or f"{key}.".startswith(derived):
            continue
        values = ["null" if node.get(key, "") is None else str(node.get(key, "")) for node in flat]
        if values[1].startswith("experiment:"):
            values[2] = values[1]  # its folder is above
        cells = [escape(text) for text in (key, *values)]
        if values[2] != values[1]:
            asked_by_hand.append([*cells[:3], f"<b>{cells[3]}</b>"])
        elif values[1] != values[0]:
            by_experiment.append(cells)
    rows = [*asked_by_hand, *by_experiment]
    head = ("key", "leash's default", f"experiment {run.experiment}", "this run")
    return markup.table(head, rows) if rows else ""


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node
