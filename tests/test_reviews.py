"""Reviews: the reward by hand numbers, the splits, and what a missing scorer says."""

import math
import sys

import pytest

from conf import check
from conf.compose import compose_checked
from envs.tasks import Reply, Reviews

# Valences in vaderSentiment's list.
WONDERFUL, GOOD, TERRIBLE = 2.7, 1.9, -2.1


def compound(*valences: float) -> float:
    """Hutto and Gilbert's score of words without rules between them."""
    total = sum(valences)
    return total / math.sqrt(total**2 + 15)


def reward(text: str, *, complete: bool = True):
    return Reviews().reward({}, Reply(text=text, complete=complete, messages=[]))


def test_subjects_of_train_and_eval_are_apart():
    train, held_out = (
        [row["messages"][0]["content"] for row in Reviews().rows(split)]
        for split in ("train", "eval")
    )
    assert len(set(train)) == len(train) >= 30
    assert len(set(held_out)) == len(held_out) >= 10
    assert not set(train) & set(held_out)
    assert Reviews().make_example()["messages"][0]["content"] == train[0]


@pytest.mark.parametrize(
    ("text", "valences"),
    [
        ("It was wonderful.", [WONDERFUL]),
        ("It was good and wonderful.", [GOOD, WONDERFUL]),
        ("It was terrible.", [TERRIBLE]),
        ("It was a room.", [0.0]),
        ("", [0.0]),
    ],
)
def test_reward_is_the_compound_score(text, valences):
    made = reward(text)
    want = pytest.approx(compound(*valences), abs=1e-4)  # it is rounded to four digits
    assert (made.total, made.parts["sentiment"], made.parts["ended"]) == (want, want, 1.0)
    assert made.success == (sum(valences) > math.sqrt(5))  # where the score passes 0.5


def test_being_cut_off_halves_praise_and_excuses_nothing():
    praise = reward("It was good and wonderful.", complete=False)
    assert praise.total == pytest.approx(compound(GOOD, WONDERFUL) / 2, abs=1e-4)
    assert (praise.parts["ended"], praise.success) == (0.0, False)
    assert reward("It was terrible.", complete=False).total == reward("It was terrible.").total


def test_scorer_can_be_gamed():
    """What docs/kl.md is about: praise of nothing beats a review."""
    review = reward("The room was clean and quiet, if a little small for the price.")
    assert reward("Wonderful, excellent, great, good!").total > review.total + 0.4


@pytest.fixture
def no_scorer(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    check.try_task.cache_clear()
    yield
    check.try_task.cache_clear()  # what was found wrong here is right elsewhere


@pytest.mark.usefixtures("no_scorer")
def test_a_missing_scorer_is_one_line_that_names_the_extra():
    with pytest.raises(ValueError, match=r"Reviews need vaderSentiment.*\.\[sentiment\]") as e:
        compose_checked(["experiment=ppo_sentiment_smollm"])
    assert "\n" not in str(e.value)
