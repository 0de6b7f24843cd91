"""What a report says beside its curves: the main numbers, how to repeat them, what was changed."""

import shlex
from collections.abc import Iterator
from typing import Any

from trainer.display_text import duration
from trainer.redact import redact
from trainer.run_files import Run, dig, number
from trainer.show import page, svg

PLACES = ("output_dir", "resume")  # they name a place, not a run
LEVELS = {"error": 0, "warn": 1, "info": 2}
_LEFT_OUT = (*(f"{key}=" for key in PLACES), "hydra.")


def tiles(run: Run) -> dict[str, str]:
    """Return the few numbers that tell how a run went: first and last."""
    out = {}
    wanted = [("reward, first \u2192 last ten", "reward/mean")]
    wanted += [("sampled accuracy", "eval/sampled_accuracy")]
    wanted += [("greedy accuracy", "eval/greedy_accuracy")]
    if not run.series("reward/mean"):
        wanted.append(("loss, first \u2192 last ten", "loss/total"))
    for name, metric in wanted:
        points = run.series(metric)
        if len(points) == 1:
            out[name.partition(",")[0]] = svg.short(points[0][1])
        elif points:
            last = points[-1][1] if metric.startswith("eval/") else run.last_ten_mean(metric)
            out[name] = f"{svg.short(points[0][1])} \u2192 {svg.short(last or 0.0)}"
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


def command(run: Run) -> str:
    """Return the command that repeats a run, without its place; "" if Hydra did not start it."""
    words = [_safe(word) for word in run.words if not word.startswith(_LEFT_OUT)]
    named = [word for word in words if word.startswith("experiment=")]
    first = named or [f"experiment={run.experiment}"]
    rest = [word for word in words if word not in named]
    return shlex.join(["python", "train.py", *first, *rest]) if run.words else ""


def _safe(word: str) -> str:
    """Return an override without its secret."""
    key, sign, value = word.partition("=")
    return f"{key}{sign}{redact({key: value})[key]}"


def notes(run: Run) -> tuple[str, str]:
    """Draw what the run said about itself (trainer/diagnosis.py): what is wrong, what explains."""
    found = run.status.get("notes")
    held = [note for note in found if isinstance(note, dict)] if isinstance(found, list) else []
    held.sort(key=lambda note: LEVELS.get(str(note.get("level")), len(LEVELS)))
    drawn = [(str(note.get("level")), _note(note)) for note in held]
    wrong = "".join(text for level, text in drawn if level in ("error", "warn"))
    return wrong, "".join(text for level, text in drawn if level not in ("error", "warn"))


def _note(note: dict[str, Any]) -> str:
    over = note.get("until")
    when = f"iteration {note.get('iteration')}" + (f" to {over}" if over is not None else "")
    level = page.escape(note.get("level"))
    return (
        f'<p class="note {level}"><b>{page.escape(note.get("title"))}</b> '
        f'<span class="muted">{page.escape(when)}</span><br>{page.escape(note.get("text"))}</p>'
    )


def commands(run: Run) -> dict[str, str]:
    """Return how to repeat a run, and how to go on with one that is not finished; HTML."""
    resume = f"python train.py resume={shlex.quote(str(run.folder.resolve()))}"
    over = run.state in ("finished", "running")
    told = {"repeat": command(run), "go on": "" if over else resume}
    return {name: page.command(text) for name, text in told.items() if text}


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
        device = machine.get("device")
        out |= {"device": page.escape(device)} if device else {}
        rest = ", ".join(f"{k} {v}" for k, v in machine.items() if k != "device")
        out["versions"] = page.escape(rest)
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
