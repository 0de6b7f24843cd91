"""Reward models in runs: pairs as batches, a run that trains one, and scores of whole chats."""

import json

import pytest
import torch
from contracts import one_process
from runs import train_here
from tensordict import TensorDict

from envs import ChatEnv
from envs.rewards import Rewarded, RewardModel
from envs.tasks import LearntReward, Preferences, Reply, SortDigits
from envs.tasks.task import assistant
from policies import GPT2RewardModel, load_policy
from policies.models import find_model, load_tokenizer
from policies.reward_model import ChatRewards, Rewards
from trainer import PreferenceObjective, PreferencePairs
from trainer.losses import token_weights

ROW = {"messages": [{"role": "user", "content": "Sort 312"}], "chosen": "123", "rejected": "12"}


# Preferences


def pairs() -> PreferencePairs:
    task = Preferences()
    parts = {"policy": load_policy("tiny"), "runtime": one_process(), "size": 8}
    return PreferencePairs(task=task, env=ChatEnv(task), **parts)


def test_a_pair_is_compared_from_where_it_parts_to_the_end_of_the_turn():
    source = pairs()
    decode = source.policy.tokenizer.decode
    batch = source.batch([ROW, {**ROW, "rejected": "321"}])
    ids, attended = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    for i, reply in enumerate(("123", "12", "123", "321")):
        text = f"user\nSort 312<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>"
        assert decode(ids[i][attended[i]]).endswith(text)
    compared = [decode(row[kept]) for row, kept in zip(ids, batch["loss_mask"], strict=True)]
    # The last of "12" is padding: the documented loss runs to the end of the longer reply.
    assert compared == ["3<|im_end|>", "<|im_end|><|endoftext|>", "123<|im_end|>", "321<|im_end|>"]
    assert batch["group_id"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("cut", [1, 4])
def test_the_weighted_terms_are_the_documented_loss_in_any_micro_batch(cut):
    batch = pairs()(3)
    mask = batch["loss_mask"]
    rewards = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    mine, theirs = (rewards.clone().requires_grad_() for _ in range(2))
    total = {"total_tokens": float(mask.sum()), "total_rows": float(mask.any(-1).sum())}
    batch["weight"] = token_weights(mask, "sequence_mean", **total)
    objective, loss = PreferenceObjective(), 0.0
    for rows in torch.arange(16).split(16 // cut):
        part = batch.select("weight", "group_id")[rows]
        terms = objective(Rewards(mine[rows]), part)
        loss = loss + (part["weight"] * terms.loss["preference"]).sum()
    loss.backward()
    data = {"input_ids": batch["tokens", "full"], "rewards": theirs}
    data["attention_mask"] = batch["masks", "all_attention_mask"]
    both = TensorDict(data, batch_size=[16])
    expected = GPT2RewardModel.compute_reward_loss(both[0::2], both[1::2])
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
    with pytest.raises(ValueError, match="cuts a pair"):
        objective(Rewards(rewards[1:3]), batch[1:3])


def test_rows_without_a_worse_reply_are_an_error(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"question": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(3)]
    for wrong in ("c", None, "a"):
        cells = [*rows, {"question": "x?", "chosen": "a", "rejected": wrong}]
        path.write_text("\n".join(map(json.dumps, cells)))
        if wrong == "c":
            task = Preferences(str(path))
            assert len(task.preferences()) + len(task.rows("eval")) == 4
            continue
        with pytest.raises(ValueError, match="row 3, rejected: expected"):
            Preferences(str(path))


def test_the_packaged_pairs_are_right_and_share_nothing_with_eval():
    task = Preferences()
    rows = [*task.preferences(), *task.rows("eval")]
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 1200
    for row in rows:
        digits = row["messages"][0]["content"].rpartition(" ")[2]
        assert row["chosen"] == "".join(sorted(digits)) != row["rejected"]


@pytest.mark.runs
def test_rm_tiny_learns_to_prefer(tmp_path):
    train_here(tmp_path, "experiment=rm_tiny", "trainer.num_iterations=60", "tracker=none")
    batch = pairs().batch(list(Preferences().rows("eval")))
    reward = GPT2RewardModel(tmp_path / "model")
    with torch.no_grad():
        ends = reward(batch["tokens", "full"], batch["masks", "all_attention_mask"])[1].squeeze(-1)
    assert (ends[0::2] > ends[1::2]).float().mean() > 0.75  # 0.5 by chance


# A reward model as the task's reward


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


def end_score(folder, row: dict, reply: str, *, complete: bool = True) -> float:
    """Return the reward at the last token of a chat written out, by the model itself."""
    question = row["messages"][0]["content"]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{reply}"
    text += "<|im_end|>" * complete  # a cut one ends with its last token
    ids = load_tokenizer(find_model("tiny"))(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return GPT2RewardModel(folder)(ids)[0][0, -1].item()


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
        score = end_score(folder, row, reply.text, complete=reply.complete)
        label = end_score(folder, row, row["answer"])
        assert reward.parts["score"] == pytest.approx(score, abs=1e-4)
        assert reward.total == pytest.approx(score - label, abs=1e-4)
    assert [r.success for r in together] == [False, True, False, False]
    plain = LearntReward(reward_model=str(folder), relative=False, score_clip=0.01)
    totals = [r.total for r in plain.rewards(rows, replies)]
    assert totals == [max(min(r.parts["score"], 0.01), -0.01) for r in together]


def test_a_reward_model_is_one_of_several_rewards(folder):
    task = SortDigits()
    rows = [task.row("312"), task.row("4412")]
    replies = [Reply("123", True, [*row["messages"], assistant("123")]) for row in rows]
    plain = [end_score(folder, row, "123") for row in rows]
    clip = max(map(abs, plain)) / 2
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


def test_a_folder_without_a_reward_model_is_refused_before_anything_is_loaded(tmp_path):
    for wrong in (str(tmp_path), "nowhere"):
        with pytest.raises(ValueError, match=r"reward_model\.safetensors"):
            LearntReward(reward_model=wrong)
    with pytest.raises(ValueError, match=r"reward_model\.safetensors"):
        ChatRewards(find_model("tiny").folder)
    with pytest.raises(ValueError, match="score_clip"):
        LearntReward(reward_model="experiment:rm_tiny", score_clip=0)


@pytest.mark.runs
def test_ppo_trains_through_it(folder, tmp_path):
    words = ["experiment=ppo_tldr_tiny", "policy.model=tiny", "trainer.num_iterations=2"]
    words += ["trainer.prompts_per_iteration=8", "eval.max_rows=4"]
    rows = train_here(tmp_path / "run", *words, f"env.task.reward_model={folder}")
    assert {"reward_part/score", "kl/ref_sequence", "value/explained_variance"} <= rows[2].keys()
    assert rows[1]["reward_part/score"] != rows[2]["reward_part/score"]
    assert rows[2]["reward/raw_mean"] != 0
