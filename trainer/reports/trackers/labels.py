"""What a tracker calls a run: its name, its sweep, its tags. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.runs.run_files import is_sweep, load_run, read_yaml


def run_labels(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, group (its sweep), tags and job_type of the run in a folder."""
    run, mode = load_run(folder), config.get("mode") or "train"
    objective = config["algorithm"]["objective"]["_target_"].rpartition(".")[2]
    sweep = folder.parent if is_sweep(folder.parent) else None
    model = Path(config["policy"]["model"])
    if model.name == "model":  # of another run
        model = model.parent
    return {
        "name": " ".join([run.experiment, *_telling(run.overrides, sweep)]),
        "group": f"{sweep.parent.name}/{sweep.name}" if sweep else None,
        "tags": [run.experiment, model.name, objective],
        "job_type": "sft" if mode == "train" and objective == "SFTObjective" else mode,
    }


def _telling(overrides: Mapping[str, str], sweep: Path | None) -> list[str]:
    """Return the overrides that tell a run from others; within a sweep those that are swept."""
    words = read_yaml(sweep / "sweep.json").get("words", []) if sweep else []  # JSON is YAML
    several = [word for word in words if "," in word or "(" in word]
    swept = {word.partition("=")[0].lstrip("+") for word in several}
    hidden = ("experiment", "output_dir", "tracker")  # told elsewhere
    told = [key for key in overrides if key.partition(".")[0] not in hidden]
    return [f"{key}={overrides[key]}" for key in told if not swept or key in swept]
