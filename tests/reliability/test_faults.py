"""Real runs with a fault put in: a full disk, a folder that goes, closed streams, edited data."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from runs import ROOT, environment, metrics, train, wait_for
from small_faults import TINY, lines_of, one_error

from trainer.runs.run_files import read_status

pytestmark = pytest.mark.reliability
TASK = """
from envs.tasks import SortDigits

class Task(SortDigits):
    def __init__(self, fault="", **kwargs):
        super().__init__(**kwargs)
        self.fault, self.count = fault, 0

    def reward(self, row, reply):
        self.count += 1
        if self.count == 40 and self.fault:
            raise {"keyboard": KeyboardInterrupt, "exit": SystemExit}[self.fault]("by a reward")
        return super().reward(row, reply)
"""


FULL = """
mkdir -p {disk} && mount -t tmpfs -o size={size}k tmpfs {disk} || exit 77
cd {root}; {python} train.py {words} output_dir={disk}/run 2>&1; code=$?
cat {disk}/run/status.json > {out}/status.json
mv {disk}/fill {disk}/run/model/x 2>/dev/null; cp -r {disk}/run {out}/run
exit $code
"""


@pytest.mark.parametrize("size", [24, 60, 200, 400, 600, 900])
def test_a_full_disk_is_one_line_a_true_status_and_a_run_that_goes_on(tmp_path, size):
    """Disks of several sizes, in kB, full at another write each."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    disk, words = tmp_path / "disk", " ".join(TINY)
    parts = {"disk": disk, "size": size, "out": tmp_path, "words": words}
    code = FULL.format(root=ROOT, python=sys.executable, **parts)
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", code], env=environment(), capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("may not mount a disk of its own")
    print(done.stdout, done.stderr)
    assert done.returncode in (1, 2)
    assert "No space left on device" in one_error(done.stdout)
    if (text := (tmp_path / "status.json").read_text()) and (tmp_path / "run/config.yaml").exists():
        status = json.loads(text)
        assert (status["state"], "No space left" in status["reason"]) == ("failed", True)


@pytest.mark.parametrize("size", [1, 8, 60, 200])
def test_a_limit_of_file_sizes_is_one_line_and_a_run_that_goes_on(cache, tmp_path, size):
    """ulimit -f, in kB: at config.yaml, at what is logged, at weights."""
    folder = tmp_path / "run"
    words = " ".join([*TINY, f"output_dir={folder}"])
    code = f"ulimit -f {size}; exec {sys.executable} {ROOT}/train.py {words} 2>&1"
    done = subprocess.run(["bash", "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode in (1, 2), done.stdout
    assert "File too large" in one_error(done.stdout)
    if (status := folder / "status.json").is_file():
        assert json.loads(status.read_text())["state"] == "failed"
    if (folder / "config.yaml").is_file():
        assert train(f"resume={folder}").code == 0


def test_a_run_whose_folder_is_removed_ends_and_says_so(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, str(ROOT / "train.py"), *TINY[:3], "trainer.num_iterations=999"]
    process = subprocess.Popen(
        [*command, *TINY[4:], f"output_dir={folder}"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        env=environment(),
    )
    wait_for(lambda: lines_of(folder) > 2, process)
    folder.rename(tmp_path / "gone")
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert str(folder) in one_error(text)
    assert not (folder / "model").exists()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_needs_no_open_streams(tmp_path, closed):
    words = f"{' '.join(TINY)} trainer.num_iterations=1"
    words = words.replace("trainer.num_iterations=6 ", "")
    command = f"{sys.executable} {ROOT}/train.py {words} output_dir={tmp_path}/run {closed}"
    done = subprocess.run(["bash", "-c", command], env=environment(), timeout=600)
    assert done.returncode == 0
    assert read_status(tmp_path / "run")["state"] == "finished"
    sound = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert sound["progress/iteration"] == 1
    assert (tmp_path / "run" / ".lock").read_text().count("\n") == 0, "no print went into a file"


@pytest.mark.parametrize("level", ["1", "2"])
def test_an_optimised_python_trains_too(tmp_path, level):
    done = train(*TINY, f"output_dir={tmp_path}/run", PYTHONOPTIMIZE=level)
    assert done.code == 0, done.text


@pytest.mark.parametrize("fault", ["keyboard", "exit"])
def test_what_ends_a_process_ends_a_run_with_a_line_when_a_reward_raises_it(tmp_path, fault):
    (tmp_path / "own_task.py").write_text(TASK)
    words = ["allow_targets=true", "env.task._target_=own_task.Task", f"+env.task.fault={fault}"]
    done = train(*TINY, *words, f"output_dir={tmp_path}/run", PYTHONPATH=str(tmp_path))
    assert done.code == 1
    assert ("KeyboardInterrupt" if fault == "keyboard" else "SystemExit") in one_error(done.text)
    assert read_status(tmp_path / "run")["state"] == "failed"


def test_a_longer_run_is_the_one_that_was_never_ended_but_for_its_evaluation_there(tmp_path):
    short, whole = tmp_path / "short", tmp_path / "whole"
    steady = [*TINY, "optimizer.schedule=constant"]  # a linear one depends on the length
    assert train(*steady, f"output_dir={short}").code == 0
    again = train(f"resume={short}", "trainer.num_iterations=8")
    assert again.code == 0, again.text
    words = [word.replace("iterations=6", "iterations=8") for word in steady]
    assert train(*words, f"output_dir={whole}").code == 0
    mine, theirs = metrics(short), metrics(whole)
    kept = {key: value for key, value in mine[6].items() if key.startswith("eval/")}
    assert kept, "what was measured at its end stays"
    mine[6] = {key: value for key, value in mine[6].items() if key not in kept}
    assert mine == theirs
    assert read_status(short)["objective"] == read_status(whole)["objective"]


def test_data_that_was_edited_before_a_run_goes_on_is_refused(tmp_path):
    rows = [{"question": f"Say {i}", "answer": f"#### {i}"} for i in range(12)]
    data, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["env=gsm8k", f"env.dataset={data}", "policy.max_prompt_tokens=null"]
    done = train(*TINY, *words, f"output_dir={folder}")
    assert done.code == 0, done.text
    data.write_text(data.read_text().replace("#### 3", "#### 4"))
    done = train(f"resume={folder}", "trainer.num_iterations=8")
    assert done.code in (1, 2)
    assert "env.dataset" in one_error(done.text)
    assert "put the old file back" in done.text


def test_a_signal_after_the_end_leaves_a_run_finished_with_exit_code_0(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TINY, f"output_dir={folder}"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        env=environment(),
    )
    wait_for(lambda: read_status(folder).get("state") == "finished", process)
    for _ in range(3):
        if process.poll() is None:
            os.kill(process.pid, 15)
        time.sleep(0.02)
    text = process.communicate(timeout=300)[0]
    assert (process.returncode, read_status(folder)["state"]) == (0, "finished"), text
