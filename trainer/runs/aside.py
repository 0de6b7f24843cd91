"""What is no training, a preflight or a mode, run in a folder that is removed. Torch-free."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from trainer.runs.launch import start


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
