"""The W&B workspace: what it draws exists, and without an account one line says what to do."""

import json
import re
from pathlib import Path

import pytest

from trainer.reports import dashboard

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def test_every_metric_is_one_of_the_metrics_page(capsys):
    assert dashboard.main(["--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    panels = [names for section in printed["sections"].values() for names in section.values()]
    drawn = [name for names in panels for name in names]
    documented = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    groups = {name.split("/")[0] + "/*" for name in documented if "<" in name}
    assert set(drawn) <= {*documented, *groups}
    assert len(drawn) == len(set(drawn)), "a metric is drawn twice"
    parts = {name for name in documented if name.startswith(("reward_part/", "loss/"))}
    wanted = {"reward/mean", "kl/ref", "kl/ref_sequence", "kl/ref_k3", "kl/coeff", "eval/pass@k"}
    wanted |= {"eval/reward", "kl/behaviour_k3", "policy/importance_limited"}
    assert wanted | {name for name in parts if "<" not in name} <= set(drawn)
    assert "reward_part/*" in drawn
    assert printed["x"] in documented


def test_the_workspace_draws_the_panels_over_iterations(capsys):
    dashboard.main(["--dry-run"])
    printed = json.loads(capsys.readouterr().out)["sections"]
    made = dashboard.workspace("team", "mine")
    assert {s.name: [p.title for p in s.panels] for s in made.sections} == {
        name: [*panels] for name, panels in printed.items()
    }
    drawn = [panel for section in made.sections for panel in section.panels]
    assert {panel.x for panel in drawn} == {"progress/iteration"}
    asked = {p.title: p.metric_regex for p in drawn if p.metric_regex}
    assert re.fullmatch(asked["Accuracy on held-out prompts"], "eval/pass@8")
    assert re.fullmatch(asked["Reward parts"], "reward_part/format")


@pytest.mark.usefixtures("no_wandb_account")
def test_without_a_login_one_line_says_how(capsys):
    assert dashboard.main(["--project", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no W&B login: run `wandb login`")
    assert said.count("\n") == 1
