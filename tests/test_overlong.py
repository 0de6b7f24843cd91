"""What is done to rewards and masks after a rollout: numbers of the paper, and who still counts."""

import pytest
import torch
from contracts import G, Words, leash, make_policy, one_process, rollout
from omegaconf import OmegaConf
from tensordict import TensorDict

from conf.build import make_source, make_verbs
from conf.compose import compose_checked, set_up
from envs.chat_env import ChatEnv
from trainer import DropTruncated, GroupAdvantage, OverlongPenalty
from trainer.metrics import idle_groups, summarize


def test_the_overlong_penalty_is_that_of_dapo_at_the_last_sampled_token():
    batch = rollout(make_policy(), turns=3)
    before = batch["reward_raw"].clone()
    sampled = batch["masks", "all_response_mask"]
    lengths = sampled.sum(-1).tolist()
    most, buffer, weight = max(lengths) - 1, 6, 0.5
    batch = OverlongPenalty(max_tokens=most, buffer=buffer, weight=weight)(batch)
    seen = set()
    for i, n in enumerate(lengths):
        want = -1.0 if n > most else min(0.0, (most - buffer - n) / buffer)  # eq. 13
        seen.add(want)
        added = batch["reward_raw"][i] - before[i]
        last = sampled[i].nonzero()[-1]
        assert added[last].item() == pytest.approx(weight * want, abs=1e-6)
        assert added.abs().sum().item() == pytest.approx(weight * abs(want), abs=1e-6)
        assert batch["reward_part", "overlong"][i].item() == pytest.approx(weight * want)
    assert (min(seen), max(seen)) == (-1, 0)
    assert any(-1 < value < 0 for value in seen)


@pytest.mark.parametrize("wrong", [{"buffer": 0}, {"buffer": 21}, {"buffer": 4, "weight": -1.0}])
def test_impossible_penalties_are_refused(wrong):
    with pytest.raises(ValueError, match="buffer"):
        OverlongPenalty(max_tokens=20, **wrong)


def test_truncated_replies_teach_nothing_and_are_no_part_of_the_baseline():
    batch = rollout(make_policy())
    cut = batch["truncated"]
    assert 0 < int(cut.sum()) < len(cut)
    advantage = GroupAdvantage(group_size=G, leash=leash(0.0), scale_by_std=False)
    dropped = advantage(DropTruncated()(batch.clone()))
    kept = batch["masks", "all_response_mask"] & ~cut[:, None]
    assert torch.equal(dropped["loss_mask"], kept)
    raw = batch["reward_raw"].sum(-1)
    want = torch.zeros_like(dropped["advantage"])
    for i in (~cut).nonzero().flatten().tolist():
        others = [j for j in range(i // G * G, i // G * G + G) if not cut[j]]
        want[i] = (raw[i] - raw[others].mean()) * kept[i]
    torch.testing.assert_close(dropped["advantage"], want)
    assert not torch.equal(advantage(batch)["advantage"], want)


def test_a_group_is_idle_if_its_kept_rows_have_one_reward_or_there_are_none():
    td = TensorDict({"group_id": torch.tensor([7, 7, 1, 1, 4, 4])}, [6])
    td["reward_raw"] = torch.tensor([[0.5, 0.5], [1, 0], [0, 1], [0, 0.5], [0, 1], [0, 0]])
    td["loss_mask"] = torch.ones(6, 2, dtype=torch.bool)
    assert idle_groups(td).tolist() == [True, False, False]
    td["loss_mask"][4:] = False
    assert idle_groups(td).tolist() == [True, False, True]
    td["loss_mask"][3] = False
    assert idle_groups(td).tolist() == [True, True, True], "one alone has nothing beside it"


@pytest.mark.parametrize("source", ["Rollouts", "DynamicRollouts"])
def test_a_configuration_shapes_in_order_and_its_parts_still_add_up(source):
    set_up()
    penalty = "{_target_:trainer.OverlongPenalty,max_tokens:6,buffer:4}"
    words = [
        "experiment=grpo_tiny",
        f"algorithm.group_size={G}",
        "trainer.prompts_per_iteration=4",
        f"algorithm.source._target_=trainer.{source}",
        f"algorithm.after_rollout={{first:{penalty},second:{{_target_:trainer.DropTruncated}}}}",
    ]
    parts = {"task": Words(), "env": ChatEnv(Words(), group_size=G), "generator": make_policy()}
    cfg = OmegaConf.create(compose_checked(words))
    parts["runtime"] = one_process()
    batch = make_source(cfg, make_verbs(cfg, **parts).values(), **parts)(0)
    assert set(batch["reward_part"].keys()) == {"length", "overlong"}
    total = sum(batch["reward_part"].values())
    torch.testing.assert_close(batch["reward_raw"].sum(-1), total)
    assert (batch["reward_part", "overlong"] < 0).any()
    assert not batch["loss_mask"][batch["truncated"]].any()
    metrics = summarize(GroupAdvantage(group_size=G, leash=leash(0.0))(batch), one_process())
    parts = metrics["reward_part/length"] + metrics["reward_part/overlong"]
    assert metrics["reward/raw_mean"] == pytest.approx(parts)
