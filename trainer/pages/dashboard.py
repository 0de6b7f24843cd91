"""Create a W&B workspace with the main curves.

    python -m trainer.pages.dashboard --entity my-team --project leash
    python -m trainer.pages.dashboard --dry-run     the sections as JSON, no network or login

wandb-workspaces (`pip install -e '.[dashboard]'`) is imported only here. Names: docs/metrics.md.
"""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from policies.optional_packages import EXTRAS
from trainer.pages.panels import MAIN, MORE, Panel
from trainer.pages.trackers.mirror import first_line
from trainer.runs.redact import redact_text
from trainer.runs.run_files import ITERATION

# the charts of report.html, and the parts of the reward
SECTIONS: dict[str, Sequence[Panel]] = {
    "Curves": (*MAIN, Panel("Reward parts", "mean per response", {"reward_part/*": "part"})),
    "More curves": MORE,
}
LOGIN = "no W&B login: run `wandb login` or set WANDB_API_KEY, then again; --dry-run needs none"


def workspace(entity: str, project: str) -> Any:
    """Return the unsaved workspace; the x axis of every panel is progress/iteration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own use of pydantic
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws

    def plot(panel: Panel) -> Any:
        names = [*panel.metrics]
        # eval/pass@k is logged as eval/pass@8
        patterns = [re.sub(r"\*$|(?<=@)k$", ".*", name) for name in names]
        data = {"y": names} if patterns == names else {"metric_regex": f"^({'|'.join(patterns)})$"}
        return wr.LinePlot(title=panel.title, title_y=panel.unit, x=ITERATION, **data)

    sections = [
        ws.Section(name=name, is_open=panels is not MORE, panels=[*map(plot, panels)])
        for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(entity=entity, project=project, name="leash", sections=sections)


def main(words: Sequence[str]) -> int:
    """Create or print the workspace; return the exit code."""
    parser = argparse.ArgumentParser("python -m trainer.pages.dashboard", description=LOGIN)
    parser.add_argument("--entity", help="W&B team or user; default: yours")
    parser.add_argument("--project", default="leash", help="as in tracker.project")
    parser.add_argument("--dry-run", action="store_true", help="print the sections as JSON")
    args = parser.parse_args(words)
    if args.dry_run:
        metrics = {
            name: {panel.title: [*panel.metrics] for panel in panels}
            for name, panels in SECTIONS.items()
        }
        print(json.dumps({"x": ITERATION, "sections": metrics}, indent=1))
        return 0
    try:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True, quiet=True))
        if not wandb.login(prompt=False, verify=False):
            raise ValueError(LOGIN)
        board = workspace(args.entity or wandb.Api().default_entity, args.project)
        board.save()
        print(f"dashboard  {board.url}")
    except Exception as error:  # of the network or of W&B: one line suffices
        missing = f"{EXTRAS['wandb_workspaces']} ({error})" * isinstance(error, ImportError)
        print(f"error: {missing or redact_text(first_line(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
