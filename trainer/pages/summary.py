"""The result of a run in a few numbers, and the commands that resume, repeat or use it."""

import re
import shlex
from pathlib import Path
from typing import Any

from trainer.pages.formats import duration, nats, short
from trainer.runs.folders import program, quoted
from trainer.runs.redact import redact_text
from trainer.runs.run_files import PLACES, Run, dig, number, read_yaml

GAINS = {  # only the first one before the accuracies that a run has
    "reward/raw_mean": "task reward",
    "reward/mean": "reward",
    "preference/accuracy": "preference accuracy",
    "loss/total": "loss",
    "eval/sampled_accuracy": "sampled accuracy",
    "eval/greedy_accuracy": "greedy accuracy",
}


def tiles(run: Run) -> dict[str, str]:
    """Return the main numbers of a run: first value, and last or mean of the last ten."""
    out: dict[str, str] = {}
    rows = number(run.status.get("held_out"))
    prompts = "prompt" if rows == 1 else "prompts"
    few = f", of {rows:g} {prompts}" if rows and rows < 100 else ""
    for metric, name in GAINS.items():
        accuracy, points = metric.startswith("eval/"), run.series(metric)
        last = run.last(metric) if accuracy else run.last_ten_mean(metric)
        if points and last is not None and (accuracy or not out):
            count = len(run.last_ten(metric))
            mean = f", first \u2192 last {count}" if count > 1 else ""
            note = few if accuracy else mean
            out[name + note] = " \u2192 ".join(map(short, [points[0][1], last][: len(points)]))
    if kl := run.last_ten("kl/ref_sequence"):
        note = f", last {len(kl)}" if len(kl) > 1 else ""
        out[f"KL to the reference, nats per response{note}"] = nats(sum(kl) / len(kl))
    if kls := [kl for at, kl in run.series("eval/kl_ref_sequence") if at]:
        out["KL of the held-out responses, nats"] = nats(kls[-1])
    if run.metrics:
        if (efficiency := number(run.metrics[-1].get("kl/efficiency"))) is not None:
            out["KL efficiency"] = short(efficiency)
        total = number(dig(run.config, "trainer", "num_iterations"))
        done = f"{run.metrics[-1]['progress/iteration']:g}"
        out["iterations"] = f"{done} of {total:g}" if total else done
    if (seconds := number(run.status.get("seconds"))) is not None:
        out["time"] = duration(seconds)
    return out


def summary_line(run: Run) -> str:
    """Return the result of a run as one line for a terminal: the numbers of its tiles."""
    rows = ((re.sub(r"[^,]*(last \d+)", r" (\1)", t).split(", "), v) for t, v in tiles(run).items())
    each = (" ".join([name, value, *notes]) for (name, *notes), value in rows)
    return ", ".join(each).replace("\u2192", "->")


def chat_command(folder: Path, run: Run) -> str | None:
    """Return the command that chats with a run's model; None for a reward model."""
    rates = str(dig(run.config, "policy", "_target_")).endswith("load_reward_model")
    return None if rates else resume_command(folder, mode="chat")


def resume_command(folder: Path, *, mode: str = "") -> str:
    """Return the command that resumes a run, or runs another mode on its model."""
    prefix = f"mode={mode} " if mode else ""
    return f"{shlex.join(program())} {prefix}resume={shlex.quote(hydra_path(folder))}"


def stopped_line(folder: Path, run: Run, saved: int | None) -> str:
    """Return the iteration that a stopped run saved, if any, and the command to go on."""
    nothing = "nothing is saved: it ended before its first checkpoint"
    text = nothing if saved is None else f"saved at iteration {saved}"
    if python_reward(run):
        return f"{text}; call conf.api.train again: no command line names its reward"
    how = "begin again" if saved is None else "go on"
    return f"{text}; {how} with: {resume_command(folder)}"


def hydra_path(path: Path) -> str:
    """Return a path for Hydra's grammar: quoted if it has a special character.

    >>> hydra_path(Path("outputs/my run")), hydra_path(Path("multirun/kl.coeff=0.1"))
    ('outputs/my run', '"multirun/kl.coeff=0.1"')
    """
    plain = re.fullmatch(r"[\w ./:@%+-]+", str(path), re.ASCII)
    return str(path) if plain else quoted(str(path))


def repeat_command(run: Run) -> str:
    """Return the command that repeats a run in a new folder; "" if Hydra did not start it."""
    hydra = read_yaml(run.folder / ".hydra" / "hydra.yaml").get("hydra")
    left_out = (*(f"{key}=" for key in PLACES), "hydra.")
    words = [word for word in run.words if not word.startswith(left_out)]
    named = [word for word in words if word.startswith("experiment=")]
    rest = [word for word in words if word not in named]
    if (day := run.status.get("date")) and "date" not in run.overrides:
        rest.append(f"date={day}")
    if not named and (chosen := dig(hydra, "runtime", "choices", "experiment")):
        named = [f"experiment={chosen}"]  # by the primary configuration
    command = map(redact_text, [*_config_flags(hydra), *named, *rest])
    return shlex.join([*program(), *command]) if run.words or hydra else ""


def _config_flags(hydra: Any) -> list[str]:
    """Return the flags of a command line that name its configuration files, from hydra.yaml."""
    flags = []
    for source in dig(hydra, "runtime", "config_sources") or []:
        provider, path = dig(source, "provider"), dig(source, "path")
        if provider == "command-line":
            flags.append(f"--config-dir={path}")
        elif provider == "main" and dig(source, "schema") == "file":
            flags.append(f"--config-path={path}")
    name = dig(hydra, "job", "config_name")
    if name not in (None, "config"):
        flags.append(f"--config-name={name}")
    words = dig(hydra, "overrides", "hydra") or []
    return flags + [word for word in words if word.startswith("hydra.searchpath=")]


def python_reward(run: Run) -> bool:
    """Return whether a reward is a Python function, which no command line can name."""
    rewards = dig(run.config, "env", "rewards")
    nodes = rewards.values() if isinstance(rewards, dict) else ()
    return any(dig(node, "_target_") == "envs.rewards.Registered" for node in nodes)
