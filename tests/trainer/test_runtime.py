"""The run folder's status, stop signals and sums."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.runs import on_two_ranks, refusal
from support.waits import ALONE, COLLECTIVE

from trainer.runtime import Runtime
from trainer.stopping import Stopped


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_a_run_that_ends_is_finished_or_failed(tmp_path):
    with Runtime(tmp_path / "run") as runtime:
        assert status(runtime.folder)["state"] == "running"
        runtime.write_status(iteration=3, objective=0.5)
        assert status(runtime.folder)["iteration"] == 3
    done = status(runtime.folder)
    assert (done["state"], done["reason"], done["objective"]) == ("finished", None, 0.5)
    assert done["seconds"] >= 0
    assert sorted(p.name for p in runtime.folder.iterdir()) == ["status.json"]
    with pytest.raises(ZeroDivisionError), Runtime(tmp_path):
        _ = 1 / 0
    assert status(tmp_path)["state"] == "failed"


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_stops_at_the_next_border(tmp_path, number, name):
    before, steps = signal.getsignal(number), []

    def loop(runtime: Runtime) -> None:
        runtime.stops.on_stop = lambda: steps.append("told")
        for i in range(5):
            with runtime.stops.stoppable():
                steps.append(i)
            if i == 1:
                os.kill(os.getpid(), number)
                steps.append("the rest of the iteration")

    with pytest.raises(Stopped), Runtime(tmp_path) as runtime:
        loop(runtime)
    assert steps == [0, 1, "told", "the rest of the iteration"]
    found = status(tmp_path)
    assert (found["state"], found["reason"]) == ("preempted", f"stopped by {name}")
    assert signal.getsignal(number) == before, "the handlers of the caller are back"


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("went on")


@pytest.mark.parametrize("place", [nullcontext, lambda runtime: runtime.stops.stoppable()])
def test_a_signal_ends_the_set_up_and_stoppable_blocks_at_once(tmp_path, place):
    with pytest.raises(Stopped, match="Ctrl-C"), Runtime(tmp_path) as runtime, place(runtime):
        interrupted()
    assert status(tmp_path)["state"] == "preempted"


def test_a_second_signal_ends_the_process_at_once_with_a_true_status(tmp_path, monkeypatch):
    codes: list[int] = []
    with Runtime(tmp_path) as runtime:
        with runtime.stops.stoppable():
            pass
        leave = lambda code: codes.append((code, status(tmp_path)["reason"]))  # noqa: E731
        monkeypatch.setattr("trainer.runtime.os._exit", leave)
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == []
        os.kill(os.getpid(), signal.SIGINT)
    assert codes == [(128 + signal.SIGINT, "stopped by SIGTERM")]


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"policy\.device=mps"):
        Runtime(tmp_path, device="mps")
    assert "policy.device" in refusal("experiment=grpo_tiny", "policy.device=cuda:1")


@pytest.mark.runs
def test_ranks_wait_long_for_one_that_works_alone_and_not_for_a_tensor_of_a_dead_one(tmp_path):
    on_two_ranks("support.waits", tmp_path)
    found = json.loads((tmp_path / "waits.json").read_text())
    assert found.pop("ended") == "tensor"
    assert found.pop("tensor") < ALONE
    assert min(found.values()) > COLLECTIVE
