"""What a run came to, in a few numbers, and the command that goes on with it."""

import re
import shlex
from pathlib import Path

from trainer.reports.formats import duration, nats, short
from trainer.runs.folders import program, quoted
from trainer.runs.redact import redact_text
from trainer.runs.run_files import PLACES, Run, dig, number

GAINS = {  # of those before the accuracies only the first that a run has
    "reward/raw_mean": "task reward",
    "reward/mean": "reward",
    "preference/accuracy": "preference accuracy",
    "loss/total": "loss",
    "eval/sampled_accuracy": "sampled accuracy",
    "eval/greedy_accuracy": "greedy accuracy",
}


def tiles(run: Run) -> dict[str, str]:
    """Return the few numbers that tell how a run went: first, and last or mean of the last ten."""
    out: dict[str, str] = {}
    rows = number(run.status.get("held_out"))
    few = f", of {rows:g} prompt{'s' * (rows > 1)}" if rows and rows < 100 else ""
    for metric, name in GAINS.items():
        accuracy, points = metric.startswith("eval/"), run.series(metric)
        last = run.last(metric) if accuracy else run.last_ten_mean(metric)
        if points and last is not None and (accuracy or not out):
            count = len(run.last_ten(metric))
            note = few if accuracy else f", first \u2192 last {count}" * (count > 1)
            out[name + note] = " \u2192 ".join(map(short, [points[0][1], last][: len(points)]))
    if kl := run.last_ten("kl/ref_sequence"):
        note = f", last {len(kl)}" * (len(kl) > 1)
        out[f"KL to the reference, nats per reply{note}"] = nats(sum(kl) / len(kl))
    if held := [kl for at, kl in run.series("eval/kl_ref_sequence") if at]:
        out["KL of the held-out replies, nats"] = nats(held[-1])
    if run.metrics:
        if (share := number(run.metrics[-1].get("kl/efficiency"))) is not None:
            out["KL efficiency"] = short(share)
        total = number(dig(run.config, "trainer", "num_iterations"))
        done = f"{run.metrics[-1]['progress/iteration']:g}"
        out["iterations"] = f"{done} of {total:g}" if total else done
    if (seconds := number(run.status.get("seconds"))) is not None:
        out["time"] = duration(seconds)
    return out


def in_one_line(run: Run) -> str:
    """Return what a run came to for a terminal: the numbers of its tiles."""
    told = ((re.sub(r"[^,]*(last \d+)", r" (\1)", t).split(", "), v) for t, v in tiles(run).items())
    each = (" ".join([name, value, *notes]) for (name, *notes), value in told)
    return ", ".join(each).replace("\u2192", "->")


def chat_command(folder: Path, run: Run) -> str | None:
    """Return the command that chats with what a run trained; None for a model that rates."""
    rates = str(dig(run.config, "policy", "_target_")).endswith("load_reward_model")
    return None if rates else resume_command(folder, mode="chat")


NOTHING = "nothing is saved: it ended before its first checkpoint; begin again with: "


def resume_command(folder: Path, *, mode: str = "") -> str:
    """Return the command that goes on with a run, or does something else with its model."""
    what = f"mode={mode} " if mode else ""
    return f"{shlex.join(program())} {what}resume={shlex.quote(hydra_path(folder))}"


def hydra_path(path: Path) -> str:
    """Return a path as Hydra reads it back: in quotes where it has a sign of its grammar.

    >>> hydra_path(Path("outputs/my run")), hydra_path(Path("multirun/kl.coeff=0.1"))
    ('outputs/my run', '"multirun/kl.coeff=0.1"')
    """
    plain = re.fullmatch(r"[\w ./:@%+-]+", str(path), re.ASCII)
    return str(path) if plain else quoted(str(path))


def repeat_command(run: Run) -> str:
    """Return the command that repeats a run, without its place; "" if Hydra did not start it."""
    left_out = (*(f"{key}=" for key in PLACES), "hydra.")
    words = [redact_text(word) for word in run.words if not word.startswith(left_out)]
    named = [word for word in words if word.startswith("experiment=")]
    first = named or [f"experiment={run.experiment}"]
    rest = [word for word in words if word not in named]
    return shlex.join([*program(), *first, *rest]) if run.words else ""


def of_python(run: Run) -> bool:
    """Tell whether a reward is a function that Python gave, which no command line can name."""
    rewards = dig(run.config, "env", "rewards")
    nodes = rewards.values() if isinstance(rewards, dict) else ()
    return any(dig(node, "_target_") == "envs.rewards.Given" for node in nodes)
