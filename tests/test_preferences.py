"""Reward modelling: pairs as batches, the objective as the documented loss, a run that learns."""

import json

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import one_process
from runs import train_here
from tensordict import TensorDict

from envs import ChatEnv
from envs.tasks import Preferences
from policies import GPT2RewardModel, load_policy, load_reward_model
from policies.reward_model import Rewards
from trainer import Checkpoints, PreferenceObjective, PreferencePairs, PromptData, RolloutFromModel
from trainer.losses import token_weights

ROW = {"messages": [{"role": "user", "content": "Sort 312"}], "chosen": "123", "rejected": "12"}


def pairs(size: int = 8) -> PreferencePairs:
    task = Preferences()
    parts = {"policy": load_policy("tiny"), "runtime": one_process(), "size": size}
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


@pytest.mark.parametrize("cut", [1, 2, 4])
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
    chosen, rejected = (
        TensorDict(
            {
                "input_ids": batch["tokens", "full"][k::2],
                "attention_mask": batch["masks", "all_attention_mask"][k::2],
                "rewards": theirs[k::2],
            },
            batch_size=[8],
        )
        for k in (0, 1)
    )
    expected = GPT2RewardModel.compute_reward_loss(chosen, rejected)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
    with pytest.raises(ValueError, match="cuts a pair"):
        objective(Rewards(rewards[1:3]), batch[1:3])
    with pytest.raises(ValueError, match="cuts a pair"):
        objective(Rewards(rewards[:1]), batch[:1])


def test_rows_without_a_worse_reply_are_an_error(tmp_path):
    path = tmp_path / "pairs.jsonl"
    good = [{"question": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in good))
    task = Preferences(str(path), columns={"answer": "chosen"})
    assert len(task.preferences()) + len(task.rows("eval")) == 3
    for wrong in (None, "a", 3):
        rows = [*good, {"question": "x?", "chosen": "a", "rejected": wrong}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ValueError, match="row 3, rejected: expected a text other than"):
            Preferences(str(path), columns={"answer": "chosen"})


def test_the_packaged_pairs_are_right_and_share_nothing_with_eval():
    task = Preferences()
    rows = [*task.preferences(), *task.rows("eval")]
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 1200
    for row in rows:
        digits = row["messages"][0]["content"].rpartition(" ")[2]
        assert row["chosen"] == "".join(sorted(digits)) != row["rejected"]


def test_rm_tiny_learns_and_its_model_scores_rollouts(tmp_path):
    words = ["experiment=rm_tiny", "trainer.num_iterations=60", "tracker=none"]
    train_here(tmp_path / "run", *words, f"output_dir={tmp_path / 'run'}")
    reward = GPT2RewardModel(tmp_path / "run" / "model")
    source = pairs()
    batch = source.batch(list(Preferences().rows("eval")))
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    with torch.no_grad():
        ends = reward(ids, mask)[1].squeeze(-1)
    assert (ends[0::2] > ends[1::2]).float().mean() > 0.75  # 0.5 by chance
    data = PromptData(
        input_ids=ids[:4],
        attention_mask=mask[:4],
        prompt_rindex=torch.full((4,), 20),
        batch_size=[4],
    )
    model = source.policy.model
    rollout = RolloutFromModel(model, model, reward, max_new_tokens=5).rollout_from_data(data)
    assert rollout["next", "reward_raw"].sum(1).all()


def test_a_checkpoint_of_a_reward_model_restores_it(tmp_path):
    make_checkpoint(tmp_path / "gpt2", "gpt2")
    policies = [load_reward_model(str(tmp_path / "gpt2")) for _ in range(2)]  # heads differ
    tokens = torch.tensor([[5, 6, 7]])
    one, two = (p.scorer(tokens, tokens > 0).rewards for p in policies)
    assert not torch.allclose(one, two)
    runtime = one_process()
    for policy, verb in zip(policies, ("save", "restore"), strict=True):
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1)
        kept = Checkpoints(runtime, policy, optimizer)
        kept.folder = tmp_path / "checkpoints"
        kept.save(1, {}) if verb == "save" else kept.restore(kept.newest())
    assert torch.equal(policies[1].scorer(tokens, tokens > 0).rewards, one)
