"""What is no training, a preflight or a mode, run in a folder that is removed. Torch-free."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from trainer.runs.launch import start

SILENT = {"_target_": "trainer.JsonlTracker", "keep_transcripts": False}


def run_aside(config: dict[str, Any], **ours: Any) -> int:
    """Run a configuration in fresh processes; return the exit code, 1 if it found problems."""
    folder, keep = Path(tempfile.mkdtemp(prefix="leash-")), False
    try:
        return int(start(config, folder, **ours) > 0)
    except RuntimeError as error:
        keep = str(folder) in str(error)  # it names the traceback there
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def without_training_parts(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only training needs; chat and evaluate compare with a reference."""
    mode = config["mode"]
    config["kl"]["measure"] = mode != "export"
    config["algorithm"]["advantage"] = {"_target_": "trainer.NoAdvantage"}
    config["algorithm"].pop("critic", None)
    config["tracker"] = SILENT
    if mode != "evaluate":
        config["launch"]["num_processes"] = 1
    return config


def check_replies(config: dict[str, Any]) -> None:
    """Raise ValueError for a model that does not reply."""
    if config["policy"]["_target_"] == "policies.load_reward_model":
        what = f"mode={config['mode']} is for models that reply"
        raise ValueError(f"{what}, got a reward model; name a run of SFT, GRPO or PPO")


def check_target(folder: str | None) -> None:
    """Raise ValueError unless a model can be written to a folder."""
    if not folder:
        raise ValueError("mode=export needs a folder to write to; give output_dir=<folder>")
    path = Path(folder).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output_dir={folder} is there already; name a folder that is new")
