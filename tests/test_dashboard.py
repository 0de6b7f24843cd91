"""The W&B workspace: what it draws exists, and without an account one line says what to do."""

import json
import re
from pathlib import Path

import pytest

from trainer.reports import dashboard

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
    parts = {name for name in documented if name.startswith(("reward_part/", "loss/"))}
    wanted = {"reward/mean", "kl/ref", "kl/ref_sequence", "kl/ref_k3", "kl/coeff", "eval/pass@k"}
    wanted |= {"eval/reward", "kl/behaviour_k3", "policy/importance_limited"}
    assert wanted | {name for name in parts if "<" not in name} <= set(drawn)
    assert "reward_part/*" in drawn
    assert printed["x"] in documented


def test_the_workspace_draws_the_printed_sections_over_iterations(capsys):
    dashboard.main(["--dry-run"])
    printed = json.loads(capsys.readouterr().out)["sections"]
    logged = {name for panels in printed.values() for names in panels.values() for name in names}
    logged = {name.replace("@k", "@8").replace("/*", "/format") for name in logged}
    made = dashboard.workspace("team", "mine")
    drawn = {
        section.name: {
            panel.title: [n for n in logged if re.fullmatch(panel.metric_regex, n)]
            if panel.metric_regex
            else panel.y
            for panel in section.panels
        }
        for section in made.sections
    }
    for name, panels in printed.items():
        assert [*drawn[name]] == [*panels]
        for title, names in panels.items():
            wanted = {n.replace("@k", "@8").replace("/*", "/format") for n in names}
            assert set(drawn[name][title]) == wanted, title
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
