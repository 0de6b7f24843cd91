"""Make a W&B workspace with the curves that matter: python -m trainer.dashboard [--project leash].

    python -m trainer.dashboard --entity my-team --project leash
    python -m trainer.dashboard --dry-run       the sections as JSON, without network or login

wandb-workspaces (`pip install 'leash[dashboard]'`) is imported here only. Names: docs/metrics.md.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from trainer.redact import redact_text
from trainer.run_files import ITERATION
from trainer.tracker import first_line

# section: title of a panel: its metrics; a trailing /* is every metric of that group
SECTIONS: dict[str, dict[str, list[str]]] = {
    "Reward and leash": {
        "Reward": ["reward/mean", "reward/raw_mean"],
        "KL to the reference, per reply (nats)": ["kl/ref_sequence"],
        "KL to the reference, per token (nats)": ["kl/ref", "kl/ref_k3", "kl/ref_full"],
        "KL coefficient": ["kl/coeff"],
        "Held-out accuracy": ["eval/sampled_accuracy", "eval/greedy_accuracy"],
        "Reward parts": ["reward_part/*"],
    },
    "Is there something to learn from": {
        "Spread of the reward": ["reward/std"],
        "Prompts whose replies all got one reward": ["group/zero_variance_fraction"],
        "Length of replies": ["response/length_mean", "response/length_max"],
        "Replies that were cut": ["response/truncated_fraction"],
    },
    "Is the update sound": {
        "Entropy (nats per token)": ["policy/entropy"],
        "KL of the steps and of the engine": ["kl/behaviour", "kl/mismatch"],
        "Clipped tokens": ["policy/clip_fraction"],
        "Largest ratio": ["policy/ratio_max"],
        "Gradient norm": ["optim/grad_norm"],
        "Learning rate": ["optim/lr"],
        "Loss": ["loss/total", "loss/policy", "loss/kl", "loss/value"],
        "Explained variance of the critic": ["value/explained_variance"],
        "Steps left out": ["optim/skipped_steps"],
    },
    "Speed": {
        "Tokens per second": ["perf/tokens_per_s"],
        "Time of an iteration (s)": [
            "time/collect_s",
            "time/score_s",
            "time/update_s",
            "time/sync_s",
        ],
        "Peak memory (GiB)": ["perf/peak_memory_gib"],
    },
}
LOGIN = "no W&B login: run `wandb login` or set WANDB_API_KEY, then again; --dry-run needs none"


def workspace(entity: str, project: str) -> Any:
    """Return the workspace, not saved yet; every panel is drawn over progress/iteration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its own use of pydantic
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws

    def plot(title: str, metrics: list[str]) -> Any:
        group = metrics[0].removesuffix("*")
        what = {"metric_regex": f"{group}.*"} if group != metrics[0] else {"y": metrics}
        return wr.LinePlot(title=title, x=ITERATION, **what)

    sections = [
        ws.Section(name=name, is_open=True, panels=[plot(*panel) for panel in panels.items()])
        for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(entity=entity, project=project, name="leash", sections=sections)


def create(entity: str | None, project: str) -> str:
    """Save the workspace on W&B and return its address; without a login a ValueError."""
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True, quiet=True))
    if not wandb.login(prompt=False, verify=False):
        raise ValueError(LOGIN)
    made = workspace(entity or wandb.Api().default_entity, project)
    made.save()
    return made.url


def main(words: Sequence[str]) -> int:
    """Create or print the workspace; return the exit code."""
    parser = argparse.ArgumentParser("python -m trainer.dashboard", description=LOGIN)
    parser.add_argument("--entity", help="W&B team or user; default: yours")
    parser.add_argument("--project", default="leash", help="as in tracker.project")
    parser.add_argument("--dry-run", action="store_true", help="print the sections as JSON")
    given = parser.parse_args(words)
    if given.dry_run:
        print(json.dumps({"x": ITERATION, "sections": SECTIONS}, indent=1))
        return 0
    try:
        print(f"dashboard  {create(given.entity, given.project)}")
    except ImportError as error:
        missing = "expected wandb-workspaces: pip install 'leash[dashboard]'"
        print(f"error: {missing} ({error})", file=sys.stderr)
        return 2
    except Exception as error:  # of the network or of W&B: one line is enough
        print(f"error: {redact_text(first_line(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
