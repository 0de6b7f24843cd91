"""Each rule on a stream that has its fault and on one that just has not; healthy runs are quiet."""

import inspect
import json
import math
import re

import pytest
from support.pages import documented_metrics, recorded

from trainer.observer import Observer
from trainer.pages import diagnosis
from trainer.pages.diagnosis import QUIET, WORDS, Diagnose, Diagnosis, Finding
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.runtime import Runtime

FINE = {
    "reward/raw_mean": 0.5,
    "reward/std": 0.3,
    "group/zero_variance_fraction": 0.2,
    "kl/ref": 0.1,
    "kl/ref_sequence": 1.0,
    "kl/mismatch": 1e-6,
    "policy/entropy": 0.4,
    "response/truncated_fraction": 0.0,
    "optim/skipped_steps": 0.0,
    "optim/grad_norm": 0.5,
    "loss/policy": 1e-4,
    "loss/total": 1e-3,
}


def stream(count: int = 60, **changes) -> list[dict]:
    """Return healthy metrics, rising from 0.3 to 0.9, with some replaced: by a value or by f(i)."""
    out = []
    for i in range(1, count + 1):
        line = {**FINE, "reward/raw_mean": 0.3 + 0.6 * i / count, "progress/iteration": i}
        new = {n.replace("__", "/"): v(i) if callable(v) else v for n, v in changes.items()}
        out.append({name: value for name, value in {**line, **new}.items() if value != "absent"})
    return out


def said(rows: list[dict]) -> dict[str, int]:
    """Return rule: iteration at which it first spoke."""
    found = Diagnosis(rows).findings
    return {f.rule: f.iteration for f in reversed(found)}


def noise(i: int) -> float:
    return (i * 7919 % 13 - 6) / 100  # mean 0, at most 0.06


NO_GROUPS = {"group__zero_variance_fraction": "absent", "reward__std": 3e-9}
NO_REWARD = {"reward__raw_mean": "absent", "loss__total": lambda i: i / 10}
DISTILLED = {  # from a teacher that starts far away, with one reward for every response
    **{"loss__policy": "absent", "reward__raw_mean": 0.5, "reward__std": 0.0},
    **{"group__zero_variance_fraction": 1.0, "kl__ref": 4.0, "loss__total": lambda i: 4 / i},
}
STREAMS = [  # what differs from a healthy run; the rule that speaks first, and its iteration
    ({"group__zero_variance_fraction": 1.0}, {"equal_rewards": 10}),
    (NO_GROUPS, {"equal_rewards": 10}),
    ({"group__zero_variance_fraction": 0.97}, {}),
    (DISTILLED, {}),
    ({**DISTILLED, "loss__total": lambda i: i / 10}, {"falling": 30}),
    ({"response__truncated_fraction": 0.95}, {"mostly_truncated": 3}),
    (
        {"eval__reward": 0.1, "eval__sampled_accuracy": 0.1, "eval__right_by_words": 0.4},
        {"other_match": 1},
    ),
    ({"eval__reward": 0.3, "eval__sampled_accuracy": 0.3, "eval__right_by_words": 0.4}, {}),
    ({"tools__calls": lambda i: i, "tools__failures": lambda i: i * 0.95}, {"calls_fail": 3}),
    ({"tools__calls": 1.0, "tools__failures": 0.8}, {}),
    ({"tools__calls": 0.0, "tools__failures": 0.0}, {}),
    ({"kl__ref": 3.5, "kl__ref_sequence": 70.0}, {"kl_exploding": 3}),
    ({"kl__ref": 0.9, "kl__ref_sequence": lambda i: i * 1.5}, {}),
    ({"policy__entropy": 0.005}, {"entropy_collapsed": 5}),
    ({"policy__entropy": 0.02}, {}),
    ({"kl__mismatch": 0.3}, {"engine_mismatch": 2}),
    ({"kl__mismatch": 0.04}, {}),  # bfloat16
    ({"optim__grad_norm": lambda i: math.nan if i == 9 else 1}, {"not_finite": 9}),
    ({"loss__total": lambda i: None if i == 4 else 0.1}, {"not_finite": 4}),  # null in the file
    ({"optim__skipped_steps": lambda i: max(0.0, i - 20.0)}, {"skipped_steps": 21}),
    (
        {"reward__raw_mean": lambda i: 0.2 + min(i, 30) / 50 - max(i - 30, 0) / 50 + noise(i)},
        {"falling": 48},
    ),
    (NO_REWARD, {"falling": 30}),  # a supervised run
    (  # all responses are dropped now and then
        {**NO_REWARD, "reward__raw_mean": lambda i: 0.5 + noise(i) if 10 < i <= 50 else "absent"},
        {},
    ),
    ({"reward__raw_mean": lambda i: 0.3 + noise(i)}, {"stalled": 40}),
    ({"reward__raw_mean": lambda i: 0.3 + min(i, 20) / 40 + noise(i)}, {}),
]


@pytest.mark.parametrize(("changes", "wanted"), STREAMS, ids=[", ".join(c) for c, _ in STREAMS])
def test_a_rule_speaks_when_its_fault_is_there_and_not_just_short_of_it(changes, wanted):
    assert said(stream(**changes)) == wanted


def test_every_rule_has_a_stream_and_reads_metrics_that_are_logged():
    tried = {rule for _, wanted in STREAMS for rule in wanted}
    assert sorted(tried | {"reward_hacked"}) == sorted(WORDS)
    source = inspect.getsource(diagnosis) + json.dumps(WORDS)
    names = re.findall(r"\b[a-z]+/[a-z_0-9]+\b", source)
    documented = {*documented_metrics()}
    groups = {name.split("/")[0] for name in documented}
    read = {name for name in names if name.split("/")[0] in groups}
    assert len(read) > 10
    assert read <= documented


def test_a_real_run_that_learns_and_a_supervised_one_raise_nothing():
    rows = recorded("healthy_run.json")  # of grpo_tiny
    found = Diagnosis([{"progress/iteration": 0, "eval/reward": 0.1}, *rows]).findings
    assert found == []
    loss = [{"progress/iteration": i, "loss/total": 6 / i**0.5 + noise(i)} for i in range(1, 400)]
    assert Diagnosis(loss).findings == []


def test_a_reward_that_rises_while_held_out_accuracy_falls_is_hacked():
    rows = recorded("hacked_run.json")  # of ppo_tldr_tiny with kl.coeff=0
    assert said(rows) == {"reward_hacked": 30}, "with its second evaluation"

    def changed(**ends: float) -> dict[str, int]:
        new = {name.replace("__", "/"): value for name, value in ends.items()}
        return said([*rows[:-1], {**rows[-1], **new}])

    assert changed(eval__greedy_accuracy=0.23) == {}, "the greedy responses got no worse"
    assert changed(eval__sampled_accuracy=0.15, eval__greedy_accuracy=0.2) == {}, "by a sixth"
    assert changed(eval__reward=-7.5) == {}, "the held-out responses do not earn more"
    flat = [{**row, "reward/raw_mean": noise(i)} for i, row in enumerate(rows)]
    assert said(flat) == {}, "no reward rises in training"


def test_it_is_said_once_until_it_has_been_gone_for_a_while():
    cut = [0.95] * 8 + [0.1] * (QUIET - 3) + [0.95] * 5 + [0.1] * QUIET + [0.95] * 4
    rows = stream(len(cut), response__truncated_fraction=lambda i: cut[i - 1])
    found = [f for f in Diagnosis(rows).findings if f.rule == "mostly_truncated"]
    gone = 8 + (QUIET - 3) + 5 + QUIET  # the rule wants three in a row
    assert [(f.iteration, f.until) for f in found] == [(3, gone), (gone + 3, None)]


class Heard(Observer):
    """Keep what is said to people, and what is sent to those who are not at the terminal."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.alerts: list[tuple[str, bool]] = []

    def say(self, text: str, *, style: str = "") -> None:
        self.said.append(text)

    def alert(self, title: str, text: str, *, error: bool = False) -> None:
        self.alerts.append((title, error))


def test_it_is_said_at_the_terminal_in_the_status_and_once_over_a_resume(tmp_path):
    def run(first: int, last: int, **options) -> Heard:
        tracker, heard = JsonlTracker(tmp_path, **options), Heard()
        diagnose = Diagnose(Runtime(tmp_path), heard)
        for row in stream(last, kl__mismatch=0.3)[first - 1 :]:
            for observer in (tracker, diagnose):
                observer.log(row, row["progress/iteration"])
        return heard

    heard = run(1, 3)
    assert [line.split(":")[0] for line in heard.said] == ["error at iteration 2"]
    assert heard.alerts == [("Engine mismatch", True)]
    later = run(4, 6, resume=True)
    assert later.said == later.alerts == []
    notes = json.loads((tmp_path / "status.json").read_text())["notes"]
    assert [Finding(**note).rule for note in notes] == ["engine_mismatch"]
