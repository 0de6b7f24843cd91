"""The guessing game: its rules, its demonstrations, and how well it can be played."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from runs import train_here

from envs.tasks import Guess, Reply
from envs.tasks.guess import DIGITS, TURNS, is_held_out


@cache
def best(numbers: int, turns: int) -> int:
    """Return how many of so many numbers the best guesser finds, by trying all guesses."""
    if not numbers or not turns:
        return 0
    sides = range(numbers)
    return max(1 + best(k, turns - 1) + best(numbers - 1 - k, turns - 1) for k in sides)


def chance(low: int, high: int, turns: int, *, listens: bool) -> float:
    """Return how often a random guesser finds a number between these, by summing over all."""
    numbers = range(low, high + 1)

    def found(secret: int, a: int, b: int, left: int) -> float:
        if not left:
            return 0.0
        total = 0.0
        for guess in range(a, b + 1):
            side = (guess + 1, b) if guess < secret else (a, guess - 1)
            if guess == secret:
                total += 1.0
            else:
                total += found(secret, *(side if listens else (a, b)), left - 1)
        return total / (b - a + 1)

    return sum(found(secret, low, high, turns) for secret in numbers) / len(numbers)


def test_the_stated_optimum_is_that_of_all_strategies():
    assert [best(len(DIGITS), turns) for turns in (1, 2, 3)] == [1, 3, 7]
    assert chance(1, 7, TURNS, listens=True) == pytest.approx(0.68, abs=0.005)
    assert chance(1, 7, TURNS, listens=False) == pytest.approx(0.37, abs=0.005)
    assert chance(1, 7, TURNS, listens=False) == pytest.approx(1 - (6 / 7) ** 3)


@pytest.mark.parametrize(
    ("text", "complete", "said", "won"),
    [
        ("5", True, None, True),
        ("4", True, "> 4", False),
        ("> 4", True, None, False),
        ("\u0665", True, None, False),
        ("", True, None, False),
    ],
)
def test_a_guess_is_answered_until_it_is_right(text, complete, said, won):
    task, reply = Guess(num_rows=1), Reply(text, complete, [])
    row = task.row(471, 5)
    assert row["messages"][0]["content"] == "Game 471: digit 1 to 7?"
    assert task.respond(row, reply) == ([] if said is None else [{"role": "user", "content": said}])
    done = task.reward(row, reply)
    assert (done.total, done.success, done.parts["won"]) == (won, won, won)
    assert done.parts["guesses"] == float(said is not None or won)


def test_games_of_eval_are_kept_apart_and_hide_each_digit_equally_often():
    task = Guess()
    asked = {s: {r["messages"][0]["content"] for r in task.rows(s)} for s in ("train", "eval")}
    assert not asked["train"] & asked["eval"]
    assert sum(map(is_held_out, range(100, 1000))) / 900 == pytest.approx(1 / 8, abs=0.03)
    assert Counter(r["answer"] for r in task.rows("eval")) == dict.fromkeys(range(1, 8), 10)
    assert Guess(seed=1).rows("eval") == task.rows("eval")
    assert Guess(seed=1).rows("train") != task.rows("train")
    with pytest.raises(ValueError, match="num_rows >= 1"):
        Guess(num_rows=0)


def test_demonstrations_are_games_by_the_rules_and_half_of_them_listen():
    task, won, sensible = Guess(), 0, 0
    games = task.demonstrations()
    for row in games:
        turns, low, high, listens = row["messages"][1:], 1, 7, True
        assert turns[-1]["role"] == "assistant"
        guesses = [int(m["content"]) for m in turns[::2]]
        assert len(guesses) <= TURNS
        for guess, answer in zip(guesses, turns[1::2], strict=False):
            assert answer["content"] == f"{'>' if guess < row['answer'] else '<'} {guess}"
        for guess in guesses:
            listens &= low <= guess <= high
            low, high = (guess + 1, high) if guess < row["answer"] else (low, guess - 1)
        assert len(guesses) == TURNS or guesses[-1] == row["answer"]
        won, sensible = won + (guesses[-1] == row["answer"]), sensible + listens
    blind, skilled = (chance(1, 7, TURNS, listens=x) for x in (False, True))
    assert won / len(games) == pytest.approx((skilled + blind) / 2, abs=0.01)
    assert 0.55 < sensible / len(games) < 0.9, "some blind games look sensible"


def run(folder: Path, *words: str) -> dict:
    """Run an experiment in this process; return the metrics of its last iteration."""
    sizes = ("trainer.prompts_per_iteration=32", "eval.num_samples=0", "eval.max_rows=7")
    return train_here(folder, *words, *sizes)[-1]


def test_an_iteration_of_the_experiment(tmp_path: Path):
    """After a short warm-up, which knows that a guess is a digit: games go on over three turns."""
    run(tmp_path / "warm", "experiment=sft_guess_tiny", "trainer.num_iterations=40")
    model = f"policy.model={tmp_path / 'warm' / 'model'}"
    row = run(tmp_path / "run", "experiment=grpo_guess_tiny", "trainer.num_iterations=1", model)
    assert 2 < row["reward_part/guesses"] < 3
    assert row["reward/raw_mean"] == pytest.approx(row["reward_part/won"])
    assert row["response/length_max"] <= 6, "a digit and its end, three times"
    # a game ends early if it is won, or if something else than a digit was said
    assert row["response/truncated_fraction"] <= 1 - row["reward_part/won"] + 1e-9
