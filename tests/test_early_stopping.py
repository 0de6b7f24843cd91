"""A run that ends once it has learnt enough: at a value, or when evaluations stagnate."""

import pytest
from runs import lines, metrics
from small_runs import IN_ITERATION_2, Counted, stop, train

from trainer.early_stopping import EarlyStopping, read_rule
from trainer.runs.find import nothing_left
from trainer.runs.run_files import read_status

RULE = "kl/ref_sequence 1e-4"


@pytest.mark.parametrize("values", [[2, 0.6, 0.5], [0.1, 0.4, 0.7]])
def test_a_metric_that_falls_or_rises_to_a_value_ends_the_run(values):
    enough = EarlyStopping(stop_at="loss/total 0.5")
    ended = [bool(enough({"loss/total": value}, i)) for i, value in enumerate(values, 1)]
    assert ended == [False, False, True]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_counts_evaluations_since_the_best_one(patience):
    scores = [0.2, 0.4, 0.4, 0.3, 0.5, 0.1, 0.5, 0.4]
    enough, ended = EarlyStopping(patience=patience), []
    for i, score in enumerate(scores):
        enough({"loss/total": 1.0}, i)  # an iteration without an evaluation counts nothing
        if enough({"eval/sampled_accuracy": score, "eval/reward": 9.0 + i}, i):
            ended.append(i)
    best = [scores.index(max(scores[: i + 1])) for i in range(len(scores))]
    assert ended[0] == next(i for i in range(1, 8) if i - best[i] >= patience)


@pytest.mark.parametrize(("name", "iteration"), [("eval/acuracy", 0), ("kl/refsequence", 1)])
def test_a_metric_that_the_run_does_not_log_is_refused_when_it_is_first_missing(name, iteration):
    logged = [{"eval/reward": 1.0}, {"kl/ref": 0.0}]  # by an evaluation, by training
    enough = EarlyStopping(stop_at=f"{name} 1")
    assert enough(logged[1 - iteration], iteration) is None
    with pytest.raises(ValueError, match=name):
        enough(logged[iteration], iteration)


@pytest.mark.parametrize("text", ["kl/ref", "kl/ref much", "kl/ref inf"])
def test_a_rule_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"trainer\.stop_at"):
        read_rule(text)


@pytest.mark.runs
def test_the_run_ends_there_and_equals_a_longer_one_up_to_there_and_goes_on(tmp_path):
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    train(whole)
    train(ended, enough=EarlyStopping(stop_at=RULE))  # a KL, which rises from 0
    (ended / "config.yaml").write_text(f"trainer: {{stop_at: {RULE}}}")
    done, kl = metrics(ended), [line.get("kl/ref_sequence") for line in metrics(whole)]
    assert 1 < len(done) < 5
    assert done[-1]["kl/ref_sequence"] >= 1e-4 > done[-2].get("kl/ref_sequence", 0)
    assert [line.get("kl/ref_sequence") for line in done] == kl[: len(done)]
    status = read_status(ended)
    assert (status["state"], status["iteration"]) == ("finished", len(done) - 1)
    assert (ended / "model").is_dir()
    rows = [row for row in lines(ended / "transcripts.jsonl") if row["iteration"] == len(done) - 1]
    assert {row["kind"] for row in rows} == {"train", "after"}, "its evaluation is the last one"

    settings = {"num_iterations": 4, "stop_at": RULE, "patience": None}
    config = {"resume": str(ended), "mode": "train", "trainer": settings}
    assert "came to" in str(nothing_left(config))
    assert nothing_left(config | {"trainer": settings | {"stop_at": None}}) is None
    train(ended, resume=True, enough=EarlyStopping(stop_at=RULE))  # the final model was lost, say
    assert metrics(ended) == done
    train(ended, resume=True)
    assert [line.get("kl/ref_sequence") for line in metrics(ended)][1:] == kl[1:]


@pytest.mark.runs
@pytest.mark.parametrize("rule", [{"stop_at": RULE}, {"patience": 1}])
def test_a_run_that_was_stopped_and_goes_on_ends_where_an_uninterrupted_one_does(tmp_path, rule):
    train(tmp_path / "a", enough=EarlyStopping(**rule))
    train(tmp_path / "b", Counted(IN_ITERATION_2, stop), enough=EarlyStopping(**rule))
    train(tmp_path / "b", resume=True, enough=EarlyStopping(**rule))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_another_value_on_resume_is_come_to_from_the_side_of_the_first_one():
    before = EarlyStopping(stop_at="kl/ref_sequence 5")
    before({"kl/ref_sequence": 0.1}, 1)
    enough = EarlyStopping(stop_at="kl/ref_sequence 3", patience=2)
    enough.load_state_dict(before.state_dict())
    assert enough({"kl/ref_sequence": 4.0}, 2) == "kl/ref_sequence came to 4 (trainer.stop_at: 3)"
