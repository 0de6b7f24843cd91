"""The parts of a run that a configuration names by `_target_`."""

from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf


def build(node: DictConfig, **parts: Any) -> Any:
    """Make what a node's _target_ names; a fault in it is raised as it is, not Hydra's wrapping."""
    try:
        return instantiate(node, **parts)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


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
