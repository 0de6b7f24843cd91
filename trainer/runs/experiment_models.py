"""Models named `experiment:<name>`: train that experiment once and cache it. Torch-free."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from policies.cache import build_once, cache_dir
from policies.contents import content_key, sha256_of_inputs, sha256_of_leash
from trainer.runs.failures import say
from trainer.runs.lock import locked
from trainer.runs.run_files import PREFIX, Compose

IRRELEVANT = ("tracker", "launch", "checkpoint", "observers")
IRRELEVANT += ("mode", "preflight", "allow_targets")
NO_CHECKPOINTS = {"every": 0, "on_stop": False}  # a stopped warm-up starts anew


def resolve_experiment(name: str, compose: Compose, start: Callable[[dict, Path], None]) -> str:
    """Return the model folder of experiment:<name>, from the cache or by training with `start`.

    Other names are returned unchanged.
    """
    if not name.startswith(PREFIX):
        return name
    experiment = name.removeprefix(PREFIX)
    config = compose(experiment)
    folder = cache_folder(experiment, config, compose)

    def build(work: Path) -> dict[str, Any]:
        say(f"{experiment} is not in the cache as it is now: running it first")
        run_folder = folder.with_name(f"{folder.name}.run")  # kept after a failure
        with locked(run_folder):  # a killed run may still be ending
            shutil.rmtree(run_folder, ignore_errors=True)
        saves = config.get("checkpoint", {}) | NO_CHECKPOINTS
        about = {"experiment": experiment, "kept_in": str(folder), "checkpoint": saves}
        start(config | about, run_folder)
        (run_folder / "model").rename(work / "model")
        shutil.rmtree(run_folder)
        return {"experiment": experiment, "config": config}

    build_once(folder, build)
    return str(folder / "model")


def cache_folder(experiment: str, config: dict[str, Any], compose: Compose) -> Path:
    """Return the cache folder of an experiment with this configuration and its current inputs.

    The name is a hash of the configuration, of all files and code that it names, of leash's code,
    and of the same for the experiments whose models it starts from.
    """
    relevant = {k: v for k, v in config.items() if k not in IRRELEVANT}
    names = re.findall(rf'"{PREFIX}([^"]+)"', json.dumps(relevant))
    begun = [cache_folder(name, compose(name), compose).name for name in names]
    inputs = sha256_of_inputs(relevant, weights=True)
    key = content_key(relevant, inputs, begun, sha256_of_leash())
    return cache_dir() / "experiments" / f"{experiment}-{key}"


def without_training(node: Any, compose: Compose) -> Iterator[str]:
    """Replace experiment:<name> by its cached model, else its start model; yield uncached names."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from without_training(value, compose)
        elif isinstance(value, str) and value.startswith(PREFIX):
            name = value.removeprefix(PREFIX)
            config = compose(name)
            model = cache_folder(name, config, compose) / "model"
            if model.is_dir():
                node[key] = str(model)
                continue
            if key not in ("model", "reference") or config["policy"]["_target_"].endswith("_model"):
                raise ValueError(f"{value} is not in the cache; start the run once, it trains that")
            yield name
            yield from without_training(config["policy"], compose)
            node[key] = config["policy"]["model"]
