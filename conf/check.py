"""Check the rules between keys of a configuration (single keys: conf/keys.yaml), torch-free."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from conf import schema
from conf.build import (
    cells_of,
    check_task_cells,
    data_arguments,
    facts_of,
    find_target,
    has_teacher,
    make_controller,
    make_task,
)
from envs.rewards.validate import check_task, in_one_line
from envs.rows import is_file
from envs.transforms import is_kl_transform
from policies.models.find import no_model
from policies.optional_packages import EXTRAS, package_of
from trainer.kl.estimators import check_place, find_estimator
from trainer.runs.run_files import PREFIX, flatten
from trainer.stopping import read_rule
from trainer.surrogates import SURROGATES

Config = dict[str, Any]
ROOT = schema.FOLDER.parent
PACKAGES = ("policies.", "envs.", "trainer.")  # leash's own


def check(cfg: Config) -> None:
    """Raise ValueError with the first fault of a resolved configuration."""
    responses = _responses if cfg["algorithm"]["rows"] == "prompts" else _no_responses
    first = (_targets, _undeclared, schema.faults, _training, _lora, _dry_run, _ranks)
    rules = (*first, _evaluations, responses, _leash, _distil, _packages_and_models, _parts, _task)
    for rule in rules:
        for fault in rule(cfg):
            raise ValueError(fault)


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and node of every node with a _target_, at any depth."""
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield path, tree
        for key, value in tree.items():
            yield from walk(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from walk(value, f"{path}[{place}]")


def _targets(cfg: Config) -> Iterator[str]:
    """Yield each invalid _target_, and each one outside of leash without allow_targets."""
    for path, node in walk(cfg):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)+", target):
            yield f"expected {path}._target_ to be <module>.<name>, got {target!r:.80}"
            return
        module = ROOT.joinpath(*target.split(".")[:-1])
        exists = module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
        if not (cfg["allow_targets"] or (exists and target.startswith(PACKAGES))):
            yield f"{path}._target_={target} is no code of leash; allow it by allow_targets=true"
        if target == "envs.tasks.Verifiers" and not cfg["allow_targets"]:
            yield f"{path}.name={node['name']} is imported; allow it by allow_targets=true"


def _undeclared(cfg: Config) -> Iterator[str]:
    """Yield each key that leash does not declare, unless a class of the user's own may take it."""
    for group in schema.sections():
        node = cfg[group]
        targets = [part["_target_"] for _, part in walk(node)]
        if group in schema.OPEN and not all(name.startswith(PACKAGES) for name in targets):
            continue  # conf/plan.py refuses it unless an argument has its name
        for name in node.keys() - schema.declared()[schema.part_of(group, node)].keys():
            from conf.unknown_names import nearest  # only errors need it

            key = f"{group}.{name}"
            yield f"there is no key {key}{nearest(key, node[name])}"


def _training(cfg: Config) -> Iterator[str]:
    """Yield the faults between the sizes of a training run's batches and its checkpoints."""
    if cfg["mode"] != "train":
        return
    prompts, ranks = cfg["trainer"]["prompts_per_iteration"], cfg["launch"]["num_processes"]
    minibatches = cfg["algorithm"]["minibatches"]
    if prompts % ranks:
        text = f"trainer.prompts_per_iteration={prompts} to be divisible by"
        yield f"expected {text} launch.num_processes={ranks}: every process plays whole groups"
    if (prompts // ranks) % minibatches:
        text = f"the {prompts // ranks} prompts of a process to split into equal parts"
        yield f"expected {text}, got algorithm.minibatches={minibatches}; change one of them"
    packing, attention = cfg["algorithm"].get("packing"), cfg["policy"]["attn_implementation"]
    if packing and attention not in (None, "sdpa"):
        yield "algorithm.packing needs policy.attn_implementation=null or sdpa"
    saves, evaluates = cfg["checkpoint"]["every"], cfg["eval"]["every"]
    not_evaluated = not evaluates or saves % evaluates
    if cfg["checkpoint"]["keep_best"] and saves and not_evaluated:
        yield f"checkpoint.keep_best needs evaluations at its checkpoints; set eval.every={saves}"


def _lora(cfg: Config) -> Iterator[str]:
    lora = cfg["policy"]["lora"]
    for name, key in schema.declared()["policy"]["lora"].items():
        if not lora["r"] and lora[name] != key.default:
            yield f"policy.lora.{name} is for policy.lora.r > 0, got 0; set it, or leave it out"


def _dry_run(cfg: Config) -> Iterator[str]:
    if cfg["preflight_gpu"] and not cfg["preflight"]:
        yield "preflight_gpu is for preflight=true; add it, or leave preflight_gpu out"
    if cfg["preflight_gpu"] and cfg["launch"]["offload"]:
        yield "preflight_gpu counts shards on GPUs; leave launch.offload out"


def _ranks(cfg: Config) -> Iterator[str]:
    """Yield the faults between the keys of launch.*."""
    launch, ranks = cfg["launch"], cfg["launch"]["num_processes"]
    if launch["in_process"] and ranks > 1:
        yield f"launch.in_process needs launch.num_processes=1, got {ranks}; change one of them"
    shards = launch["strategy"] == "fsdp2" and ranks > 1
    if launch["offload"] and not shards:
        yield "launch.offload needs launch=fsdp2 and launch.num_processes >= 2; leave it out"
    size = launch["shards"]
    if size and not (shards and ranks % size == 0):
        wanted = "launch=fsdp2 and a divisor of launch.num_processes"
        yield f"launch.shards={size} needs {wanted}, got {ranks} ranks; change one of them"
    if shards and cfg["trainer"]["overlap"]:
        yield "trainer.overlap needs launch=ddp; leave it out, or set launch=ddp"


def _evaluations(cfg: Config) -> Iterator[str]:
    """Yield the faults of keys that need evaluations or samples of the reference."""
    held_out, kl, rule = cfg["eval"], cfg["kl"], cfg["trainer"]["stop_at"]
    if cfg["trainer"]["patience"] and not held_out["every"]:
        yield "trainer.patience counts evaluations, got eval.every=0; set eval.every=5, say"
    if rule:
        name, _ = read_rule(rule)
        if name.startswith("eval/") and not held_out["every"]:
            yield f"trainer.stop_at={name} needs evaluations, got eval.every=0; set eval.every=5"
    sft = cfg["algorithm"]["rows"] == "demonstrations"  # see `_anchor`
    measured = f"kl.measure=true{' kl.estimator=full' if sft else ''}"
    frontier = held_out["frontier"]
    samples = held_out["num_samples"] and held_out["temperature"] == 1
    of_start = kl["reference"] is None and kl["reference_temperature"] == 1 and kl["hint"] is None
    one_reference = kl["measure"] and not kl["refresh_every"] and of_start
    if frontier and not (frontier > 1 and samples and one_reference):
        text = "sampled responses (eval.num_samples >= 1, eval.temperature=1) and one reference"
        also = f"{measured}, no kl.refresh_every, reference, reference_temperature or hint"
        yield f"eval.frontier={frontier} needs >= 2 {text} ({also}); leave it out"
    frozen = not kl["refresh_every"] and kl["hint"] is None
    if held_out["forward_kl"] and not (frozen and (kl["measure"] or cfg["mode"] == "evaluate")):
        also = f"{measured}, no kl.refresh_every or kl.hint"
        yield f"eval.forward_kl={held_out['forward_kl']} needs one reference ({also}); leave it out"
    if cfg["mode"] in ("train", "evaluate"):  # other modes do not need the files
        yield from _retain(held_out)


def _retain(held_out: Config) -> Iterator[str]:
    """Yield the faults of the prompts to retain; the worker reads data sets of the hub."""
    if (data := held_out["retain"]) is None:
        return
    if not held_out["forward_kl"]:
        remedy = "set eval.forward_kl=1, or eval.retain=null"
        yield f"eval.retain={data} is for eval.forward_kl, got 0; {remedy}"
    elif all(map(is_file, [data] if isinstance(data, str) else data)):
        find_target("envs.tasks.dataset.prompts_to_retain")(data)  # raises a fault


def _leash(cfg: Config) -> Iterator[str]:
    """Yield the faults between the keys of kl.* and of teacher.*."""
    kl = cfg["kl"]
    if kl["refresh_decay"] and not kl["refresh_every"]:
        yield f"kl.refresh_decay={kl['refresh_decay']} needs kl.refresh_every, got 0; set it to 1"
    if kl["refresh_every"] and kl["reference"] is not None:
        yield "kl.refresh_every moves the reference; leave it out, or kl.reference"
    if kl["refresh_every"] and not kl["measure"]:
        yield "kl.refresh_every needs a reference, got kl.measure=false; set kl.measure=true"
    teacher = cfg["teacher"]
    if isinstance(teacher["reference"], dict) != (teacher["column"] is not None):
        text = "several teachers need the column that chooses one, and one needs none"
        yield f"{text}; give teacher.reference={{math: <model>}} and teacher.column, or neither"
    if isinstance(teacher["reference"], dict) and teacher["hint"] is not None:
        yield "teacher.hint is for one teacher; leave it out"
    for section in ("kl", "teacher") if has_teacher(cfg) else ("kl",):
        own, name = cfg[section], cfg[section]["estimator"]
        if isinstance(name, str):
            options = {"allow_biased": own["allow_biased"], "section": section}
            check_place(own["where"], name, **options)  # raises a fault, like the next line
        make_controller(own, section, **facts_of(cfg))
        yield from _hint(cfg, section)
    if make_controller(kl, **facts_of(cfg)).follows_kl and not kl["measure"]:
        yield f"kl.controller={kl['controller']} follows the measured KL; set kl.measure=true"
    if _largest_coeff(kl) > 0 and not kl["measure"]:
        key = "coeff" if kl["coeff"] else "end"
        yield f"kl.{key}={kl[key]} needs the reference; set kl.measure=true"


def _largest_coeff(kl: Config) -> float:
    """Return the largest coefficient that a constant or linear controller sets."""
    return kl["coeff"] if kl["controller"] == "constant" else max(kl["coeff"], kl["end"] or 0)


def _hint(cfg: Config, section: str) -> Iterator[str]:
    """Yield the faults between the hint of a reference and other keys."""
    if cfg[section]["hint"] is None:
        return
    if (turns := cfg["env"]["max_turns"]) > 1:
        yield f"{section}.hint is for chats of one turn, got env.max_turns={turns}; leave it out"
    if cfg["launch"]["strategy"] == "fsdp2" and cfg["launch"]["num_processes"] > 1:
        yield f"{section}.hint needs launch=ddp, got fsdp2; leave one of them out"


def _distil(cfg: Config) -> Iterator[str]:
    """Yield the faults of a run whose loss is only its KLs."""
    kl, objective = cfg["kl"], cfg["algorithm"]["objective"].get("_target_")
    if objective != "trainer.DistilObjective":
        return
    leashes = {"kl": kl, "teacher": cfg["teacher"]} if has_teacher(cfg) else {"kl": kl}
    start = kl["reference"] is None and kl["hint"] is None and kl["reference_temperature"] == 1
    if len(leashes) == 1 and start:
        yield "algorithm=distil needs a teacher; give kl.reference or teacher.reference"
    for section, leash in leashes.items():
        if leash["where"] == "reward":
            yield f"algorithm=distil needs {section}.where=loss or sequence, got reward"
    if not any(map(_largest_coeff, leashes.values())):
        wrong = " and ".join(f"{section}.coeff=0" for section in leashes)
        yield f"algorithm=distil learns from the KL alone, got {wrong}; leave it out"


def _no_responses(cfg: Config) -> Iterator[str]:
    kl, algorithm, text = cfg["kl"], cfg["algorithm"], "this algorithm samples no responses"
    none = {"coeff": 0, "measure": False, "controller": "constant"}
    wrong = [key for key in none if kl[key] != none[key]]
    if kl["measure"] and algorithm["rows"] == "demonstrations":
        yield from _anchor(cfg)
    elif wrong:
        instead = " ".join(f"kl.{key}={schema.word(none[key])}" for key in wrong)
        yield f"{text} to charge a KL on; give {instead}"
    for key in ("target_kl", "entropy_coeff", "entropy_target", "after_rollout"):
        if algorithm[key]:
            yield f"{text}, which algorithm.{key} is for; leave it out"


def _anchor(cfg: Config) -> Iterator[str]:
    """Yield the faults of a KL that SFT measures on demonstrations."""
    kl, why = cfg["kl"], "SFT has the states of demonstrations, and no samples of the policy"
    named = kl["estimator"]
    if isinstance(named, str) and find_estimator(named).needs != "vocabulary":
        remedy = "kl.estimator=forward (or full), or kl.coeff=0 kl.measure=false"
        yield f"kl.estimator={named}: {why}; give {remedy}"
    if kl["where"] != "loss":
        yield f"expected kl.where=loss, got {kl['where']}: {why}"
    if kl["hint"] is not None or make_controller(kl, **facts_of(cfg)).follows_kl:
        yield f"expected no kl.hint, and kl.controller=constant or linear: {why}"


def _responses(cfg: Config) -> Iterator[str]:
    algorithm, size, policy = cfg["algorithm"], cfg["algorithm"]["group_size"], cfg["policy"]
    if cfg["trainer"]["overlap"] and not (policy["engine"] or {}).get("url"):
        why = "a server samples while this process trains"
        yield f"trainer.overlap needs an engine with policy.engine.url: {why}; leave it out"
    critic = algorithm.get("critic")
    compares = algorithm.get("baseline", "none") != "none" or algorithm.get("scale_by_std")
    if not critic and size < 2 and compares:
        yield f"a group baseline needs algorithm.group_size >= 2, got {size}: advantages are 0"
    if cfg["mode"] == "train":
        if policy["temperature"] <= 0:
            yield "expected policy.temperature > 0, got 0: greedy responses of a group are the same"
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            if policy[name] != off:
                why = "its KL is not that of the samples (docs/kl_estimators.md)"
                yield f"expected policy.{name}={off} in training, got {policy[name]}: {why}"
    turns, limit = cfg["env"]["max_turns"], policy["max_new_tokens"]
    for path, function in walk(algorithm["after_rollout"], "algorithm.after_rollout"):
        if turns > 1 and function.get("max_tokens") == limit:  # trainer.OverlongPenalty
            yield f"{path} is of all {turns} turns; give {path}.max_tokens={limit * turns}"
    name, steps = algorithm.get("surrogate", "clip"), algorithm["epochs"] * algorithm["minibatches"]
    if isinstance(name, str) and SURROGATES[name].one_step and steps > 1:
        text = f"algorithm.surrogate={name} has no ratio for responses of an older policy"
        yield f"{text}, got {steps} steps a batch; set epochs=1 and minibatches=1"


def _packages_and_models(cfg: Config) -> Iterator[str]:
    """Yield each missing optional package and model; loads none."""
    policy = cfg["policy"]
    nodes = [node for path, node in walk(cfg) if path != "tracker" or cfg["mode"] == "train"]
    packages = ["peft"] if policy["lora"]["r"] else []
    packages += [package_of(node) for node in nodes]
    for package in packages:
        if package and find_spec(package) is None:
            yield EXTRAS[package]
    models = flatten({f"{name}.reference": cfg[name]["reference"] for name in ("kl", "teacher")})
    for key, name in {"policy.model": policy["model"], **dict(models)}.items():
        if name and not name.startswith(PREFIX) and (fault := no_model(name)):
            yield f"{key}: {fault}"


def _parts(cfg: Config) -> Iterator[str]:
    """Yield the faults of named nodes."""
    env, functions = cfg["env"], cfg["algorithm"]["after_rollout"]
    named = {f"env.{key}": env[key] for key in ("tools", "transforms", "rewards")}
    named |= {"algorithm.after_rollout": functions or {}, "observers": cfg["observers"]}
    for where, nodes in named.items():
        for name, node in (nodes if isinstance(nodes, dict) else {"<name>": nodes}).items():
            if node is not None and not (isinstance(node, dict) and "_target_" in node):
                yield f"expected {where}.{name} to be {{_target_: <class>}}, got {node!r:.80}"
    if any(env["tools"].values()) and env["max_turns"] < 2:
        yield "env.tools needs env.max_turns >= 2, one for a call and one for the answer, got 1"
    for path, node in walk(env["transforms"], "env.transforms"):
        if is_kl_transform(node["_target_"]):
            why = "a run measures and charges the KL itself, by kl.coeff, kl.where, kl.estimator"
            yield f"{path}._target_={node['_target_']}: {why}; leave it out"
    for name, node in env["rewards"].items():
        function = node and node.get("function")
        if isinstance(function, dict) and function.get("_partial_") is not True:
            yield f"expected _partial_: true next to env.rewards.{name}.function._target_, got none"


def _task(cfg: Config) -> Iterator[str]:
    """Yield the faults of the task and its local files; the worker reads data sets of the hub."""
    env, name = cfg["env"], cfg["env"]["task"].get("_target_")
    if name is None:
        yield "expected env.task._target_, e.g. envs.tasks.SortDigits; got none"
        return
    try:
        known = data_arguments(env)
    except Exception as error:  # importing a user's module may raise anything
        yield f"env.task._target_={name}: {in_one_line(error)}"
        return
    columns = {k: v for k, v in env["columns"].items() if v is not None}
    for key, value in {**env, "columns": columns}.items():
        if key in ("dataset", "eval_dataset", "columns") and value and key not in known:
            yield f"env.{key}={value}: {name} reads none; use env=gsm8k, env=chats or env=own"
    if all(map(is_file, _data_sets(env))):
        rows, held_out = cfg["algorithm"]["rows"], cfg["eval"]
        judged = rows == "prompts" or held_out["num_samples"] or held_out["greedy"]
        judged = judged and cfg["algorithm"]["needs_reward"]
        cells = cells_of(cfg) if cfg["mode"] == "train" else None  # other modes have other rows
        try_task(json.dumps([env, cells]), rows, bool(judged))


def _data_sets(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the data sets of an env and of its nested tasks."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _data_sets(value)
        elif key in ("dataset", "eval_dataset") and value:
            yield from [value] if isinstance(value, str) else value


@lru_cache(maxsize=8)  # for the jobs of a sweep; errors are not cached
def try_task(made_of: str, rows: str, rewards: bool) -> None:
    """Build a task, read the rows of algorithm.rows; raise ValueError with the first fault."""
    node, cells = json.loads(made_of)
    method = None if rows == "prompts" else rows  # the task's method that returns the rows
    make, target = partial(make_task, node), node["task"]["_target_"]
    check_task_cells(check_task(make, target, rows=method, rewards=rewards), cells)
