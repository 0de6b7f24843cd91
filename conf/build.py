"""The parts of a run, made from the nodes of its configuration."""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trainer.early_stopping import EarlyStopping

# Keys of env for its task.
DATA = ("dataset", "eval_dataset", "columns", "split", "eval_split", "match")
ENGINE = ("engine", "vllm")  # keys of policy for its generator
Section = Mapping[str, Any]  # of a configuration
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_target(target: str) -> Any:
    """Return what a `_target_` names; a module without that name is a ValueError."""
    module, _, name = target.rpartition(".")
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        missing, here = error.name or "", os.getcwd()
        if missing == module.partition(".")[0]:
            error.msg += f"; expected it in {here}, or in a folder of PYTHONPATH"
        elif f"{module}.".startswith(f"{missing}."):
            ours = Path(__file__).parents[1] / missing.partition(".")[0]
            there = Path(here, *missing.split("."))
            if ours.is_dir() and (there.is_dir() or there.with_suffix(".py").is_file()):
                error.msg += f": {ours.name} is {ours}, not {there.parent}; rename your folder"
        raise
    if not hasattr(home, name):
        names = getattr(home, "__all__", [n for n in vars(home) if not n.startswith("_")])
        close = difflib.get_close_matches(name, names, n=1)
        raise ValueError(f"{module} has no {name}{f'; did you mean {close[0]}?' if close else ''}")
    return getattr(home, name)


def arguments_of(thing: Any) -> tuple[list[str], bool]:
    """Return the arguments that a class or function names, and whether it takes any other.

    A class with **kwargs hands them on: it also has the arguments of its bases.
    """
    parameters = [*inspect.signature(thing).parameters.values()]
    is_open, bases = any(p.kind is p.VAR_KEYWORD for p in parameters), getattr(thing, "__mro__", ())
    made = [base for base in bases[1:-1] if inspect.isfunction(vars(base).get("__init__"))]
    for base in made if is_open else ():
        parameters += inspect.signature(base).parameters.values()
    return list(dict.fromkeys(p.name for p in parameters if p.kind in NAMED)), is_open and not made


def build(node: Section, *sections: Section, **parts: Any) -> Any:
    """Make what a node's _target_ names.

    The target gets the keys of its node, and those of `parts` and `sections` that it names: an
    objective gets algorithm.clip_low. ValueError for an argument that the target does not take.
    """
    node = _plain(node)
    thing = find_target(node["_target_"])
    known, takes_any = arguments_of(thing)
    keys = {name: _plain(s[name]) for s in sections for name in s if name in known}
    node = {name: keys[name] for name in keys if name not in parts} | node
    if not takes_any:
        parts = {name: part for name, part in parts.items() if name in known}
    try:
        return instantiate(node, _partial_=True)(**parts)  # given to Hydra, a dataclass is a node
    except (InstantiationException, TypeError) as error:
        cause = error.__cause__ or error
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
        if unknown and unknown[1] in node:
            takes = f"{node['_target_']} takes {', '.join(known) or 'no arguments'}"
            raise ValueError(f"{unknown[1]}: {takes}") from cause
        raise cause from None


def _plain(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def keys_for(function: Callable[..., Any], *sections: Section) -> dict[str, Any]:
    """Return those keys of `sections` that a function takes by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return {name: section[name] for section in sections for name in section if name in names}


def make_task(env: Section) -> Any:
    """Return the task that a resolved `env` names, with those keys of DATA that it takes.

    With `rewards` it is an `envs.rewards.Rewarded`.
    """
    task = build({"_convert_": "all", **env["task"]}, **data_arguments(env))
    if not (rewards := env.get("rewards")):
        return task
    made = {}
    for name, node in rewards.items():
        try:
            made[name] = build({"_convert_": "all", **node})
        except (TypeError, ValueError) as error:
            raise ValueError(f"env.rewards.{name}: {error}") from error
    return find_target("envs.rewards.Rewarded")(task, made, task_weight=env["task_weight"])


def data_arguments(env: Section) -> dict[str, Any]:
    """Return those keys of DATA that the task's constructor names and env.task does not give."""
    names, _ = arguments_of(find_target(env["task"]["_target_"]))
    return {key: env[key] for key in DATA if key in env and key in names and key not in env["task"]}


def make_runtime(cfg: DictConfig, folder: Path) -> Any:
    """Return what joins this rank to the others, by how they hold the weights."""
    kinds = {"ddp": "trainer.Runtime", "fsdp2": "trainer.shards.ShardedRuntime"}
    kind = find_target(kinds[cfg.launch.strategy])
    return kind(folder, **keys_for(kind, cfg, cfg.policy, cfg.launch))


def make_policy(node: Section, **parts: Any) -> Any:
    """Return the policy that a node names; what samples for it is `make_generator`'s."""
    return build({k: v for k, v in node.items() if k not in ENGINE}, **parts)


def make_generator(node: Section, policy: Any, folder: Path) -> Any:
    """Return what samples: the policy itself unless policy.engine says otherwise."""
    if node["engine"] == "transformers":
        return policy
    vllm_beside = find_target("policies.wrappers.vllm_wrapper.vllm_beside")
    return vllm_beside(policy, share=folder / ".engine", **_plain(node["vllm"]))


def make_transforms(cfg: DictConfig) -> dict[str, Any]:
    """Return the transforms of `env` by their names."""
    nodes = ((name, node) for name, node in cfg.env.transforms.items() if node is not None)
    return {name: build({"_convert_": "all", **node}) for name, node in nodes}


def make_env(cfg: DictConfig, task: Any, policy: Any, transforms: Iterable[Any]) -> Any:
    """Return the chats over a task, seen through transforms in their order."""
    sizes = {"group_size": cfg.algorithm.group_size, "max_turns": cfg.env.max_turns}
    env = find_target("envs.ChatEnv")(task, system_prompt=policy.system_prompt, **sizes)
    for transform in transforms:
        env = env.append_transform(transform)
    return env


def make_leash(cfg: DictConfig) -> Any:
    """Return the one object that charges the KL, made from `kl.*`; imports torch."""
    import trainer

    steer, kl = trainer.make_kl_controller, cfg.kl
    controller = steer(**keys_for(steer, kl), total=cfg.trainer.num_iterations)
    return trainer.Leash(controller, kl.estimator, kl.where, allow_biased=kl.allow_biased)


def make_verbs(cfg: DictConfig, **parts: Any) -> dict[str, Any]:
    """Return the verbs of algorithm.after_rollout by their names.

    For replies of another engine trainer.ImportanceSampling is the first, unless one is among them
    or `importance` is null.
    """
    nodes = _plain(cfg.algorithm.after_rollout) or {}
    there = any("ImportanceSampling" in (node or {}).get("_target_", "") for node in nodes.values())
    if cfg.policy.engine != "transformers" and not there:
        nodes = {"importance": {"_target_": "trainer.ImportanceSampling"}} | nodes
    return {name: build(node, cfg.trainer, **parts) for name, node in nodes.items() if node}


def make_source(cfg: DictConfig, verbs: Iterable[Any], **parts: Any) -> Any:
    """Return where batches come from; with trainer.overlap a training run samples ahead."""
    own = {"size": cfg.trainer.prompts_per_iteration, "after_rollout": [*verbs]}
    source = build(cfg.algorithm.source, cfg.algorithm, cfg.trainer, **own, **parts)
    if not cfg.trainer.overlap or cfg.mode != "train" or cfg.preflight:
        return source
    make, total = find_target("trainer.overlap.Overlap"), cfg.trainer.num_iterations
    return make(source, parts["policy"], ahead=cfg.trainer.overlap, num_iterations=total)


def make_reference(cfg: DictConfig, policy: Any) -> Any:
    """Return what the KL is to, scored in parts as large as the update's."""
    import policies
    import trainer

    kl, limit = cfg.kl, cfg.trainer.micro_batch_tokens
    if not kl.measure:
        return trainer.NoReference()
    moves = kl.refresh_every > 0
    model = policies.load_reference(policy, kl.reference, moves=moves, micro_batch_tokens=limit)
    return trainer.Reference(policy, model, every=kl.refresh_every, decay=kl.refresh_decay)


def make_early_stopping(settings: Section) -> Any:
    """Return what ends a run that has learnt enough, None unless `trainer` asks for it."""
    asked = {key: settings[key] for key in ("stop_at", "patience")}
    return EarlyStopping(**asked) if any(asked.values()) else None


def make_observers(cfg: DictConfig, runtime: Any, more: Iterable[Any] = ()) -> Any:
    """Return the observers of rank 0: `observers` first, then tracker, report and terminal."""
    import trainer
    from trainer.reports import diagnosis, display, live

    if not runtime.is_main:
        return trainer.Observer()
    everyone = trainer.Observers()
    own = {"runtime": runtime, "folder": runtime.folder}
    everyone.each = [
        *(build({"_convert_": "all", **node}, **own) for node in cfg.observers.values() if node),
        *more,
        make_tracker(cfg, runtime.folder),
        diagnosis.Diagnose(runtime, everyone),
        live.LiveReport(runtime.folder),
        display.show_run(runtime, cfg.trainer.num_iterations),
    ]
    if "ipykernel" in sys.modules:  # a notebook, see trainer.train
        everyone.each.append(live.CellCurves(runtime.folder))
    return everyone


def make_tracker(cfg: DictConfig, folder: Path) -> Any:
    """Return the tracker of a run folder."""
    told = {"folder": str(folder), "config": OmegaConf.to_container(cfg)}
    node = {key: value for key, value in cfg.tracker.items() if key != "replies"}  # of the loop
    return build(node, **told, resume=cfg.resume is not None)
