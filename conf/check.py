"""What a resolved configuration must fulfil before any model is loaded. Needs no torch, no Hydra.

What goes together with what, with this machine, its disk and its packages; what a key may be by
itself is in conf/schema.py, what a task must be in conf/check_task.py.
"""

import difflib
import os
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf import check_task, names, schema
from envs.transforms import is_leash
from policies.optional_packages import EXTRAS, package_of
from trainer.kl_control import faults_of
from trainer.runs.folders import holds_run
from trainer.runs.nodes import (
    PACKAGES,
    arguments_in_source,
    belongs,
    is_node,
    is_ours,
    parts,
    parts_at,
    walk,
    walk_texts,
)
from trainer.runs.run_files import PREFIX
from trainer.runs.targets import unknown_argument

CROWD = 4  # processes a core, above which there are surely too many
SILENT = ("Demonstrations", "PreferencePairs")  # sources that sample no replies
READ = {  # which bounds each surrogate reads; algorithm=ppo has no key for it, its own is clip
    "clip": ("clip_low", "clip_high", "dual_clip", "ratio"),
    "cispo": ("clip_low", "clip_high", "ratio"),
    "reinforce": (),
    "tv_mask": ("tv_bound", "dual_clip", "ratio"),
    "kl_mask": ("kl_bound", "dual_clip", "ratio"),
}
# Parts of a run that nodes of algorithm.* are handed: never two of them, one leash above all.
MADE = {"leash", "policy", "generator", "runtime", "task", "env", "size"}


def check(cfg: dict[str, Any]) -> None:
    """Raise ValueError with the first thing that is wrong in a resolved configuration."""
    for finding in _findings(cfg):
        raise ValueError(finding)


def is_silent(cfg: dict[str, Any]) -> bool:
    """Return whether what is learnt from samples no replies."""
    return cfg["algorithm"]["source"]["_target_"].rpartition(".")[2] in SILENT


def _findings(cfg: dict[str, Any]) -> Iterator[str]:
    yield from _unnamed(cfg)
    yield from schema.faults(cfg)
    silent = is_silent(cfg)
    for look in (_batches, _no_replies if silent else _replies, _engine, _packages, _disk):
        yield from look(cfg)
    yield from _nodes(cfg)
    yield from check_task.findings(cfg)


def _batches(cfg: dict[str, Any]) -> Iterator[str]:
    prompts, ranks = cfg["trainer"]["prompts_per_iteration"], cfg["launch"]["num_processes"]
    here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))  # of several nodes
    if here > CROWD * (cores := os.cpu_count() or 1) and cfg["mode"] in ("train", "evaluate"):
        what = f"launch.num_processes for the {cores} cores of this machine"
        yield f"expected {what}, got {here}: each loads a model of its own; lower it (or torchrun)"
    parts, saved, every = cfg["algorithm"]["minibatches"], cfg["checkpoint"], cfg["eval"]["every"]
    shards = cfg["launch"]["strategy"] != "ddp" or cfg["launch"]["offload"]
    rare = {"check_stop": cfg["trainer"]["stop_at"], "check_shards": shards}
    rare["check_limit"] = cfg["eval"]["limit"]
    for name in filter(rare.get, rare):  # few runs have a rule, shards or a limit
        yield from import_module(f"conf.{name}").findings(cfg)
    if cfg["trainer"]["patience"] and not every:
        yield "trainer.patience counts evaluations, got eval.every=0; set eval.every=5, say"
    if cfg["mode"] != "train":  # it plays no batches
        return
    if prompts % ranks:
        told = f"trainer.prompts_per_iteration={prompts} to be divisible by"
        yield f"expected {told} launch.num_processes={ranks}: every process plays whole groups"
    if (prompts // ranks) % parts:
        what = f"the {prompts // ranks} prompts of a process to split into equal parts"
        yield f"expected {what}, got algorithm.minibatches={parts}; change one of them"
    if saved["keep_best"] and saved["every"] and (not every or saved["every"] % every):
        what = "checkpoint.keep_best needs an evaluation at each checkpoint"
        yield f"{what}, got eval.every={every}; set eval.every={saved['every']}"


def _no_replies(cfg: dict[str, Any]) -> Iterator[str]:
    kl, algorithm, what = cfg["kl"], cfg["algorithm"], "this algorithm samples no replies"
    none = {"coeff": 0, "measure": False, "controller": "constant"}
    if wrong := [key for key in none if kl[key] != none[key]]:
        got = ", ".join(f"kl.{key}={str(kl[key]).lower()}" for key in wrong)
        instead = " ".join(f"kl.{key}={str(none[key]).lower()}" for key in wrong)
        kind = algorithm["source"]["_target_"].rpartition(".")[2]
        take = "sft_own env.dataset=<rows>, or sft_tiny" if kind == SILENT[0] else "rm_tiny"
        what = f"{what} to measure or charge a KL on, got {got}; take experiment={take}"
        yield f"{what}, or give {instead}"
    for key in ("target_kl", "entropy_coeff", "entropy_target", "after_rollout"):
        if algorithm[key]:
            yield f"{what}, which algorithm.{key} is for; leave it out"
    if cfg["trainer"]["overlap"]:
        yield f"{what} that trainer.overlap could sample ahead; leave it out"


def _replies(cfg: dict[str, Any]) -> Iterator[str]:
    algorithm, size = cfg["algorithm"], cfg["algorithm"]["group_size"]
    critic = algorithm.get("critic")
    if critic and critic["kind"] == "separate" and critic["detach"]:
        yield "algorithm.critic.detach is for a head; a separate critic has none: set it false"
    if not critic and size < 2 and (algorithm["baseline"] != "none" or algorithm["scale_by_std"]):
        yield f"a group baseline needs algorithm.group_size >= 2, got {size}: advantages are 0"
    if cfg["policy"]["temperature"] <= 0 and cfg["mode"] == "train":
        yield "expected policy.temperature > 0, got 0: greedy replies of a group are all the same"
    for name, one in (("top_k", 1), ("top_p", 0), ("min_p", 1)):
        if cfg["policy"][name] == one and cfg["mode"] == "train":
            yield f"policy.{name}={one} leaves one token, and replies of a group are all the same"
    yield from _bounds(algorithm)
    if not cfg["resume"]:  # a run that began before this was refused goes on
        yield from _unread(algorithm)
    yield from _parts(cfg)
    yield from faults_of(cfg["kl"], replies=cfg["trainer"]["prompts_per_iteration"] * size)


def _bounds(algorithm: dict[str, Any]) -> Iterator[str]:
    most, least = algorithm["dual_clip"], 1 + algorithm["clip_high"]
    clips = algorithm.get("surrogate", "clip") == "clip"
    if clips and most is not None and not most > least:
        yield f"expected algorithm.dual_clip > 1 + clip_high = {least:g}, or null, got {most}"
    steps = algorithm["epochs"] * algorithm["minibatches"]
    if algorithm.get("surrogate") == "reinforce" and steps > 1:
        yield (
            "algorithm.surrogate=reinforce has no ratio for replies of an older policy, got "
            f"{steps} steps a batch; set epochs=1 and minibatches=1, or surrogate=clip"
        )


def _unread(algorithm: dict[str, Any]) -> Iterator[str]:
    """Yield the bounds that are set and that the surrogate does not read."""
    name, known = algorithm.get("surrogate", "clip"), schema.declared()["algorithm=grpo"]
    for key in dict.fromkeys(key for keys in READ.values() for key in keys):
        default = known[key].default
        if key not in READ[name] and algorithm.get(key, default) != default:
            owners = " or ".join(owner for owner, keys in READ.items() if key in keys)
            what = f"algorithm.{key} is for surrogate={owners}, got surrogate={name}"
            default = "null" if default is None else default
            yield f"{what}; give that, or set algorithm.{key}={default}, the default"


def _parts(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the verbs after a rollout."""
    verbs = cfg["algorithm"]["after_rollout"] or {}
    given = verbs.values() if isinstance(verbs, dict) else [verbs]
    if not all(is_node(node) or node is None for node in given):
        yield (
            "expected algorithm.after_rollout to be names with nodes, {drop: {_target_: "
            f"trainer.DropTruncated}}}}, or null, got {verbs!r}"
        )
    turns, limit = cfg["env"]["max_turns"], cfg["policy"]["max_new_tokens"]
    for name, node in verbs.items():
        whole = node and "OverlongPenalty" in node["_target_"]
        if turns > 1 and whole and node.get("max_tokens") == limit:
            key = f"algorithm.after_rollout.{name}.max_tokens"
            yield f"{key} is of all {turns} turns, got that of one; give {key}={limit * turns}"


def _engine(cfg: dict[str, Any]) -> Iterator[str]:
    policy, known = cfg["policy"], schema.declared()["policy"]["vllm"]
    given = [name for name, key in known.items() if policy["vllm"][name] != key.default]
    if given or policy["engine"] != "transformers":
        from conf.check_engine import findings  # here: few runs have one

        yield from findings(policy, given)


def _packages(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield one line on all optional packages that are needed and not there; none is imported."""
    nodes = [node for path, node in walk(cfg) if path != "tracker" or cfg["mode"] == "train"]
    packages = ["peft"] * bool(cfg["policy"]["lora"]["r"]) + [*map(package_of, nodes)]
    packages += ["vllm"] * (cfg["policy"]["engine"] == "vllm" and not cfg["policy"]["vllm"]["url"])
    missing = [name for name in dict.fromkeys(packages) if name and find_spec(name) is None]
    if missing:
        yield "; ".join(EXTRAS[name] for name in missing)
    kind = cfg["tracker"].get("kind")  # of tracker=accelerate
    if kind and cfg["mode"] == "train" and find_spec(kind) is None:
        yield f"tracker.kind={kind} needs its package: pip install {kind.replace('_', '-')}"


def _disk(cfg: dict[str, Any]) -> Iterator[str]:
    folder, policy = cfg["output_dir"], cfg["policy"]
    if folder and not cfg["resume"] and holds_run(Path(folder).expanduser()):
        what = f"output_dir={folder} already holds a run, or files that one would replace"
        yield f"{what}; go on with it by resume={folder}, or name another folder"
    for key, name in ("policy.model", policy["model"]), ("kl.reference", cfg["kl"]["reference"]):
        if name is not None and not name.startswith(PREFIX):
            from policies.models import no_model, too_few_positions

            if fault := no_model(name):
                yield f"{key}: {fault}"
            elif key == "policy.model" and policy["_target_"] == "policies.load_policy":
                prompt, new = policy["max_prompt_tokens"], policy["max_new_tokens"]
                yield from too_few_positions(name, prompt=prompt, new=new)
    experiments = sorted(path.stem for path in (names.FOLDER / "experiment").glob("*.yaml"))
    for key, value in walk_texts(cfg):
        if value.startswith(PREFIX) and value.removeprefix(PREFIX) not in experiments:
            yield f"{key}={value}: there is no such experiment, only {', '.join(experiments)}"
    if policy["chat_template"] is not None:
        from policies.chats.known_templates import read_template

        try:
            read_template(policy["chat_template"])
        except ValueError as error:
            yield f"policy.chat_template: {error}"


def _unnamed(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each _target_ that is no dotted name; all other findings take them for such."""
    for path, node in walk(cfg):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)+", target):
            got = "null" if target is None else f"{target!r:.80}"
            yield f"expected {path}._target_ to be <module>.<name>, as envs.tasks.Facts; got {got}"


def foreign(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each node that names what is no part of leash for its place, unless all may be named.

    The parent asks before it starts a run, and a worker that has no parent.
    """
    if cfg["allow_targets"]:
        return
    yield from _unnamed(cfg)
    leave = "set allow_targets=true if you trust it"
    if cfg.get("resume"):
        leave = f"{leave}; it is to be said again: this folder may be somebody else's"
    for path, node in walk(cfg):
        value = node["_target_"]
        if value in parts()["programs"]:
            what = "starts any program or imports any module that its arguments name"
            yield f"{path}._target_={value} {what}; {leave}"
        elif not is_ours(value.rpartition(".")[0]):
            ours = ", ".join(PACKAGES)
            yield f"{path}._target_={value}: expected code of {ours}; {leave}"
        elif not belongs(value, path):
            close = difflib.get_close_matches(value, parts_at(path), n=2, cutoff=0)
            hint = f"; did you mean {' or '.join(close)}?" if close else ", which takes none"
            from conf.hints import known_elsewhere

            hint = known_elsewhere(value) or hint
            yield f"{path}._target_={value}: no part of leash for {path}{hint}"


def _nodes(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the nodes: who may be named, and what must not be given."""
    for name, node in cfg["env"]["transforms"].items():
        if node is not None and not is_node(node):
            yield f"expected env.transforms.{name}._target_, got {node!r:.80}; name its class"
    for path, node in walk(cfg["env"]["transforms"], "env.transforms"):
        if is_leash(target := node["_target_"]):
            told = "a run measures and charges the KL itself, by kl.coeff, kl.where, kl.estimator"
            yield f"{path}._target_={target}: {told}; leave it out"
    for path, node in walk(cfg["algorithm"], "algorithm"):
        for key in MADE & set(node):
            yield f"{path}.{key} is made by the run, for all parts alike; leave it out"
    yield from foreign(cfg)
    for path, node in walk({key: cfg[key] for key in ("algorithm", "env")}):
        known = arguments_in_source(node["_target_"])
        for key in node:
            if key[:1] != "_" and known is not None and key not in known:
                yield unknown_argument(f"{path}.{key}", node["_target_"], known)
