"""What the one at the terminal sees, on a terminal and in a log file."""

import io
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from policies.cache import write_text
from trainer.reports import about
from trainer.reports.display import Display, show_run
from trainer.reports.text import duration, sparkline
from trainer.reports.trackers.files import JsonlTracker
from trainer.runs.run_files import load_run
from trainer.runtime import Runtime


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """Return a file that Display takes for a terminal of 100 columns."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    return io.StringIO()


def frames(file: io.StringIO) -> str:
    """Return all that was drawn, without colours and cursor movements."""
    plain = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\", "", file.getvalue())
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", plain)


def test_a_log_file_gets_one_plain_line_per_iteration() -> None:
    file = io.StringIO()
    about = {"model": "tiny", "report": Path("/r/report.html")}
    with Display(3, title="grpo_tiny", about=about, folder=Path("/r"), file=file) as display:
        display.evaluating("40 prompts x 8 samples, greedy", 0.0)
        display.evaluating("40 prompts x 8 samples, greedy", 0.5)
        display._evaluating = display._evaluating._replace(since=time.monotonic() - 25)
        display.update(0, {"eval/sampled_accuracy": 0.25, "eval/greedy_accuracy": 0.5})
        metrics = {"reward/mean": 0.5, "kl/ref_sequence": -0.0004, "time/iteration_s": 90.0}
        display.update(2, metrics)
        display.update(
            3, {"reward/mean": 0.75, "eval/sampled_accuracy": 0.5, "time/iteration_s": 30.0}
        )
    display.finish()
    assert file.getvalue().splitlines() == [
        "grpo_tiny: 3 iterations",
        "  model   tiny",
        "  report  /r/report.html",
        "evaluating 40 prompts x 8 samples, greedy",
        "before training  accuracy 0.25  greedy 0.50  25.0 s",
        "iteration 2/3  reward 0.500  KL 0.000 nats per reply  90.0 s  1 min 55 s left",
        "iteration 3/3  reward 0.750  accuracy 0.50  30.0 s",
        "report   /r/report.html",
        "metrics  /r/metrics.jsonl",
        "model    /r/model",
        "chat     python train.py mode=chat resume=/r",
    ]


def test_a_long_run_leaves_a_hundred_lines_in_a_log_and_every_evaluation() -> None:
    file = io.StringIO()
    with Display(300, title="sft", file=file) as display:
        for i in range(1, 301):
            extra = {"eval/sampled_accuracy": 0.5} if i == 100 else {}
            display.update(i, {"loss/total": 1.0, **extra})
    lines = file.getvalue().splitlines()[1:]
    assert len(lines) == 101
    assert sum("accuracy" in line for line in lines) == 1
    assert lines[-1].startswith("iteration 300/300")


def test_sft_shows_its_loss() -> None:
    file = io.StringIO()
    with Display(2, title="sft", file=file) as display:
        display.update(1, {"loss/total": 2.5, "time/iteration_s": 1.0})
    assert "iteration 1/2  loss 2.5000  1.0 s  1 s left" in file.getvalue()


def test_replies_cannot_draw_on_the_terminal() -> None:
    file = io.StringIO()
    row = {"prompt": "[bold]hi[/bold]", "response": "a\x1b[31m\nb\ud800" + "x" * 200, "reward": 1.0}
    Display(1, file=file).samples("before", [row])
    shown = file.getvalue()
    assert "[bold]hi[/bold]" in shown
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 3
    assert shown.rstrip().endswith("...   [reward 1.00]")


def test_a_terminal_shows_the_evaluation_going_on_and_then_its_result_for_good(terminal) -> None:
    with Display(2, title="run", folder=Path("/r"), file=terminal) as display:
        display.evaluating("40 prompts x 8 samples", 0.25)
        display._evaluating = display._evaluating._replace(since=time.monotonic() - 70)
        display._live.refresh()
        assert "evaluating 40 prompts x 8 samples: 25%, 1 min 10 s" in frames(terminal)
        display.update(0, {"eval/sampled_accuracy": 0.125})
        evaluated = len(terminal.getvalue())
        display._began -= 130
        display.update(1, {"reward/mean": 0.25, "time/iteration_s": 5.0})
        display.update(2, {"reward/mean": 0.5, "perf/tokens_per_s": 1234.0})
    display.finish()
    shown, later = (
        frames(terminal),
        re.sub(r"\x1b\S*?[A-Za-z]", "", terminal.getvalue()[evaluated:]),
    )
    assert "before training  accuracy 0.12  70.0 s" in shown
    assert "accuracy" not in later, "the accuracy before training does not stand beside the reward"
    assert "1/2 2 min 10 s, 1 min 15 s left" in shown  # one iteration of 5 s, then 70 s evaluation
    assert "reward 0.500  1,234 tok/s" in shown
    assert shown.rstrip().endswith("mode=chat resume=/r")


@pytest.mark.parametrize(
    ("last", "text"),
    [(False, "stopping at the next safe point;"), (True, "ending with this evaluation;")],
)
def test_a_stop_is_answered_at_once(terminal, capfd, monkeypatch, last, text) -> None:
    with Display(2, file=terminal) as display:
        display.evaluating("4 prompts", 0.5, last=last)
        display.stopping()
        display._live.refresh()
        assert text in frames(terminal)
    assert capfd.readouterr().err == "", "nothing may be written between the live lines"
    monkeypatch.delenv("FORCE_COLOR")
    with Display(2, file=io.StringIO()) as display:
        display.evaluating("4 prompts", 0.5, last=last)
        display.stopping()
    assert capfd.readouterr().err == f"{text} Ctrl-C again stops at once\n"
    Display(2, quiet=True).stopping()  # another rank
    assert capfd.readouterr().err == ""


def test_what_is_saved_is_said_with_the_command_that_goes_on() -> None:
    file = io.StringIO()
    Display(2, file=file, folder=Path("/my runs/1")).stopped(saved=7)
    assert file.getvalue() == (
        "saved at iteration 7; go on with: python train.py resume='/my runs/1'\n"
    )


def test_the_last_lines_say_what_the_run_came_to_in_the_time_of_its_page(tmp_path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log({"eval/sampled_accuracy": 0.25, "eval/greedy_accuracy": 0.5}, 0)
    for i in range(1, 13):
        tracker.log({"reward/mean": i / 16, "kl/ref_sequence": i / 4}, i)
    tracker.log({"reward/mean": 0.0, "kl/ref_sequence": 0.0, "eval/sampled_accuracy": 0.9}, 13)
    write_text(tmp_path / "status.json", '{"state": "finished", "seconds": 84.2}')
    file = io.StringIO()
    Display(13, folder=tmp_path, file=file).finish()
    # of 13 the last quarter: 11, 12 and a zero are 23 / 3, of 16 and of 4
    assert file.getvalue().splitlines()[0] == (
        "accuracy 0.25 -> 0.9 (held out, sampled), reward 0.0625 -> 0.479, "
        "KL 1.92 nats per reply (last 3), 1 min 24 s"
    )
    assert about.tiles(load_run(tmp_path))["time"] == "1 min 24 s"


def test_the_clock_is_that_of_the_run_and_not_of_its_first_iteration(terminal) -> None:
    with Display(2, since=time.time() - 70, file=terminal) as display:
        display.update(1, {"reward/mean": 0.5})
    assert "1/2 1 min 10 s" in frames(terminal)


def shown_header(folder: Path) -> list[str]:
    display = show_run(Runtime(folder), 5)
    display.console.file = file = io.StringIO()
    with display:
        pass
    display.stopped(saved=None)
    display.finish()
    return file.getvalue().splitlines()


def test_the_header_names_experiment_model_and_the_live_report(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "some" / "where"  # as output_dir= may be: no part of it is the experiment
    (folder / ".hydra").mkdir(parents=True)
    write_text(
        folder / ".hydra" / "hydra.yaml", "hydra: {runtime: {choices: {experiment: grpo_tiny}}}"
    )
    write_text(folder / "config.yaml", "policy: {model: org/name}")
    write_text(
        folder / "status.json", '{"model": {"origin": "cache", "sha256": "0123456789abcdef"}}'
    )
    assert shown_header(folder)[:3] == [
        "grpo_tiny: 5 iterations",
        "  model   org/name (cache, sha256 0123456789ab)",
        f"  report  {folder}/report.html",
    ]
    monkeypatch.chdir(folder.parent)  # resume=where names the same places
    assert shown_header(Path("where")) == shown_header(folder)


def test_a_click_on_the_report_s_path_opens_it(terminal) -> None:
    report = Path("/my runs/1/report.html")
    with Display(2, about={"report": report}, folder=report.parent, file=terminal) as display:
        pass
    display.finish()
    links = re.findall(r"\x1b\]8;id=\d+;(.*?)\x1b\\(.*?)\x1b\]8;;", terminal.getvalue())
    assert links[:2] == [("file:///my%20runs/1/report.html", "/my runs/1/report.html")] * 2


def test_an_iteration_whose_replies_were_all_dropped_has_no_reward(terminal, monkeypatch) -> None:
    dropped = {"reward/dropped_fraction": 1.0, "loss/total": 9.0, "time/iteration_s": 1.0}
    with Display(3, file=terminal) as display:
        for i in (1, 2):
            display.update(i, {"reward/mean": i / 4, "reward/dropped_fraction": 0.0})
        display.update(3, dropped)
        assert list(display._curve) == [0.25, 0.5]
    assert "reward none" in frames(terminal)
    monkeypatch.delenv("FORCE_COLOR")
    log = io.StringIO()
    with Display(3, title="x", file=log) as display:
        display.update(2, dropped)
    assert log.getvalue().splitlines()[1] == "iteration 2/3  reward none  1.0 s  1 s left"


def test_a_warm_up_names_what_stays_and_not_its_own_folder(tmp_path) -> None:
    kept = "{experiment: sft_tiny, kept_in: /cache/sft_tiny-1, policy: {model: tiny}}"
    write_text(tmp_path / "config.yaml", kept)
    assert shown_header(tmp_path) == [
        "sft_tiny: 5 iterations",
        "  model    tiny (?, sha256 ?)",
        "  kept in  /cache/sft_tiny-1",
    ]


LATEST = {
    "reward/mean": 0.5,
    "kl/ref_sequence": 1.25,
    "kl/ref": 0.25,
    "policy/entropy": 0.125,
    "response/length_mean": 5.0,
    "perf/tokens_per_s": 1234.0,
    "time/iteration_s": 4.0,
    "time/collect_s": 3.0,
    "time/update_s": 1.0,
    "time/sync_s": 0.0,
}


@pytest.mark.parametrize("columns", [60, 160])
def test_the_live_lines_fit_the_terminal_and_lose_nothing(terminal, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with Display(80, title="grpo_tiny", file=terminal) as display:
        for i in range(1, 31):
            display.update(i, {**LATEST, "reward/mean": i / 30})
        display._began -= 3730
    with display.console.capture() as captured:
        display.console.print(display._draw())
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.get()).splitlines()
    assert max(map(len, lines)) <= columns
    shown = " ".join(" ".join(lines).split())
    assert "30/80 1 h 2 min, 3 min 20 s left" in shown  # 50 iterations of 4 s
    for part in (
        "reward 1.000 KL 1.250 nats per reply 0.250 nats per token entropy 0.125 length 5",
        "1,234 tok/s 4.0 s",
        "collect 75% update 25%",
    ):
        assert part in shown
    assert len(re.findall("[\u2581-\u2588]", shown)) == 24
    assert len(lines) == (4 if columns == 60 else 2)


def test_what_the_policy_wrote_is_coloured_and_nothing_else(terminal) -> None:
    pieces = {"text": ["4", "2", " tool:", "\x1b[2J", "7"], "log_prob": [-1, -2, None, None, -3]}
    rows = [
        {"prompt": "6 x 7?", "response": "", "reward": 1.0, "pieces": pieces},
        {"prompt": "unseen", "response": "unseen", "reward": 0.5},
        {"prompt": "6 x 7?", "response": "x" * 300, "reward": 0.0},
    ]
    display = Display(80, file=terminal, show_every=5)
    for i in range(1, 7):
        display.trained_on(i, rows)
    Display(80, file=terminal, show_every=0).trained_on(5, rows)
    shown = terminal.getvalue()
    assert shown.count("best and worst reply of iteration 5") == 1
    coloured = "".join(re.findall(r"\x1b\[36m([^\x1b]*)\x1b\[0m", shown)).rstrip("x")
    assert coloured == "427"
    assert "\x1b[2J" not in shown
    assert "unseen" not in shown
    assert f"{'x' * 237}..." in frames(terminal)
    assert "[reward 1.00]" in shown


def test_the_configuration_says_how_often_replies_are_shown(tmp_path) -> None:
    write_text(tmp_path / "config.yaml", "trainer: {show_every: 7}")
    assert show_run(Runtime(tmp_path), 5).show_every == 7


def test_a_long_note_is_wrapped_at_words_on_a_terminal_and_one_line_in_a_log(terminal) -> None:
    text = " ".join(["raise policy.max_new_tokens"] * 9)
    Display(2, file=terminal).note(text, wrap=True)
    assert [len(line) <= 100 for line in frames(terminal).splitlines()] == [True] * 3
    assert frames(terminal).split() == text.split()
    log = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FORCE_COLOR")
        Display(2, file=log).note(text, wrap=True)
    assert log.getvalue() == f"{text}\n"


def test_sparkline_and_duration_take_odd_values() -> None:
    assert sparkline([1.0, 1.0], unicode=False) == ".."
    assert sparkline([0.0, math.nan, 1.0], unicode=False) == ".#"
    assert sparkline([]) == ""
    climb = [min(i, 100) / 100 + (i % 2) / 100 for i in range(1000)]  # then a plateau
    drawn = sparkline(climb)
    assert len(drawn) == 24
    assert drawn[0] == "\u2581"
    assert set(drawn[3:]) == {"\u2588"}, "a plateau is flat beside the climb"
    assert duration(59.6) == "1 min 0 s"


def test_a_reader_that_goes_away_ends_the_display_and_not_the_run():
    code = """
import sys
from trainer.runs.failures import say
from trainer.reports.display import Display
with Display(3, title="demo") as display:
    sys.stdin.read()  # until the pipe is closed
    say("as the parent does")
    for i in range(1, 4):
        display.update(i, {"reward/mean": 0.5})
print("done", file=sys.stderr)
"""
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, "done\n")
