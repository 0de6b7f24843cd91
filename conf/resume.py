"""Load the saved configuration of a run, with the keys that a resume or a mode may change."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from conf.compose import checked
from conf.schema import TYPES, declared, part_of, sections
from policies.contents import files_of
from trainer.runs.discover import find_jobs, has_weights, is_running, nothing_left
from trainer.runs.run_files import PLACES, PREFIX

OF_TRAINER = ("num_iterations", "stop_at", "patience", "overlap", "profile")
RESUMABLE = (*(f"trainer.{name}" for name in OF_TRAINER), "policy.engine", "observers")
RESUMABLE += ("tracker", "launch", "checkpoint")
MOVABLE = ("env.dataset", "env.eval_dataset", "eval.retain")  # to a place with the same content
# Evaluations before and after have the same rows, temperature and frontier.
RESUMABLE += ("eval.every", "eval.num_samples", "eval.greedy", "eval.prompts_per_batch")

OF_A_RESUME = (*RESUMABLE, *MOVABLE)
CLASSES = {"float": (int, float), "int": int, "bool": bool, "str": str, "list": list, "dict": dict}


def resumed(
    folder: str, cfg: DictConfig, words: Sequence[str], *, may=OF_A_RESUME, **instead: Any
) -> dict[str, Any]:
    """Return a run's saved configuration, checked, with the keys of `words`, then `instead`.

    `cfg`: Hydra's composition of the words. Raise ValueError for a key outside of `may`.
    """
    saved: Any = OmegaConf.create(read_saved(Path(folder)))
    for key in (word.partition("=")[0].lstrip("+~") for word in words):
        key = key.replace("/", ".")  # policy/engine=vllm sets policy.engine
        if key.partition(".")[0] in ("resume", "mode", "hydra"):
            continue
        if not is_among(key, (*may, "allow_targets")):
            new = "; start a new run for it" if cfg.mode == "train" else ""
            raise ValueError(f"{key} cannot change here, only {', '.join(may)}{new}")
        value = OmegaConf.select(cfg, key)
        names = list(value) if OmegaConf.is_list(value) else value
        if cfg.mode == "train" and key in MOVABLE and not files_of(names):
            raise ValueError(f"expected {key} to be files with the rows of this run, got {value}")
        OmegaConf.update(saved, key, value, merge=False, force_add=True)
    saved.update({"resume": str(folder), "mode": cfg.mode, "preflight": False, **instead})
    return checked(saved)


def is_among(key: str, names: Sequence[str]) -> bool:
    """Return whether a key is in `names`, or within one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def read_saved(folder: Path) -> dict[str, Any]:
    """Read the config.yaml of a run folder; raise ValueError if it is missing or damaged."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"resume={folder}: expected a run folder with config.yaml, got none")
    try:
        saved: Any = OmegaConf.to_container(OmegaConf.load(path))
        tree = dict(declared()["root"])
        for group in sections():
            node = saved.get(group)
            tree[group] = declared()[part_of(group, node) if isinstance(node, dict) else group]
        fault = next(damage(tree, saved), "")
    except (OSError, UnicodeError, yaml.YAMLError, AttributeError) as error:
        saved, fault = {}, str(error).splitlines()[0]
    if fault:
        raise ValueError(
            f"{path} is damaged, or of another version of leash: {fault}; put a copy of it back, "
            "or start a new run"
        )
    return saved


def damage(tree: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the keys that a saved node lacks, and the keys whose values have a wrong type."""
    for name, key in tree.items():
        at, value = f"{path}{name}", node.get(name)
        if name not in node:
            yield f"it has no {at}"
        elif isinstance(key, dict):
            if isinstance(value, dict):
                yield from damage(key, value, f"{at}.")
            else:
                yield f"expected {at} to be {TYPES['dict'][1]}, got {value!r}"
        else:
            null = value is None and key.type.endswith("| null")
            kind = CLASSES.get(key.type.partition(" ")[0], object)
            if not (null or isinstance(value, kind) or "${" in str(value)):
                yield f"expected {at} to be {TYPES[key.type][1]}, got {value!r}"


def job_config(cfg: DictConfig, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the checked configuration of a run or of a job of a sweep that may resume.

    Raise ValueError if it has fewer iterations than the run that it resumes.
    """
    if cfg.resume == "auto":
        place, key = Path(cfg.output_dir).expanduser(), "output_dir"
        config = resumed_if_held(place, checked(cfg) | {"resume": None}, key=key)
    elif cfg.resume:
        config = resumed(cfg.resume, cfg, words)
    else:
        config = resumed_if_held(folder, checked(cfg))
    nothing_left(config)
    return config


def resumed_if_held(
    folder: Path, config: dict[str, Any], *, key: str = "hydra.sweep.dir"
) -> dict[str, Any]:
    """Return the configuration of a run that resumes if its folder, named by `key`, holds it.

    Raise ValueError if the folder holds a run with another configuration.
    """
    if not (folder / "config.yaml").is_file():
        return config
    saved = read_saved(folder)
    config = config | {"date": config["date"] or saved["date"]}
    for other in differences(saved, config):
        if not is_among(other, RESUMABLE):
            raise ValueError(f"{folder} holds a run with another {other}; give another {key}")
    return config | {"resume": str(folder)}


def differences(saved: Any, config: Any, key: str = "") -> Iterator[str]:
    """Yield the keys whose values differ; experiment:<name> equals its saved model folder."""
    if isinstance(saved, dict) and isinstance(config, dict):
        for name in sorted({*saved, *config} - {*PLACES}):
            path = f"{key}.{name}" if key else name
            yield from differences(saved.get(name), config.get(name), path)
    elif saved != config and not str(config).startswith(PREFIX):
        yield key


def last_run(folder: Path, *, trained: bool = False) -> Path:
    """Return the latest run below a folder that is not running; if `trained`, with weights.

    A run starts when its config.yaml is written.
    """
    runs = [job for job in find_jobs(folder) if (job / "config.yaml").is_file()]
    for run in sorted(runs, key=lambda run: (run / "config.yaml").stat().st_mtime, reverse=True):
        if not is_running(run) and (has_weights(run) or not trained):
            return run
    raise ValueError(f"resume=last: there is no such run in {folder}; give resume=<run folder>")
