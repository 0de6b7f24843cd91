"""What a composed configuration must fulfil before any model is loaded. Torch-free.

Every finding is one line: expected, got, what to do.
"""

import difflib
import math
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from conf import control, extras, files, nodes, task
from conf.bounds import NUMBERS, RANGES, RELATED, choices, is_silent
from conf.nodes import PACKAGES, walk
from trainer.kl_control import check_place

ROOT = Path(__file__).parents[1]
LAZY = (*PACKAGES, "envs.transforms")  # their names are known without torch
CROWD = 4  # processes a core, above which there are surely too many


def check(cfg: dict[str, Any]) -> None:
    """Raise ValueError with the first thing that is wrong in a resolved configuration."""
    for finding in _findings(cfg):
        raise ValueError(finding)


def _findings(cfg: dict[str, Any]) -> Iterator[str]:
    yield from nodes.unnamed(cfg)
    flat = dict(_leaves(cfg))
    for key, known in choices(cfg).items():
        if key in flat and flat[key] not in known:
            names = ", ".join(str(c).replace("None", "null") for c in known)
            yield f"expected {key} to be one of {names}, got {flat[key]!r}"
    for key, range_ in NUMBERS.items():
        value = flat.get(key)
        if value is not None and not (math.isfinite(value) and RANGES[range_](value)):
            finite = "" if math.isfinite(value) else " and finite"
            yield f"expected {key} {range_}{finite}, got {value}"
    betas = cfg["optimizer"]["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"expected optimizer.betas {RELATED['optimizer.betas']}, got {betas}"
    if not -(2**63) <= cfg["seed"] < 2**63:
        yield f"expected seed {RELATED['seed']}, got {cfg['seed']}"
    yield from _machine(cfg)
    yield from _batches(cfg)
    yield from _leash(cfg)
    yield from _best(cfg)
    yield from extras.findings(cfg)
    yield from files.findings(cfg)
    yield from _targets(cfg)
    yield from nodes.findings(cfg)
    yield from task.findings(cfg)


def _machine(cfg: dict[str, Any]) -> Iterator[str]:
    device, ranks, cores = cfg["policy"]["device"], cfg["launch"]["num_processes"], os.cpu_count()
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        yield f"expected policy.device {RELATED['policy.device']} (a GPU or none), got {device}"
    if ranks > CROWD * (cores or 1):
        yield (
            f"expected launch.num_processes for the {cores} cores of this machine, got {ranks}: "
            "each is a process of its own with a model of its own; lower it"
        )
    if dropout := cfg["policy"]["lora"]["dropout"]:
        yield (
            f"expected policy.lora.dropout {RELATED['policy.lora.dropout']}, got {dropout}: the "
            "log-probs that are trained on would not be those that sampled"
        )


def _batches(cfg: dict[str, Any]) -> Iterator[str]:
    prompts, ranks = cfg["trainer"]["prompts_per_iteration"], cfg["launch"]["num_processes"]
    parts = cfg["algorithm"]["minibatches"]
    if prompts % ranks:
        yield (
            f"expected trainer.prompts_per_iteration={prompts} to be divisible by "
            f"launch.num_processes={ranks}: every process plays whole groups"
        )
    if (prompts // ranks) % parts:
        yield (
            f"expected the {prompts // ranks} prompts of a process to split into "
            f"algorithm.minibatches={parts} equal parts; change trainer.prompts_per_iteration"
        )


def _leash(cfg: dict[str, Any]) -> Iterator[str]:
    kl, algorithm = cfg["kl"], cfg["algorithm"]
    if is_silent(cfg):
        silent = "this algorithm samples no replies"
        if kl["coeff"] > 0:
            yield f"{silent} to put a KL on, got kl.coeff={kl['coeff']}; set kl.coeff=0"
        if kl["measure"]:
            yield f"{silent} to measure a KL on; set kl.measure=false"
        if kl["controller"] != "constant":
            yield f"{silent} to control a KL of; set kl.controller=constant"
        for key in ("target_kl", "entropy_coeff", "entropy_target", "after_rollout"):
            if algorithm[key]:
                yield f"{silent}, which algorithm.{key} is for; leave it out"
        return
    if "critic" in algorithm:
        yield from _critic(algorithm)
    elif algorithm["group_size"] < 2 and _compares(algorithm):
        yield (
            f"a group baseline needs algorithm.group_size >= 2, got {algorithm['group_size']}: "
            "alone, every advantage is 0"
        )
    yield from _bounds(algorithm)
    if cfg["policy"]["temperature"] <= 0 and cfg["mode"] == "train":
        yield (
            f"expected policy.temperature > 0 in RL, got {cfg['policy']['temperature']}: greedy "
            "replies of a group are all the same"
        )
    yield from _reference(kl)
    try:
        check_place(kl["where"], kl["estimator"], allow_biased=kl["allow_biased"])
    except ValueError as error:
        yield str(error)
    yield from control.findings(cfg)
    if max(kl["coeff"], kl["end"] or 0) > 0 and not kl["measure"]:
        yield f"kl.coeff={kl['coeff']} needs the reference; set kl.measure=true"


def _reference(kl: dict[str, Any]) -> Iterator[str]:
    if kl["refresh_decay"] and not kl["refresh_every"]:
        yield f"kl.refresh_decay={kl['refresh_decay']} needs kl.refresh_every, got 0; set it to 1"
    if kl["refresh_every"] and kl["reference"] is not None:
        yield (
            "kl.refresh_every makes the reference a copy of the policy, got kl.reference="
            f"{kl['reference']}; leave one of them out"
        )
    if kl["refresh_every"] and not kl["measure"]:
        yield "kl.refresh_every needs a reference, got kl.measure=false; set kl.measure=true"


def _compares(algorithm: dict[str, Any]) -> bool:
    """Return whether a reply is judged by the others of its prompt."""
    return algorithm["baseline"] != "none" or algorithm["scale_by_std"]


def _bounds(algorithm: dict[str, Any]) -> Iterator[str]:
    most, least = algorithm["dual_clip"], 1 + algorithm["clip_high"]
    if most is not None and not most > least:
        above = RELATED["algorithm.dual_clip"]
        yield f"expected algorithm.dual_clip {above} = {least:g}, or null, got {most}"
    if most is not None and algorithm.get("surrogate", "clip") != "clip":
        yield (
            f"algorithm.dual_clip is a bound of algorithm.surrogate=clip, got surrogate="
            f"{algorithm['surrogate']}; set dual_clip=null"
        )
    steps = algorithm["epochs"] * algorithm["minibatches"]
    if algorithm.get("surrogate") == "reinforce" and steps > 1:
        yield (
            "algorithm.surrogate=reinforce has no ratio for replies of an older policy, got "
            f"{steps} steps a batch; set epochs=1 and minibatches=1, or surrogate=clip"
        )


def _critic(algorithm: dict[str, Any]) -> Iterator[str]:
    critic = algorithm["critic"]
    if critic["kind"] == "separate" and critic["detach"]:
        yield "algorithm.critic.detach is for a head; a separate critic has none: set it false"


def _best(cfg: dict[str, Any]) -> Iterator[str]:
    saved, every = cfg["checkpoint"], cfg["eval"]["every"]
    if saved["keep_best"] and saved["every"] and (not every or saved["every"] % every):
        yield (
            f"checkpoint.keep_best needs an evaluation at each checkpoint, got eval.every={every} "
            f"and checkpoint.every={saved['every']}; set eval.every={saved['every']}"
        )


def _targets(cfg: dict[str, Any]) -> Iterator[str]:
    for path, node in () if cfg["allow_targets"] else walk(cfg):
        key, value = f"{path}._target_", node["_target_"]
        module, _, name = value.rpartition(".")
        if not _is_ours(module):
            yield (
                f"{key}={value}: expected code of {', '.join(PACKAGES)}; set allow_targets=true "
                "if you trust this configuration"
            )
        elif module in LAZY and name not in (names := import_module(module).__all__):
            close = difflib.get_close_matches(name, names, n=1) or names
            yield f"{key}={value}: {module} has no {name}; did you mean {' or '.join(close)}?"


def _is_ours(module: str) -> bool:
    """Return whether a dotted name is a module of leash, not something that one imports.

    >>> _is_ours("envs.tasks"), _is_ours("policies.cache.os"), _is_ours("os")
    (True, False, False)
    """
    path = ROOT.joinpath(*module.split("."))
    there = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return module.split(".")[0] in PACKAGES and there


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node
