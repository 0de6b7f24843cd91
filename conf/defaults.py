"""What a run's configuration would be without its overrides, kept for the report."""

from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.explain import FOLDER, compose_raw
from trainer.runs.run_files import dig, read_yaml


def keep(folder: Path) -> Path:
    """Write .hydra/defaults.yaml into the run folder that Hydra has made; return the folder.

    `experiment`: the configuration of the experiment as its file has it; `leash`: that of the same
    choice of policy, env, algorithm ... without any experiment.
    """
    hydra = folder / ".hydra"
    choices = dig(read_yaml(hydra / "hydra.yaml"), "hydra", "runtime", "choices") or {}
    groups = [f"{g}={c}" for g, c in choices.items() if (FOLDER / g).is_dir() and g != "experiment"]
    try:
        held = {
            "experiment": _plain([f"experiment={choices.get('experiment')}"]),
            "leash": _plain(["~experiment", *groups]),
        }
    except (HydraException, OmegaConfBaseException):  # files of one's own, by --config-dir
        return folder
    (hydra / "defaults.yaml").write_text(yaml.safe_dump(held, sort_keys=False))
    return folder


def _plain(words: list[str]) -> dict[str, Any]:
    """Return a composed configuration; what comes from the environment stays as it is written."""
    return OmegaConf.to_container(compose_raw(words), resolve=False)
