"""benchmarks/yardstick.py without TRL: what it hands over, reads, judges and writes."""

import math
import re

import numpy as np
import pytest
import yaml
from runs import lines

from benchmarks import yardstick, yardstick_page
from benchmarks.yardstick_trl import order, reward_of, settings
from conf.compose import compose_checked
from envs.tasks import SortDigits
from trainer.limit import Limit
from trainer.metric_names import ACCURACY, HELD_KL


@pytest.mark.parametrize("name", yardstick.CASES)
@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (2, 4)])
def test_each_case_is_given_to_trl_with_its_batches_and_steps(name, epochs, steps):
    words = f"{yardstick.CASES[name].words} {yardstick.BOTH} {yardstick.QUIET} seed=7"
    words += f" algorithm.epochs={epochs} algorithm.minibatches={steps}"
    config = compose_checked(words.split())
    given = settings(config)
    replies = config["trainer"]["prompts_per_iteration"] * config["algorithm"]["group_size"]
    assert given["per_device_train_batch_size"] == replies / steps
    # TRL: one generation for that many steps, each batch of it seen that often
    assert (given["steps_per_generation"], given["num_iterations"]) == (steps, epochs)
    assert given["max_steps"] == config["trainer"]["num_iterations"] * epochs * steps
    assert (given["seed"], given["use_bias_correction_kl"], given["loss_type"]) == (7, True, "dapo")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("kl=reward", "kl.where"),
        ("kl.estimator=full", "kl.estimator"),
        ("algorithm.baseline=none", "algorithm.baseline"),
    ],
)
def test_what_trl_cannot_do_is_refused(word, key):
    with pytest.raises(ValueError, match=key):
        settings(compose_checked(["experiment=grpo_tiny", word]))


@pytest.mark.runs
def test_the_prompts_are_those_of_the_run_in_its_order(small_run):
    config = yaml.safe_load((small_run.folder / "config.yaml").read_text())
    rows = SortDigits().rows("train")
    chosen, size = order(config, len(rows)), config["trainer"]["prompts_per_iteration"]
    trained = [r for r in lines(small_run.folder / "transcripts.jsonl") if r["kind"] == "train"]
    assert trained
    for record in trained:
        place = (record["iteration"] - 1) * size + record["group"]
        assert rows[chosen[place]]["messages"][-1]["content"] == record["prompt"]


def test_the_reward_is_the_tasks_and_a_cut_reply_has_not_ended():
    task = SortDigits(num_rows=4)
    rows = [task.row("312"), task.row("54")]
    reward = reward_of(task, rows, lambda: [2])
    said = [[{"role": "assistant", "content": text}] for text in ("45", "123", "123", "321")]
    got = reward(
        prompts=[rows[i]["messages"] for i in (1, 0, 0, 0)],
        completions=said,
        completion_ids=[[8, 9, 2], [5, 6, 7, 2], [5, 6, 7], [7, 6, 5, 2]],
        row=[1, 0, 0, 0],
        trainer_state=None,
    )
    assert got == [1.0, 1.0, 0.9, 0.1]


def run(library: str, rewards: list[float], *, accuracy: float, kl: float, pace: float) -> dict:
    points = [
        {"seconds": 5 + pace * i, "cpu": 2 * i, "replies": 8 * (i + 1), "reward": reward}
        for i, reward in enumerate(rewards)
    ]
    scores = {"greedy": 1.0, ACCURACY: accuracy, HELD_KL: kl}
    before = {"rows": 2, ACCURACY: 0.25, "greedy": 0.5}
    found = {"library": library, "points": points, "eval": scores, "before": before}
    return found | {"wall": 30.0, "cpu": 20.0, "peak": 1 << 30, "load": 0.5, "logged_kl": 0.75}


def test_the_table_has_means_ranges_and_what_the_kl_could_have_bought():
    case = yardstick_page.Case("A case", "", (1, 2), 1, samples=4, limit=4, window=2, goal=0.5)
    values = np.array([[1.0] * 1024 + [0.0] * 3072] * 2)
    runs = [
        run("leash", [0.1, 0.5, 0.7, 0.9], accuracy=0.5, kl=0.4, pace=2),
        run("leash", [0.1, 0.1, 0.1, 0.1], accuracy=0.5, kl=0.2, pace=4),
        run("TRL", [0.5, 0.5, 0.5, 0.5], accuracy=0.75, kl=1.0, pace=3),
    ]
    told = yardstick_page.table(case, runs, Limit(values, values))
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", told, re.M))
    assert rows["A case"] == "leash | TRL"
    assert rows["reward, last 2 iterations"] == "0.450 (0.100 to 0.800) | 0.500"
    assert rows["replies until the reward is 0.5"] == "24 (1 of 2 seeds) | 8"
    assert rows["seconds until the reward is 0.5"] == "9 (1 of 2 seeds) | 5"
    assert rows["seconds an iteration, after the first"] == "3.00 (2.00 to 4.00) | 3.00"
    # kl(a || p) of a Bernoulli, p = 1/4: what 0.5 costs at least
    least = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    share = rows["KL efficiency (1: no policy does it with less)"].partition(" | ")[0]
    numbers = [float(number) for number in re.findall(r"[\d.]+", share)]
    exact = [least / 2 * (1 / 0.4 + 1 / 0.2), least / 0.4, least / 0.2]
    assert numbers == pytest.approx(exact, abs=0.015)  # to two digits, and by samples
