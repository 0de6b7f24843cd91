"""The run folder's status, stop signals and sums."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from refusals import refusal

from trainer.runtime import Runtime, Stopped

ROOT = Path(__file__).parents[1]


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_a_run_that_ends_is_finished(tmp_path):
    with Runtime(tmp_path / "run") as runtime:
        assert status(runtime.folder)["state"] == "running"
        runtime.write_status(iteration=3, objective=0.5)
        assert status(runtime.folder)["iteration"] == 3
    done = status(runtime.folder)
    assert (done["state"], done["reason"], done["objective"]) == ("finished", None, 0.5)
    assert done["seconds"] >= 0
    assert sorted(p.name for p in runtime.folder.iterdir()) == ["status.json"]


STOPS = [(signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGINT, "stopped by Ctrl-C")]


@pytest.mark.parametrize(("number", "reason"), STOPS)
def test_a_signal_stops_at_the_next_border(tmp_path, number, reason):
    before = signal.getsignal(number)
    steps = []

    def loop(runtime: Runtime) -> None:
        runtime.on_stop = lambda: steps.append("told")
        for i in range(5):
            with runtime.stoppable():
                steps.append(i)
            if i == 1:
                os.kill(os.getpid(), number)
                steps.append("the rest of the iteration")

    with pytest.raises(Stopped), Runtime(tmp_path) as runtime:
        loop(runtime)
    assert steps == [0, 1, "told", "the rest of the iteration"]
    assert status(tmp_path)["state"] == "preempted"
    assert status(tmp_path)["reason"] == reason
    assert signal.getsignal(number) == before, "the handlers of the caller are back"


@pytest.mark.parametrize("place", ["set-up", "stoppable block"])
def test_a_signal_ends_what_holds_nothing_at_once(tmp_path, place):
    def work(runtime: Runtime) -> None:
        if place == "set-up":
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")
        with runtime.stoppable():
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")

    with pytest.raises(Stopped, match="stopped by Ctrl-C"), Runtime(tmp_path) as runtime:
        work(runtime)
    assert status(tmp_path)["state"] == "preempted"


def test_a_run_that_fails_says_so(tmp_path):
    with pytest.raises(ZeroDivisionError), Runtime(tmp_path):
        _ = 1 / 0
    assert status(tmp_path)["state"] == "failed"


def test_a_second_signal_ends_the_process_at_once_with_a_true_status(tmp_path, monkeypatch):
    codes: list[int] = []
    with Runtime(tmp_path) as runtime:
        with runtime.stoppable():
            pass
        exit_process = lambda code: codes.append((code, status(tmp_path)["reason"]))  # noqa: E731
        monkeypatch.setattr("trainer.runtime.os._exit", exit_process)
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == []
        os.kill(os.getpid(), signal.SIGINT)
    assert codes == [(128 + signal.SIGINT, "stopped by SIGTERM")]


def test_what_accelerate_launch_always_sets_is_no_setting(tmp_path, monkeypatch):
    usual = {"MIXED_PRECISION": "no", "GRADIENT_ACCUMULATION_STEPS": "1", "USE_FSDP": "false"}
    for name, value in usual.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    assert Runtime(tmp_path).accelerator.gradient_accumulation_steps == 1


def test_float64_is_asked_only_of_devices_that_have_it():
    """Apple's MPS has none: `in_float64` goes to the CPU first, and nothing goes round it."""
    for folder in ("policies", "trainer"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text() if "torchrl" not in path.parts else ""
            asked = re.findall(r"^.*(?<!\.cpu\(\))\.double\(\).*$", text, re.M)
            asked = [line for line in asked if "x.cpu() if x.device.type" not in line]
            on_cpu = "torch.tensor(max("  # made there
            assert not [line for line in asked if on_cpu not in line], f"{path}: use in_float64"


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"policy\.device=mps"):
        Runtime(tmp_path, device="mps")
    assert "policy.device" in refusal("experiment=grpo_tiny", "policy.device=cuda:1")


def test_a_clock_that_is_set_back_does_not_make_a_run_younger(tmp_path, monkeypatch):
    with Runtime(tmp_path) as runtime:
        monkeypatch.setattr("time.time", lambda: 0.0)
        runtime.write_status()
        assert 0 <= status(tmp_path)["seconds"] < 100
