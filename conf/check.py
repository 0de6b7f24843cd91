"""What a resolved configuration must fulfil before any model is loaded: all that needs two keys.

What a key may be by itself is in conf/keys.yaml. Needs no torch and no Hydra.
"""

import inspect
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf import schema
from conf.build import data_arguments, find_target, make_task
from envs.data import is_file, load_table
from envs.rewards.trl_function import is_of_trl
from envs.rewards.validate import complaint, in_one_line
from envs.transforms import is_leash
from policies.chats.templates import read_template
from policies.models import no_model, too_few_positions
from policies.optional_packages import EXTRAS, package_of
from trainer.early_stopping import read_rule
from trainer.kl_control import faults_of
from trainer.metric_names import unknown
from trainer.runs.folders import holds_run, is_main_rank
from trainer.runs.run_files import PREFIX

Config = dict[str, Any]
ROOT = schema.FOLDER.parent
PACKAGES = ("policies", "envs", "trainer")  # of leash
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
# What a source of batches asks of a task; rollouts ask for a reward.
ROWS = {"trainer.Demonstrations": "demonstrations", "trainer.PreferencePairs": "preferences"}


def check(cfg: Config) -> None:
    """Raise ValueError with the first thing that is wrong in a resolved configuration."""
    rules = (_targets, schema.faults, _launch, _batches, _evaluation)
    algorithm = (_no_replies,) if is_silent(cfg) else (_replies, _surrogate, _leash)
    for rule in (*rules, *algorithm, _engine, _packages, _models, _parts, _task):
        for fault in rule(cfg):
            raise ValueError(fault)


def is_silent(cfg: Config) -> bool:
    """Return whether what is learnt from samples no replies."""
    return str(cfg["algorithm"]["source"].get("_target_")).rpartition(".")[2] in SILENT


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and node of every node with a _target_, within lists and other nodes too.

    >>> [path for path, _ in walk({"a": {"_target_": "x.y", "b": [{"_target_": "x.z"}]}})]
    ['a', 'a.b[0]']
    """
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield path, tree
        for key, value in tree.items():
            yield from walk(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from walk(value, f"{path}[{place}]")


def _targets(cfg: Config) -> Iterator[str]:
    """Yield each _target_ that is no dotted name, or no code of leash unless all may be named."""
    for path, node in walk(cfg):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)+", target):
            example = f"<module>.<name>, as envs.tasks.Facts; got {target!r:.80}"
            yield f"expected {path}._target_ to be {example}"
        elif not cfg["allow_targets"] and not is_ours(target.rpartition(".")[0]):
            what = f"{path}._target_={target}: expected code of {', '.join(PACKAGES)}"
            yield f"{what}; set allow_targets=true if you trust it"


def is_ours(module: str) -> bool:
    """Return whether a dotted name is a module of leash, not something that one imports.

    >>> is_ours("envs.tasks"), is_ours("policies.cache.os"), is_ours("os")
    (True, False, False)
    """
    path = ROOT.joinpath(*module.split("."))
    exists = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return module.partition(".")[0] in PACKAGES and exists


def _batches(cfg: Config) -> Iterator[str]:
    if cfg["mode"] != "train":  # it plays no batches
        return
    prompts, ranks = cfg["trainer"]["prompts_per_iteration"], cfg["launch"]["num_processes"]
    parts, saved, every = cfg["algorithm"]["minibatches"], cfg["checkpoint"], cfg["eval"]["every"]
    if prompts % ranks:
        what = f"trainer.prompts_per_iteration={prompts} to be divisible by"
        yield f"expected {what} launch.num_processes={ranks}: every process plays whole groups"
    if (prompts // ranks) % parts:
        what = f"the {prompts // ranks} prompts of a process to split into equal parts"
        yield f"expected {what}, got algorithm.minibatches={parts}; change one of them"
    if saved["keep_best"] and saved["every"] and (not every or saved["every"] % every):
        what = "checkpoint.keep_best needs an evaluation at each checkpoint"
        yield f"{what}, got eval.every={every}; set eval.every={saved['every']}"


def _launch(cfg: Config) -> Iterator[str]:
    launch, ranks = cfg["launch"], cfg["launch"]["num_processes"]
    here, cores = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)), os.cpu_count() or 1
    if here > CROWD * cores:
        yield f"expected launch.num_processes for the {cores} cores of this machine, got {here}"
    shards = launch["strategy"] == "fsdp2" and ranks > 1
    if launch["offload"] and not shards:
        yield "launch.offload needs launch=fsdp2 and launch.num_processes >= 2; leave it out"
    if shards and cfg["trainer"]["overlap"]:
        yield "trainer.overlap needs launch=ddp; leave it out, or set launch=ddp"
    if ranks > 1 and cfg["mode"] in ("chat", "export"):
        yield f"mode={cfg['mode']} is one process, got launch.num_processes={ranks}; set it to 1"


def _evaluation(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the ends of a run that evaluations decide, and with eval.limit."""
    kl, held_out = cfg["kl"], cfg["eval"]
    rule, drawn, greedy = cfg["trainer"]["stop_at"], held_out["num_samples"], held_out["greedy"]
    if cfg["trainer"]["patience"] and not held_out["every"]:
        yield "trainer.patience counts evaluations, got eval.every=0; set eval.every=5, say"
    if rule:
        name, _ = read_rule(rule)
        if (hint := unknown(name)) and not cfg["allow_targets"]:
            yield f"trainer.stop_at: there is no metric {name}{hint}"
        one = {"sampled": drawn, "greedy": greedy, "pass": drawn > 1}
        kind = re.match(r"eval/([a-z]+)", name)
        if kind and not (held_out["every"] and one.get(kind[1], drawn or greedy)):
            got = f"eval.every={held_out['every']}, eval.num_samples={drawn}, eval.greedy={greedy}"
            yield f"trainer.stop_at: evaluations of this run have no {name}, got {got}"
    if not (limit := held_out["limit"]):
        return
    what = f"eval.limit={limit} is of replies at temperature 1 of one reference that is measured"
    wrong = {
        "an algorithm that samples none": is_silent(cfg),
        "kl.measure=false": not kl["measure"],
        "kl.refresh_every": kl["refresh_every"],
        "kl.reference; run python -m trainer.reports <run folder> --limit": kl["reference"],
        "eval.num_samples=0": not drawn,
        "eval.temperature": held_out["temperature"] != 1,
        "1 reply a row, where best-of-n needs 2": limit == 1,
    }
    for got in (reason for reason, holds in wrong.items() if holds):
        yield f"{what}, got {got}; leave one of them out"


def _no_replies(cfg: Config) -> Iterator[str]:
    kl, algorithm, what = cfg["kl"], cfg["algorithm"], "this algorithm samples no replies"
    none = {"coeff": 0, "measure": False, "controller": "constant"}
    if wrong := [key for key in none if kl[key] != none[key]]:
        got = ", ".join(f"kl.{key}={str(kl[key]).lower()}" for key in wrong)
        instead = " ".join(f"kl.{key}={str(none[key]).lower()}" for key in wrong)
        like = "sft_own or sft_tiny" if algorithm.get("mask") else "an experiment of it, as rm_tiny"
        yield f"{what} to measure or charge a KL on, got {got}; give {instead}, or take {like}"
    for key in ("target_kl", "entropy_coeff", "entropy_target", "after_rollout"):
        if algorithm[key]:
            yield f"{what}, which algorithm.{key} is for; leave it out"
    if cfg["trainer"]["overlap"]:
        yield f"{what} that trainer.overlap could sample ahead; leave it out"


def _replies(cfg: Config) -> Iterator[str]:
    algorithm, size, policy = cfg["algorithm"], cfg["algorithm"]["group_size"], cfg["policy"]
    critic = algorithm.get("critic")
    if cfg["trainer"]["overlap"] and not (policy["engine"] == "vllm" and policy["vllm"]["url"]):
        why = "a server samples while this process trains"
        yield f"trainer.overlap needs policy.engine=vllm and policy.vllm.url: {why}; leave it out"
    if critic and critic["kind"] == "separate" and critic["detach"]:
        yield "algorithm.critic.detach is for a head; a separate critic has none: set it false"
    if not critic and size < 2 and (algorithm["baseline"] != "none" or algorithm["scale_by_std"]):
        yield f"a group baseline needs algorithm.group_size >= 2, got {size}: advantages are 0"
    if policy["temperature"] <= 0 and cfg["mode"] == "train":
        yield "expected policy.temperature > 0, got 0: greedy replies of a group are all the same"
    for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        if policy[name] != off and cfg["mode"] == "train":
            why = "the log-probs that are trained on are of the whole distribution"
            yield f"expected policy.{name}={off} in training, got {policy[name]}: {why}"
    verbs = algorithm["after_rollout"] or {}
    if not isinstance(verbs, dict) or not all(
        is_node(verb) for verb in filter(None, verbs.values())
    ):
        node = "{drop: {_target_: trainer.DropTruncated}}"
        yield f"expected algorithm.after_rollout to be names with nodes, {node}, got {verbs!r}"
        return
    turns, limit = cfg["env"]["max_turns"], policy["max_new_tokens"]
    for name, verb in verbs.items():
        penalty = verb and "OverlongPenalty" in verb["_target_"]
        if turns > 1 and penalty and verb.get("max_tokens") == limit:
            key = f"algorithm.after_rollout.{name}.max_tokens"
            yield f"{key} is of all {turns} turns, got that of one; give {key}={limit * turns}"


def _surrogate(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the bounds of a surrogate; those that it does not read are told."""
    algorithm = cfg["algorithm"]
    name, known = algorithm.get("surrogate", "clip"), schema.declared()["algorithm=grpo"]
    most, least = algorithm["dual_clip"], 1 + algorithm["clip_high"]
    if name == "clip" and most is not None and not most > least:
        yield f"expected algorithm.dual_clip > 1 + clip_high = {least:g}, or null, got {most}"
    steps = algorithm["epochs"] * algorithm["minibatches"]
    if name == "reinforce" and steps > 1:
        what = "algorithm.surrogate=reinforce has no ratio for replies of an older policy"
        yield f"{what}, got {steps} steps a batch; set epochs=1 and minibatches=1"
    for key in dict.fromkeys(key for keys in READ.values() for key in keys):
        default = known[key].default
        if key not in READ[name] and algorithm.get(key, default) != default:
            owners = " or ".join(owner for owner, keys in READ.items() if key in keys)
            yield f"algorithm.{key} is for surrogate={owners}, got surrogate={name}; leave it out"


def _leash(cfg: Config) -> Iterator[str]:
    replies = cfg["trainer"]["prompts_per_iteration"] * cfg["algorithm"]["group_size"]
    yield from faults_of(cfg["kl"], replies=replies)


def _engine(cfg: Config) -> Iterator[str]:
    policy, known = cfg["policy"], schema.declared()["policy"]["vllm"]
    given = [name for name, key in known.items() if policy["vllm"][name] != key.default]
    if policy["engine"] == "transformers":
        for name in given:
            yield f"policy.vllm.{name} is for policy.engine=vllm; give that, or leave it out"
        return
    for name in given if policy["vllm"]["url"] else ():
        if name not in ("url", "dtype", "tolerance"):
            option = f"--{name.replace('_', '-')}"
            yield f"policy.vllm.{name} is the server's to set: give `vllm serve` {option} instead"
    if policy["_target_"] == "policies.load_reward_model":
        yield "policy.engine=vllm samples replies, a reward model gives none; leave it out"


def _packages(cfg: Config) -> Iterator[str]:
    """Yield one line on all optional packages that are needed and missing; none is imported."""
    nodes = [node for path, node in walk(cfg) if path != "tracker" or cfg["mode"] == "train"]
    packages = ["peft"] * bool(cfg["policy"]["lora"]["r"]) + [*map(package_of, nodes)]
    packages += ["vllm"] * (cfg["policy"]["engine"] == "vllm" and not cfg["policy"]["vllm"]["url"])
    if missing := [name for name in dict.fromkeys(packages) if name and find_spec(name) is None]:
        yield "; ".join(EXTRAS[name] for name in missing)
    kind = cfg["tracker"].get("kind")  # of tracker=accelerate
    if kind and cfg["mode"] == "train" and find_spec(kind) is None:
        yield f"tracker.kind={kind} needs its package: pip install {kind.replace('_', '-')}"


def _models(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the models and the folder that a run names."""
    folder, policy = cfg["output_dir"], cfg["policy"]
    fresh = folder and not cfg["resume"] and cfg["mode"] == "train" and is_main_rank()
    if fresh and holds_run(Path(folder).expanduser()):
        yield f"output_dir={folder} already holds a run; resume it by resume={folder}"
    for key, name in ("policy.model", policy["model"]), ("kl.reference", cfg["kl"]["reference"]):
        if name is None or name.startswith(PREFIX):
            continue
        if fault := no_model(name):
            yield f"{key}: {fault}"
        elif key == "policy.model" and policy["_target_"] == "policies.load_policy":
            prompt, new = policy["max_prompt_tokens"], policy["max_new_tokens"]
            yield from too_few_positions(name, prompt=prompt, new=new)
    if policy["chat_template"] is not None:
        try:
            read_template(policy["chat_template"])
        except ValueError as error:
            yield f"policy.chat_template: {error}"


def is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _parts(cfg: Config) -> Iterator[str]:
    """Yield what nodes of env and algorithm must not be or have."""
    for name, node in cfg["env"]["transforms"].items():
        if node is not None and not is_node(node):
            yield f"expected env.transforms.{name}._target_, got {node!r:.80}; name its class"
    for path, node in walk(cfg["env"]["transforms"], "env.transforms"):
        if is_leash(node["_target_"]):
            why = "a run measures and charges the KL itself, by kl.coeff, kl.where, kl.estimator"
            yield f"{path}._target_={node['_target_']}: {why}; leave it out"
    for path, node in walk(cfg["algorithm"], "algorithm"):
        for key in MADE & set(node):
            yield f"{path}.{key} is made by the run, for all parts alike; leave it out"


def _task(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the task and its data: it is made, and its rows are looked at.

    A data set of the hub is left to the worker.
    """
    env, name = cfg["env"], cfg["env"]["task"].get("_target_")
    if name is None:
        yield "expected env.task._target_, e.g. envs.tasks.SortDigits; got none"
        return
    try:
        known = data_arguments(env)
    except Exception as error:  # importing a user's module may raise anything
        yield f"env.task._target_={name}: {in_one_line(error)}"
        return
    columns = {key: value for key, value in env["columns"].items() if value is not None}
    for key, value in {**env, "columns": columns}.items():
        if key in ("dataset", "eval_dataset", "columns") and value and key not in known:
            yield f"env.{key}={value}: {name} reads none; use env=gsm8k, env=chats or env=own"
    for reward, node in (env.get("rewards") or {}).items():
        yield from _reward(f"env.rewards.{reward}", node)
    tables = [value for value in _data_sets(env) if not is_file(value)]
    files = [Path(value).expanduser() for value in _data_sets(env) if is_file(value)]
    if tables:  # of the hub
        for path in files:
            load_table(str(path))
        return
    stamps = tuple(path.stat().st_mtime_ns for path in files if path.is_file())
    source = cfg["algorithm"]["source"].get("_target_", "")
    if fault := try_task(json.dumps(env), source, stamps):
        yield fault


def _data_sets(node: dict[str, Any]) -> Iterator[str]:
    """Yield the data sets of an env and of the tasks within its task."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _data_sets(value)
        elif key in ("dataset", "eval_dataset") and isinstance(value, str) and value:
            yield value


def _reward(where: str, node: Any) -> Iterator[str]:
    """Yield what is wrong with one of env.rewards: mostly a function where what calls it goes."""
    if not is_node(node):
        yield f"{where}: expected _target_, e.g. envs.rewards.Function; got {node!r:.80}"
        return
    function = node.get("function")
    if isinstance(function, dict) and function.get("_partial_") is not True:
        yield f"{where}.function: expected _partial_: true beside its _target_, got none"
    try:
        found = find_target(name := node["_target_"])
    except Exception as error:  # importing a user's module may raise anything
        yield f"{where}: {in_one_line(error)}"
        return
    if inspect.isfunction(found):
        kind = "TRLFunction" if is_of_trl(found) else "Function"
        write = f"{where}={{_target_: envs.rewards.{kind}, function: {{_target_: {name}, "
        yield f"{where}._target_={name} is a function; write '{write}_partial_: true}}}}'"


@lru_cache(maxsize=8)  # a sweep asks for each of its jobs
def try_task(env: str, source: str, stamps: tuple[int, ...]) -> str | None:
    """Return what making a task and reading its rows complains about, or None.

    `stamps`: when its files were changed, for the cache.
    """
    node, rewards = json.loads(env), source == "trainer.Rollouts"
    name = node["task"]["_target_"]
    return complaint(lambda: make_task(node), name, rows=ROWS.get(source), rewards=rewards)
