"""Rewrite the pages of runs and sweeps from the files in their folders.

python -m trainer.pages <run or sweep folder>                 # its page
python -m trainer.pages <run or sweep folder> --svg run.svg   # only the picture
python -m trainer.pages <run or sweep folder> --frontier      # sample its reference first
python -m trainer.pages outputs                               # the pages of all runs below
python -m trainer.pages <run> <run or sweep> ...              # compare.html in this folder
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from policies.files import write_text
from trainer.pages.frontier_chart import sample_frontier
from trainer.pages.report import run_svg, write_report
from trainer.pages.sweep_page import sweep_svg, write_comparison, write_sweep
from trainer.runs.discover import find_jobs, find_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages of a run, a sweep or all of them below a folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.pages", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder")
    parser.add_argument("--svg", type=Path, help="write only the main picture to this file")
    about = "responses of the reference to each held-out prompt, 64 without a number (docs/kl.md)"
    parser.add_argument("--frontier", type=int, nargs="?", const=64, metavar="N", help=about)
    try:
        _run(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    runs, sweeps = [], []
    for folder in args.folders:
        matches = find_runs(folder)
        if not any(matches):
            raise ValueError(
                f"expected a run or sweep folder, got {folder} without metrics.jsonl or "
                "status.json in it: see outputs/ and multirun/"
            )
        runs += matches[0]
        sweeps += matches[1]
    one = (runs or sweeps)[0]
    if len(runs) + len(sweeps) > 1 and (args.svg or args.frontier):
        several = " ".join(map(str, args.folders))
        raise ValueError(f"--svg and --frontier take one run or sweep, got several: {several}")
    jobs = [job for sweep in sweeps for job in find_jobs(sweep)]
    if len(args.folders) > 1:
        print(write_comparison(list(dict.fromkeys([*runs, *jobs]))))
        return
    if args.frontier:
        sample_frontier(one, args.frontier)
        runs += jobs
    if args.svg:
        write_text(args.svg, sweep_svg(one) if sweeps else run_svg(one))
        print(args.svg)
    else:
        for path in [*map(write_report, runs), *map(write_sweep, sweeps)]:
            print(path)


if __name__ == "__main__":
    sys.exit(main())
