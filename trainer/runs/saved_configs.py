"""Saved configurations: with the names of today, and how two differ. Torch-free."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainer.runs.redact import redact
from trainer.runs.run_files import PLACES, PREFIX, read_yaml

ROOT = Path(__file__).parents[2]
# Keys that are younger than run folders which go on, with what a run without them means.
YOUNGER: dict[str, dict[str, Any]] = {
    "root": {"gguf": None, "hub": None},
    "policy": {
        **{"chat_template_kwargs": {}, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        **{"engine": "transformers", "vllm": {}},
    },
    "env": {"overlong": "drop"},
    "tracker": {"replies": "16"},
    "eval": {"limit": 0},
    "trainer": {"stop_at": None, "patience": None, "overlap": 0},
    "launch": {"strategy": "ddp", "offload": False},
}


def as_today(saved: Any) -> dict[str, Any]:
    """Return a saved configuration with the keys of today, and no key of an algorithm twice."""
    saved = YOUNGER["root"] | saved
    for group, keys in YOUNGER.items():
        if isinstance(saved.get(group), dict):
            saved = saved | {group: keys | saved[group]}
    policy = saved.get("policy")
    if isinstance(policy, dict) and isinstance(policy["vllm"], dict):
        saved = saved | {"policy": policy | {"vllm": _vllm() | policy["vllm"]}}
    algorithm = dict(saved.get("algorithm") or {})
    keys = {**(saved.get("kl") or {}), **(saved.get("trainer") or {}), **algorithm}
    for part in ("source", "advantage", "objective"):
        node = algorithm.get(part) or {}
        algorithm[part] = {k: v for k, v in node.items() if k not in keys or v != keys[k]}
    if "clip_ratio" in algorithm:
        algorithm["dual_clip"] = algorithm.pop("clip_ratio")
    if "clip_low" in algorithm:  # they sample, and learnt all of that
        algorithm.setdefault("mask", "response")
    if "shaping" in algorithm:
        verbs, corrects = algorithm.pop("shaping") or {}, algorithm.pop("mismatch", None)
        if corrects:
            verbs = verbs | {"mismatch": corrects | {"_target_": "trainer.ImportanceSampling"}}
        algorithm["after_rollout"] = verbs or None
    return saved | {"algorithm": algorithm}


@cache
def _vllm() -> dict[str, Any]:
    """Return the defaults of policy.vllm: a run without them had none of it."""
    declared = yaml.safe_load((ROOT / "conf" / "keys.yaml").read_text())
    return {name: key[1] for name, key in declared["policy"]["vllm"].items()}


def holds_same(folder: Path, config: dict[str, Any]) -> bool:
    """Return whether a folder holds a job with this configuration; False if it holds none.

    A job with another one, or a damaged one, is a ValueError.
    """
    saved = read_yaml(folder / "config.yaml")
    if not saved and (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} holds a run without its config.yaml; move it away")
    if saved and (lost := config.keys() - as_today(saved).keys()):
        raise ValueError(f"{folder}/config.yaml is damaged: it has no {min(lost)}; move it away")
    for key, there, asked in _changes(as_today(saved), config) if saved else ():
        there, asked = (redact({key: value})[key] for value in (there, asked))
        raise ValueError(
            f"{folder} holds a job with {key}={there}, got {asked}; give the words of that sweep, "
            "or another hydra.sweep.dir"
        )
    return bool(saved)


def _changes(saved: Any, config: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield key, saved and asked value of what differs; of a warm-up its folder is saved."""
    if isinstance(saved, dict) and isinstance(config, dict):
        for name in dict.fromkeys([*saved, *config]):
            path = f"{key}.{name}" if key else name
            if path not in PLACES:
                yield from _changes(saved.get(name), config.get(name), path)
    elif saved != config and not str(config).startswith(PREFIX):
        yield key, saved, config
