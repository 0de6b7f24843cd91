"""Draw docs/sentiment_frontier.svg from a sweep over kl.coeff, and print its replies as markdown.

    python docs/kl_frontier.py multirun/ppo_sentiment_smollm/<date_time>

A point of the picture is the mean over the last three iterations of a run: the task reward of the
training replies against their KL to the reference. The replies are held-out ones after training.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.reports.chart import Chart, colour, standalone
from trainer.reports.formats import short
from trainer.runs.find import find_jobs
from trainer.runs.run_files import Run, load_run, read_lines

PICTURE = Path(__file__).with_name("sentiment_frontier.svg")
WIDTH, HEIGHT, LAST = 480, 320, 3


@dataclass(frozen=True)
class Point:
    """What one run reached; held-out replies are (subject, text, reward)."""

    coeff: float
    before: float  # task reward of the first iteration's replies
    reward: float
    kl: float  # nats per sequence
    held_out: tuple[float, float]  # task reward of held-out replies before and after
    replies: list[tuple[str, str, float]]


def read(folder: Path, *, count: int = 3) -> list[Point]:
    """Return a point for each finished job of a sweep, by coefficient."""
    runs = [load_run(job) for job in find_jobs(folder)]
    points = [_point(run, count) for run in runs if run.state == "finished"]
    if not points:
        raise ValueError(f"expected finished runs in {folder}, found none")
    return sorted(points, key=lambda point: point.coeff)


def _point(run: Run, count: int) -> Point:
    reward = [value for _, value in run.series("reward/raw_mean")]
    kl = [value for _, value in run.series("kl/ref_sequence")]
    held_out = [value for _, value in run.series("eval/reward")]
    rows = read_lines(run.folder / "transcripts.jsonl")
    after = [row for row in rows if row["kind"] == "after"]
    return Point(
        coeff=run.last("kl/coeff") or 0.0,
        before=reward[0],
        reward=sum(reward[-LAST:]) / len(reward[-LAST:]),
        kl=sum(kl[-LAST:]) / len(kl[-LAST:]),
        held_out=(held_out[0], held_out[-1]),
        replies=[(_subject(x["prompt"]), x["response"], x["reward"]) for x in after[:count]],
    )


def _subject(prompt: str) -> str:
    """Return what a request is about.

    >>> _subject("Write a one-sentence review of a bakery.")
    'a bakery'
    """
    return prompt.strip().rpartition(" review of ")[2].rstrip(".")


def picture(points: list[Point]) -> str:
    """Return sentiment against KL as an SVG document, a labelled point per coefficient."""
    spots = {short(point.coeff): (point.kl, point.reward) for point in points}
    spots["start"] = (0.0, points[0].before)
    kls, rewards = zip(*spots.values(), strict=True)
    title, unit = "Sentiment against KL to the reference", "reward from -1 to 1; labels: kl.coeff"
    chart = Chart(title, unit, width=WIDTH, height=HEIGHT)
    ends = (min(rewards), max(rewards))
    chart.axes((0.0, max(kls)), ends, x_label="KL, nats per reply", inset=(12, 36))
    chart.path(sorted(spots.values()), f"stroke:{colour(0)}")
    for name, (kl, reward) in spots.items():
        chart.dot(kl, reward, f"fill:{colour(0)}", radius=4.5)
        chart.text(chart.x(kl) + 9, chart.y(reward) + 15, name, style="value")
    return standalone([chart.svg()], width=WIDTH, height=HEIGHT)


def markdown(points: list[Point]) -> str:
    """Return the numbers and the replies as two tables."""
    lines = [
        "| kl.coeff | training reward, first -> last | held-out reward | KL, nats per reply |",
        "|---|---|---|---|",
    ]
    for p in points:
        first, last = p.held_out
        lines.append(
            f"| {p.coeff:g} | {p.before:.2f} -> {p.reward:.2f} | {first:.2f} -> {last:.2f} "
            f"| {p.kl:.1f} |"
        )
    lines += ["", "| kl.coeff | asked about | held-out reply | reward |", "|---|---|---|---|"]
    for p in points:
        for subject, text, reward in p.replies:
            readable = text.encode("ascii", "replace").decode()
            plain = " ".join(readable.replace("|", "/").split())
            lines.append(f"| {p.coeff:g} | {subject} | {plain} | {reward:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected the folder of a sweep: python docs/kl_frontier.py <folder>")
    found = read(Path(sys.argv[1]))
    PICTURE.write_text(picture(found))
    print(markdown(found))
