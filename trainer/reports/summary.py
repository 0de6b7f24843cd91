"""What a run came to, in a few numbers, and the command that goes on with it."""

import re
import shlex
from pathlib import Path

from trainer.reports.formats import duration, nats, short
from trainer.runs.run_files import Run, dig, number, read_yaml

GAINS = {  # of those before the accuracies only the first that a run has
    "reward/raw_mean": "task reward",
    "reward/mean": "reward",
    "preference/accuracy": "preference accuracy",
    "loss/total": "loss",
    "eval/sampled_accuracy": "sampled accuracy",
    "eval/greedy_accuracy": "greedy accuracy",
}


def tiles(run: Run) -> dict[str, str]:
    """Return the few numbers that tell how a run went: first and last."""
    out, rows = {}, number(run.status.get("held_out"))
    few = f", of {rows:g} prompt{'s' * (rows > 1)}" if rows and rows < 100 else ""
    for metric, ends in _gains(run).items():
        accuracy, count = metric.startswith("eval/"), len(run.last_ten(metric))
        note = few if accuracy else f", first \u2192 last {count}" * (count > 1)
        out[GAINS[metric] + note] = " \u2192 ".join(map(short, ends))
    if kl := run.last_ten("kl/ref_sequence"):
        note = f", last {len(kl)}" * (len(kl) > 1)
        out[f"KL to the reference, nats per reply{note}"] = nats(sum(kl) / len(kl))
    if held := [kl for at, kl in run.series("eval/kl_ref_sequence") if at]:
        out["KL of the held-out replies, nats"] = nats(held[-1])
    if run.metrics:
        total = number(dig(run.config, "trainer", "num_iterations"))
        done = f"{run.metrics[-1]['progress/iteration']:g}"
        if (share := number(run.metrics[-1].get("kl/efficiency"))) is not None:
            out["KL efficiency"] = short(share)
        out["iterations"] = f"{done} of {total:g}" if total else done
    seconds = number(run.status.get("seconds"))
    return out if seconds is None else {**out, "time": duration(seconds)}


def in_one_line(run: Run) -> str:
    """Return what a run came to for a terminal: the numbers of its tiles."""
    told = ((re.sub(r"[^,]*(last \d+)", r" (\1)", t).split(", "), v) for t, v in tiles(run).items())
    each = (" ".join([name, value, *notes]) for (name, *notes), value in told)
    return ", ".join(each).replace("\u2192", "->")


def _gains(run: Run) -> dict[str, list[float]]:
    """Return the first value and the last (or mean of the `last_ten`) of what should improve."""
    out = {}
    for metric in GAINS:
        accuracy, points = metric.startswith("eval/"), run.series(metric)
        last = run.last(metric) if accuracy else run.last_ten_mean(metric)
        if points and last is not None and (accuracy or not out):
            out[metric] = [points[0][1], last][: len(points)]
    return out


def chat_command(folder: Path, run: Run) -> str | None:
    """Return the command that chats with what a run trained; None for a model that rates."""
    rates = str(dig(run.config, "policy", "_target_")).endswith("load_reward_model")
    return None if rates else resume_command(folder, mode="chat")


NOTHING = "nothing is saved: it ended before its first checkpoint; begin again with: "


def resume_command(folder: Path, *, mode: str = "") -> str:
    """Return the command that goes on with a run, or does something else with its model.

    A run whose own code was allowed to needs that said again.
    """
    what = f"mode={mode} " if mode else ""
    allowed = read_yaml(folder / "config.yaml").get("allow_targets") is True
    leave = " allow_targets=true" if allowed else ""
    return f"python train.py {what}resume={shlex.quote(str(folder))}{leave}"
