"""A reward model as the task's reward: scores of whole chats, and where the model comes from."""

from pathlib import Path

import pytest
import torch
import yaml
from runs import train_here

from envs import ChatEnv
from envs.rewards import Rewarded, RewardModel
from envs.tasks import LearntReward, Reply, SortDigits
from envs.tasks.task import assistant
from policies import GPT2RewardModel, load_policy
from policies.models import find_model, load_tokenizer
from policies.reward_model import ChatRewards
from trainer.runs.launch import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a reward model with a random head."""
    place = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(0)
    model = GPT2RewardModel(load_policy("tiny").model)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(place)
    load_tokenizer(find_model("tiny")).save_pretrained(place)
    return place


def end_score(folder, text: str) -> float:
    """Return the reward at the last token of a text, by the model itself."""
    ids = load_tokenizer(find_model("tiny"))(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return GPT2RewardModel(folder)(ids)[0][0, -1].item()


def chat_text(question: str, reply: str, end: str) -> str:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return prompt + reply + end


def test_a_reply_is_scored_at_its_end_against_the_label_within_the_clip(folder):
    task = LearntReward(reward_model=str(folder), score_clip=10.0)
    rows = [*task.rows("eval")[:3], task.rows("eval")[0]]
    said = [("123", True), (rows[1]["answer"], True), ("12 1", False), ("", True)]
    replies = [
        Reply(text, ended, [*row["messages"], assistant(text)])
        for row, (text, ended) in zip(rows, said, strict=True)
    ]
    together = task.rewards(rows, replies)
    for row, reply, reward in zip(rows, replies, together, strict=True):
        question = row["messages"][0]["content"]
        end = "<|im_end|>" if reply.complete else ""  # a cut one at its last token
        score = end_score(folder, chat_text(question, reply.text, end))
        label = end_score(folder, chat_text(question, row["answer"], "<|im_end|>"))
        assert reward.parts["score"] == pytest.approx(score, abs=1e-4)
        assert reward.total == pytest.approx(score - label, abs=1e-4)
        assert task.rewards([row], [reply])[0].total == pytest.approx(reward.total, abs=1e-4)
    assert [r.success for r in together] == [False, True, False, False]
    assert together[1].total == pytest.approx(0, abs=1e-5)
    plain = LearntReward(reward_model=str(folder), relative=False, score_clip=0.01)
    totals = [r.total for r in plain.rewards(rows, replies)]
    assert all(abs(t) <= 0.01 for t in totals)
    assert totals == [max(min(r.parts["score"], 0.01), -0.01) for r in together]


def test_a_reward_model_is_one_of_several_rewards(folder):
    task = SortDigits()
    rows = [task.row("312"), task.row("4412")]
    replies = [Reply("123", True, [*row["messages"], assistant("123")]) for row in rows]
    plain = [
        end_score(folder, chat_text(row["messages"][0]["content"], "123", "<|im_end|>"))
        for row in rows
    ]
    for clip in (100.0, max(map(abs, plain)) / 2):
        model = RewardModel(str(folder), weight=2, score_clip=clip)
        got = Rewarded(task, {"model": model}, task_weight=0.5).rewards(rows, replies)
        clipped = [min(max(score, -clip), clip) for score in plain]
        assert [r.parts["model"] for r in got] == pytest.approx(clipped, abs=1e-4)
        want = [0.5 + 2 * clipped[0], 2 * clipped[1]]
        assert [r.total for r in got] == pytest.approx(want, abs=1e-4)


def test_forwards_of_any_size_give_the_same_scores(folder):
    task = LearntReward(reward_model=str(folder))
    chats = [[*r["messages"], assistant(r["answer"])] for r in task.rows("eval")[:9]]
    whole = ChatRewards(folder)(chats)
    assert ChatRewards(folder, limit=50)(chats) == pytest.approx(whole, abs=1e-4)
    env = ChatEnv(task)
    assert env._rewards(task.rows("eval")[:1], [Reply("1", True, chats[0])])[0].parts["score"]


def test_a_folder_without_a_reward_model_is_refused_before_anything_is_loaded(tmp_path):
    for wrong in (str(tmp_path), "nowhere"):
        with pytest.raises(ValueError, match=r"folder with reward_model\.safetensors"):
            LearntReward(reward_model=wrong)
    with pytest.raises(ValueError, match=r"with reward_model\.safetensors, got"):
        ChatRewards(find_model("tiny").folder)
    with pytest.raises(ValueError, match="score_clip > 0"):
        LearntReward(reward_model="experiment:rm_tiny", score_clip=0)


def test_ppo_trains_through_it(folder, tmp_path):
    words = ["experiment=ppo_tldr_tiny", "policy.model=tiny", "trainer.num_iterations=2"]
    words += [
        "trainer.prompts_per_iteration=8",
        "eval.max_rows=4",
        f"env.task.reward_model={folder}",
    ]
    rows = train_here(tmp_path / "run", *words, f"output_dir={tmp_path / 'run'}")
    assert {"reward_part/score", "kl/ref_sequence", "value/explained_variance"} <= rows[2].keys()
    assert rows[1]["reward_part/score"] != rows[2]["reward_part/score"]
    assert rows[2]["reward/raw_mean"] != 0


WORKER = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[2])
(folder / "model").mkdir()
(folder / "model" / "weights").write_text("w")
(folder / "status.json").write_text(json.dumps({"state": "finished", "objective": 0.0}))
"""


def test_experiments_are_made_wherever_a_configuration_names_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr("trainer.runs.launch.SCRIPT", script)

    def compose(name: str) -> dict:
        launch = {"num_processes": 1, "threads": 1}
        return {"policy": {"model": "tiny"}, "name": name, "launch": launch}

    names = ["experiment:a", "experiment:b", {"c": ["experiment:a", 3]}]
    config = {"policy": {"model": names[0]}, "env": {"task": {"model": names[1], **names[2]}}}
    prepare(config, tmp_path / "run", compose=compose)
    assert capsys.readouterr().out.count("running it first") == 2  # each once
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    found = [saved["policy"]["model"], saved["env"]["task"]["model"], *saved["env"]["task"]["c"]]
    assert found[0] == found[2]
    assert found[3] == 3
    for name, path in zip("ab", found, strict=False):
        assert (Path(path) / "weights").read_text() == "w"
        assert Path(path).parent.name.startswith(f"{name}-")
    assert config["policy"]["model"] == "experiment:a", "what was given is left as it was"
