"""report.html: what a run did, in one page that opens anywhere.

    python -m trainer.report <run or sweep folder>                 # write it (again)
    python -m trainer.report <run or sweep folder> --svg run.svg   # only the picture
    python -m trainer.report outputs                               # those of all runs below

Built from the files of the folder alone, at any time, torch-free. Charts of metrics that a run
does not log are left out, so SFT and RL runs share it.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer import page, svg
from trainer.redact import redact
from trainer.run_files import Run, dig, find_runs, load_run, number, read_lines, write_text


@dataclass(frozen=True)
class Panel:
    """One chart: metric names and what the legend calls them."""

    title: str
    unit: str
    metrics: dict[str, str]


PANELS = (
    Panel("Reward", "mean per reply", {"reward/mean": "with KL", "reward/raw_mean": "task"}),
    Panel("KL to the reference", "nats per reply (k1)", {"kl/ref_sequence": "kl"}),
    Panel(
        "Accuracy on held-out prompts",
        "share of replies",
        {
            "eval/sampled_accuracy": "sampled",
            "eval/greedy_accuracy": "greedy",
            "eval/pass@k": "pass@k",
        },
    ),
    Panel(
        "KL per token",
        "nats per token",
        {"kl/ref": "k1", "kl/ref_k3": "k3", "kl/ref_full": "full"},
    ),
    Panel("Policy entropy", "nats per token", {"policy/entropy": "entropy"}),
    Panel(
        "Reply length",
        "tokens",
        {"response/length_mean": "mean", "response/length_max": "max"},
    ),
    Panel(
        "Loss",
        "mean of the last epoch's steps",
        {
            "loss/total": "total",
            "loss/policy": "policy",
            "loss/kl": "kl",
            "loss/value": "value",
        },
    ),
    Panel("Gradient norm", "before clipping", {"optim/grad_norm": "norm"}),
    Panel(
        "Shares to watch",
        "share of replies, groups, tokens",
        {
            "response/truncated_fraction": "cut replies",
            "group/zero_variance_fraction": "equal groups",
            "policy/clip_fraction": "clipped",
        },
    ),
    Panel(
        "Time per iteration",
        "seconds",
        {
            "time/iteration_s": "all",
            "time/collect_s": "collect",
            "time/score_s": "score",
            "time/update_s": "update",
            "time/sync_s": "sync",
        },
    ),
    Panel("Critic", "explained variance", {"value/explained_variance": "explained"}),
    Panel("Learning rate", "mean of the last epoch's steps", {"optim/lr": "lr"}),
    Panel("Speed", "tokens per second", {"perf/tokens_per_s": "tokens"}),
    Panel("Reward on held-out prompts", "mean per reply", {"eval/reward": "reward"}),
    Panel("KL between policy and sampler", "nats per token", {"kl/behaviour": "behaviour"}),
    Panel("KL coefficient", "factor of the KL", {"kl/coeff": "coeff"}),
)
MAIN_PANELS = 13  # the rest is folded


def write_report(folder: str | Path) -> Path:
    """Write <folder>/report.html from the files there and return its path."""
    run = load_run(folder)
    path = run.folder / "report.html"
    write_text(path, page.page(f"{run.experiment} - leash", _body(run)))
    return path


def run_svg(folder: str | Path) -> str:
    """Draw a run's reward (or loss) and KL curves as a standalone SVG document."""
    run = load_run(folder)
    wanted = ("Reward", "KL to the reference", "Accuracy on held-out prompts", "Loss")
    drawn = [_chart(panel, run) for title in wanted for panel in PANELS if panel.title == title]
    shown = [chart for chart in drawn if chart][:2]
    if not shown:
        raise ValueError(f"expected metrics in {run.folder}/metrics.jsonl, got none to draw")
    return svg.standalone(shown, width=360, height=220)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a run, a sweep or all that lie below a folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    parser.add_argument("--svg", type=Path, help="write only the main picture to this file")
    args = parser.parse_args(arguments)
    from trainer import sweep

    runs, sweeps = find_runs(args.folder)
    if not runs and not sweeps:
        print(
            f"expected a run or sweep folder, got {args.folder} without metrics.jsonl or "
            "status.json in it: see outputs/ and multirun/",
            file=sys.stderr,
        )
        return 2
    if not args.svg:
        for path in [*map(write_report, runs), *map(sweep.write_sweep, sweeps)]:
            print(path)
        return 0
    if len(runs) + len(sweeps) > 1:
        print(f"--svg draws one run or sweep, got {args.folder} with several", file=sys.stderr)
        return 2
    text = run_svg(runs[0]) if runs else sweep.frontier_svg(sweep.read_rows(sweeps[0]))
    write_text(args.svg, text)
    print(args.svg)
    return 0


def _body(run: Run) -> list[str]:
    reason = run.status.get("reason")
    main = [_chart(panel, run) for panel in PANELS[:MAIN_PANELS]]
    more = [_chart(panel, run) for panel in (*PANELS[MAIN_PANELS:], *_other_panels(run))]
    config = yaml.safe_dump(redact(run.config), sort_keys=False, width=100) if run.config else ""
    folded = page.charts([chart for chart in more if chart])
    return [
        page.heading(run.experiment, run.state),
        f'<p class="{run.state}">{page.escape(reason)}</p>' if reason else "",
        page.tiles(_tiles(run)),
        page.facts(_facts(run)),
        page.charts([chart for chart in main if chart], title="Curves"),
        f"<details><summary>More curves</summary>{folded}</details>" if folded else "",
        *_transcripts(run.folder),
        page.folded("Config", config) if config else "",
    ]


def _chart(panel: Panel, run: Run) -> str:
    series: list[svg.Series] = []
    for index, (metric, name) in enumerate(panel.metrics.items()):
        logged = _logged(metric, run)
        points = run.series(logged)
        # an equal curve says nothing new: the task reward without a KL part, SFT's only loss
        if points and not any(_alike(points, other.points) for other in series):
            dots = metric.startswith("eval/")
            name = name if logged == metric else logged.rpartition("/")[2]
            series.append(svg.Series(name, points, hue=index, dots=dots))
    return svg.line_chart(series, title=panel.title, unit=panel.unit) if series else ""


def _alike(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Return whether two curves are one, up to the rounding of a float32."""
    pairs = zip(points, others, strict=False)
    same = all(a == b and math.isclose(x, y, rel_tol=1e-6) for (a, x), (b, y) in pairs)
    return same and len(points) == len(others)


def _logged(metric: str, run: Run) -> str:
    """Return the name under which a run logs a metric: eval/pass@k as eval/pass@8."""
    stem, at, _ = metric.partition("@")
    return next((n for n in run.names() if at and n.startswith(stem + at)), metric)


def _other_panels(run: Run) -> list[Panel]:
    """Make panels of what no other panel shows, reward parts together."""
    known = {_logged(metric, run) for panel in PANELS for metric in panel.metrics}
    rest = [n for n in run.names() if n not in known and not n.startswith("progress/")]
    parts = {n: n.removeprefix("reward_part/") for n in rest if n.startswith("reward_part/")}
    single = [Panel(n, "", {n: n}) for n in rest if n not in parts]
    return ([Panel("Reward parts", "mean per reply", parts)] if parts else []) + single


def _tiles(run: Run) -> dict[str, str]:
    tiles = {}
    wanted = [("reward", "reward/mean"), ("sampled accuracy", "eval/sampled_accuracy")]
    wanted += [("greedy accuracy", "eval/greedy_accuracy")]
    if not run.series("reward/mean"):
        wanted.append(("loss", "loss/total"))
    for name, metric in wanted:
        points = run.series(metric)
        if points:
            last = points[-1][1] if metric.startswith("eval/") else run.last_ten_mean(metric)
            tiles[name] = f"{svg.short(points[0][1])} \u2192 {svg.short(last or 0.0)}"
    kl = run.last_ten_mean("kl/ref_sequence")
    if kl is not None:
        tiles["KL to the reference, nats per reply"] = svg.short(kl)
    seconds = number(run.status.get("seconds"))
    if run.metrics:
        tiles["iterations"] = f"{run.metrics[-1]['progress/iteration']:g}"
    if seconds is not None:
        minutes, rest = divmod(round(seconds), 60)
        tiles["time"] = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return tiles


def _facts(run: Run) -> dict[str, str]:
    folder = str(run.folder.resolve())
    resume = f"python train.py resume={shlex.quote(folder)}"
    values = {}
    if run.status.get("model"):
        keys = ("name", "origin", "sha256")
        name, origin, sha = (dig(run.status, "model", key) or "?" for key in keys)
        values["model"] = f"{page.escape(name)} <span class=muted>from {page.escape(origin)}</span>"
        values["sha256"] = f"<code>{page.escape(sha)}</code>"
    overrides = redact(dict(run.overrides))
    if overrides:
        text = " ".join(shlex.quote(f"{key}={value}") for key, value in overrides.items())
        values["overrides"] = f"<code>{page.escape(text)}</code>"
    values["folder"] = f"<code>{page.escape(folder)}</code>"
    values["resume"] = f"<code>{page.escape(resume)}</code>"
    return values


def _transcripts(folder: Path) -> list[str]:
    rows = read_lines(folder / "transcripts.jsonl")
    before = {r.get("prompt"): r for r in rows if r.get("kind") == "before"}
    after = {r.get("prompt"): r for r in rows if r.get("kind") == "after"}
    prompts = [p for p in before if p in after] or list(before) or list(after)
    pairs = [_card(p, [("before", before.get(p)), ("after", after.get(p))]) for p in prompts[:6]]
    train = [r for r in rows if r.get("kind") == "train"]
    latest = max((number(r.get("iteration")) or 0 for r in train), default=0)
    ranked = _ranked([r for r in train if r.get("iteration") == latest])
    best = ranked[: min(3, (len(ranked) + 1) // 2)]
    worst = ranked[len(best) :][:-4:-1]
    parts = [f"<h2>Replies</h2><h3>Before and after training</h3>{_cards(pairs)}"] if pairs else []
    for name, shown in (("best", best), ("worst", worst)):
        cards = [_card(r.get("prompt"), [("", r)]) for r in shown]
        title = "" if parts else "<h2>Replies</h2>"
        head = f"{title}<h3>Latest training replies, {name} (iteration {latest:g})</h3>"
        parts += [head + _cards(cards)] if cards else []
    return parts


def _ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort by reward, the best first, each prompt and reply once."""
    once = {(r.get("prompt"), r.get("response")): r for r in rows}
    return sorted(once.values(), key=lambda r: -(number(r.get("reward")) or 0.0))


def _cards(cards: Sequence[str]) -> str:
    return f'<div class="pairs">{"".join(cards)}</div>'


def _card(prompt: object, replies: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    parts = [f'<div class="prompt">{page.escape(prompt)}</div>']
    for name, row in replies:
        if row is None:
            continue
        named = [("reward", "reward"), ("kl", "KL"), ("advantage", "advantage")]
        values = [(title, number(row.get(key))) for key, title in named]
        texts = [f"{title} {svg.short(value)}" for title, value in values if value is not None]
        texts += ["cut"] * bool(row.get("truncated"))
        line = " \u00b7 ".join([name] * bool(name) + texts)
        parts.append(f'<div class="reply">{page.escape(row.get("response"))}</div>')
        parts.append(f'<div class="facts">{page.escape(line)}</div>')
    return f'<div class="card">{"".join(parts)}</div>'


if __name__ == "__main__":
    sys.exit(main())
