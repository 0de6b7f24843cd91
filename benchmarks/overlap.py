"""What sampling ahead saves: an iteration takes max(sample, learn) + sync, not their sum.

    python -m benchmarks.overlap [--experiment grpo_tiny] [--iterations 20] [key=value ...]

Runs an experiment with trainer.overlap=0 and 1 (--ahead 0 1 2 4 for others), one thread a process,
and prints medians in seconds: of sampling, of learning (scores and update), of handing weights
over, of an iteration; how old the weights were that sampled the last batch; and the ratio of an
iteration to max(sample, learn) + sync, 0 having the sum. Needs a core for each process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(folder: Path, *words: str) -> dict[str, float]:
    """Train; return the median seconds of the phases of an iteration, the first ones left out."""
    command = [sys.executable, str(ROOT / "train.py"), *words, f"output_dir={folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "time/iteration_s" in line][3:]

    def median(name: str) -> float:
        return statistics.median(row[f"time/{name}_s"] for row in rows)

    sampled = "sample" if "time/sample_s" in rows[0] else "collect"
    learn = statistics.median(row["time/score_s"] + row["time/update_s"] for row in rows)
    found = {"sample": median(sampled), "learn": learn, "sync": median("sync")}
    found["stale"] = rows[-1].get("policy/staleness", 0.0)
    return found | {"iteration": median("iteration")}


def main() -> None:
    """Print a line for each number of iterations ahead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", default="grpo_tiny")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--ahead", type=int, nargs="*", default=[0, 1])
    args, more = parser.parse_known_args()
    words = [f"experiment={args.experiment}", f"trainer.num_iterations={args.iterations}"]
    words += ["eval.num_samples=0", "eval.greedy=false", "checkpoint.every=0", *more]
    print(
        f"{'overlap':>7} {'sample':>7} {'learn':>7} {'sync':>7} {'iteration':>9} {'stale':>5}"
        "  to what it should"
    )
    for ahead in args.ahead:
        with tempfile.TemporaryDirectory() as folder:
            took = run(Path(folder) / "run", *words, f"trainer.overlap={ahead}")
        together = max if ahead else lambda *both: sum(both)
        least = together(took["sample"], took["learn"]) + took["sync"]
        values = " ".join(f"{took[name]:7.3f}" for name in ("sample", "learn", "sync"))
        values += f" {took['iteration']:9.3f} {took['stale']:5g}"
        print(f"{ahead:>7} {values}  {took['iteration'] / least:.2f}", flush=True)


if __name__ == "__main__":
    main()
