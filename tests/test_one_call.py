"""trainer.train: Hydra reads its words as they were meant, its runs are those of a command."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from pages import write_lines, write_status
from runs import lines

import trainer
from conf.api import Trained, _words
from envs.tasks import Reward
from trainer.runs.folders import quoted
from trainer.runs.run_files import load_run

SMALL = {
    "policy": {"max_new_tokens": 4},
    "algorithm": {"group_size": 2},
    "trainer": {"num_iterations": 1, "prompts_per_iteration": 2},
    "eval": {"num_samples": 1, "greedy": False},
    "checkpoint": {"every": 0},
    "launch": {"threads": 1},
}
SFT = {key: SMALL[key] for key in SMALL if key != "algorithm"}
ASKED = ["Hi", "What?", "Name a word.", "7 + 5?"]


def length(row, reply) -> float:
    return float(len(reply.text))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Go to an empty folder: runs lie in its outputs/."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(reward=length, rows=ASKED, **changed):
    return trainer.train("tiny", reward, rows, **{**SMALL, **changed})


def left() -> list[Path]:
    return list(Path("outputs").glob("*/*"))


def read_back(words) -> dict:
    """Return what Hydra's own parser makes of words."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    return {override.key_or_group: override.value() for override in parsed}


def test_any_text_is_read_back_by_hydra_as_it_is():
    draw = random.Random(0)
    texts = ["", "a b", "C:\\tmp\\", 'say "no"', "it's", "a=b,c", "[x]", "{y: 1}", "null", "1e-3"]
    texts += ["\\" * n + end for n in range(4) for end in ('"', "'", "", "x")]
    texts += ["".join(draw.choices("\\\"' ,=[]{}:#\n", k=8)) for _ in range(300)]
    for text in texts:
        (value,) = read_back([f"key={quoted(text)}"]).values()
        assert str(value) == text or getattr(value, "text", value) == text


def test_overrides_are_read_back_by_hydra_as_they_were_given():
    given = {
        "kl": {"coeff": 0.1, "estimator": "full"},
        "algorithm": "rloo",
        "policy": {"stop": ["a b", "c"], "lora": {"r": 4}},
        "trainer.num_iterations": 20,
        "optimizer.lr": 1e-05,
        "eval.greedy": False,
        "seed": None,
    }
    found = read_back(_words(given))
    assert found.pop("policy.stop") is not None
    assert {k: getattr(v, "text", v) for k, v in found.items()} == {
        "kl.coeff": 0.1,
        "kl.estimator": "full",
        "algorithm": "rloo",
        "policy.lora.r": 4,
        "trainer.num_iterations": 20,
        "optimizer.lr": 1e-5,
        "eval.greedy": False,
        "seed": None,
    }


@pytest.mark.parametrize(
    "row",
    [
        lambda text: text,
        lambda text: {"prompt": text, "level": 3},
        lambda text: {"question": text, "level": 3},
        lambda text: {"messages": [{"role": "user", "content": text}], "level": 3},
    ],
    ids=["text", "prompt", "question", "messages"],
)
def test_rows_of_every_kind_are_asked_and_a_reward_gets_their_cells(row):
    seen = []

    def watch(row, reply):
        seen.append((reply.messages[-2]["content"], row["columns"].get("level")))
        return 0.5

    run = call(watch, [row(text) for text in ASKED])
    assert run.status["state"] == "finished"
    assert {text for text, _ in seen} <= set(ASKED)
    assert {level for _, level in seen} == ({None} if row("x") == "x" else {3})
    assert (run.folder / "model" / "config.json").is_file()
    assert len(run.metrics) == 2


def of_trl(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def test_functions_of_every_kind_are_rewards_and_two_calls_are_two_runs():
    first = call({"length": length, "of_trl": of_trl})
    parts = [first.last(f"reward_part/{name}") for name in ("length", "of_trl")]
    assert parts[0] == pytest.approx(parts[1])  # the same numbers by both roads
    assert first.last("reward/mean") == pytest.approx(sum(parts))
    second = call(lambda row, reply: 0.25)
    assert second.last("reward/mean") == pytest.approx(0.25)
    assert second.folder != first.folder
    assert "reward_part/length" not in second.names()


def test_what_a_task_would_give_is_refused_by_what_a_function_gives():
    with pytest.raises(Exception, match="expected a finite number as the reward"):
        call(lambda row, reply: Reward(total=1.0, parts={}, success=True))


def test_eval_rows_are_the_ones_held_out():
    run = call(eval_rows=["And you?", "Who?"], rows=ASKED)
    first = [x for x in lines(run.folder / "transcripts.jsonl") if x["iteration"] == 0]
    said = {line["prompt"] for line in first}
    assert said
    assert all("And you?" in text or "Who?" in text for text in said)
    assert len(lines(run.folder / "eval_dataset.jsonl")) == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"trainer": {"num_iterations": 0}}, "num_iterations >= 1"),
        ({"trainer": {"no_such": 1}}, "no_such"),
        ({"launch": {"num_processes": 2}}, "launch.num_processes=1 in one process"),
        ({"rows": []}, "it is empty"),
        ({"rows": "Hi"}, "put it into a list"),
        ({"rows": {"prompt": "Hi"}}, "put it into a list"),
        ({"experiment": "grpo_nothing"}, "grpo_nothing"),
    ],
)
def test_what_is_refused_is_a_line_and_leaves_nothing(changed, said):
    with pytest.raises(ValueError, match=said) as caught:
        call(**changed)
    assert len(str(caught.value).splitlines()) == 1
    assert not left()


def test_a_folder_that_holds_a_run_is_refused_and_kept():
    run = call(output_dir="mine")
    kept = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="already holds a run"):
        call(output_dir="mine")
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == kept


def test_an_error_of_the_users_function_names_its_line():
    def wrong(row, reply):
        return row["level"]

    with pytest.raises(Exception, match="level") as caught:
        call(wrong)
    assert "test_one_call.py" in str(caught.value)


def test_stopping_it_saves_a_checkpoint_and_raises_keyboard_interrupt():
    asked = []

    def stops(row, reply):
        asked.append(1)
        if len(asked) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return float(len(reply.text))

    before = signal.getsignal(signal.SIGINT)
    long = {"num_iterations": 50, "prompts_per_iteration": 2}
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C"):
        call(stops, trainer=long, checkpoint={"every": 25}, output_dir="mine")
    assert signal.getsignal(signal.SIGINT) is before
    status = json.loads(Path("mine/status.json").read_text())
    assert status["state"] == "preempted"
    (saved,) = Path("mine/checkpoints").iterdir()
    assert saved.name == f"iteration_{status['iteration']:06}"
    assert call().status["state"] == "finished"  # this process can train another one


def test_demonstrations_need_no_reward():
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "Yes."}]}
        for q in ASKED
    ]
    run = trainer.train("tiny", None, chats, experiment="sft_own", **SFT)
    assert run.status["state"] == "finished"
    assert run.last("loss/total") > 0


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("abc", "expected a list of rows, got str"),
        (["a", None], "row 1, prompt: expected a text or a list of messages, got None"),
        ([{"q": "a"}] * 9, "expected a column 'prompt', got q"),
        (["a", {"question": "b"}], r"row 1, prompt: expected a text .* remove the row$"),
    ],
)
def test_what_are_no_rows_is_refused_in_one_line(tmp_path, rows, says):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=says):
        trainer.train("tiny", length, rows, output_dir=folder)
    assert not (folder / "dataset.jsonl").exists()


def test_a_reward_is_tried_on_the_first_row_before_a_model_is_loaded(monkeypatch):
    def wrong(row, reply):
        return row["levels"]

    monkeypatch.setattr("policies.load_policy", None)  # calling it would be another error
    with pytest.raises(
        RuntimeError, match=r"KeyError: 'levels' .*test_one_call.py, line"
    ) as caught:
        call(wrong)
    assert "tried on the first row" in "\n".join(caught.value.__notes__)


def test_the_returned_runs_repr_is_short(tmp_path):
    folder = write_status(write_lines(tmp_path, {"kl/ref_sequence": 0.5}), state="finished")
    run = Trained(**vars(load_run(folder)))
    assert repr(run).startswith(f"Run('{tmp_path}': finished, KL to the reference 0.5 nats")
    assert "iterations 1" in repr(run)
