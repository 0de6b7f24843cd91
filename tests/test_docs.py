"""What README and docs promise: commands compose, examples run, links lead somewhere."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from conf.compose import compose_checked, expand
from policies.load import load_policy

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Return every train.py command of the pages that can be composed as it stands."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"python train\.py(?: [^\n`|#(]*)?", text)
    needs_files = ("resume=", "/path/to", ".jsonl", "--cfg", "my_tasks")
    return sorted({c.strip() for c in found if not any(n in c for n in needs_files)})


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_documented_command_composes(command) -> None:
    words = [w for w in shlex.split(command)[2:] if "..." not in w]
    overrides = [w for w in words if not w.startswith("-")]
    for job in expand(overrides) if "-m" in words else [overrides]:
        assert compose_checked(job)["trainer"]["num_iterations"] >= 1


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_script_by_hand_runs_and_leaves_the_built_model_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("by_hand", ROOT / "docs/by_hand.py")
    by_hand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    before = load_policy("tiny").model.state_dict()
    rewards = by_hand.main(iterations=2)
    assert len(rewards) == 2
    assert all(0 <= r <= 1 for r in rewards)
    assert set(before)  # the built model itself is read, never written
    after = load_policy("tiny").model.state_dict()
    assert all((before[k] == after[k]).all() for k in before)


def test_own_task_example_rewards_as_described() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/own_task.md").read_text(), re.S)[1]
    scope: dict = {}
    exec(code, scope)
    task, reply = scope["Shout"](), scope["Reply"]
    row = task.rows("eval")[0]
    assert row["word"] == "bread"
    assert task.reward(row, reply("BREAD", True, [])).success
    assert task.reward(row, reply("bread", True, [])).total == 0.5
    assert task.reward(row, reply("", True, [])).total == 0.0
