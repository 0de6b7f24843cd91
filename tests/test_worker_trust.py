"""What a worker makes of a configuration that its parent has not checked, or not like this."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

import train
from conf.compose import compose_checked
from conf.start import set_up
from conf.worker import load

ROOT = Path(__file__).parents[1]
STRANGER = {"_target_": "stranger_of_workers.mark"}


@pytest.fixture
def marking(tmp_path, monkeypatch):
    """Return a file that exists once a stranger's module was imported or called."""
    (tmp_path / "stranger_of_workers.py").write_text(
        "from pathlib import Path\n"
        "def mark(*a, **k): Path(__file__).with_name('MARK').write_text('x')\n"
        "mark()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "MARK"


def put(node: dict, place: str, config: dict) -> dict:
    """Return the configuration with a node at a place, as a.b.c."""
    head, _, rest = place.partition(".")
    inner = put(node, rest, dict(config.get(head) or {})) if rest else node
    return {**config, head: inner}


def saved(folder: Path, config: dict) -> tuple[str, str]:
    """Return a file with a configuration, and its sha256."""
    path = folder / "config.yaml"
    path.write_text(text := yaml.safe_dump(config))
    return str(path), sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def config() -> dict:
    set_up()
    return compose_checked(["experiment=grpo_tiny", "policy.model=tiny", "tracker=none"])


PLACES = {
    "policy": STRANGER,
    "env.task": STRANGER,
    "env.transforms.x": {"_target_": "trainer.runs.launch.run", "script": "a", "config": "b"},
    "env.transforms.y": {"_target_": "envs.transforms.MCPServer", "command": ["touch", "MARK"]},
    "env.rewards": {"x": {"_target_": "envs.rewards.Function", "function": STRANGER}},
    "algorithm.objective": {"_target_": "${oc.env:OF_A_STRANGER}"},
    "algorithm.after_rollout": {"x": {"_target_": "trainer.DropTruncated", "a": [[STRANGER]]}},
    "tracker": {"_target_": "trainer.JsonlTracker", "_args_": [STRANGER]},
    "anything": {"_target_": "os.system"},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_without_a_parent_makes_no_node_of_a_stranger(
    place, config, tmp_path, marking, capfd, monkeypatch
):
    """Whatever the file says of allow_targets."""
    monkeypatch.setenv("OF_A_STRANGER", STRANGER["_target_"])
    monkeypatch.delenv("LEASH_PARENT", raising=False)
    path, _ = saved(tmp_path, put(PLACES[place], place, config) | {"allow_targets": True})
    assert train.worker(path, str(tmp_path)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}")
    assert "_target_" in line
    assert not marking.exists()


def test_leave_is_given_as_a_word_and_a_file_that_was_changed_is_refused(config, tmp_path):
    path, checked = saved(tmp_path, put(STRANGER, "env.task", config) | {"allow_targets": True})
    assert load(path, allow_targets="true").env.task._target_ == STRANGER["_target_"]
    assert load(path, checked=checked, resume="run").resume == "run"
    with Path(path).open("a") as file:
        file.write("# a blank more\n")
    with pytest.raises(ValueError, match="is no longer what was checked"):
        load(path, checked=checked, allow_targets="true")


@pytest.mark.parametrize("words", [[], ["allow_targets=false"]])
def test_a_worker_by_hand_says_in_one_line_whose_code_it_leaves(words, config, tmp_path, marking):
    path, _ = saved(tmp_path, put(STRANGER, "env.task", config) | {"allow_targets": True})
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--worker", path, tmp_path, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "env.task._target_=stranger_of_workers.mark: expected code of policies" in line
    assert not marking.exists()
