"""What a resolved configuration must fulfil before any model is loaded. Needs no torch, no Hydra.

Every finding is one line: expected, got, what to do. What a key may be by itself stands in
conf/schema.py; here is what goes together with what, with this machine, its disk and its packages.
The task of a configuration: conf/check_task.py.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf import check_task, names, schema
from policies.optional_packages import EXTRAS
from trainer.kl_control import MAX_ERROR, check_place
from trainer.runs.experiment_models import PREFIX
from trainer.runs.folders import holds_run
from trainer.runs.targets import PACKAGES, ROOT, walk, walk_texts

LAZY = (*PACKAGES, "envs.transforms")  # their names are known without torch
CROWD = 4  # processes a core, above which there are surely too many
SILENT = ("Demonstrations", "PreferencePairs")  # sources that sample no replies
# Parts of a run that nodes of algorithm.* are handed: never two of them, one leash above all.
MADE = {"leash", "policy", "generator", "runtime", "task", "env", "size"}
# Classes of leash that need an optional package, with the argument that asks for it and its
# default; None: the class itself asks.
ASKING: dict[str, tuple[str, str | None, Any]] = {
    "MathProblems": ("math_verify", "symbolic", True),
    "MATHRewardParser": ("math_verify", "symbolic", False),
    "MCPServer": ("mcp", None, None),
    "RayTransform": ("ray", None, None),
    "RayRetrieveKL": ("ray", None, None),
    "RayKLRewardTransform": ("ray", None, None),
    "ReasoningGym": ("reasoning_gym", None, None),
    "Reviews": ("vaderSentiment", None, None),
    "TensorboardTracker": ("tensorboard", None, None),
    "TrackioTracker": ("trackio", None, None),
    "vLLMWrapper": ("vllm", None, None),
}


def check(cfg: dict[str, Any]) -> None:
    """Raise ValueError with the first thing that is wrong in a resolved configuration."""
    for finding in _findings(cfg):
        raise ValueError(finding)


def _findings(cfg: dict[str, Any]) -> Iterator[str]:
    yield from _unnamed(cfg)
    yield from schema.faults(cfg)
    silent = cfg["algorithm"]["source"]["_target_"].rpartition(".")[2] in SILENT
    for look in (_machine, _batches, _no_replies if silent else _replies, _packages, _disk):
        yield from look(cfg)
    yield from _nodes(cfg)
    yield from check_task.findings(cfg)


def _machine(cfg: dict[str, Any]) -> Iterator[str]:
    ranks, cores = cfg["launch"]["num_processes"], os.cpu_count()
    if ranks > CROWD * (cores or 1):
        yield (
            f"expected launch.num_processes for the {cores} cores of this machine, got {ranks}: "
            "each is a process of its own with a model of its own; lower it"
        )


def _batches(cfg: dict[str, Any]) -> Iterator[str]:
    prompts, ranks = cfg["trainer"]["prompts_per_iteration"], cfg["launch"]["num_processes"]
    parts, saved, every = cfg["algorithm"]["minibatches"], cfg["checkpoint"], cfg["eval"]["every"]
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
    if saved["keep_best"] and saved["every"] and (not every or saved["every"] % every):
        yield (
            f"checkpoint.keep_best needs an evaluation at each checkpoint, got eval.every={every} "
            f"and checkpoint.every={saved['every']}; set eval.every={saved['every']}"
        )


def _no_replies(cfg: dict[str, Any]) -> Iterator[str]:
    kl, algorithm, what = cfg["kl"], cfg["algorithm"], "this algorithm samples no replies"
    if kl["coeff"] > 0:
        yield f"{what} to put a KL on, got kl.coeff={kl['coeff']}; set kl.coeff=0"
    if kl["measure"]:
        yield f"{what} to measure a KL on; set kl.measure=false"
    if kl["controller"] != "constant":
        yield f"{what} to control a KL of; set kl.controller=constant"
    for key in ("target_kl", "entropy_coeff", "entropy_target", "after_rollout"):
        if algorithm[key]:
            yield f"{what}, which algorithm.{key} is for; leave it out"


def _replies(cfg: dict[str, Any]) -> Iterator[str]:
    kl, algorithm, size = cfg["kl"], cfg["algorithm"], cfg["algorithm"]["group_size"]
    critic = algorithm.get("critic")
    if critic and critic["kind"] == "separate" and critic["detach"]:
        yield "algorithm.critic.detach is for a head; a separate critic has none: set it false"
    if not critic and size < 2 and (algorithm["baseline"] != "none" or algorithm["scale_by_std"]):
        yield (
            f"a group baseline needs algorithm.group_size >= 2, got {size}: "
            "alone, every advantage is 0"
        )
    if cfg["policy"]["temperature"] <= 0 and cfg["mode"] == "train":
        yield (
            f"expected policy.temperature > 0 in RL, got {cfg['policy']['temperature']}: greedy "
            "replies of a group are all the same"
        )
    yield from _bounds(algorithm)
    yield from _parts(cfg)
    yield from _leash(kl, replies=cfg["trainer"]["prompts_per_iteration"] * size)


def _bounds(algorithm: dict[str, Any]) -> Iterator[str]:
    most, least = algorithm["dual_clip"], 1 + algorithm["clip_high"]
    if most is not None and not most > least:
        yield (f"expected algorithm.dual_clip > 1 + clip_high = {least:g}, or null, got {most}")
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


def _parts(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the verbs after a rollout."""
    verbs = cfg["algorithm"]["after_rollout"] or {}
    if not isinstance(verbs, dict) or not all(map(_is_node, verbs.values())):
        yield (
            "expected algorithm.after_rollout to be names with nodes, {drop: {_target_: "
            f"trainer.DropTruncated}}}}, or null, got {verbs!r}"
        )
    turns, limit = cfg["env"]["max_turns"], cfg["policy"]["max_new_tokens"]
    for name, node in verbs.items():
        whole = "OverlongPenalty" in node.get("_target_", "")
        if turns > 1 and whole and node.get("max_tokens") == limit:
            key = f"algorithm.after_rollout.{name}.max_tokens"
            yield f"{key} is of all {turns} turns, got that of one; give {key}={limit * turns}"


def _leash(kl: dict[str, Any], *, replies: int) -> Iterator[str]:
    if kl["refresh_decay"] and not kl["refresh_every"]:
        yield f"kl.refresh_decay={kl['refresh_decay']} needs kl.refresh_every, got 0; set it to 1"
    if kl["refresh_every"] and kl["reference"] is not None:
        yield (
            "kl.refresh_every makes the reference a copy of the policy, got kl.reference="
            f"{kl['reference']}; leave one of them out"
        )
    if kl["refresh_every"] and not kl["measure"]:
        yield "kl.refresh_every needs a reference, got kl.measure=false; set kl.measure=true"
    try:
        check_place(kl["where"], kl["estimator"], allow_biased=kl["allow_biased"])
    except ValueError as error:
        yield str(error)
    steers = kl["controller"]
    for key, owner in (("target", "adaptive"), ("end", "linear")):
        if kl[key] is None and steers == owner:
            yield f"kl.controller={steers} needs kl.{key}, got none; give kl.{key}=..."
        if kl[key] is not None and steers != owner:
            yield f"kl.{key} is for kl.controller={owner}, got {steers}; leave kl.{key} out"
    if steers == "adaptive" and kl["coeff"] == 0:
        yield "kl.controller=adaptive multiplies kl.coeff, which stays 0; start from kl.coeff=0.01"
    if steers == "adaptive" and not kl["measure"]:
        yield "kl.controller=adaptive follows the measured KL; set kl.measure=true"
    if steers == "adaptive" and kl["horizon"] <= MAX_ERROR * replies:
        yield (
            f"expected kl.horizon > {MAX_ERROR * replies:g}, a fifth of an iteration's {replies} "
            f"replies, got {kl['horizon']:g}: the coefficient would not stay positive"
        )
    if max(kl["coeff"], kl["end"] or 0) > 0 and not kl["measure"]:
        yield f"kl.coeff={kl['coeff']} needs the reference; set kl.measure=true"


def _packages(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield one line on all optional packages that are needed and not there; none is imported."""
    packages = dict.fromkeys(needed_packages(cfg))
    if missing := [EXTRAS[package] for package in packages if find_spec(package) is None]:
        yield "; ".join(missing)


def needed_packages(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the optional packages that a resolved configuration asks for.

    A tracker is for training only.

    >>> config = {"mode": "train", "policy": {"lora": {"r": 8}}}
    >>> list(needed_packages({"env": {"_target_": "envs.tasks.Reviews"}, **config}))
    ['peft', 'vaderSentiment']
    """
    if cfg["policy"]["lora"]["r"]:
        yield "peft"
    for path, node in walk(cfg):
        home, _, name = node["_target_"].rpartition(".")
        aside = path == "tracker" and cfg["mode"] != "train"
        if home.partition(".")[0] in PACKAGES and name in ASKING and not aside:
            package, argument, default = ASKING[name]
            if argument is None or node.get(argument, default):
                yield package


def _disk(cfg: dict[str, Any]) -> Iterator[str]:
    folder, policy = cfg["output_dir"], cfg["policy"]
    if folder and not cfg["resume"] and holds_run(Path(folder).expanduser()):
        yield (
            f"output_dir={folder} already holds a run, or files that one would replace; go on with "
            f"it by resume={folder}, or name another folder"
        )
    for key, name in ("policy.model", policy["model"]), ("kl.reference", cfg["kl"]["reference"]):
        if name is not None and not name.startswith(PREFIX):
            from policies.models import no_model

            if fault := no_model(name):
                yield f"{key}: {fault}"
    experiments = sorted(path.stem for path in (names.FOLDER / "experiment").glob("*.yaml"))
    for key, value in walk_texts(cfg):
        if value.startswith(PREFIX) and value.removeprefix(PREFIX) not in experiments:
            there = ", ".join(experiments)
            yield f"{key}={value}: there is no such experiment; there are {there}"
    if policy["_target_"] == "policies.load_policy":
        yield from _positions(policy)
    if policy["chat_template"] is not None:
        from policies.chats.templates import read_template

        try:
            read_template(policy["chat_template"])
        except ValueError as error:
            yield f"policy.chat_template: {error}"


def _positions(policy: dict[str, Any]) -> Iterator[str]:
    """Yield that the longest sequence does not fit into a local model."""
    try:
        config = json.loads((Path(policy["model"]).expanduser() / "config.json").read_text())
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # no local model, or one that load names broken
        return
    prompt, new = policy["max_prompt_tokens"], policy["max_new_tokens"]
    if isinstance(most, int) and (prompt or 1) + new > most:
        asked = f"policy.max_prompt_tokens={prompt} and " if prompt else ""
        yield (
            f"{asked}policy.max_new_tokens={new} make up to {(prompt or 1) + new} tokens, "
            f"{policy['model']} has max_position_embeddings {most}; lower one of them"
        )


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _unnamed(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each _target_ that is no dotted name; all other findings take them for such."""
    for path, node in walk(cfg):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)+", target):
            got = "null" if target is None else f"{target!r:.80}"
            yield f"expected {path}._target_ to be <module>.<name>, as envs.tasks.Facts; got {got}"


def _nodes(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the nodes: who may be named, and what must not be given."""
    for name, node in cfg["env"]["transforms"].items():
        if node is not None and not _is_node(node):
            yield f"expected env.transforms.{name}._target_, got {node!r:.80}; name its class"
    for path, node in walk(cfg["algorithm"], "algorithm"):
        for key in MADE & set(node):
            yield f"{path}.{key} is made by the run, for all parts alike; leave it out"
    for path, node in () if cfg["allow_targets"] else walk(cfg):
        key, value = f"{path}._target_", node["_target_"]
        module, _, name = value.rpartition(".")
        if not _is_ours(module):
            yield (
                f"{key}={value}: expected code of {', '.join(PACKAGES)}; set allow_targets=true "
                "if you trust this configuration"
            )
        elif module in LAZY and name not in (there := import_module(module).__all__):
            close = difflib.get_close_matches(name, there, n=1) or there
            yield f"{key}={value}: {module} has no {name}; did you mean {' or '.join(close)}?"


def _is_ours(module: str) -> bool:
    """Return whether a dotted name is a module of leash, not something that one imports.

    >>> _is_ours("envs.tasks"), _is_ours("policies.cache.os"), _is_ours("os")
    (True, False, False)
    """
    path = ROOT.joinpath(*module.split("."))
    there = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return module.split(".")[0] in PACKAGES and there
