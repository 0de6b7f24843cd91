"""A run that ends once it has learnt enough: at a value, or when evaluations stagnate."""

import json
from pathlib import Path

import pytest
from refusals import refusal
from small_runs import IN_ITERATION_2, Counted, stop, train

from trainer.early_stopping import EarlyStopping, read_rule
from trainer.runs.find import nothing_left
from trainer.runs.run_files import load_run

ROOT = Path(__file__).parents[1]


def lines(folder):
    """Return what a run logged, without what depends on the machine."""
    return [
        {name: v for name, v in line.items() if name.split("/")[0] not in ("time", "perf")}
        for line in load_run(folder).metrics
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


def test_a_metric_that_falls_or_rises_ends_the_run():
    falls, rises = (EarlyStopping(stop_at="loss/total 0.5") for _ in range(2))
    assert [bool(falls({"loss/total": x}, i)) for i, x in enumerate([2, 0.6, 0.5], 1)][-2:] == [
        False,
        True,
    ]
    assert [bool(rises({"loss/total": x}, i)) for i, x in enumerate([0.1, 0.4, 0.7], 1)] == [
        False,
        False,
        True,
    ]
    assert EarlyStopping(stop_at="a/b 0")({"a/b": 0.0}, 0) is None, "never before training"


def test_patience_counts_evaluations_since_the_best_one():
    scores = [0.2, 0.4, 0.4, 0.3, 0.5, 0.1, 0.5, 0.4]
    for patience in (1, 2, 3):
        enough, ended = EarlyStopping(patience=patience), None
        for i, score in enumerate(scores):
            enough({"loss/total": 1.0}, i)  # an iteration without an evaluation counts nothing
            if enough({"eval/sampled_accuracy": score, "eval/reward": 9.0 + i}, i) and not ended:
                ended = i
        by_hand = next(
            i for i in range(1, len(scores)) if i - scores.index(max(scores[: i + 1])) >= patience
        )
        assert ended == by_hand


def test_a_metric_of_evaluations_needs_some():
    rule = "trainer.stop_at=eval/reward 1"
    assert "eval/reward needs evaluations" in refusal("experiment=grpo_tiny", rule, "eval.every=0")


@pytest.mark.parametrize(("name", "iteration"), [("eval/acuracy", 0), ("kl/refsequence", 1)])
def test_a_metric_that_the_run_does_not_log_is_told_by_what_it_logs_first(name, iteration):
    logged = [{"eval/reward": 1.0}, {"kl/ref": 0.0}]  # by an evaluation, by training
    enough = EarlyStopping(stop_at=f"{name} 1")
    assert enough(logged[1 - iteration], iteration) is None
    with pytest.raises(ValueError, match=f"no metric {name}"):
        enough(logged[iteration], iteration)


def test_a_rule_given_on_resume_waits_for_the_next_evaluation():
    before = EarlyStopping(patience=9)
    before({"eval/sampled_accuracy": 0.1}, 0)
    for state in (before.state_dict(), None):  # of a run with another rule, or with none
        enough = EarlyStopping(stop_at="eval/sampled_accuracy 0.9")
        if state:
            enough.load_state_dict(state)
        assert enough({"loss/total": 0.1}, 3) is None
        assert enough({"eval/sampled_accuracy": 0.5}, 4) is None
        assert enough({"eval/sampled_accuracy": 0.95}, 5)


@pytest.mark.parametrize("text", ["kl/ref", "0.9", "kl/ref much", "kl 3", "kl/ref inf", ""])
def test_a_rule_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="expected trainer\\.stop_at"):
        read_rule(text)


def test_the_run_ends_there_and_equals_a_longer_one_up_to_there(tmp_path, whole):
    kl = lines(whole)[2]["kl/ref_sequence"]  # of iteration 2, it rises from 0
    shown = train(tmp_path, enough=EarlyStopping(stop_at=f"kl/ref_sequence {kl * 0.999}"))
    assert "enough at iteration 2: kl/ref_sequence came to" in shown
    assert lines(tmp_path) == lines(whole)[:3]
    run = load_run(tmp_path)
    assert run.state == "finished"
    assert run.status["ended"].startswith("kl/ref_sequence came to")
    assert (tmp_path / "model").is_dir()
    assert (tmp_path / "checkpoints" / "iteration_000002").is_dir()
    replies = (tmp_path / "transcripts.jsonl").read_text()
    assert '"after"' in replies, "the last evaluation is that after training"


def test_replies_of_the_evaluation_that_ended_the_run_are_those_after_training(tmp_path):
    train(tmp_path, enough=EarlyStopping(patience=1))
    text = (tmp_path / "transcripts.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    last = load_run(tmp_path).status["iteration"]
    kinds = {row["kind"] for row in rows if row["iteration"] == last}
    assert kinds == {"train", "after"}


@pytest.mark.parametrize("rule", [{"stop_at": "kl/ref_sequence 1e-4"}, {"patience": 1}])
def test_a_run_that_was_stopped_and_goes_on_ends_where_an_uninterrupted_one_does(tmp_path, rule):
    train(tmp_path / "a", enough=EarlyStopping(**rule))
    train(tmp_path / "b", Counted(IN_ITERATION_2, stop), enough=EarlyStopping(**rule))
    train(tmp_path / "b", resume=True, enough=EarlyStopping(**rule))
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def test_nothing_is_left_to_do_while_the_rule_is_the_same(tmp_path, whole):
    rule = {"stop_at": "kl/ref_sequence 1e-4"}
    train(tmp_path, enough=EarlyStopping(**rule))
    (tmp_path / "config.yaml").write_text(f"trainer: {{stop_at: {rule['stop_at']}}}")
    done = lines(tmp_path)
    assert 1 < len(done) < 5
    config = {
        "resume": str(tmp_path),
        "mode": "train",
        "trainer": {"num_iterations": 4, "patience": None, **rule},
    }
    assert "came to" in str(nothing_left(config))
    config["trainer"] = {"num_iterations": 4, "stop_at": None, "patience": None}
    assert nothing_left(config) is None
    train(tmp_path, resume=True, enough=EarlyStopping(**rule))  # the final model was lost, say
    assert lines(tmp_path) == done
    train(tmp_path, resume=True)
    assert [line["kl/ref_sequence"] for line in lines(tmp_path)[1:]] == [
        line["kl/ref_sequence"] for line in lines(whole)[1:]
    ]
