"""Build the parts of a run from the nodes of its configuration; conf/plan.py gives out the keys."""

import difflib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import policies
import trainer
from envs.tasks.task import rewards_anything
from trainer.kl.controllers import CONTROLLERS, KLControllerBase
from trainer.kl.estimators import find_estimator

# Keys of env that are arguments of tasks.
DATA = ("dataset", "eval_dataset", "columns", "split", "eval_split", "skip_bad_rows", "match")
Section = Mapping[str, Any]  # a part of the configuration
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_target(target: str) -> Any:
    """Import the object that a `_target_` names; raise ValueError if its module lacks the name."""
    module, _, name = target.rpartition(".")
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        missing, cwd = error.name or "", os.getcwd()
        if missing == module.partition(".")[0]:
            error.msg += f"; expected it in {cwd}, or in a folder of PYTHONPATH"
        elif f"{module}.".startswith(f"{missing}."):
            ours = Path(__file__).parents[1] / missing.partition(".")[0]
            local = Path(cwd, *missing.split("."))
            if ours.is_dir() and (local.is_dir() or local.with_suffix(".py").is_file()):
                error.msg += f": {ours.name} is {ours}, not {local.parent}; rename your folder"
        raise
    if not hasattr(loaded, name):
        names = getattr(loaded, "__all__", [n for n in vars(loaded) if not n.startswith("_")])
        close = difflib.get_close_matches(name, names, n=1)
        raise ValueError(f"{module} has no {name}{f'; did you mean {close[0]}?' if close else ''}")
    return getattr(loaded, name)


def arguments_of(thing: Any) -> tuple[list[str], bool]:
    """Return the argument names of a class or function, and whether it takes any other name.

    A class with **kwargs also takes the arguments of its base classes.
    """
    parameters = [*inspect.signature(thing).parameters.values()]
    is_open, mro = any(p.kind is p.VAR_KEYWORD for p in parameters), getattr(thing, "__mro__", ())
    bases = [base for base in mro[1:-1] if inspect.isfunction(vars(base).get("__init__"))]
    for base in bases if is_open else ():
        parameters += inspect.signature(base).parameters.values()
    return list(dict.fromkeys(p.name for p in parameters if p.kind in NAMED)), is_open and not bases


def arguments_of_node(node: Section) -> tuple[list[str], bool]:
    """Return `arguments_of` a node's target; raise ValueError for a key that it does not take."""
    names, takes_any = arguments_of(find_target(node["_target_"]))
    unknown = [key for key in node if key not in names and not key.startswith("_")]
    if unknown and not takes_any:
        takes = f"{node['_target_']} takes {', '.join(names) or 'no arguments'}"
        raise ValueError(f"{unknown[0]}: {takes}")
    return names, takes_any


def build(node: Section, **parts: Any) -> Any:
    """Build the object that a node's _target_ names.

    The arguments are the keys of the node, and the `parts` whose names are in the signature (with
    **kwargs: all). Raise ValueError if the target does not take a key of the node.
    """
    node = _plain(node)
    known, takes_any = arguments_of_node(node)
    if not takes_any:
        parts = {name: part for name, part in parts.items() if name in known}
    try:
        return instantiate(node, _partial_=True)(**parts)  # Hydra would convert dataclasses
    except (InstantiationException, TypeError) as error:
        raise (error.__cause__ or error) from None


def _plain(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def make_task(env: Section, *, needs_reward: bool = True) -> Any:
    """Build the task of a resolved `env`, with the keys of DATA that the task takes.

    With `rewards`, or a `task_weight` other than 1, the result is an `envs.rewards.Rewarded`, also
    for a task without rewards that `needs_reward` allows.
    """
    task = build({"_convert_": "all", **env["task"]}, **data_arguments(env))
    bare = not env["rewards"] and env["task_weight"] == 1
    if bare and (needs_reward or rewards_anything(task)):
        return task
    built = {}
    for name, node in env["rewards"].items():
        try:
            built[name] = build({"_convert_": "all", **node})
        except (ImportError, TypeError, ValueError) as error:
            raise ValueError(f"env.rewards.{name}: {error}") from error
    return find_target("envs.rewards.Rewarded")(task, built, task_weight=env["task_weight"])


def data_arguments(env: Section) -> dict[str, Any]:
    """Return the keys of DATA that the task takes as arguments and that env.task does not set."""
    names, _ = arguments_of(find_target(env["task"]["_target_"]))
    return {key: env[key] for key in DATA if key in env and key in names and key not in env["task"]}


def make_tools(nodes: Section) -> dict[str, Any]:
    """Return the tools of env.tools by name: functions with their keys given, or objects."""
    tools = {}
    for name, node in nodes.items():
        if not node:
            continue
        arguments_of_node(node)  # raises ValueError for a key that the tool does not take
        target, fixed = find_target(node["_target_"]), dict(node)
        del fixed["_target_"]
        maker = None
        if inspect.isclass(target):
            maker, fixed = partial(build, {"_convert_": "all", **node}), {}
            target = maker()
        tool = find_target("envs.tools.TypedTool").of(name, target, **fixed)
        tools[name] = replace(tool, maker=maker)
    return tools


def has_teacher(config: Section) -> bool:
    """Return whether a configuration names a teacher."""
    return config["teacher"]["reference"] is not None or config["teacher"]["hint"] is not None


def cells_of(config: Section) -> Section:
    """Return what references read of each row, for `check_task_cells`."""
    teacher = config["teacher"]
    hints = {f"{name}.hint": config[name]["hint"] for name in ("kl", "teacher")}
    models = teacher["reference"] if isinstance(teacher["reference"], Mapping) else {}
    return {
        "hints": {key: hint for key, hint in hints.items() if hint},
        "column": teacher["column"] if models else None,
        "teachers": [*map(str, models)],
    }


def check_task_cells(task: Any, cells: Section | None) -> None:
    """Raise ValueError if rows of a task lack the cells of `cells_of`, if any."""
    if cells and (cells["hints"] or cells["column"]):
        find_target("trainer.kl.cells.check_cells")(task.rows("train"), **cells)


def make_controller(kl: Section, section: str = "kl", **facts: Any) -> KLControllerBase:
    """Build the controller of kl.controller; torch-free.

    It gets the keys of kl.* and the `facts` of the run (see CONTROLLERS) that are its arguments.
    `section`: "kl" or "teacher", for messages. Raise ValueError if a key is missing.
    """
    controller = kl["controller"]
    node = controller if isinstance(controller, Mapping) else {}
    make = find_target(node["_target_"]) if node else CONTROLLERS[controller]
    names, _ = arguments_of(make)
    keys = {name: kl[name] for name in names if name in kl and name not in node}
    for name, parameter in inspect.signature(make).parameters.items():
        if name in keys and keys[name] is None and parameter.default is parameter.empty:
            text = f"{section}.controller={controller} needs {section}.{name}, got none"
            raise ValueError(f"{text}; give {section}.{name}=...")
    return build({"_target_": f"{make.__module__}.{make.__name__}", **keys, **node}, **facts)


def facts_of(config: Section) -> dict[str, int]:
    """Return what a controller may take: iterations, and responses per iteration."""
    settings, size = config["trainer"], config["algorithm"]["group_size"]
    responses = settings["prompts_per_iteration"] * size
    return {"total": settings["num_iterations"], "responses": responses}


def make_leash(keys: Any, section: str, *, charges: bool = True, teacher: Any = None) -> Any:
    """Build the leash of `kl` or `teacher` from the keys of conf/plan.py; imports torch.

    Without `charges` (nothing is sampled and no KL is measured) only the controller reads keys.
    """
    kl, options = keys[section], {}
    controller = make_controller(kl, section, **facts_of(keys.config))
    if charges:
        estimator = kl["estimator"]
        estimator = build(estimator) if isinstance(estimator, Mapping) else estimator
        options = {"estimator": estimator, "where": kl["where"], "allow_biased": kl["allow_biased"]}
        if find_estimator(estimator).needs == "vocabulary":  # never in the reward
            options["cap"] = kl["cap"]
        if estimator == "jsd":
            options["jsd_weight"] = kl["jsd_weight"]
    name = "ref" if section == "kl" else section
    return trainer.Leash(controller, name=name, teacher=teacher, **options)


def make_reference(
    policy: Any,
    env: Any,
    *,
    name: str,
    reference: str | Mapping[str, str] | None,
    reference_temperature: float,
    hint: str | None,
    micro_batch_tokens: int,
    refresh_every: int = 0,
    refresh_decay: float = 0.0,
    column: str | None = None,
) -> Any:
    """Build a reference from keys of its section; its micro-batches are as long as the update's.

    Several models give `Teachers`; `column` names the teacher of a row.
    """
    if isinstance(reference, Mapping):
        same = {"name": name, "reference_temperature": reference_temperature, "hint": hint}
        same |= {"micro_batch_tokens": micro_batch_tokens}
        models = dict.fromkeys(reference.values())  # two names may share one
        loaded = {m: make_reference(policy, env, reference=m, **same) for m in models}
        each = {label: loaded[model] for label, model in reference.items()}
        return find_target("trainer.kl.teachers.Teachers")(each, column)
    options = {"temperature_factor": reference_temperature, "moves": refresh_every > 0}
    options["micro_batch_tokens"] = micro_batch_tokens
    try:
        model = policies.load_reference(policy, reference, **options)
    except ValueError as error:
        if reference is None:
            raise
        section = "kl" if name == "ref" else name
        raise ValueError(f"{section}.reference={reference}: {error}") from error
    if hint is not None:
        hint = find_target("trainer.kl.hints.Hint")(hint, env=env, policy=policy)
    options = {"every": refresh_every, "decay": refresh_decay}
    return trainer.Reference(policy, model, name=name, hint=hint, **options)


def custom_observers(cfg: DictConfig, runtime: Any, more: Iterable[Any] = ()) -> list[Any]:
    """Build the user's observers on rank 0, before a model is loaded."""
    at = {"runtime": runtime, "folder": runtime.folder}
    nodes = [node for node in cfg.observers.values() if node] if runtime.is_main else []
    custom = [*(build({"_convert_": "all", **node}, **at) for node in nodes), *more]
    if wrong := [type(each) for each in custom if not isinstance(each, trainer.Observer)]:
        raise ValueError(f"expected observers to be trainer.Observer objects, got {wrong[0]}")
    return custom


def make_observers(
    cfg: DictConfig, runtime: Any, custom: Iterable[Any], *, show_every: int = 0
) -> Any:
    """Build the observers of rank 0: the user's own, then tracker, report and terminal."""
    from trainer.pages import diagnosis, display, live

    if not runtime.is_main:
        return trainer.Observer()
    observers = trainer.Observers()
    observers.each = [
        *custom,
        make_tracker(cfg, runtime.folder),
        diagnosis.Diagnose(runtime, observers),
        live.LiveReport(runtime.folder),
        display.show_run(runtime, cfg.trainer.num_iterations, show_every=show_every),
    ]
    if "ipykernel" in sys.modules:  # a notebook, see conf/api.py
        observers.each.append(live.CellCurves(runtime.folder))
    return observers


def make_tracker(cfg: DictConfig, folder: Path) -> Any:
    """Build the tracker of a run folder."""
    options = {"folder": str(folder), "config": OmegaConf.to_container(cfg)}
    # tracker.responses is a key of the loop.
    node = {key: value for key, value in cfg.tracker.items() if key != "responses"}
    return build(node, **options, resume=cfg.resume is not None)
