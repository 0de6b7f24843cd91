"""report.html: what a run did, in one page that opens anywhere; of a running one, what it does.

    python -m trainer.reports <run or sweep folder>                 # write it (again)
    python -m trainer.reports <run or sweep folder> --svg run.svg   # only the picture
    python -m trainer.reports outputs                               # those of all runs below

Built from the files of the folder alone, at any time, torch-free. Charts of metrics that a run
does not log are left out, so SFT and RL runs share it. A run writes its page again and again
(`LiveReport`), and the page of a run that is going on reloads itself.
"""

import argparse
import logging
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from policies.cache import write_text
from trainer.observer import Observer
from trainer.reports import about, page, panels, svg
from trainer.reports.replies import replies
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, find_runs, load_run

log = logging.getLogger(__name__)
PICTURE = ("Reward", "KL to the reference", "Accuracy on held-out prompts", "Loss")
SECONDS, SHARE = 5.0, 0.02  # the least time from page to page; what pages may take of a run's time


def write_report(folder: str | Path) -> Path:
    """Write <folder>/report.html from the files there and return its path."""
    run = load_run(folder)
    path = run.folder / "report.html"
    patience = max(120.0, 5 * (run.last_ten_mean("time/iteration_s") or 0.0))
    text = page.page(
        f"{run.experiment} - leash",
        _body(run),
        patience=patience if run.state == "running" else None,
    )
    write_text(path, text)
    return path


class LiveReport(Observer):
    """Write a run's page again while it goes on, every SECONDS and in at most a SHARE of its time.

    `quiet`: write none, as other ranks than 0. `write`: what writes the page of a folder; None is
    `write_report`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quiet: bool = False,
        write: Callable[[Path], Path] | None = None,
    ) -> None:
        self.folder, self.write = folder, write
        self.due = float("inf") if quiet else 0.0  # of time.monotonic()

    def begin(self) -> None:
        """Write the first page."""
        self.refresh()

    def evaluating(self, what: str, share: float, *, last: bool) -> None:
        """Keep the page alive: one that stands still says that the run is dead."""
        self.refresh()

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the page if it is time to; the first curves at once."""
        self.refresh(now=iteration <= 1)

    def end(self, state: str, *, saved: int | None) -> None:
        """Write the last page."""
        write_report(self.folder)

    def refresh(self, *, now: bool = False) -> bool:
        """Write the page if it is time to, or `now`; return whether it was written."""
        start = time.monotonic()
        if start < self.due and not (now and self.due < float("inf")):
            return False
        try:
            (self.write or write_report)(self.folder)
        except Exception as error:  # a page must never end a training run
            log.warning("no more live report: %s: %s", type(error).__name__, error)
            self.due = float("inf")
            return False
        end = time.monotonic()
        self.due = end + max(SECONDS, (end - start) / SHARE)
        return True


def run_svg(folder: str | Path) -> str:
    """Draw a run's reward (or loss) and KL curves as a standalone SVG document."""
    run = load_run(folder)
    drawn = [panels.draw(p, run) for title in PICTURE for p in panels.MAIN if p.title == title]
    shown = [chart for chart in drawn if chart][:2]
    if not shown:
        raise ValueError(f"expected metrics in {run.folder}/metrics.jsonl, got none to draw")
    return svg.standalone(shown, width=360, height=220)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a run, a sweep or all that lie below a folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.reports", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    parser.add_argument("--svg", type=Path, help="write only the main picture to this file")
    args = parser.parse_args(arguments)
    from trainer.reports import sweep

    runs, sweeps = find_runs(args.folder)
    if not runs and not sweeps:
        print(
            f"expected a run or sweep folder, got {args.folder} without metrics.jsonl or "
            "status.json in it: see outputs/ and multirun/",
            file=sys.stderr,
        )
        return 2
    if not args.svg:
        try:
            for path in [*map(write_report, runs), *map(sweep.write_sweep, sweeps)]:
                print(path)
        except OSError as error:
            print(f"cannot write the report: {error.strerror}: {args.folder}", file=sys.stderr)
            return 2
        return 0
    if len(runs) + len(sweeps) > 1:
        print(f"--svg draws one run or sweep, got {args.folder} with several", file=sys.stderr)
        return 2
    text = run_svg(runs[0]) if runs else sweep.frontier_svg(sweep.read_rows(sweeps[0]))
    write_text(args.svg, text)
    print(args.svg)
    return 0


def _body(run: Run) -> list[str]:
    more = panels.figures([*panels.MORE, *panels.others(run)], run)
    config = yaml.safe_dump(redact(run.config), sort_keys=False, width=100) if run.config else ""
    changes = about.changes(run)
    wrong, explained = about.notes(run)
    return [
        page.heading(run.experiment, run.state),
        *_notices(run),
        wrong,
        page.tiles(about.tiles(run)),
        explained,
        page.facts(about.commands(run)),
        _curves(run),
        page.folded("More curves", page.charts(more)),
        *replies(run.folder),
        f"<h2>Environment</h2>{page.facts(about.environment(run))}",
        f"<h2>Configuration</h2>{changes}" if changes else "",
        page.folded("Whole configuration", page.block(config)),
    ]


def _curves(run: Run) -> str:
    """Draw the main curves, or say when they come."""
    drawn = page.charts(panels.figures(panels.MAIN, run), title="Curves")
    if drawn or run.state != "running":
        return drawn
    return '<p class="muted">The first curves come after iteration 1; this page reloads itself.</p>'


def _notices(run: Run) -> list[str]:
    """Say why a run ended, or what to do about one that seems to have."""
    reason, state = run.status.get("reason"), run.state
    if state == "killed":
        reason = "its process is gone and left no reason: killed, or out of memory"
    told = (
        f'<p class="{page.look(state)}"><b>{page.escape(reason)}</b>{_traceback(run)}</p>'
        if reason
        else ""
    )
    resumed = run.status.get("resumed")
    since = f'<p class="muted">resumed {page.escape(resumed)}</p>' if resumed else ""
    again = page.command(f"python -m trainer.reports {shlex.quote(str(run.folder.resolve()))}")
    return [told, since, page.stale(again) if state == "running" else ""]


def _traceback(run: Run) -> str:
    """Link the files of the ranks that failed; they lie beside the page."""
    files = sorted((run.folder / "errors").glob("rank*.txt")) if run.state == "failed" else []
    return "".join(f' <a href="errors/{f.name}">errors/{f.name}</a>' for f in files)
