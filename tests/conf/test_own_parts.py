"""Parts of a user's own: their state survives a resume, their files are compared, they watch."""

import json
import os
import signal

import pytest
import torch
from omegaconf import OmegaConf
from runs import SMALL, metrics

import train as script
from conf.compose import compose_checked
from envs.rewards.functions import RewardFunction
from envs.transforms import Transform
from policies.cache import sha256_of_inputs
from trainer.early_stopping import Stopped
from trainer.objectives import GRPOObjective
from trainer.observer import Observer


class Counted:
    """Count calls; the count, as a number and as a tensor, is the state."""

    count = 0

    def state_dict(self):
        return {"count": self.count, "tensor": torch.tensor(self.count)}

    def load_state_dict(self, state):
        assert state["tensor"] == torch.tensor(state["count"])
        self.count = state["count"]


class Verb(Counted):
    crash_at, error = 0, AssertionError

    def __call__(self, batch):
        self.count += 1
        if self.count == self.crash_at and self.error is Stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.count == self.crash_at:
            raise self.error
        counts = torch.full(batch["loss_mask"].shape, float(self.count))
        return batch.set(("logged", "policy/own_verb"), counts)


class Objective(Counted, GRPOObjective):
    def __call__(self, scores, batch):
        self.count += 1
        terms = super().__call__(scores, batch)
        terms.loss["policy"] = terms.loss["policy"] * self.count
        return terms


class Mounted(Counted, Transform):
    """Add the number of steps so far to the reward."""

    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])

    def _apply_transform(self, reward):
        self.count += 1
        return reward + 0.01 * self.count


class Rewarding(Counted, RewardFunction):
    def scores(self, rows, responses):
        self.count += len(rows)
        return [0.001 * self.count] * len(rows)


class Watching(Counted, Observer):
    def log(self, metrics, iteration):
        self.count += 1


NAME = "test_own_parts"
OWN = (
    *SMALL,
    "trainer.num_iterations=4",
    "policy.model=tiny",
    "eval.max_rows=4",
    "allow_targets=true",
    f"algorithm.objective._target_={NAME}.Objective",
    f"+algorithm.after_rollout={{own: {{_target_: {NAME}.Verb}}}}",
    f"+env.transforms={{own: {{_target_: {NAME}.Mounted}}}}",
    f"+env.rewards={{own: {{_target_: {NAME}.Rewarding}}}}",
    f"observers={{own: {{_target_: {NAME}.Watching}}}}",
)


@pytest.mark.runs
def test_parts_of_a_users_own_resume_to_the_bit(tmp_path, cache, monkeypatch):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    config = compose_checked(OWN)
    script.train(OmegaConf.create(config), straight)
    for at, error in ((3, AssertionError), (4, Stopped)):  # a crash, then a signal
        monkeypatch.setattr(Verb, "crash_at", at)
        monkeypatch.setattr(Verb, "error", error)
        with pytest.raises(error):
            script.train(OmegaConf.create(config), broken)
        config["resume"] = str(broken)
    monkeypatch.setattr(Verb, "crash_at", 0)
    script.train(OmegaConf.create(config | {"resume": str(broken)}), broken)
    assert metrics(broken) == metrics(straight)
    assert [line["policy/own_verb"] for line in metrics(straight)[1:]] == [1, 2, 3, 4]
    states = [
        json.loads((run / "checkpoints/iteration_000004/state.json").read_text())["parts"]
        for run in (straight, broken)
    ]
    assert states[0] == states[1]
    names = {"algorithm.objective", "algorithm.after_rollout.own", "env.transforms.own"}
    assert states[0].keys() == names | {"env.rewards.own", "observers.own"}


def test_files_and_code_that_a_configuration_names_are_hashed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_code.py").write_text("x = 1")
    names = ("rows.jsonl", "more.jsonl", "p1.csv", "chat.jinja", "model/a.safetensors")
    for name in (*names, "model/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    config = {
        "policy": {"model": str(tmp_path / "model"), "chat_template": str(tmp_path / "chat.jinja")},
        "env": {
            "dataset": [str(tmp_path / "rows.jsonl"), str(tmp_path / "more.jsonl"), "a/hub_id"],
            "eval_dataset": str(tmp_path / "p*.csv"),
            "task": {"tasks": {"a": {"dataset": str(tmp_path / "more.jsonl")}}},
            "rewards": [{"_target_": "own_code.x"}],
        },
        "kl": {"_target_": "trainer.kl.leash.Leash", "name": str(tmp_path)},
    }
    before = sha256_of_inputs(config)
    keys = {"policy.model", "policy.chat_template", "env.dataset", "env.rewards.0._target_"}
    keys |= {"env.eval_dataset", "env.task.tasks.a.dataset"}
    assert before.keys() == keys
    (tmp_path / "model" / "a.safetensors").write_text("2")  # the reference's hash covers it
    assert sha256_of_inputs(config) == before
    changed = ("more.jsonl", "p1.csv", "chat.jinja", "own_code.py", "model/tokenizer.json")
    for name in changed:
        (tmp_path / name).write_text("2")
    after = sha256_of_inputs(config)
    assert all(before[key] != after[key] for key in keys)
