"""The run folder's status, stop signals and sums."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from trainer.runtime import Runtime, Stopped


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
    assert not (tmp_path / "errors").exists()
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


def test_stopped_is_not_an_ordinary_error():
    assert not issubclass(Stopped, Exception)


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


def test_the_seed_is_that_of_torch(tmp_path):
    drawn = []
    for seed in (5, 5, 6):
        Runtime(tmp_path, seed=seed)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
