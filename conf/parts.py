"""The parts of a run that a configuration names by `_target_`."""

import difflib
import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

DATA = ("dataset", "eval_dataset", "columns", "split", "eval_split")  # keys of env for its task


def build(node: DictConfig, **parts: Any) -> Any:
    """Make what a node's _target_ names, with those of `parts` that it takes.

    A fault in it is raised as it is, not in Hydra's wrapping.
    """
    try:
        taken = inspect.signature(find(node["_target_"])).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            parts = {k: v for k, v in parts.items() if k in taken or k.startswith("_")}
        return instantiate(node, **parts)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def make_task(env: Mapping[str, Any]) -> Any:
    """Return the task that a resolved `env` names, with those keys of DATA that it takes."""
    return build(env["task"], _convert_="all", **data_arguments(env))


def data_arguments(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keys of DATA that the task's constructor names and env.task does not give."""
    parameters = inspect.signature(find(env["task"]["_target_"])).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = [key for key in DATA if takes_all or key in parameters]
    return {key: env[key] for key in wanted if key not in env["task"]}


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


def make_tracker(cfg: DictConfig, folder: Path) -> Any:
    """Return the tracker, told what the run is called and which sweep it belongs to."""
    sweep = folder.parent if "=" in folder.name else None
    return build(cfg.tracker, _partial_=True)(
        folder=str(folder),
        config=OmegaConf.to_container(cfg),
        name=folder.name,
        group=str(sweep) if sweep else None,
        tags=[cfg.policy.model.rpartition("/")[2], cfg.algorithm.objective._target_],
        resume=cfg.resume is not None,
    )


def make_reference(cfg: DictConfig, policy: Any) -> Any:
    """Return the model that the KL is to, scored in parts as large as the update's; None without.

    Imports torch: for the process that trains.
    """
    if not cfg.kl.measure:
        return None
    import policies

    limit = cfg.trainer.micro_batch_tokens
    return policies.load_reference(policy, cfg.kl.reference, micro_batch_tokens=limit)
