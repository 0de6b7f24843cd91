"""Compare leash and TRL's GRPOTrainer on the same task with the same evaluation.

    make yardstick                                    all cases, into docs/yardstick.md and .svg
    make yardstick ARGS="--cases tiny --seeds 1"      some; finished runs are reused

For each case and seed leash trains first, then TRL with the settings, rows and reward of that run
(benchmarks/yardstick_trl.py), never concurrently. Seconds and memory of both are measured from
outside. Then leash evaluates both models on the held-out prompts and computes their KL efficiency
from samples of the reference. Runs stay in --folder.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.measure import ROOT
from benchmarks.yardstick_page import (
    LIBRARIES,
    Case,
    Record,
    about,
    charts,
    fill,
    logged_kl,
    points,
    table,
)
from policies.files import write_text
from policies.models.find import find_model
from trainer.kl import FRONTIER_FILE
from trainer.kl.frontier import Frontier, read_frontier
from trainer.pages.chart import standalone
from trainer.pages.frontier_chart import sample_frontier
from trainer.runs.run_files import load_run, read_lines

BOTH = "kl.where=loss kl.estimator=k3_ratio kl.controller=constant optimizer.schedule=constant"
QUIET = "eval.every=0 eval.num_samples=0 eval.greedy=false eval.frontier=0 checkpoint.every=0"
LOGS = dict(zip(LIBRARIES, ("metrics.jsonl", "log.jsonl"), strict=True))
EVERY = 0.1  # seconds between measurements of a run

CASES = {
    "tiny": Case(
        "The embedded task",
        "experiment=grpo_tiny kl.coeff=0.3 optimizer.lr=5e-4"
        " trainer.num_iterations=80 trainer.prompts_per_iteration=32",
        seeds=(1, 2, 3), threads=1, samples=16, frontier=512, window=5, goal=0.7,
    ),
    "smollm": Case(
        "SmolLM2 on short facts",
        "experiment=grpo_smollm policy.autocast=null kl.coeff=0.02 optimizer.lr=2e-5"
        " trainer.num_iterations=12 trainer.prompts_per_iteration=8",
        seeds=(1, 2, 3), threads=2, samples=8, frontier=64, window=3, goal=0.7,
    ),
}  # fmt: skip


def main() -> None:
    """Run the missing runs, then evaluate, draw and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of each case's own")
    parser.add_argument("--words", nargs="*", default=[], help="for both, as key=value")
    parser.add_argument("--peer", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "yardstick")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "yardstick.md")
    args = parser.parse_args()
    for name in args.cases:
        case, folder = CASES[name], args.folder.resolve() / name
        words = [*case.words.split(), *BOTH.split(), *args.words]
        evaluate(folder / "before", case, words)  # trains a missing start model
        for seed in args.seeds or case.seeds:
            place = folder / str(seed)
            train(place, case, [*words, f"seed={seed}"], args.peer.absolute())
            judge(place, case, words)
        if not (folder / FRONTIER_FILE).is_file():  # all runs of leash share the start model
            first = sorted(folder.glob("*/leash/run"))[0]
            sample_frontier(first, case.frontier)
            (first / FRONTIER_FILE).replace(folder / FRONTIER_FILE)
    report(args.folder, args.page)


def train(place: Path, case: Case, words: Sequence[str], peer: Path) -> None:
    """Train with leash, then with TRL on the settings of that run."""
    ours, theirs = (place / library / "run" for library in LIBRARIES)
    overrides = [*words, *QUIET.split(), f"launch.threads={case.threads}", f"output_dir={ours}"]
    monitor([sys.executable, "train.py", *overrides], place / "leash", case.threads)
    config = yaml.safe_load((ours / "config.yaml").read_text())
    start = find_model(config["policy"]["model"]).folder
    command = [str(peer), "-m", case.peer, *map(str, (ours, start, theirs))]
    monitor(command, place / "TRL", case.threads)


def monitor(command: Sequence[str], folder: Path, threads: int) -> None:
    """Run a command that logs a line per iteration, unless usage.json exists.

    usage.json has the time of each line, in seconds since the start and of the processors, the
    total times, and the peak of the resident memory of all processes together.
    """
    path, log = folder / "usage.json", folder / "run" / LOGS[folder.name]
    if path.is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)  # unfinished, without checkpoints
    folder.mkdir(parents=True)
    load = os.getloadavg()[0]
    print(f"{folder}, load {load:.1f} ...", file=sys.stderr, flush=True)
    times: list[tuple[float, float]] = []
    most, start = Use(0, 0.0), time.perf_counter()
    with (folder / "output.log").open("w") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        work = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        while work.poll() is None:
            now = use(work.pid)
            most = Use(max(most.memory, now.memory), max(most.seconds, now.seconds))
            lines = log.read_bytes().count(b"\n") if log.is_file() else 0
            times += [(time.perf_counter() - start, most.seconds)] * (lines - len(times))
            time.sleep(EVERY)
    wall = time.perf_counter() - start
    if work.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {work.returncode}, see {out.name}")
    times += [(wall, most.seconds)] * (len(read_lines(log)) - len(times))
    record = {"load": load, "wall": wall, "cpu": most.seconds, "peak": most.memory, "times": times}
    write_text(path, json.dumps(record))


@dataclass(frozen=True)
class Use:
    """Resource use of processes: resident bytes, seconds of the processors."""

    memory: int
    seconds: float


def use(pid: int) -> Use:
    """Measure a process and its children; seconds include ended children.

    A forked child shares the memory of its parent until it executes another program.
    """
    memory, seconds = 0, 0.0
    programs: dict[int, list[str]] = {}
    try:
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            programs[process.pid] = process.cmdline()
            if programs[process.pid] != programs.get(process.ppid()):
                memory += process.memory_info().rss
            seconds += sum(process.cpu_times()[:4])  # of the process and its ended children
    except psutil.Error:  # a process has just ended
        pass
    return Use(memory, seconds)


def judge(place: Path, case: Case, words: Sequence[str]) -> None:
    """Evaluate both models of a seed with leash; write all results of each to record.json."""
    ours = place / "leash" / "run"
    config = yaml.safe_load((ours / "config.yaml").read_text())
    responses = config["trainer"]["prompts_per_iteration"] * config["algorithm"]["group_size"]
    for library in LIBRARIES:
        folder = place / library
        model = [f"policy.model={folder / 'run' / 'model'}"]
        overrides = [*words, *model, f"kl.reference={config['policy']['model']}"]
        rows = read_lines(folder / "run" / LOGS[library])
        run = json.loads((folder / "usage.json").read_text())
        versions = folder / "run" / "versions.json"
        record = {
            **run,
            "library": library,
            "points": [vars(p) for p in points(rows, run["times"], responses=responses)],
            "logged_kl": logged_kl(rows, window=case.window),
            "eval": evaluate(folder / "eval", case, overrides),
            "before": evaluate(place.parent / "before", case, words),
            "versions": json.loads(versions.read_text())
            if versions.is_file()
            else load_run(ours).status["machine"],
        }
        write_text(folder / "record.json", json.dumps(record))


def evaluate(folder: Path, case: Case, words: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of mode=evaluate for sampled responses, with the same random streams."""
    path = folder / "eval.json"
    if not path.is_file():
        mode = ["mode=evaluate", "seed=0", f"eval.num_samples={case.samples}", "eval.greedy=true"]
        command = [sys.executable, "train.py", *words, *mode, f"output_dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    scores = json.loads(path.read_text())
    return {**scores["sampled"], "greedy": scores["greedy"]["eval/greedy_accuracy"]}


def report(folder: Path, page: Path) -> None:
    """Draw and write the results of all cases in the folder."""
    runs: dict[str, list[Record]] = {}
    frontiers: dict[str, Frontier] = {}
    for name in CASES:
        paths = sorted(folder.glob(f"{name}/*/*/record.json"))
        samples = folder / name / FRONTIER_FILE
        if paths and samples.is_file() and (frontier := read_frontier(samples)):
            frontiers[name] = frontier
            runs[name] = [json.loads(path.read_text()) for path in paths]
    parts = [about(next(iter(runs.values())))]
    parts += [table(CASES[name], group, frontiers[name]) for name, group in runs.items()]
    page.with_suffix(".svg").write_text(standalone([charts(CASES[n], runs[n]) for n in runs]))
    page.write_text(fill(page.read_text() if page.is_file() else "", "\n\n".join(parts)))
    print(f"{page}\n{page.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
