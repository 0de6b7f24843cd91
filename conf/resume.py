"""The saved configuration of a run that goes on or that a mode is for, with what may change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf import names
from conf.compose import compose_raw, settle
from trainer.runs.find import no_run
from trainer.runs.saved_configs import as_today

RESUMABLE = ("trainer.num_iterations", "tracker", "launch", "checkpoint", "eval")


def load_for_resume(
    folder: str, words: Sequence[str], *, mode: str = "train", may=RESUMABLE, **instead: Any
) -> dict[str, Any]:
    """Return a run's saved configuration, `instead` in it, with overrides that `may` change.

    allow_targets is not taken from it: it counts on the command line alone.
    """
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"resume={folder}: {no_run(Path(folder))}")
    may = (*may, "allow_targets")
    changed = [word.partition("=")[0].lstrip("+~") for word in words]
    for key in changed:
        if not any(key == name or key.startswith(f"{name}.") for name in may):
            when, allowed = "on resume" if mode == "train" else f"in mode={mode}", ", ".join(may)
            raise ValueError(f"{key} cannot change {when}, only {allowed}; start a new run for it")
    saved = OmegaConf.create(as_today(OmegaConf.to_container(OmegaConf.load(path))))
    if "tracker" not in changed:  # its keys are those of the saved one
        kind = saved.tracker._target_.rpartition(".")[2].removesuffix("Tracker").lower()
        known = (names.FOLDER / "tracker" / f"{kind}.yaml").is_file()
        words = [f"tracker={kind if known else 'jsonl'}", *words]
    fresh = compose_raw(words)
    saved.allow_targets = False  # the folder may be anybody's
    for key in changed:
        OmegaConf.update(saved, key, OmegaConf.select(fresh, key), merge=False)
    saved.update({"resume": str(folder), "mode": mode, "preflight": False, **instead})
    return settle(saved)
