"""The parts of a run that a configuration names by `_target_`."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trainer.runs.run_files import dig, is_sweep, load_run, read_yaml

DATA = ("dataset", "eval_dataset", "columns", "split", "eval_split")  # keys of env for its task
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def build(node: Mapping[str, Any] | DictConfig, **parts: Any) -> Any:
    """Make what a node's _target_ names, with those of `parts` that it takes.

    A fault in it is raised as it is, not in Hydra's wrapping.
    """
    try:
        taken = inspect.signature(kind := find(node["_target_"])).parameters
        named = {*taken, *arguments_of(kind)}  # with those that a class hands on to its base
        parts = {k: v for k, v in parts.items() if k in named}
        make = instantiate(node, _partial_=True)  # given to Hydra, a dataclass would become a node
        return make(**parts)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def taken(function: Callable[..., Any], *nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of `nodes` that a function takes, by their name only."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: node[name] for node in nodes for name in node if name in names}


def make_task(env: Mapping[str, Any]) -> Any:
    """Return the task that a resolved `env` names, with those keys of DATA that it takes.

    With `rewards` it is an `envs.rewards.Rewarded`.
    """
    task = build({"_convert_": "all", **env["task"]}, **data_arguments(env))
    if not (rewards := env.get("rewards")):
        return task
    made = {name: _make_reward(name, node) for name, node in rewards.items()}
    return find("envs.rewards.Rewarded")(task, made, task_weight=env["task_weight"])


def _make_reward(name: str, node: Mapping[str, Any]) -> Any:
    """Return what env.rewards.<name> names; a ValueError of its constructor says the name."""
    try:
        return build({"_convert_": "all", **node})
    except ValueError as error:
        raise ValueError(f"env.rewards.{name}: {error}") from error


def make_env(cfg: DictConfig, task: Any, policy: Any) -> Any:
    """Return the chats over a task, seen through the transforms of `env` in their order.

    Imports torch: for the process that trains.
    """
    from envs import ChatEnv

    env: Any = ChatEnv(
        task,
        group_size=cfg.algorithm.group_size,
        max_turns=cfg.env.max_turns,
        system_prompt=policy.system_prompt,
    )
    for name, node in cfg.env.transforms.items():
        if node is None:
            continue
        if "_target_" not in node:
            raise ValueError(f"expected env.transforms.{name}._target_, got none; name its class")
        env = env.append_transform(build({"_convert_": "all", **node}))
    return env


def data_arguments(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keys of DATA that the task's constructor names and env.task does not give.

    What it hands on by **keywords counts where a base names it.
    """
    parameters = inspect.signature(kind := find(env["task"]["_target_"])).parameters
    names = set(parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names |= arguments_of(kind)
    return {key: env[key] for key in DATA if key in names and key not in env["task"]}


def arguments_of(kind: Any) -> set[str]:
    """Return the arguments that the constructors of a class and of its bases name.

    >>> sorted(arguments_of(find("envs.tasks.SortDigits")) - {"seed"})
    ['max_digits', 'min_digits', 'num_rows']
    """
    made_by = [vars(base).get("__init__") for base in getattr(kind, "__mro__", ())[:-1]]
    signatures = [inspect.signature(function) for function in made_by if function]
    return {p.name for s in signatures for p in list(s.parameters.values())[1:] if p.kind in NAMED}


def find(target: str) -> Any:
    """Return what a `_target_` names; a module without that name is a ValueError."""
    module, _, name = target.rpartition(".")
    if not module:
        raise ValueError(f"expected <module>.<name>, got {target!r}")
    home = import_module(module)
    if not hasattr(home, name):
        names = getattr(home, "__all__", [n for n in vars(home) if not n.startswith("_")])
        close = difflib.get_close_matches(name, names, n=1)
        raise ValueError(f"{module} has no {name}{f'; did you mean {close[0]}?' if close else ''}")
    return getattr(home, name)


def make_observers(cfg: DictConfig, runtime: Any) -> Any:
    """Return who watches the run: tracker, diagnosis, report and terminal, on rank 0."""
    import trainer
    from trainer.reports.diagnosis import Diagnose
    from trainer.reports.display import show_run
    from trainer.reports.live import LiveReport

    if not runtime.is_main:
        return trainer.Observer()
    everyone = trainer.Observers()
    everyone.each = [
        make_tracker(cfg, runtime.folder),
        Diagnose(runtime, everyone),
        LiveReport(runtime.folder),
        show_run(runtime, cfg.trainer.num_iterations),
    ]
    return everyone


def make_tracker(cfg: DictConfig, folder: Path) -> Any:
    """Return the tracker, told what the run is called and which sweep it belongs to."""
    run, objective = load_run(folder), cfg.algorithm.objective._target_.rpartition(".")[2]
    sweep = folder.parent if is_sweep(folder.parent) else None
    mode, model = cfg.get("mode") or "train", Path(cfg.policy.model)
    if model.name == "model":  # of another run
        model = model.parent
    return build(
        cfg.tracker,
        folder=str(folder),
        config=OmegaConf.to_container(cfg),
        name=" ".join([run.experiment, *_telling(run.overrides, sweep)]),
        group=f"{sweep.parent.name}/{sweep.name}" if sweep else None,
        tags=[run.experiment, model.name, objective],
        job_type="sft" if mode == "train" and objective == "SFTObjective" else mode,
        resume=cfg.resume is not None,
    )


def make_leash(cfg: DictConfig) -> Any:
    """Return the one object that charges the KL, made from `kl.*`; imports torch."""
    import trainer

    steer = trainer.make_kl_controller
    controller = steer(**taken(steer, cfg.kl), total=cfg.trainer.num_iterations)
    kl = cfg.kl
    return trainer.Leash(controller, kl.estimator, kl.where, allow_biased=kl.allow_biased)


def make_source(cfg: DictConfig, **parts: Any) -> Any:
    """Return where batches come from, with the verbs of algorithm.after_rollout."""
    parts["micro_batch_tokens"] = cfg.trainer.micro_batch_tokens
    named = (cfg.algorithm.after_rollout or {}).values()
    verbs = [build(node, **parts) for node in named]
    size = cfg.trainer.prompts_per_iteration
    return build(cfg.algorithm.source, size=size, after_rollout=verbs, **parts)


def _telling(overrides: Mapping[str, str], sweep: Path | None) -> list[str]:
    """Return the overrides that tell a run from others; within a sweep those that are swept."""
    words = dig(read_yaml(sweep / "multirun.yaml"), "hydra", "overrides", "task") if sweep else None
    several = [word for word in words or [] if "," in word or "(" in word]
    swept = {word.partition("=")[0].lstrip("+") for word in several}
    hidden = ("experiment", "output_dir", "tracker")  # told elsewhere
    told = [key for key in overrides if key.partition(".")[0] not in hidden]
    return [f"{key}={overrides[key]}" for key in told if not swept or key in swept]


def make_reference(cfg: DictConfig, policy: Any) -> Any:
    """Return what the KL is to, scored in parts as large as the update's.

    Imports torch: for the process that trains.
    """
    import policies
    import trainer

    kl, limit = cfg.kl, cfg.trainer.micro_batch_tokens
    if not kl.measure:
        return trainer.NoReference()
    moves = kl.refresh_every > 0
    model = policies.load_reference(policy, kl.reference, moves=moves, micro_batch_tokens=limit)
    return trainer.Reference(policy, model, every=kl.refresh_every, decay=kl.refresh_decay)
