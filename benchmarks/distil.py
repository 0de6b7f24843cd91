"""Distil the same teacher with leash and with TRL's DistillationTrainer; leash evaluates both.

    python -m benchmarks.distil --peer .venv-trl/bin/python

For each seed leash trains experiment=distil_tiny, then TRL with the settings and prompts of that
run, never concurrently. Prints the figures of docs/distillation.md.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import yaml

from benchmarks.measure import ROOT, markdown
from benchmarks.yardstick import CASES, LOGS, evaluate, train
from benchmarks.yardstick_page import LIBRARIES, Record, spread
from trainer.kl.frontier import ACCURACY, EVAL_KL
from trainer.runs.run_files import read_lines

CASE = replace(CASES["tiny"], words="experiment=distil_tiny", peer="benchmarks.distil_trl")
LENGTHS = "response/length_mean", "completions/mean_length"
ROWS: list[tuple[str, Callable[[Record], float], str]] = [
    ("held-out accuracy, sampled", lambda r: r[ACCURACY], ".3f"),
    ("held-out accuracy, greedy", lambda r: r["greedy"], ".3f"),
    ("KL to the teacher, nats per response", lambda r: r[EVAL_KL], ".3f"),
    ("CPU seconds per iteration, after the first", lambda r: r["pace"], ".2f"),
    ("response tokens per CPU second", lambda r: r["speed"], ",.0f"),
    ("CPU seconds, start to end", lambda r: r["cpu"], ".0f"),
    ("peak memory, MiB", lambda r: r["peak"] / 2**20, ",.0f"),
]


def main() -> None:
    """Run the missing runs, then print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=CASE.seeds)
    parser.add_argument("--peer", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "distil")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        place = args.folder.resolve() / str(seed)
        train(place, CASE, [CASE.words, f"seed={seed}"], args.peer.absolute())
        runs.append([record(place, library) for library in LIBRARIES])
    ratios = [ours["pace"] / theirs["pace"] for ours, theirs in runs]
    table = [
        [name, *(spread([value(run[i]) for run in runs], form) for i in range(len(LIBRARIES)))]
        for name, value, form in ROWS
    ]
    print(markdown(["", *LIBRARIES], table))
    print(f"\nCPU seconds per iteration, leash / TRL: {spread(ratios, '.2f')}")


def record(place: Path, library: str) -> Record:
    """Return the evaluation of a trained model, and what its training took."""
    folder = place / library
    config = yaml.safe_load((place / "leash" / "run" / "config.yaml").read_text())
    words = [CASE.words, f"policy.model={folder / 'run' / 'model'}"]
    usage = json.loads((folder / "usage.json").read_text())
    logged = zip(read_lines(folder / "run" / LOGS[library]), usage["times"], strict=True)
    seen = [(row[name], cpu) for row, (_, cpu) in logged for name in LENGTHS if name in row]
    pace = (seen[-1][1] - seen[0][1]) / (len(seen) - 1)
    tokens = fmean(length for length, _ in seen) * config["trainer"]["prompts_per_iteration"]
    scores = evaluate(folder / "eval", CASE, words)
    return {**usage, **scores, "pace": pace, "speed": tokens / pace}


if __name__ == "__main__":
    main()
