"""Real runs with a fault: closed streams, a reward that ends the process, damaged run folders.

A damaged folder is resumed to the bit, or ends with one line; its run was killed in the fourth of
four iterations.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.faults import TINY, one_error
from support.runs import ROOT, environment, lines, metrics, train

from trainer.runs.run_files import read_status

pytestmark = pytest.mark.reliability
TASK = """
from envs.tasks import SortDigits

class Task(SortDigits):
    count = 0

    def reward(self, row, response):
        self.count += 1
        if self.count == 40:
            raise {fault}("by a reward")
        return super().reward(row, response)
"""


def test_a_run_needs_no_open_streams(tmp_path):
    words = " ".join([*TINY, f"output_dir={tmp_path}/run"])
    command = f"{sys.executable} {ROOT}/train.py {words} <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], env=environment(), timeout=600)
    assert done.returncode == 0
    assert read_status(tmp_path / "run")["state"] == "finished"
    assert metrics(tmp_path / "run")[-1]["progress/iteration"] == 4
    assert "\n" not in (tmp_path / "run" / ".lock").read_text(), "no print went into a file"


@pytest.mark.parametrize("fault", ["KeyboardInterrupt", "SystemExit"])
def test_what_ends_a_process_fails_a_run_when_a_reward_raises_it(tmp_path, fault):
    (tmp_path / "own_task.py").write_text(TASK.format(fault=fault))
    words = ["allow_targets=true", "env.task._target_=own_task.Task"]
    done = train(*TINY, *words, f"output_dir={tmp_path}/run", PYTHONPATH=str(tmp_path))
    assert done.code == 1
    assert fault in one_error(done.text)
    assert read_status(tmp_path / "run")["state"] == "failed"


# Damaged run folders.


NEWEST = "checkpoints/iteration_000002"
DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "gone": lambda path: path.unlink(),
    "garbled": lambda path: path.write_bytes(b"\0\xff{" * 99),
}
PASSED_OVER = (
    "status.json",
    "metrics.jsonl",
    "transcripts.jsonl",
    f"{NEWEST}/state.json",
    f"{NEWEST}/model/model.safetensors",
)


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory) -> Path:
    """Return the folder of a run that nothing happened to, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = train(*TINY, "checkpoint.keep_last=9", f"output_dir={folder}")
    assert done.code == 0, done.text
    return folder


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """Return a copy of it as a kill after its second checkpoint has left it."""
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "model")
    for number in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"iteration_00000{number}")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "iteration": 3}))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_run_goes_on_to_the_bit_past_a_damaged_file(name, damage, killed, whole):
    """From the checkpoint before where the newest one is damaged; lost lines stay lost."""
    DAMAGES[damage](killed / name)
    done = train(f"resume={killed}")
    assert done.code == 0, done.text
    assert ("skipped damaged iteration_000002" in done.text) == name.startswith(NEWEST)
    models = [folder / "model" / "model.safetensors" for folder in (killed, whole)]
    assert models[0].read_bytes() == models[1].read_bytes()
    after = {
        f: [row for row in metrics(f) if row["progress/iteration"] > 2] for f in (killed, whole)
    }
    assert after[killed] == after[whole]
    if "jsonl" not in name:
        assert metrics(killed) == metrics(whole)
        assert lines(killed / "transcripts.jsonl") == lines(whole / "transcripts.jsonl")


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_its_configuration_a_run_does_not_go_on_and_keeps_what_it_has(damage, killed):
    DAMAGES[damage](killed / "config.yaml")
    before = (killed / "metrics.jsonl").read_bytes()
    done = train(f"resume={killed}")
    assert done.code in (1, 2)
    assert "config.yaml" in one_error(done.text)
    assert (killed / "metrics.jsonl").read_bytes() == before
    assert (killed / NEWEST).is_dir()
