"""PPO and GAE: against loops over tokens in float64; the critic's life, a run.

That layouts, micro-batches and ranks change nothing is in test_invariance.py.
"""

import math

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from support.policies import close, leash, make_policy, one_process, rollout, scaled, wrapper_of
from support.runs import Finished, train_here
from support.slow_maths import (
    gae_agrees_with_the_paper,
    plain_values,
    random_gae_case,
    slow_gae,
    values_are_those_of_a_plain_forward,
)
from support.updates import Record, double_policy, make_update, tables
from tensordict import TensorDict

from envs.transforms.kl import RetrieveKL
from policies import TransformersWrapper, ValueNetwork, load_policy
from policies.critic import Critic
from trainer import (
    GAE,
    Checkpoints,
    GAEAdvantage,
    GRPOLoss,
    PPOLoss,
    PPOObjective,
    Runtime,
    make_optimizer,
)
from trainer.metrics import explained_variance, return_sums, summarize

COEFF, LOW, HIGH, CLIP, WEIGHT = 0.3, 0.1, 0.3, 0.05, 0.7
GAMMA, LMBDA = 0.97, 0.8
PAID = leash(COEFF, "reward")
CRITICS = {"head": {}, "detached": {"detach": True}, "separate": {"kind": "separate"}}


policy = pytest.fixture(double_policy)


def prepared(policy, critic) -> TensorDict:
    """Return a batch of two turns with advantages; policy and critic have moved since."""
    batch = rollout(policy, turns=2, count=2)
    batch = RetrieveKL(scaled(policy, 0.95))(batch)
    batch["loss_mask"][1] = False  # a row that counts for nothing
    options = {"gamma": GAMMA, "lmbda": LMBDA, "runtime": one_process()}
    policy.scorer.critic = Critic(policy.scorer, **critic)
    advantage = GAEAdvantage(policy=policy, leash=PAID, **options)
    draw = torch.Generator().manual_seed(1)
    head = policy.scorer.critic.head
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=draw))
        head.bias.fill_(0.3)
    batch = advantage(batch)
    with torch.no_grad():
        for module, factor in ((policy.model, 1.02), (policy.scorer.critic, 1.1)):
            for p in module.parameters():
                p.mul_(factor)
    return batch


def objective(value_clip: float | None = CLIP) -> PPOObjective:
    bounds = {"clip_low": LOW, "clip_high": HIGH, "value_clip": value_clip}
    return PPOObjective(leash=PAID, value_coeff=WEIGHT, **bounds)


def slow_ppo(policy, batch, value_clip: float | None) -> dict[str, float]:
    """Return the losses, token by token, and leave their gradient in policy and critic."""
    ppo, fit, clipped, far = [], [], [], []
    for i in range(batch.batch_size[0]):
        real = batch["masks", "all_attention_mask"][i]
        ids, keep = batch["tokens", "full"][i][real], batch["loss_mask"][i][real]
        gen, old = batch["log_probs", "full"][i][real], batch["value"][i][real]
        advantage, returns = batch["advantage"][i][real], batch["returns"][i][real]
        table = tables(policy.model, ids, batch["temperature"][i])  # [t - 1, V]
        value = plain_values(policy, ids)  # [t]
        for t in range(1, len(ids)):
            if not keep[t]:
                continue
            r, a = (table[t - 1, ids[t]] - gen[t]).exp(), advantage[t]
            bounded = torch.clamp(r, 1 - LOW, 1 + HIGH)
            ppo.append(-torch.minimum(r * a, bounded * a))
            clipped.append(bool(r * a > bounded * a))
            loss = (value[t] - returns[t]) ** 2
            if value_clip is not None:
                near = min(max(value[t], old[t] - value_clip), old[t] + value_clip)
                loss = torch.maximum(loss, (near - returns[t]) ** 2)
                far.append(bool(abs(value[t] - old[t]) > value_clip))
            fit.append(WEIGHT * loss / 2)
    losses = {"policy": sum(ppo) / len(ppo), "value": sum(fit) / len(fit)}
    policy.scorer.zero_grad()
    sum(losses.values()).backward()
    shares = {"clipped": sum(clipped) / len(clipped), "far": sum(far) / max(len(far), 1)}
    return {**{name: float(v.detach()) for name, v in losses.items()}, **shares}


def same_gradient(policy, grads) -> None:
    """Compare a gradient with the one that slow_ppo left."""
    got = torch.cat([g.flatten() for g in grads])
    want = torch.cat([p.grad.flatten() for p in policy.scorer.parameters()])
    assert (got - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("value_clip", [CLIP, None])
@pytest.mark.parametrize("critic", CRITICS)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(policy, critic, value_clip):
    batch, optimizer = prepared(policy, CRITICS[critic]), Record(policy.scorer.parameters())
    update = make_update(policy, objective(value_clip), optimizer, micro_batch_tokens=120)
    metrics = update(batch.clone())
    want = slow_ppo(policy, batch, value_clip)
    same_gradient(policy, optimizer.grads)
    assert metrics["loss/policy"] == pytest.approx(want["policy"], abs=1e-5)
    assert metrics["loss/value"] == pytest.approx(want["value"], rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(want["policy"] + want["value"], abs=1e-5)
    assert metrics["policy/clip_fraction"] == pytest.approx(want["clipped"])
    assert 0 < want["clipped"] < 1
    far = None if value_clip is None else pytest.approx(want["far"])
    assert metrics.get("value/clip_fraction") == far
    assert value_clip is None or 0 < want["far"] < 1
    assert all(p.grad.any() for p in policy.scorer.critic.parameters())


def test_rewards_values_and_advantages_are_those_of_the_paper(policy):
    batch = rollout(policy, turns=2, count=2)
    batch = RetrieveKL(scaled(policy, 0.95))(batch)
    batch["truncated"] = torch.ones_like(batch["truncated"])  # a limit is as terminal as an end
    batch["loss_mask"][1] = False  # a row that counts for nothing
    options = {"policy": policy, "runtime": one_process()}
    policy.scorer.critic = Critic(policy.scorer)
    gae = GAEAdvantage(**options, leash=PAID, gamma=GAMMA, lmbda=LMBDA, micro_batch_tokens=100)
    torch.nn.init.normal_(policy.scorer.critic.head.weight, std=0.1)
    batch, mask = gae(batch), batch["loss_mask"]
    value = torch.zeros_like(batch["value"])
    with torch.no_grad():
        for i in range(batch.batch_size[0]):
            real = batch["masks", "all_attention_mask"][i]
            value[i][real] = plain_values(policy, batch["tokens", "full"][i][real]).float()
    close(batch["value"], value * mask, 1e-5, "values")
    reward = batch["reward_raw"] - COEFF * batch["kl_penalty"] * mask
    close(batch["reward"], reward, 1e-6, "rewards")
    advantage = slow_gae(reward.double(), value.double(), mask, GAMMA, LMBDA)
    close(batch["returns"], (advantage + value) * mask, 1e-5, "returns")
    white = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-4) * mask
    close(batch["advantage"], white, 1e-5, "whitened")


def test_a_value_is_read_off_the_state_that_predicts_its_token():
    values_are_those_of_a_plain_forward()


@pytest.mark.parametrize("critic", CRITICS.values(), ids=CRITICS)
def test_a_rank_that_has_run_out_of_rows_reaches_every_parameter(policy, critic):
    policy.scorer.critic = Critic(policy.scorer, **critic)
    none = torch.zeros(0, 3, dtype=torch.int64)
    policy.scorer(none, none.bool()).values.sum().backward()
    assert all(p.grad is not None for p in policy.scorer.parameters())


def test_in_the_warm_up_the_critic_trains_alone_and_at_its_own_rate():
    policy = make_policy.__wrapped__()
    batch = prepared(policy, {"warmup": 2, "lr_scale": 10.0})
    optimizer = make_optimizer(policy.scorer, lr=1e-3, weight_decay=0.1)
    update = make_update(policy, objective(), optimizer, lr=1e-3, epochs=2, minibatches=2)

    def weights():
        return torch.nn.utils.parameters_to_vector(policy.model.parameters()).detach().clone()

    head = policy.scorer.critic.head.weight
    before, old = weights(), head.detach().clone()
    for _ in range(2):
        update(batch.clone())
    assert torch.equal(weights(), before)
    # AdamW moves about its rate a step: 10 times 1e-3, 8 steps.
    moved = (head - old).abs().mean().item()
    assert 0.02 < moved < 0.09
    update(batch.clone())
    assert not torch.equal(weights(), before)


@pytest.mark.parametrize("kind", ["head", "separate"])
def test_a_checkpoint_brings_back_the_critic_and_its_moments(tmp_path, kind):
    policies = [make_policy.__wrapped__() for _ in range(2)]
    batch = prepared(policies[0], {"kind": kind})
    policies[1].scorer.critic = Critic(policies[1].scorer, kind=kind)
    optimizers = [make_optimizer(policy.scorer, lr=1e-3) for policy in policies]
    pairs = list(zip(policies, optimizers, strict=True))
    updates = [make_update(policy, objective(), optimizer, lr=1e-3) for policy, optimizer in pairs]
    updates[0](batch.clone())
    stores = [Checkpoints(Runtime(tmp_path), policy, optimizer) for policy, optimizer in pairs]
    stores[0].save(1, {})
    stores[1].restore(stores[1].newest())
    metrics = [update(batch.clone()) for update in updates]
    assert metrics[0] == metrics[1]
    both = zip(*(policy.scorer.named_parameters() for policy in policies), strict=True)
    for (name, a), (_, b) in both:
        assert torch.equal(a, b), name
        moments = [o.state[p] for o, p in zip(optimizers, (a, b), strict=True)]
        assert all(torch.equal(moments[0][k], moments[1][k]) for k in moments[0]), name
    saved = load_file(stores[0].newest() / "model" / "model.safetensors")
    assert not any("head" in name for name in saved)  # an ordinary model, without a critic


@pytest.mark.runs
def test_ppo_learns_and_so_does_its_critic(small_run: Finished, tmp_path):
    warm = OmegaConf.load(small_run.folder / "config.yaml").policy.model
    words = ["experiment=ppo_tiny", f"policy.model={warm}", "trainer.num_iterations=12", "seed=7"]
    words += ["optimizer.lr=2e-4", "algorithm.critic.lr_scale=10", "eval.greedy=false"]
    words += ["eval.max_rows=80", f"output_dir={tmp_path / 'run'}"]
    rows = train_here(tmp_path / "run", *words)
    accuracy = [row["eval/sampled_accuracy"] for row in (rows[0], rows[-1])]
    assert accuracy[1] > accuracy[0] + 0.25
    explained = [row["value/explained_variance"] for row in rows[1:]]
    assert abs(explained[0]) < 0.05, "a critic starts with nothing"
    assert sum(explained[-5:]) / 5 > 0.2
    assert abs(rows[1]["kl/ref_sequence"]) < 1e-4
    assert rows[-1]["kl/ref_sequence"] > 0.5
    for row in rows[1:]:  # the KL is paid in the reward
        paid = row["reward/raw_mean"] - row["kl/coeff"] * row["kl/ref_sequence"]
        assert row["reward/mean"] == pytest.approx(paid, abs=1e-5)


# The public module.


def actor(policy) -> TransformersWrapper:
    """Return the policy as one that scores, by the same weights."""
    return wrapper_of(policy).get_new_version(generate=False)


def test_ppo_loss_and_gradient_are_those_of_the_loop_behind_torchrls_names(policy):
    batch = prepared(policy, CRITICS["head"])
    batch["state_value"], batch["value_target"] = batch["value"], batch["returns"]
    options = {"clip_epsilon": (LOW, HIGH), "entropy_bonus": False}
    critic = {"critic_coeff": WEIGHT / 2, "loss_critic_type": "l2", "clip_value": CLIP}
    out = PPOLoss(actor(policy), ValueNetwork(policy), **critic, **options)(batch)
    grads = torch.autograd.grad(out.loss_objective + out.loss_critic, [*policy.scorer.parameters()])
    want = slow_ppo(policy, batch, CLIP)
    same_gradient(policy, grads)
    assert float(out.loss_critic.detach()) == pytest.approx(want["value"], rel=1e-4)
    assert float(out.value_clip_fraction) == pytest.approx(want["far"])
    assert float(out.clip_fraction) == pytest.approx(want["clipped"])
    kept = batch["loss_mask"]
    with torch.no_grad():
        value = ValueNetwork(policy)(batch.copy())["state_value"]
    left = (batch["returns"] - value)[kept].var(correction=0)
    explained = 1 - float(left / batch["returns"][kept].var(correction=0))
    assert float(out.explained_variance) == pytest.approx(explained, abs=1e-5)
    # Without a critic it is GRPOLoss.
    alone, plain = (kind(actor(policy), **options)(batch) for kind in (PPOLoss, GRPOLoss))
    assert alone.loss_critic is None
    assert torch.equal(alone.loss_objective, plain.loss_objective)


def test_a_critic_of_its_own_body_cannot_be_detached():
    with pytest.raises(ValueError, match="detach"):
        Critic(make_policy().scorer, kind="separate", detach=True)


# GAE.


def test_it_is_the_sum_of_the_paper_over_the_kept_tokens():
    gae_agrees_with_the_paper()


def test_the_explained_variance_is_over_the_kept_tokens():
    """Over all ranks, too: test_invariance.py compares what runs of one and of two log."""
    reward, value, mask = random_gae_case(2)
    td = TensorDict({"loss_mask": mask, "value": value, "returns": reward}, [6])
    kept, errors = reward[mask], (reward - value)[mask]
    want = float(1 - errors.var(correction=0) / kept.var(correction=0))
    assert summarize(td, one_process())["value/explained_variance"] == pytest.approx(want)
    for returns, keep in ((torch.full_like(value, 0.1), mask), (reward, mask & False)):
        assert math.isnan(explained_variance(return_sums(returns, value, keep))), "no variance"


@pytest.mark.parametrize("shape", [(6, 12), (6, 12, 1)])
def test_gae_takes_torchrl_shapes_and_writes_advantage_and_target(shape):
    reward, value, mask = random_gae_case(3)
    td = TensorDict({"state_value": value.reshape(shape), "loss_mask": mask}, [6])
    td["next", "reward"] = reward.reshape(shape)
    td["next", "done"] = torch.ones(6, 1, dtype=torch.bool)  # of the row
    out = GAE(gamma=0.9, lmbda=0.8)(td.clone())
    want = slow_gae(reward, value, mask, 0.9, 0.8)
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
