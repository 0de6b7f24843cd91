"""What a report says beside its curves: the main numbers, how to repeat them, what was changed."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.reports import page, svg
from trainer.reports.text import duration
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, dig, number

PLACES = ("output_dir", "resume")  # they name a place, not a run
LEVELS = {"error": 0, "warn": 1, "info": 2}
GAINS = {  # of those before the accuracies only the first that a run has
    "reward/raw_mean": "task reward",
    "reward/mean": "reward",
    "loss/total": "loss",
    "eval/sampled_accuracy": "sampled accuracy",
    "eval/greedy_accuracy": "greedy accuracy",
}
_LEFT_OUT = (*(f"{key}=" for key in PLACES), "hydra.")


def tiles(run: Run) -> dict[str, str]:
    """Return the few numbers that tell how a run went: first and last."""
    out = {}
    for metric, ends in _gains(run).items():
        count = 0 if metric.startswith("eval/") else len(run.last_ten(metric))
        name = GAINS[metric] + (f", first \u2192 last {count}" if count > 1 else "")
        out[name] = " \u2192 ".join(map(svg.short, ends))
    kl = run.last_ten_mean("kl/ref_sequence")
    if kl is not None:
        out["KL to the reference, nats per reply"] = svg.short(kl)
    seconds = number(run.status.get("seconds"))
    if run.metrics:
        total = number(dig(run.config, "trainer", "num_iterations"))
        of = f" of {total:g}" if total else ""
        out["iterations"] = f"{run.metrics[-1]['progress/iteration']:g}{of}"
    if seconds is not None:
        out["time"] = duration(seconds)
    return out


def summary(run: Run) -> str:
    """Return in one line what a run came to: the numbers of its tiles, for a terminal."""
    gains = {metric: " -> ".join(map(svg.short, ends)) for metric, ends in _gains(run).items()}
    found = [metric for metric in gains if metric.startswith("eval/")]
    told = [
        f"accuracy {gains[metric]} (held out, {GAINS[metric].partition(' ')[0]})"
        for metric in found[:1]
    ]
    told += [f"{GAINS[metric]} {value}" for metric, value in gains.items() if metric not in found]
    kl, seconds = run.last_ten_mean("kl/ref_sequence"), number(run.status.get("seconds"))
    count = len(run.last_ten("kl/ref_sequence"))
    mean = f" (last {count})" if count > 1 else ""
    told += [] if kl is None else [f"KL {svg.short(kl)} nats per reply{mean}"]
    told += [] if seconds is None else [duration(seconds)]
    return ", ".join(told)


def _gains(run: Run) -> dict[str, list[float]]:
    """Return the first value and the last (or mean of the `last_ten`) of what should improve."""
    out = {}
    for metric in GAINS:
        accuracy, points = metric.startswith("eval/"), run.series(metric)
        last = run.last(metric) if accuracy else run.last_ten_mean(metric)
        if points and last is not None and (accuracy or not out):
            out[metric] = [points[0][1], last][: len(points)]
    return out


def task_reward(run: Run) -> str:
    """Name the metric of the task's reward: that without a KL part, where a run has it."""
    return "reward/raw_mean" if run.series("reward/raw_mean") else "reward/mean"


def command(run: Run) -> str:
    """Return the command that repeats a run, without its place; "" if Hydra did not start it."""
    words = [safe(word) for word in run.words if not word.startswith(_LEFT_OUT)]
    named = [word for word in words if word.startswith("experiment=")]
    first = named or [f"experiment={run.experiment}"]
    rest = [word for word in words if word not in named]
    return shlex.join(["python", "train.py", *first, *rest]) if run.words else ""


def resume(folder: Path, *, mode: str = "") -> str:
    """Return the command that goes on with a run, or does something else with its model."""
    words = [f"mode={mode}"] * bool(mode) + [f"resume={shlex.quote(str(folder.resolve()))}"]
    return " ".join(["python train.py", *words])


def safe(word: str) -> str:
    """Return an override without its secret."""
    key, sign, value = word.partition("=")
    return f"{key}{sign}{redact({key: value})[key]}"


def notes(run: Run) -> tuple[str, str]:
    """Draw what the run said about itself (diagnosis.py): what is wrong, what explains.

    What explains is folded once the run is over.
    """
    found = run.status.get("notes")
    held = [note for note in found if isinstance(note, dict)] if isinstance(found, list) else []
    held.sort(key=lambda note: LEVELS.get(str(note.get("level")), len(LEVELS)))
    drawn = [(str(note.get("level")), _note(note)) for note in held]
    wrong = "".join(text for level, text in drawn if level in ("error", "warn"))
    explained = "".join(text for level, text in drawn if level not in ("error", "warn"))
    over = run.state != "running"
    return wrong, page.folded("What the run explained", explained) if over else explained


def _note(note: dict[str, Any]) -> str:
    over = note.get("until")
    when = f"iteration {note.get('iteration')}" + (f" to {over}" if over is not None else "")
    level = page.escape(note.get("level"))
    return (
        f'<p class="note {level}"><b>{page.escape(note.get("title"))}</b> '
        f'<span class="muted">{page.escape(when)}</span><br>{page.escape(note.get("text"))}</p>'
    )


def commands(run: Run) -> dict[str, str]:
    """Return how to repeat a run, to talk to a finished one, to go on with another; HTML."""
    over = run.state in ("finished", "running")
    told = {"repeat": command(run), "go on": "" if over else resume(run.folder)}
    told["chat"] = resume(run.folder, mode="chat") if run.state == "finished" else ""
    return {name: page.copyable(text) for name, text in told.items() if text}


def environment(run: Run) -> dict[str, str]:
    """Return the folder, the model and the machine; HTML."""
    out = {"folder": f"<code>{page.escape(run.folder.resolve())}</code>"}
    if run.status.get("model"):
        keys = ("name", "origin", "sha256")
        name, origin, sha = (dig(run.status, "model", key) or "?" for key in keys)
        out["model"] = f"{page.escape(name)} <span class=muted>from {page.escape(origin)}</span>"
        out["sha256"] = f"<code>{page.escape(sha)}</code>"
    machine = run.status.get("machine")
    if isinstance(machine, dict):
        left = {key: str(value) for key, value in machine.items()}
        ranks, device = left.pop("ranks", ""), left.pop("device", "")
        many = f" on {ranks} ranks" if ranks not in ("", "1") else ""
        rows = {"device": device + many, "system": left.pop("system", "")}
        rows["leash"] = " at ".join(left.pop(key) for key in ("leash", "commit") if key in left)
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in left.items())
        out |= {name: page.escape(value) for name, value in rows.items() if value}
    return out


def changes(run: Run) -> str:
    """Draw a table of what the run and its experiment changed, "" if nothing is known of it.

    Keys that follow another (`${kl.where}`) are left out: the other one is there.
    """
    theirs, leash = run.defaults.get("experiment"), run.defaults.get("leash")
    if not (run.config and isinstance(theirs, dict) and isinstance(leash, dict)):
        return ""
    known = {**dict(_leaves(leash)), **dict(_leaves(theirs))}
    derived = [key for key, value in known.items() if str(value).startswith("${")]
    flat = [dict(_leaves(redact(node))) for node in (leash, theirs, run.config)]
    rows, own = [], []
    for key in dict.fromkeys(key for node in flat for key in node):
        default, asked, got = (_text(node, key) for node in flat)
        if key not in flat[2] or key in PLACES:  # another algorithm's, or a place
            continue
        if any(key == other or key.startswith(f"{other}.") for other in derived):
            continue
        got = asked if asked.startswith("experiment:") else got  # its folder is above
        cells = [page.escape(text) for text in (key, default, asked, got)]
        if got != asked:
            own.append([*cells[:3], f"<b>{cells[3]}</b>"])
        elif asked != default:
            rows.append(cells)
    head = ("key", "default", f"experiment {run.experiment}", "this run")
    return page.table(head, [*own, *rows]) if own or rows else ""


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _text(node: dict[str, Any], key: str) -> str:
    if key not in node:
        return ""
    return "null" if node[key] is None else str(node[key])
