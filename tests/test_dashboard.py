"""The W&B workspace: what it draws exists, and without an account a line says what to do."""

import json
import re
from pathlib import Path

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
    drawn = [panel for section in made.sections for panel in section.panels]
    assert {panel.x for panel in drawn} == {"progress/iteration"}
    asked = {panel.title: panel.metric_regex for panel in drawn if panel.metric_regex}
    assert re.fullmatch(asked["Accuracy on held-out prompts"], "eval/pass@8")
