"""A run of train.py in a folder of its own, once: what is finished there is not run again."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.runs.run_files import load_run

ROOT = Path(__file__).parents[1]


def train_once(words: Sequence[str], folder: Path) -> bool:
    """Train unless it was done; what is said goes to a log beside the folder. Return if it ended.

    `words` are overrides; checkpoints are off, so what was cut off begins anew.
    """
    if folder.exists():
        if load_run(folder).state == "finished":
            return True
        shutil.rmtree(folder)
    print(f"{folder} ...", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), *words]
    log_of = folder.with_name(f"{folder.name}.log")
    with log_of.open("w") as log:
        told = [*command, "checkpoint.every=0", f"output_dir={folder}"]
        done = subprocess.run(told, stdout=log, stderr=log, check=False)
    if done.returncode:
        print(f"  failed, see {log_of}", file=sys.stderr)
    return done.returncode == 0
