"""Print what the jobs of a sweep over kl.coeff came to, and what they write, as Markdown.

    python docs/responses.py multirun/ppo_sentiment_smollm/<date_time>

Rewards and KL are those of the held-out responses, the KL in nats per response. The efficiency is
known once the reference was sampled: `python -m trainer.pages <sweep> --frontier`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.kl import FRONTIER_FILE
from trainer.kl.frontier import EVAL_KL, EVAL_REWARD, Frontier, read_frontier
from trainer.pages.sweep_jobs import efficiency
from trainer.runs.discover import find_jobs
from trainer.runs.run_files import Run, load_run, read_lines


@dataclass(frozen=True)
class Point:
    """What one run reached; held-out responses are (subject, text, reward)."""

    coeff: float
    reward: tuple[float, float]  # before and after
    kl: float
    efficiency: float | None
    responses: list[tuple[str, str, float]]


def read(folder: Path, *, count: int = 3) -> list[Point]:
    """Return a point for each finished job of a sweep, by coefficient."""
    runs = [load_run(job) for job in find_jobs(folder)]
    frontier = read_frontier(folder / FRONTIER_FILE) if (folder / FRONTIER_FILE).is_file() else None
    points = [_point(run, frontier, count) for run in runs if run.state == "finished"]
    if not points:
        raise ValueError(f"expected finished runs in {folder}, found none")
    return sorted(points, key=lambda point: point.coeff)


def _point(run: Run, frontier: Frontier | None, count: int) -> Point:
    held_out = [value for _, value in run.series(EVAL_REWARD)]
    kl = run.last(EVAL_KL) or 0.0
    rows = read_lines(run.folder / "transcripts.jsonl")
    after = [row for row in rows if row["kind"] == "after"]
    return Point(
        coeff=run.last("kl/coeff") or 0.0,
        reward=(held_out[0], held_out[-1]),
        kl=kl,
        efficiency=efficiency(run, frontier) if frontier else None,
        responses=[(_subject(x["prompt"]), x["response"], x["reward"]) for x in after[:count]],
    )


def _subject(prompt: str) -> str:
    """Return what a request is about.

    >>> _subject("Write a one-sentence review of a bakery.")
    'a bakery'
    """
    return prompt.strip().rpartition(" review of ")[2].rstrip(".")


def markdown(points: list[Point]) -> str:
    """Return the numbers and the responses as two tables."""
    lines = [
        "| kl.coeff | held-out reward | KL, nats per response | efficiency |",
        "|---|---|---|---|",
    ]
    for p in points:
        first, last = p.reward
        efficiency = "-" if p.efficiency is None else f"{p.efficiency:.2f}"
        lines.append(f"| {p.coeff:g} | {first:.2f} -> {last:.2f} | {p.kl:.1f} | {efficiency} |")
    lines += ["", "| kl.coeff | asked about | held-out response | reward |", "|---|---|---|---|"]
    for p in points:
        for subject, text, reward in p.responses:
            readable = text.encode("ascii", "replace").decode()
            plain = " ".join(readable.replace("|", "/").split())
            lines.append(f"| {p.coeff:g} | {subject} | {plain} | {reward:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected the folder of a sweep: python docs/responses.py <folder>")
    print(markdown(read(Path(sys.argv[1]))))
