"""Advantage estimation against the paper's sum, written as a double loop in float64."""

import math

import pytest
import torch
from gae_by_hand import agrees_with_the_paper, random_case, slow
from tensordict import TensorDict

import trainer.gae
from policies import ValueNetwork, load_policy
from trainer import GAE
from trainer.advantage import whitened
from trainer.metrics import explained_variance, return_sums, summarize
from trainer.runtime import Runtime


def test_it_is_the_sum_of_the_paper_over_the_kept_tokens():
    agrees_with_the_paper()


def test_what_user_and_tool_say_changes_nothing():
    reward, value, mask = random_case()
    want = trainer.gae.gae(reward, value, mask)
    other = trainer.gae.gae(reward + 7.0 * ~mask, value - 3.0 * ~mask, mask)
    assert torch.equal(other, want)
    assert not want[~mask].any()


class TwoRanks(Runtime):
    """This process and another one with the same batch."""

    def sums(self, values):
        return {k: 2 * v for k, v in values.items()}

    def sum(self, values):
        return 2 * values


def test_explained_variance_and_whitening_are_over_the_kept_tokens_of_all_ranks(tmp_path):
    reward, value, mask = (x.float() if x.is_floating_point() else x for x in random_case(2))
    td = TensorDict({"loss_mask": mask, "value": value, "returns": reward}, [6])
    both = summarize(td, TwoRanks(tmp_path))["value/explained_variance"]
    errors = (reward - value)[mask]
    want = 1 - errors.var(correction=0) / reward[mask].var(correction=0)
    assert both == pytest.approx(float(want), rel=1e-5)
    kept = reward[mask]
    std = torch.cat([kept, kept]).std()  # of all ranks, unbiased
    want = (reward - kept.mean()) / (std + 1e-4) * mask
    torch.testing.assert_close(whitened(reward, mask, TwoRanks(tmp_path)), want)
    for returns, keep in ((torch.full_like(value, 0.1), mask), (reward, mask & False)):
        assert math.isnan(explained_variance(return_sums(returns, value, keep))), "no variance"


# The public module.


@pytest.mark.parametrize("shape", [(6, 12), (6, 12, 1)])
def test_gae_takes_torchrl_shapes_and_writes_advantage_and_target(shape):
    reward, value, mask = random_case(3)
    td = TensorDict({"state_value": value.reshape(shape), "loss_mask": mask}, [6])
    td["next", "reward"] = reward.reshape(shape)
    td["next", "done"] = torch.ones(6, 1, dtype=torch.bool)  # of the row
    out = GAE(gamma=0.9, lmbda=0.8)(td.clone())
    want = slow(reward, value, mask, 0.9, 0.8)
    assert out["advantage"].shape == out["value_target"].shape == shape
    torch.testing.assert_close(out["advantage"].reshape(6, 12), want)
    torch.testing.assert_close(out["value_target"].reshape(6, 12), (want + value) * mask)
    white = GAE(gamma=0.9, lmbda=0.8, average_gae=True)(td)["advantage"].reshape(6, 12)[mask]
    torch.testing.assert_close(white, (want[mask] - want[mask].mean()) / (want[mask].std() + 1e-4))


def test_a_reward_of_the_row_is_paid_once_and_a_done_ends_an_episode_inside_it():
    value = torch.zeros(2, 4)
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    td = TensorDict({"state_value": value, "loss_mask": mask}, [2])
    td["next", "reward"] = torch.tensor([[1.0], [2.0]])
    got = GAE(gamma=0.5, lmbda=1.0)(td)["advantage"]
    assert got.tolist() == [[0.0, 0.5, 1.0, 0.0], [0.25, 0.5, 1.0, 2.0]]
    td["next", "reward"] = torch.ones(2, 4, 1)
    td["next", "done"] = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]).bool().unsqueeze(-1)
    assert GAE(lmbda=1.0)(td)["advantage"].tolist() == [[0, 2, 1, 0], [2, 1, 2, 1]]


def test_keys_and_the_value_network_can_be_given():
    policy = load_policy("tiny")
    network = ValueNetwork(policy)
    torch.nn.init.normal_(policy.scorer.critic.head.weight)
    td = TensorDict({("tokens", "full"): torch.tensor([[5, 6, 7, 8]])}, [1])
    td["masks", "all_attention_mask"] = torch.ones(1, 4, dtype=torch.bool)
    td["loss_mask"], td["score"] = torch.tensor([[0, 0, 1, 1]]).bool(), torch.tensor([[1.0]])
    made = GAE(lmbda=1.0, value_network=network)
    made.set_keys(reward="score", advantage="A")
    value = made(td)["state_value"]
    assert not value.requires_grad
    assert value[0, 2:].all()
    torch.testing.assert_close(td["A"], (1 - value) * td["loss_mask"])
    with torch.no_grad():
        torch.testing.assert_close(network(td)["state_value"], value)
