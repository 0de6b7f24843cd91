"""Group advantages over a batch: what is written, by hand numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.policies import leash
from tensordict import TensorDict

from trainer.advantage import BetaAdvantage, GroupAdvantage
from trainer.baselines import BASELINES, group_advantage, spread, standardise


@given(
    baseline=st.sampled_from(["group_mean", "leave_one_out"]),
    credit=st.sampled_from(["trajectory", "return_to_go"]),
    value=st.floats(-1e5, 1e5, width=32) | st.sampled_from([0.1, 0.2, 0.7, 1 / 3]),
    size=st.integers(2, 16),
)
def test_equal_rewards_of_a_group_are_no_advantage_to_the_last_bit(baseline, credit, value, size):
    """In float32 the mean of eight times 0.2 is not 0.2; also of responses of unequal length."""
    last = torch.arange(3 * size) % 4  # last token of each row
    mask = torch.arange(4) <= last.unsqueeze(-1)  # [3 size, 4]
    reward = torch.zeros(3 * size, 4).scatter_(-1, last.unsqueeze(-1), value)
    mask[1] = False  # left the loss mask
    for scale in (spread, None):
        options = {"baseline": baseline, "scale": scale, "credit": credit}
        assert not group_advantage(reward, 0 * reward, mask, size, **options).any()
    assert not standardise(torch.full((size,), value)).any()


# Task 1 and 0, KL -0.5 and -1.5: half of each difference around the mean, all of it alone.
STD = 0.5**0.5 + 1e-4
LEFT = {
    "group_mean": ({}, 0.5 / STD + 0.5, -0.5 / STD - 0.5),
    "leave_one_out": ({"scale_by_std": False}, 2.0, -2.0),
    "none": ({"scale_by_std": False}, 0.5, -1.5),
}


def leaves_the_baseline(baseline: str) -> None:
    options, first, second = LEFT[baseline]
    td = TensorDict(batch_size=[6])
    td["reward_raw"] = torch.tensor([[1.0], [9.0], [0.0], [7.0], [2.0], [8.0]])
    td["kl_penalty"] = torch.tensor([[1.0], [6.0], [3.0], [5.0], [2.0], [4.0]])
    td["loss_mask"] = torch.tensor([[True], [False], [True], [False], [True], [False]])
    made = GroupAdvantage(group_size=3, baseline=baseline, leash=leash(0.5, "reward"), **options)
    alone = 2.0 - 0.5 * 2.0 if baseline == "none" else 0.0
    want = torch.tensor([first, 0, second, 0, alone, 0])
    torch.testing.assert_close(made(td)["advantage"].squeeze(-1), want)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_row_that_left_the_loss_enters_neither_baseline_nor_scale(baseline):
    leaves_the_baseline(baseline)


def test_the_density_of_bnpo_is_that_of_the_groups_that_are_learnt_from():
    raw = torch.tensor([[1.0], [0.0], [1.0], [1.0], [0.0], [0.0], [0.0], [1.0]])
    td = TensorDict({"reward_raw": raw, "loss_mask": raw >= 0}, [8])
    td["loss_mask"][4:6] = False  # a response that could not be judged took its group along
    got = BetaAdvantage(group_size=2, leash=leash(0.0), scale_by_std=False)(td)["advantage"]
    # Means 0.5, 1, 0.5 have mean 2/3 and variance 1/12, and so has Beta(10/9, 5/9).
    shapes = (1 + 10 / 27, 1 + 5 / 27)
    log_norm = math.lgamma(sum(shapes)) - sum(map(math.lgamma, shapes))
    each = 0.5 / (math.exp(log_norm) * 0.5 ** (sum(shapes) - 2))
    want = [each, -each, 0, 0, 0, 0, -each, each]
    assert got.squeeze(-1).tolist() == pytest.approx(want, rel=1e-5)


def test_what_makes_no_advantage_is_refused():
    td = TensorDict({"reward_raw": torch.ones(4, 1), "loss_mask": torch.ones(4, 1) > 0}, [4])
    options = {"leash": leash(0.0), "scale_by_std": False}
    with pytest.raises(ValueError, match="rewards from 0 to 1"):
        BetaAdvantage(group_size=2, **options)(td.set("reward_raw", -td["reward_raw"]))
    with pytest.raises(ValueError, match="kl_penalty"):
        GroupAdvantage(group_size=2, leash=leash(0.5, "reward"))(td)
    td["group_id"] = torch.tensor([1, 1, 1, 2])
    with pytest.raises(ValueError, match="groups of 2 rows"):
        GroupAdvantage(group_size=2, **options)(td)
