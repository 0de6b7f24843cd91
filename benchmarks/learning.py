"""Train every algorithm on the embedded task and draw curves over several seeds.

    python -m benchmarks.learning [--seeds 101 102 103] [--experiments rloo_tiny ...]

Runs each experiment on each seed, one after the other, with about eight evaluations; finished runs
in --folder are reused. Then draws docs/learning.svg (--svg) and prints a table. A curve is the mean
of the seeds, its band goes from the lowest to the highest. `--words key=value` apply to every run:
use a separate --folder for them.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.measure import ROOT, markdown
from conf.compose import compose_checked, set_up
from trainer.kl.frontier import EVAL_KL
from trainer.runs.run_files import load_run

EXPERIMENTS = (
    "grpo_tiny",
    "dr_grpo_tiny",
    "dapo_tiny",
    "bnpo_tiny",
    "gspo_tiny",
    "cispo_tiny",
    "dppo_tiny",
    "gdpo_tiny",
    "rloo_tiny",
    "reinforce_pp_tiny",
    "reinforce_pp_baseline_tiny",
    "ppo_tiny",
)
# Okabe and Ito's colours and three more, dark enough for white paper and light enough for black.
HUES = ("#0077b6", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7f7f7f", "#8c564b")
HUES = (*HUES, "#9467bd", "#e0245e", "#2a9d8f", "#6a5acd")
PANELS = (  # metric, title, iterations averaged per point
    ("eval/sampled_accuracy", "held-out accuracy, sampled", 1),
    ("reward/raw_mean", "reward", 5),
    ("kl/ref_sequence", "KL to the start, nats a response", 5),
)
EVALUATIONS = 8
WIDTH, HEIGHT, TOP, LEFT = 330, 240, 34, 44  # of a panel, and its margins, in pixels

Curve = dict[int, float]  # a metric by iteration


def main() -> None:
    """Run the missing runs, then draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "learning")
    parser.add_argument("--svg", type=Path, default=ROOT / "docs" / "learning.svg")
    parser.add_argument("--words", nargs="*", default=[])
    args = parser.parse_args()
    set_up()
    runs: dict[str, list[list[dict]]] = {}
    for name in args.experiments:
        folders = [args.folder.resolve() / name / str(seed) for seed in args.seeds]
        for seed, folder in zip(args.seeds, folders, strict=True):
            run(name, seed, folder, args.words)
        runs[name] = [rows(folder) for folder in folders]
    args.svg.write_text(draw(runs))
    print(table(runs, args.words))
    print(f"\n{args.svg}")


def run(name: str, seed: int, folder: Path, words: Sequence[str]) -> None:
    """Train an experiment unless it has finished; its output goes to <folder>.log."""
    if folder.exists():
        if load_run(folder).state == "finished":
            return
        shutil.rmtree(folder)  # unfinished, without checkpoints
    print(f"{folder} ...", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = [f"experiment={name}", f"seed={seed}", *words]
    every = max(compose_checked(overrides)["trainer"]["num_iterations"] // EVALUATIONS, 1)
    overrides += [f"eval.every={every}", "checkpoint.every=0", f"output_dir={folder}"]
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        command = [sys.executable, str(ROOT / "train.py"), *overrides]
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{name} with seed {seed} failed, see {log.name}")


def rows(folder: Path) -> list[dict]:
    """Return metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(run: Sequence[dict], metric: str, window: int) -> Curve:
    """Return a metric by iteration, each the mean of the last `window` values.

    >>> curve([{"a": 1, "progress/iteration": 0}, {"a": 3, "progress/iteration": 1}], "a", 2)
    {0: 1.0, 1: 2.0}
    """
    seen = [(row["progress/iteration"], row[metric]) for row in run if metric in row]
    values = [value for _, value in seen]
    return {at: fmean(values[max(i + 1 - window, 0) : i + 1]) for i, (at, _) in enumerate(seen)}


def align(curves: Sequence[Curve]) -> dict[int, list[float]]:
    """Return the values of all seeds by iteration, for iterations that all seeds have."""
    by_iteration = defaultdict(list)
    for one in curves:
        for at, value in one.items():
            by_iteration[at].append(value)
    return {at: values for at, values in sorted(by_iteration.items()) if len(values) == len(curves)}


def table(runs: dict[str, list[list[dict]]], words: Sequence[str] = ()) -> str:
    """Return the numbers of the runs as Markdown; ranges are over seeds."""
    head = (
        "experiment",
        "kl.coeff",
        "sampled, before",
        "sampled, after",
        "greedy",
        "KL",
        "seconds",
    )
    rows = []
    for name, seeds in runs.items():
        coeff = compose_checked([f"experiment={name}", *words])["kl"]["coeff"]
        first, last = [run[0] for run in seeds], [run[-1] for run in seeds]
        seconds = fmean(sum(row.get("time/iteration_s", 0.0) for row in run) for run in seeds)
        cells = [
            f"{coeff:g}",
            average(first, "eval/sampled_accuracy"),
            average(last, "eval/sampled_accuracy", spread=True),
            average(last, "eval/greedy_accuracy"),
            average(last, EVAL_KL, spread=True),
            f"{seconds:.0f}",
        ]
        rows.append([f"`{name}`", *cells])
    return markdown(head, rows)


def average(ends: Sequence[dict], metric: str, *, spread: bool = False) -> str:
    """Return the mean over seeds, with `spread` and the range; "" for a missing metric."""
    values = [row[metric] for row in ends if metric in row]
    if not values:
        return ""
    text = f"{fmean(values):.2f}"
    return f"{text} ({min(values):.2f} to {max(values):.2f})" if spread else text


def draw(runs: dict[str, list[list[dict]]]) -> str:
    """Return the picture: a panel for each metric, a colour for each experiment, a legend below."""
    columns = 5
    legend_rows = -(-len(runs) // columns)
    width, height = LEFT + len(PANELS) * WIDTH, TOP + HEIGHT + 40 + 18 * legend_rows
    parts = [panel(runs, i, *which) for i, which in enumerate(PANELS)]
    for i, name in enumerate(runs):
        x = LEFT + i % columns * (width - LEFT) / columns
        y = TOP + HEIGHT + 44 + 18 * (i // columns)
        parts.append(f'<path d="M{x:.0f} {y - 4}h16" stroke="{hue(i)}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 22:.0f}" y="{y}">{name.removesuffix("_tiny")}</text>')
    style = "text{font:12px system-ui,sans-serif;fill:#7a8794}.title{font-weight:600}"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
        f"<style>{style}</style>\n{body}\n</svg>\n"
    )


def panel(
    runs: dict[str, list[list[dict]]], place: int, metric: str, title: str, window: int
) -> str:
    """Return one chart: the mean of the seeds over the band that they span."""
    curves = {name: align([curve(run, metric, window) for run in r]) for name, r in runs.items()}
    end = max((max(points) for points in curves.values() if points), default=1) or 1
    values = [v for points in curves.values() for at in points.values() for v in at]
    high = ceiling(max([1e-9, *values]))
    left = LEFT + place * WIDTH

    def at(x: float, y: float) -> str:
        share = max(y, 0.0) / high
        return f"{left + x / end * (WIDTH - 60):.1f},{TOP + HEIGHT * (1 - share):.1f}"

    out = [f'<text class="title" x="{left}" y="{TOP - 14}">{title}</text>']
    for k in range(5):
        y = high * k / 4
        place_y = TOP + HEIGHT * (1 - k / 4)
        out.append(f'<path d="M{left} {place_y}h{WIDTH - 60}" stroke="#8884" fill="none"/>')
        out.append(f'<text x="{left - 6}" y="{place_y + 4}" text-anchor="end">{y:g}</text>')
    for share in (0, 0.5, 1):
        x = left + share * (WIDTH - 60)
        out.append(
            f'<text x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{share * end:g}</text>'
        )
    for i, points in enumerate(curves.values()):
        upper = [at(x, max(v)) for x, v in points.items()]
        lower = [at(x, min(v)) for x, v in reversed(points.items())]
        line = " ".join(at(x, fmean(v)) for x, v in points.items())
        out.append(f'<polygon points="{" ".join(upper + lower)}" fill="{hue(i)}" opacity=".12"/>')
        out.append(f'<polyline points="{line}" fill="none" stroke="{hue(i)}" stroke-width="1.8"/>')
    return "\n".join(out)


def ceiling(value: float) -> float:
    """Return a number above `value` that has round quarters.

    >>> ceiling(0.57), ceiling(0.96), ceiling(2.7)
    (0.8, 1.0, 4.0)
    """
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{next(m for m in (1, 2, 4, 8, 10) if value <= m * power) * power:.4g}")


def hue(number: int) -> str:
    """Return the colour of an experiment."""
    return HUES[number % len(HUES)]


if __name__ == "__main__":
    main()
