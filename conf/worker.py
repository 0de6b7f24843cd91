"""The configuration of a worker: what its parent has checked, or it is checked here."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


def load(path: str, *, checked: str = "", allow_targets: str = "", **instead: str) -> DictConfig:
    """Return the configuration in a file, `instead` in it; ValueError if it is not to be trusted.

    `checked`: the sha256 of what the parent has checked. Without one the code that it names is
    looked at here too, and allow_targets counts as it is given, not as the file has it.
    """
    data = Path(path).read_bytes()
    cfg: Any = OmegaConf.create(data.decode())
    if not checked:
        from conf.check import foreign  # here: a worker with a parent does not need it

        cfg.allow_targets = allow_targets == "true"
        from conf.interpolations import bounded

        with bounded():
            resolved = OmegaConf.to_container(cfg, resolve=True)
        for fault in foreign(resolved):
            raise ValueError(fault)
    elif checked != sha256(data).hexdigest():
        raise ValueError(f"{path} is no longer what was checked: it was changed; start again")
    return OmegaConf.merge(cfg, instead)
