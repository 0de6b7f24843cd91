"""train: Hydra reads its words as they were meant, its runs are those of a command."""

import itertools
import json
import os
import signal
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from support.runs import lines

from conf.api import _words, train

SMALL = {
    "policy": {"max_new_tokens": 4},
    "algorithm": {"group_size": 2},
    "trainer": {"num_iterations": 1, "prompts_per_iteration": 2},
    "eval": {"num_samples": 1, "greedy": False},
    "checkpoint": {"every": 0},
    "launch": {"threads": 1},
}
ASKED = ["Hi", "What?", "Name a word.", "7 + 5?"]


def length(row, response) -> float:
    return float(len(response.text))


def of_trl(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """Go to an empty folder: runs lie in its outputs/."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(reward=length, rows=ASKED, model="tiny", **changed):
    return train(model, reward, rows, **{**SMALL, **changed})


def read_back(words) -> dict:
    """Return what Hydra's own parser makes of words."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    values = {override.key_or_group: override.value() for override in parsed}
    return {key: getattr(value, "text", value) for key, value in values.items()}


@given(st.text(st.sampled_from("\\\"' ,=[]{}:#\n") | st.characters(codec="ascii"), max_size=8))
def test_overrides_and_any_text_are_read_back_by_hydra_as_they_were_given(text):
    given = {"kl": {"coeff": 0.1}, "policy": {"lora": {"r": 4}, "model": text}}
    flat = {"kl.coeff": 0.1, "policy.lora.r": 4, "policy.model": text}
    same = {"optimizer.lr": 1e-5, "eval.greedy": False, "seed": None}
    assert read_back(_words(given | same)) == flat | same


@pytest.mark.parametrize("kind", ["text", "question", "messages"])
def test_rows_of_every_kind_are_asked_and_a_reward_gets_their_cells(kind):
    seen, level = [], None if kind == "text" else 3

    def row(text: str):
        value = [{"role": "user", "content": text}] if kind == "messages" else text
        return text if kind == "text" else {kind: value, "level": level}

    def watch(row, response):
        seen.append((response.messages[-2]["content"], row["columns"].get("level")))
        return 0.5

    run = call(watch, [row(text) for text in ASKED])
    assert run.status["state"] == "finished"
    assert {*seen} <= {(text, level) for text in ASKED}
    assert (run.folder / "model" / "config.json").is_file()
    assert len(run.metrics) == 2


def test_functions_of_every_kind_are_rewards_and_two_calls_are_two_runs(place):
    """Also where a reward changes the directory."""
    first = call({"length": length, "of_trl": of_trl}, eval_rows=["And you?"])
    parts = [first.last(f"reward_part/{name}") for name in ("length", "of_trl")]
    assert parts[0] == pytest.approx(parts[1])  # the same numbers by both roads
    assert first.last("reward/mean") == pytest.approx(sum(parts))
    responses = lines(first.folder / "transcripts.jsonl")
    assert all("And you?" in line["prompt"] for line in responses if line["kind"] == "before")
    (place / "elsewhere").mkdir()
    second = call(lambda row, response: os.chdir(place / "elsewhere") or 0.25)
    assert second.last("reward/mean") == pytest.approx(0.25)
    assert second.folder != first.folder
    assert (second.folder / "model").is_dir()
    assert not list((place / "elsewhere").iterdir())
    assert "reward_part/length" not in second.names()


REFUSED = [
    ({"trainer": {"num_iterations": 0}}, r"trainer\.num_iterations"),
    ({"launch": {"num_processes": 2}}, r"launch\.num_processes"),
    ({"env": {"max_turns": 0}}, r"env\.max_turns"),
    ({"rows": []}, "at least one row"),
    ({"rows": "rows.jsonl"}, r"got a str; .*load_table"),
    ({"rows": Path("rows")}, r"list of rows, got a PosixPath"),
    ({"rows": ["a", None]}, "dataset, row 2: expected a text or an object, got None"),
    ({"output_dir": "."}, "already holds a run"),
    ({"mode": "chat"}, r"train trains, .* mode=chat resume="),
    ({"resume": "outputs/old"}, r"python \S*train.py resume=outputs"),
    ({"env": {"tools": {"f": length}}}, r"got <function length .*_target_"),
    ({"model": object()}, r"got object; save it .*save_pretrained"),
]


@pytest.mark.parametrize(("changed", "key"), REFUSED)
def test_what_is_refused_is_a_line_and_leaves_nothing(changed, key, place):
    (place / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=key) as caught:
        call(**changed)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(Path("outputs").glob("*/*"))
    assert {path.name for path in place.iterdir()} <= {"metrics.jsonl", "outputs"}


def test_a_reward_that_fails_is_named_by_its_line_before_a_model_is_loaded(monkeypatch):
    def load(**options):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("policies.load_policy", load)
    with pytest.raises(RuntimeError, match=r"KeyError: 'levels' .*test_one_call.py, line"):
        call(lambda row, response: row["levels"])


@pytest.mark.runs
def test_stopping_it_saves_a_checkpoint_and_raises_keyboard_interrupt():
    calls = itertools.count()

    def stops(row, response):
        if next(calls) == 11:
            os.kill(os.getpid(), signal.SIGINT)
        return length(row, response)

    before = signal.getsignal(signal.SIGINT)
    long = {"num_iterations": 50, "prompts_per_iteration": 2}
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C"):
        call(stops, trainer=long, checkpoint={"every": 25}, output_dir="mine")
    assert signal.getsignal(signal.SIGINT) is before
    status = json.loads(Path("mine/status.json").read_text())
    (saved,) = Path("mine/checkpoints").iterdir()
    assert status["state"] == "preempted"
    assert saved.name == f"iteration_{status['iteration']:06}"
    assert call().status["state"] == "finished"  # this process can train another one


def test_demonstrations_need_no_reward():
    said = {"role": "assistant", "content": "Yes."}
    chats = [{"messages": [{"role": "user", "content": text}, said]} for text in ASKED]
    few = {key: value for key, value in SMALL.items() if key != "algorithm"}
    run = train("tiny", None, chats, experiment="sft_own", **few)
    assert run.status["state"] == "finished"
    assert run.last("loss/total") > 0
