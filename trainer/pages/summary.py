"""The result of a run in a few numbers, and the commands that resume, repeat or use it."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.pages.formats import duration, nats, short
from trainer.runs.folders import program, quoted
from trainer.runs.redact import redact_text
from trainer.runs.run_files import PLACES, Run, dig, number, read_yaml

GAINS = {  # a run shows the first of these that it logs, before its accuracies
    "reward/raw_mean": "task reward",
    "reward/mean": "reward",
    "preference/accuracy": "preference accuracy",
    "loss/total": "loss",
    "eval/sampled_accuracy": "sampled accuracy",
    "eval/greedy_accuracy": "greedy accuracy",
}


class Tile(NamedTuple):
    """A number of a run: its first value and its last one, or the mean of the last ten."""

    name: str
    value: str
    note: str = ""


def tiles(run: Run) -> list[Tile]:
    """Return the main numbers of a run."""
    out: list[Tile] = []
    rows = number(run.status.get("held_out"))
    few = f"of {rows:g} prompt{'s' if rows > 1 else ''}" if rows and rows < 100 else ""
    for metric, name in GAINS.items():
        accuracy, points = metric.startswith("eval/"), run.series(metric)
        last = run.last(metric) if accuracy else run.last_ten_mean(metric)
        if points and last is not None and (accuracy or not out):
            ends = [points[0][1], last][: len(points)]
            note = few if accuracy else _averaged(run.last_ten(metric))
            out.append(Tile(name, " \u2192 ".join(map(short, ends)), note))
    for metric, model in (("kl/ref_sequence", "reference"), ("kl/teacher_sequence", "teacher")):
        if kl := run.last_ten(metric):
            mean = f"{nats(sum(kl) / len(kl))} nats"
            out.append(Tile(f"KL to the {model} per response", mean, _averaged(kl)))
    if kls := [kl for at, kl in run.series("eval/kl_ref_sequence") if at]:
        out.append(Tile("KL of the held-out responses", f"{nats(kls[-1])} nats"))
    if run.metrics:
        if (efficiency := number(run.metrics[-1].get("kl/efficiency"))) is not None:
            out.append(Tile("KL efficiency", short(efficiency)))
        total = number(dig(run.config, "trainer", "num_iterations"))
        done = f"{run.metrics[-1]['progress/iteration']:.0f}"
        out.append(Tile("iterations", f"{done} of {total:.0f}" if total else done))
    if (seconds := number(run.status.get("seconds"))) is not None:
        out.append(Tile("time", duration(seconds)))
    return out


def _averaged(values: Sequence[float]) -> str:
    return f"last {len(values)}" if len(values) > 1 else ""


def summary_line(run: Run) -> str:
    """Return the result of a run as one line for a terminal: the numbers of its tiles."""
    each = (f"{name} {value}" + (f" ({note})" if note else "") for name, value, note in tiles(run))
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
    if has_python_reward(run):
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


def has_python_reward(run: Run) -> bool:
    """Return whether a reward is a Python function, which no command line can name."""
    rewards = dig(run.config, "env", "rewards")
    nodes = rewards.values() if isinstance(rewards, dict) else ()
    return any(dig(node, "_target_") == "envs.rewards.Registered" for node in nodes)


def repeat_command(run: Run) -> str:
    """Return the command that repeats a run in a new folder.

    "" if Hydra did not start it, or if a reward is a Python function, which no command can name.
    """
    if has_python_reward(run):
        return ""
    hydra = read_yaml(run.folder / ".hydra" / "hydra.yaml").get("hydra")
    left_out = (*(f"{key}=" for key in PLACES), "hydra.")
    words = [word for word in run.words if not word.startswith(left_out)]
    named = [word for word in words if word.startswith("experiment=")]
    rest = [word for word in words if word not in named]
    if (day := run.status.get("date")) and "date" not in run.overrides:
        rest.append(f"date={day}")
    if not named and (chosen := dig(hydra, "runtime", "choices", "experiment")):
        named = [f"experiment={chosen}"]  # chosen by the primary configuration
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
