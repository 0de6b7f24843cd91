"""What a person at the terminal sees, on a terminal and in a log file."""

import io
import os
import re
import sys
import time

import pytest
from rich.console import Console, Group
from support.pages import write_lines, write_status

from trainer.pages.display import STOPPING, Display


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """Return a file that Display takes for a terminal of 100 columns."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    return io.StringIO()


def plain(text: str) -> str:
    """Return what was drawn, without colours, links and cursor movements."""
    text = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\", "", text)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


def live_lines(display: Display) -> list[str]:
    """Return what the refresh thread would draw now."""
    console = Console(width=int(os.environ["COLUMNS"]), file=io.StringIO(), highlight=False)
    console.print(Group(*display._bar.get_renderables()))
    return [line.rstrip() for line in plain(console.file.getvalue()).splitlines()]


def age(display: Display, seconds: float) -> None:
    """Make the evaluation that goes on older."""
    display._evaluating = display._evaluating._replace(since=time.monotonic() - seconds)
    display._printed -= seconds


def begun(total: int, **options) -> Display:
    display = Display(total, **options)
    display.begin()
    return display


def test_a_log_file_gets_one_plain_line_per_iteration_with_the_time_left(tmp_path):
    """Beside what the docstring of Display shows."""
    folder, file = write_status(tmp_path, seconds=84.2), io.StringIO()
    display = begun(3, title="grpo_tiny", folder=folder, file=file)
    for fraction in (0.0, 0.25, 0.5):  # a line a minute
        display.evaluating("evaluating 40 prompts", fraction, last=False)
        age(display, 25 if fraction else 61)
    display.log({"eval/sampled_accuracy": 0.25}, 0)
    display.log({"reward/mean": 0.5, "kl/ref_sequence": -0.0004, "time/iteration_s": 90.0}, 2)
    last = {"reward/mean": 0.75, "eval/sampled_accuracy": 0.5, "time/iteration_s": 30.0}
    display.log(last, 3)
    write_lines(folder, last)
    display.end("finished", saved=3)
    _, begins, evaluates, before, *iterations, said = file.getvalue().splitlines()[:7]
    assert begins == "evaluating 40 prompts"
    assert evaluates.startswith(f"{begins}: 25%, 1 min 1 s, about 3 min 3 s left")
    assert before.split("  ")[1::2] == ["accuracy 0.25"]
    assert [line.split("  ")[1:] for line in iterations] == [
        ["reward 0.500", "KL 0.000 nats per response", "90.0 s", "1 min 55 s left"],
        ["reward 0.750", "accuracy 0.50", "30.0 s"],
    ]
    assert "reward 0.75" in said
    assert file.getvalue().splitlines()[-1].endswith(f"mode=chat resume={folder}")


def test_responses_are_shown_now_and_then_and_cannot_draw_on_the_terminal():
    row = {"prompt": "[bold]hi[/bold]", "response": "a\x1b[31m\nb\ud800" + "x" * 300, "reward": 1.0}
    display = Display(80, file=(file := io.StringIO()), show_every=5)
    display.responses([row], 0, kind="before")
    for i in range(1, 7):
        display.responses([row, {**row, "prompt": "6 x 7?"}, row], i, kind="train")
    lines = file.getvalue().splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["responses before training", "best and worst response of iteration 5"]
    assert len(lines) == 2 + 3 * 2, "a line each"
    assert "[bold]hi[/bold]" in lines[1]
    assert not [part for part in ("\x1b", "6 x 7?") if part in file.getvalue()]


def test_a_terminal_shows_what_goes_on_below_a_bar_and_results_for_good(terminal, tmp_path):
    display = begun(2, title="run", folder=tmp_path, file=terminal)
    display.evaluating("sampling the reference", 0.5, last=False)
    age(display, 600)  # not in the time left: there is none at the end
    display.evaluating("evaluating 40 prompts", 0.25, last=False)
    age(display, 70)
    line = "evaluating 40 prompts: 25%, 1 min 10 s, about 3 min 30 s left"
    assert live_lines(display)[-1].startswith(line)
    display.log({"eval/sampled_accuracy": 0.125}, 0)
    assert "accuracy 0.12  70.0 s" in plain(terminal.getvalue())
    display.log({"reward/mean": 0.25, "policy/entropy": 0.125, "time/iteration_s": 5.0}, 1)
    lines = live_lines(display)
    assert re.search(r"run .* 1/2 0:00:0\d 1 min 15 s left", lines[0])  # 5 s, 70 s of evaluation
    assert lines[1:] == ["reward 0.250  entropy 0.125  5.0 s"], "and no accuracy"
    display.end("preempted", saved=7)
    assert f"resume={tmp_path}" in plain(terminal.getvalue())


def test_a_stopped_run_whose_reward_is_a_python_function_prints_no_command(terminal, tmp_path):
    reward = "{_target_: envs.rewards.Registered, name: mine}"  # of conf.api.train
    (tmp_path / "config.yaml").write_text(f"env: {{rewards: {{mine: {reward}}}}}")
    begun(2, folder=tmp_path, file=terminal).end("preempted", saved=None)
    assert "conf.api.train" in plain(terminal.getvalue())
    assert "resume=" not in plain(terminal.getvalue())


def test_a_stop_is_answered_at_once(terminal, capfd, monkeypatch):
    display = begun(2, file=terminal)
    display.stopping()
    assert live_lines(display)[-1] == STOPPING
    display.end("preempted", saved=None)
    assert capfd.readouterr().err == "", "nothing may be written between the live lines"
    monkeypatch.delenv("FORCE_COLOR")
    begun(2, file=io.StringIO()).stopping()
    assert STOPPING in capfd.readouterr().err


def test_a_breakpoint_has_the_terminal_to_itself(terminal, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(display._bar))
    usual = sys.breakpointhook
    display = begun(3, title="demo", file=terminal)
    breakpoint()
    assert seen == [None]
    assert sys.breakpointhook is usual
    display.log({"reward/mean": 0.5, "time/iteration_s": 1.0}, 1)
    assert "iteration 1/3  reward 0.500" in plain(terminal.getvalue())
