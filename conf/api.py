"""The Python API `conf.api.train(model, reward, rows)`: one new run in this process."""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf import run
from conf.compose import (
    compose,
    compose_checked,
    compose_experiment,
    temporary_folder,
    write_defaults,
)
from envs.rewards.trl_function import register
from policies.files import write_text
from trainer.pages.summary import resume_command
from trainer.runs.folders import holds_run, quoted, remove_unused, unique_folder
from trainer.runs.launch import prepare
from trainer.runs.lock import LOCK_FILE, locked
from trainer.runs.run_files import Run, flatten, load_run
from trainer.runs.run_log import LOG_FILE, run_log
from trainer.stopping import Stopped

Rows = Iterable[Mapping[str, Any] | str]


def train(
    model: str | Path,
    reward: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None,
    rows: Rows,
    *,
    eval_rows: Rows | None = None,
    observers: Sequence[Any] = (),
    experiment: str = "grpo_own",
    **overrides: Any,
) -> Run:
    """Train a chat model on rows in this process; return its run: `.folder`, `.metrics`, `.status`.

    `reward`: a function of (row, response), a reward function of TRL, or several by name; None for
    SFT. A row is a text or has a "prompt", "question" or "messages"; the reward gets its other
    cells in row["columns"]. A tenth of the rows is held out without `eval_rows`. `observers`:
    trainer.Observer objects. `overrides`: keys of the configuration, `kl={"coeff": 0.1}`,
    `algorithm="rloo"`, `**{"trainer.num_iterations": 20}`.
    Raise ValueError as the command line does. The model is in `run.folder / "model"`.
    """
    if (mode := overrides.get("mode", "train")) != "train":
        command = f"python train.py mode={mode} resume=<run folder>"
        raise ValueError(f"train trains, got mode={mode!r}; run {command}")
    if resumed := overrides.pop("resume", None):
        command = resume_command(Path(resumed))
        raise ValueError(f"train begins a new run; resume {resumed} by: {command}")
    if not isinstance(model, str | Path):
        text = f"expected model to be a folder or a hub id, got {type(model).__name__}"
        raise ValueError(f"{text}; save it and its tokenizer by save_pretrained, give the folder")
    rewards = _named(reward)
    words = [f"experiment={experiment}", f"policy.model={quoted(str(model))}"]
    if rewards and not isinstance(overrides.get("env"), str):
        words.append("env=prompts")
    words += _words(overrides)
    words += _register(rewards)
    for folder_of in (unique_folder, temporary_folder):  # a new folder for every call
        folder_of.cache_clear()
    # Absolute: a reward may change the directory.
    folder = Path(compose(words, with_hydra=True).hydra.run.dir).absolute()
    if holds_run(folder):
        raise ValueError(f"{folder} already holds a run; give another output_dir")
    with locked(folder), run_log(folder):
        with _removed_if_refused(folder):
            words += _data("dataset", rows, folder, shown=reward is None)
            words += _data("eval_dataset", eval_rows, folder, shown=reward is None)
            _prepare(words, folder)
        try:
            run.train(OmegaConf.load(folder / "config.yaml"), folder, observers)
        except Stopped as stop:
            raise KeyboardInterrupt(str(stop)) from None
        finally:
            gc.unfreeze()  # the loop froze objects of this process
    return load_run(folder)


def _named(reward: Any) -> Mapping[str, Any]:
    """Return the rewards by name; a single function goes by its `__name__`."""
    if reward is None or isinstance(reward, Mapping):
        return reward or {}
    name = getattr(reward, "__name__", "reward")
    return {name if name.isidentifier() else "reward": reward}


def _register(rewards: Mapping[str, Any]) -> list[str]:
    """Keep functions for the environment; return the overrides that name them."""
    words = []
    for name, function in rewards.items():
        if not callable(function):
            expected = 'expected reward to be a function or {"name": function}'
            raise ValueError(f"{expected}, got {function}")
        register(name, function)
        words.append(f'+env.rewards.{name}={{_target_: envs.rewards.Registered, name: "{name}"}}')
    return words


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove the files of a run that is refused before it starts."""
    try:
        yield
    except BaseException:
        for name in ("dataset.jsonl", "eval_dataset.jsonl", LOCK_FILE, LOG_FILE):
            (folder / name).unlink(missing_ok=True)
        remove_unused(folder)
        raise


def _prepare(words: list[str], folder: Path) -> None:
    """Check the overrides and write the configuration into the run folder."""
    config, composed = compose_checked(words), compose(words, with_hydra=True)
    if (ranks := config["launch"]["num_processes"]) != 1:
        raise ValueError(f"expected launch.num_processes=1 in one process, got {ranks}")
    write_defaults(folder, composed.hydra)
    for name, node in ("hydra", composed), ("overrides", composed.hydra.overrides.task):
        OmegaConf.save(node, folder / ".hydra" / f"{name}.yaml")
    prepare(config, folder, compose=compose_experiment, worker=run.worker)


def _data(key: str, rows: Rows | None, folder: Path, *, shown: bool) -> list[str]:
    """Write rows into the run folder, `shown` for SFT; return the overrides that name them."""
    if rows is None:
        return []
    if isinstance(rows, str | Path | Mapping):
        remedy = 'for a file or a hub id give envs.data.load_table("my.jsonl").rows'
        raise ValueError(
            f"expected {key} to be a list of rows, got a {type(rows).__name__}; {remedy}"
        )
    records = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, str | Mapping):
            raise ValueError(f"{key}, row {number}: expected a text or an object, got {row!r:.60}")
        records.append({"prompt": row} if isinstance(row, str) else row)
    path = folder / f"{key}.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in records))
    words = [f"env.{key}={quoted(str(path))}"]
    named = [name for name in ("prompt", "question", "messages") if records and name in records[0]]
    if key == "dataset" and not shown and named[:1] not in ([], ["prompt"]):
        words.append(f"env.columns.question={named[0]}")
    return words


def _words(overrides: Mapping[str, Any]) -> list[str]:
    """Format overrides as words of a command line."""
    return [f"{key}={_spelt(value)}" for key, value in flatten(overrides) if key]


def _spelt(value: Any) -> str:
    if isinstance(value, str | Path):
        return quoted(str(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}: {_spelt(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_spelt, value))}]"
    try:
        return json.dumps(value)
    except TypeError:
        text = f"expected keys to be numbers, texts, lists or dicts, got {value!r:.60}"
        remedy = "put a function into a file and give {'_target_': 'my_file.name'}"
        raise ValueError(f"{text}; {remedy} with allow_targets=True") from None
