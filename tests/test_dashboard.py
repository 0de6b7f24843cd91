"""The W&B workspace: what it draws exists, and without an account a line says what to do."""

import json
import re
from pathlib import Path

import pytest

from trainer.reports import dashboard

PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()


def test_the_workspace_draws_each_documented_metric_at_most_once_over_iterations(capsys):
    assert dashboard.main(["--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)["sections"]
    names = [name for section in printed.values() for panel in section.values() for name in panel]
    documented = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(documented) == len(set(documented))
    groups = {name.split("/")[0] + "/*" for name in documented if "<" in name}
    assert set(names) <= {*documented, *groups}
    assert len(names) == len(set(names))
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
    assert "wandb login" in said
    assert said.count("\n") == 1
