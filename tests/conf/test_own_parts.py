"""Parts of a user's own: their state survives a resume, their files are compared, they watch."""

import json
import os
import signal
import sys
from datetime import date

import pytest
import torch
from omegaconf import OmegaConf
from support.runs import SMALL, asked, do, metrics

import train as script
from conf.compose import compose_checked, compose_experiment
from envs.rewards.functions import RewardFunction
from envs.transforms import Transform
from policies.chats.templates import read_template
from policies.contents import sha256_of_inputs
from policies.models.find import find_model, load_tokenizer
from trainer.objectives import GRPOObjective
from trainer.observer import Observer
from trainer.runs.launch import prepare
from trainer.runs.run_files import load_run
from trainer.stopping import Stopped


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
    (tmp_path / "own_code.py").write_text("import own_helper\nx = 1")
    names = ("rows.jsonl", "more.jsonl", "p1.csv", "chat.jinja", "own_helper.py")
    for name in (*names, "model/a.safetensors", "model/tokenizer.json"):
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
    changed = ("more.jsonl", "p1.csv", "chat.jinja", "own_helper.py", "model/tokenizer.json")
    for name in changed:
        (tmp_path / name).write_text("2")
    after = sha256_of_inputs(config)
    assert all(before[key] != after[key] for key in keys)


REWARD = """from own_scale import SCALE
def score(row, response):
    return SCALE * len(response.text)
"""
DATED = "{{ strftime_now('%d %b %Y') }}"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return the words of a run on own rows, with a reward and a template that writes a date."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_score", "own_scale"):  # of the test before
        monkeypatch.delitem(sys.modules, name, raising=False)
    rows = [{"question": f"Say {i}.", "answer": str(i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_score.py").write_text(REWARD)
    (tmp_path / "own_scale.py").write_text("SCALE = 0.5\n")
    (tmp_path / "dated.jinja").write_text(DATED + read_template("chatml"))
    function = "{_target_: own_score.score, _partial_: true}"
    return [
        *("experiment=grpo_own", "policy.model=tiny", "policy.device=cpu", "allow_targets=true"),
        f"env.dataset={tmp_path / 'rows.jsonl'}",
        f"policy.chat_template={tmp_path / 'dated.jinja'}",
        f"+env.rewards.own={{_target_: envs.rewards.Function, function: {function}}}",
        *("policy.max_new_tokens=4", "trainer.num_iterations=1", "eval.max_rows=2"),
        *("trainer.prompts_per_iteration=2", "algorithm.group_size=2"),
    ]


def begin(words, run):
    """Do what `python train.py` does with words, in this process."""
    config = asked(words)
    prepare(config, run, compose=compose_experiment, worker=script.worker)
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.resume = config["resume"]
    return script.train(cfg, run)


@pytest.mark.runs
def test_a_run_compares_what_it_reads_with_what_it_was_trained_on(own, tmp_path, capsys):
    run, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    begin(own, run)
    capsys.readouterr()
    evaluate = ["mode=evaluate", f"resume={run}", f"output_dir={tmp_path / 'eval'}"]
    do(tmp_path / "scratch", *evaluate)
    assert "note" not in capsys.readouterr().out
    moved, other = tmp_path / "moved" / "my.jsonl", tmp_path / "other.jsonl"
    moved.parent.mkdir()
    other.write_text(rows.read_text() + '{"question": "Say 40.", "answer": "40"}\n')
    rows.rename(moved)
    (tmp_path / "own_scale.py").write_text("SCALE = 2\n")
    resume = [f"resume={run}", "trainer.num_iterations=2"]
    for place in ("a/hub_id", other):
        with pytest.raises(ValueError, match=r"env\.dataset"):
            begin([*resume, f"env.dataset={place}"], run)
    begin([*resume, f"env.dataset={moved}"], run)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == 2, "of both resumes that began"
    assert all("env.rewards.own.function._target_" in note for note in notes)
    assert [row["progress/iteration"] for row in metrics(run)] == [0, 1, 2]
    moved.write_text(other.read_text())
    do(tmp_path / "scratch", *evaluate)
    assert "files of env.dataset" in capsys.readouterr().out


def test_the_day_of_the_start_stays_the_day_of_a_run(own, tmp_path, monkeypatch):
    class Day(date):
        @classmethod
        def today(cls):
            return date(2024, 7, 26)

    def keep(_, batch):
        ids.extend(batch["tokens", "full"])
        return batch

    run, ids = tmp_path / "run", []
    with monkeypatch.context() as patch:
        patch.setattr(Verb, "__call__", keep)
        patch.setattr("trainer.runs.launch.date", Day)
        begin([*own, f"+algorithm.after_rollout={{own: {{_target_: {NAME}.Verb}}}}"], run)
    texts = load_tokenizer(find_model("tiny")).batch_decode(ids)
    assert len(texts) == 4
    assert all(text.startswith("26 Jul 2024<|im_start|>") for text in texts)
    assert load_run(run).status["date"] == "2024-07-26"
    for mode in ("train trainer.num_iterations=2", "evaluate", "chat", "export output_dir=new"):
        assert asked([f"resume={run}", *f"mode={mode}".split()])["date"] == "2024-07-26"
    with pytest.raises(ValueError, match="date"):
        asked([f"resume={run}", "date=2024-07-27"])
    with pytest.raises(ValueError, match="date"):
        asked([*own, "date=26.7.2024"])
