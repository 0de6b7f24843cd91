"""benchmarks/yardstick.py without TRL: what it hands over, refuses and reads."""

import pytest
import yaml
from runs import lines

from benchmarks import yardstick
from benchmarks.yardstick_trl import order, settings
from conf.compose import compose_checked
from envs.tasks import SortDigits


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


def test_what_trl_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"kl\.where"):
        settings(compose_checked(["experiment=grpo_tiny", "kl=reward"]))


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
