"""Models named `experiment:<name>`: train that experiment once and cache it. Torch-free."""

import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from policies.cache import build_once, cache_dir
from trainer.runs.failures import say
from trainer.runs.lock import locked
from trainer.runs.run_files import PREFIX

Compose = Callable[[str], dict[str, Any]]  # from the name of an experiment to its configuration
IRRELEVANT = ("tracker", "launch", "checkpoint", "mode", "preflight", "allow_targets")


def resolve_experiment(name: str, compose: Compose, start: Callable[[dict, Path], None]) -> str:
    """Return the model folder of experiment:<name>, from the cache or by training with `start`.

    Other names are returned unchanged.
    """
    if not name.startswith(PREFIX):
        return name
    experiment = name.removeprefix(PREFIX)
    config = compose(experiment)
    folder = cache_folder(experiment, config)

    def build(work: Path) -> dict[str, Any]:
        say(f"{experiment} is not in the cache yet: running it first")
        run_folder = folder.with_name(f"{folder.name}.run")  # kept after a failure
        with locked(run_folder):  # a killed run may still be ending
            shutil.rmtree(run_folder, ignore_errors=True)
        start({**config, "experiment": experiment, "kept_in": str(folder)}, run_folder)
        (run_folder / "model").rename(work / "model")
        shutil.rmtree(run_folder)
        return {"experiment": experiment, "config": config}

    build_once(folder, build)
    return str(folder / "model")


def cache_folder(experiment: str, config: dict[str, Any]) -> Path:
    """Return the cache folder of an experiment with this configuration.

    The key hashes the configuration, the source files of the task and leash's version.
    """
    relevant = {k: v for k, v in config.items() if k not in IRRELEVANT}
    sources = _sources(config.get("env", {}).get("task"))
    text = json.dumps([relevant, version("leash-rl"), *sources], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return cache_dir() / "experiments" / f"{experiment}-{key}"


def _sources(task: Any) -> list[str]:
    """Return the texts of the files that define a task, its parts and their base classes."""
    classes = map(resolve_name, re.findall(r'"_target_": "([\w.]+)"', json.dumps(task)))
    bases = {base for cls in classes for base in getattr(cls, "__mro__", (cls,))} - {object}
    return [Path(file).read_text() for file in sorted({inspect.getfile(base) for base in bases})]


def without_training(node: Any, compose: Compose) -> Iterator[str]:
    """Replace each experiment:<name> by its cached or its start model; yield the latter."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from without_training(value, compose)
        elif isinstance(value, str) and value.startswith(PREFIX):
            name = value.removeprefix(PREFIX)
            config = compose(name)
            model = cache_folder(name, config) / "model"
            if model.is_dir():
                node[key] = str(model)
                continue
            if key not in ("model", "reference") or config["policy"]["_target_"].endswith("_model"):
                raise ValueError(f"{value} is not in the cache; start the run once, it trains that")
            yield name
            yield from without_training(config["policy"], compose)
            node[key] = config["policy"]["model"]
