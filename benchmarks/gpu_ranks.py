"""Train tiny models on several ranks of this machine, and compare their metrics with one rank's.

    PYTHONPATH=tests python -m benchmarks.gpu_ranks FOLDER     writes FOLDER/table.md

More ranks than GPUs share them by gloo (see `share_gpus`), others have one each by NCCL; without a
GPU they are CPU ranks. The cases and their launcher are those of tests/support/sharded.py, and so
is the command of a rank: FOLDER, ranks, launch, cases.
"""

import math
import os
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from support import sharded
from support.runs import metrics
from support.sharded import linked, prepare, ranks_of, start
from torch import distributed

from benchmarks.measure import markdown
from trainer.runs.run_files import read_status

FEW = ("grpo", "ppo", "dapo")  # ppo: a critic of its own; dapo: ranks sample uneven rounds
PARTED = ("grpo, LoRA", "grpo_full, by layers", "sft, bfloat16", "grpo, offload")
UNEVEN = "grpo, a rank without rows"
FIRST, LAST, ON = "4 fsdp2", "2 ddp", "grpo"  # the last way also goes on with the first one's run
WAYS = {FIRST: ("grpo", "grpo, LoRA"), "2 fsdp2": (*FEW, *PARTED, UNEVEN), LAST: (*FEW, UNEVEN)}
LIMIT, HALF = 1e-3, 0.05  # of the furthest metric; HALF in bfloat16, where rounding changes samples


def share_gpus(ranks: int) -> None:
    """Join the ranks, by gloo for CUDA tensors too if there are fewer GPUs than ranks.

    NCCL refuses two ranks on one GPU. Accelerate keeps a group that exists, and takes the GPU of
    LOCAL_RANK; it names that GPU to `barrier`, which gloo refuses.
    """
    gpus = torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if gpus >= ranks else "gloo"
    if gpus:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend)
    wait = distributed.barrier
    if backend == "gloo":
        distributed.barrier = lambda group=None, async_op=False, device_ids=None: wait(
            group, async_op
        )


def furthest(got: Path, want: Path, *, samples: bool) -> tuple[float, str]:
    """Return the largest distance |a - b| / (|b| + 0.1) of two runs' metrics, and where it is.

    Without `samples` those of evaluations are left out.
    """
    found = []
    for number, rows in enumerate(zip_longest(metrics(got), metrics(want), fillvalue={})):
        for name in {name for row in rows for name in row}:
            if name.startswith("eval/") and not samples:
                continue
            a, b = (row.get(name, math.nan) for row in rows)
            far = abs(a - b) / (abs(b) + 0.1)
            found.append((math.inf if math.isnan(far) else far, f"{name} of iteration {number}"))
    return max(found)


def compare(name: str, got: Path, want: Path) -> tuple[str, str, str]:
    """Return the furthest metric, where it is, and the result."""
    rounded = name in sharded.ROUNDED
    far, where = furthest(got, want, samples=not rounded)
    return f"{far:.1e}", where, "pass" if far <= (HALF if rounded else LIMIT) else "FAIL"


def cases(place: Path) -> Iterator[tuple[object, ...]]:
    """Train all, one rank first; yield the rows of the table."""
    script = ("-m", "benchmarks.gpu_ranks")
    sharded.make_models(place / "model", ())
    one = linked(place, "1 ddp")
    start(one, 1, "ddp", sorted({name for names in WAYS.values() for name in names}), script)
    for way, names in WAYS.items():
        at = linked(place, way)
        runs = {name: (name, at / "many" / name) for name in names}
        if way == LAST and finished(place / FIRST / "many" / ON):
            prepare(place / FIRST / "many", at, [ON], of=FIRST)
            runs[f"{ON}, resumed after {FIRST}"] = ON, at / "on" / f"{ON} of {FIRST}"
            (at / "on" / f"{ON} of {FIRST}" / "status.json").unlink()
        try:
            start(at, *ranks_of(way), names, script)
        except AssertionError as error:
            print(error, file=sys.stderr)
        for title, (name, folder) in runs.items():
            found = ("", "it did not finish", "FAIL")
            if finished(folder):
                found = compare(name, folder, one / "many" / name)
            yield title, *ranks_of(way), *found


def finished(folder: Path) -> bool:
    """Return whether a run came to its end."""
    return read_status(folder).get("state") == "finished"


def main(place: Path) -> int:
    """Write and print the table; return the number of failures."""
    place.mkdir(parents=True)
    rows = list(cases(place))
    table = markdown(["case", "ranks", "launch", "furthest", "metric", "result"], rows)
    (place / "table.md").write_text(table + "\n")
    print(table)
    return sum(row[-1] == "FAIL" for row in rows)


if __name__ == "__main__":
    if sys.argv[2:]:  # a rank
        if (count := int(sys.argv[2])) > 1:
            share_gpus(count)
        sharded.main(*sys.argv[1:])
    else:
        sys.exit(main(Path(sys.argv[1]).absolute()))
