"""Baselines over the rows that are learnt from, by hand numbers."""

import torch
from contracts import leash
from tensordict import TensorDict

from trainer.advantage import GroupAdvantage

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
    made = GroupAdvantage(
        group_size=3,
        baseline=baseline,
        leash=leash(0.5, "reward"),
        **options,
    )
    alone = 2.0 - 0.5 * 2.0 if baseline == "none" else 0.0
    want = torch.tensor([first, 0, second, 0, alone, 0])
    torch.testing.assert_close(made(td)["advantage"].squeeze(-1), want)
