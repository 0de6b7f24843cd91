"""What studies share: a run of train.py or the samples of a limit, made once, and a table."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.limit import FILE, Limit, read_limit
from trainer.reports.limits import make
from trainer.runs.folders import quoted
from trainer.runs.lock import FILE as LOCK
from trainer.runs.lock import is_free
from trainer.runs.run_files import load_run

ROOT = Path(__file__).parents[1]


def train_once(words: Sequence[str], folder: Path) -> bool:
    """Train unless it was done; what is said goes to a log beside the folder. Return if it ended.

    `words` are overrides; checkpoints are off, so what was cut off begins anew.
    """
    if folder.exists():
        if load_run(folder).state == "finished":
            return True
        if (folder / LOCK).exists() and not is_free(folder):
            raise SystemExit(f"{folder} is still written to, by a study that was killed? End that")
        shutil.rmtree(folder)
    print(f"{folder} ...", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), *words]
    log_of = folder.with_name(f"{folder.name}.log")
    with log_of.open("w") as log:
        told = [*command, "checkpoint.every=0", f"output_dir={quoted(str(folder))}"]
        done = subprocess.run(told, stdout=log, stderr=log, check=False)
    if done.returncode:
        print(f"  failed, see {log_of}", file=sys.stderr)
    return done.returncode == 0


def limit_once(folder: Path, runs: Sequence[Path], samples: int) -> Limit:
    """Return the limit in a folder; the first of `runs`, which start from one model, samples it."""
    if not (folder / FILE).is_file():
        if not runs:
            raise SystemExit(f"expected a run in {folder} to sample the reference of, found none")
        make(runs[0], samples)
        (runs[0] / FILE).replace(folder / FILE)
    if (limit := read_limit(folder / FILE)) is None:
        raise SystemExit(f"{folder / FILE} is damaged; remove it")
    return limit


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]], *, rule: str = "---") -> str:
    """Return a table; `rule` stands below the columns after the first.

    >>> print(markdown(["a", "b"], [[1, 2.5]], rule="---:"))
    | a | b |
    |---|---:|
    | 1 | 2.5 |
    """
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" + f"|{rule}" * (len(head) - 1) + "|", *lines[1:]])
