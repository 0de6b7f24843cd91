"""The W&B workspace: what it draws exists, and without an account one line says what to do."""

import json
import re
from pathlib import Path

import pytest

from trainer import dashboard

PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()


def test_every_metric_is_one_of_the_metrics_page(capsys):
    assert dashboard.main(["--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    panels = [names for section in printed["sections"].values() for names in section.values()]
    drawn = [name for names in panels for name in names]
    documented = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    groups = {name.split("/")[0] + "/*" for name in documented if "<" in name}
    assert set(drawn) <= {*documented, *groups}
    assert len(drawn) == len(set(drawn)), "a metric is drawn twice"
    assert {"reward/mean", "kl/ref", "kl/ref_sequence", "kl/ref_k3", "kl/coeff"} <= set(drawn)
    assert printed["x"] in documented


def test_the_workspace_draws_the_printed_sections_over_iterations():
    made = dashboard.workspace("team", "mine")
    drawn = {
        section.name: {
            panel.title: [panel.metric_regex or ""] if panel.metric_regex else panel.y
            for panel in section.panels
        }
        for section in made.sections
    }
    wanted = json.loads(json.dumps(dashboard.SECTIONS).replace("/*", "/.*"))
    assert drawn == wanted
    assert {panel.x for section in made.sections for panel in section.panels} == {
        "progress/iteration"
    }
    assert (made.entity, made.project) == ("team", "mine")


@pytest.mark.usefixtures("no_wandb_account")
def test_without_a_login_one_line_says_how(capsys):
    assert dashboard.main(["--project", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no W&B login: run `wandb login`")
    assert said.count("\n") == 1
