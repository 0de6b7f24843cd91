"""Quantities computed another way: a double loop, plain forwards, every response enumerated."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import trainer.gae
from policies.critic import Critic
from policies.scorer import Scorer
from support.policies import close, leash, make_policy, rollout
from support.updates import Record, make_update
from trainer import GRPOObjective, ImportanceSampling


def slow_gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lmbda: float) -> Tensor:
    """Return A_t = sum over l of (gamma lmbda)^l delta_(t+l), term by term over the kept tokens."""
    out = torch.zeros_like(value)
    for i in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[i, t]]
        r, v = [float(reward[i, t]) for t in steps], [float(value[i, t]) for t in steps]
        v.append(0.0)  # the episode is over, by itself or by a limit
        for n, t in enumerate(steps):
            for k in range(n, len(steps)):
                delta = r[k] + gamma * v[k + 1] - v[k]
                out[i, t] += (gamma * lmbda) ** (k - n) * delta
    return out


def random_gae_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return reward, value, mask [6, 12] with prompts, tool turns, padding and an empty row."""
    draw = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(6, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 12, generator=draw) < 0.6
    mask[0], mask[1] = True, False
    mask[2] = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]).bool()
    return reward, value, mask


def gae_agrees_with_the_paper() -> None:
    """Raise AssertionError unless gae is the sum of the paper over the kept tokens."""
    reward, value, mask = random_gae_case()
    for gamma in (1.0, 0.9):
        for lmbda in (0.0, 0.5, 0.95, 1.0):
            got = trainer.gae.gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
            want = slow_gae(reward, value, mask, gamma, lmbda)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def plain_values(policy, ids: Tensor) -> Tensor:
    """Return V(tokens < t) of one sequence by a plain forward, [T]; entry 0 is not used."""
    critic = policy.scorer.critic
    body = policy.model.base_model if critic.body is None else critic.body.model
    states = body(input_ids=ids[None]).last_hidden_state[0]  # [T, H]
    states = states.detach() if critic.detach else states
    return torch.cat([torch.zeros(1), states[:-1] @ critic.head.weight[0] + critic.head.bias])


def values_are_those_of_a_plain_forward() -> None:
    """Raise AssertionError unless value[t] is read off the state that predicts token t."""
    policy = make_policy.__wrapped__()
    batch = rollout(policy, count=2)
    policy.scorer.critic = Critic(policy.scorer)
    torch.nn.init.normal_(policy.scorer.critic.head.weight)
    attended = batch["masks", "all_attention_mask"]
    with torch.no_grad():
        got = policy.scorer.values(batch["tokens", "full"], attended, batch["loss_mask"])
        for i in range(batch.batch_size[0]):
            want = plain_values(policy, batch["tokens", "full"][i][attended[i]])
            kept = batch["loss_mask"][i][attended[i]]
            close(got[i][attended[i]], want * kept, 1e-4, "values")


V, PROMPT = 6, 2


def six_tokens(width: int, seed: int) -> Qwen2ForCausalLM:
    """Return a model of one layer over six tokens, its weights so large that tokens differ."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape))
    return model


class Enumerated:
    """All responses with what each engine says of them; a rollout weighted by its probability."""

    def __init__(self, generator: Qwen2ForCausalLM, model: Qwen2ForCausalLM) -> None:
        first, second = torch.cartesian_prod(torch.arange(V), torch.arange(V)).unbind(-1)
        prompt = torch.full((V * V,), PROMPT)
        self.ids = torch.stack([prompt, first, second], -1)
        self.model, self.policy = model, type("Policy", (), {"scorer": Scorer(model)})()
        self.gen = self.log_probs(generator).detach()
        draw = torch.Generator().manual_seed(1)
        self.reward = torch.randn(V * V, generator=draw, dtype=torch.float64)

    def log_probs(self, model) -> Tensor:
        table = model(input_ids=self.ids).logits[:, :-1].double().log_softmax(-1)
        return table.gather(-1, self.ids[:, 1:, None]).squeeze(-1)  # [V*V, 2]

    def true_gradient(self) -> Tensor:
        """Return that of the expected reward of the trained model, by its definition."""
        self.model.zero_grad()
        (-(self.log_probs(self.model).sum(-1).exp() * self.reward).sum()).backward()
        return torch.cat([p.grad.flatten().double() for p in self.model.parameters()])

    def expected_gradient(self, verb=lambda batch: batch) -> tuple[Tensor, dict]:
        """Return what one update does on average to what the generator samples."""
        td = TensorDict({"loss_mask": torch.tensor([[False, True, True]] * V**2)}, [V**2])
        td["tokens", "full"] = self.ids
        td["masks", "all_attention_mask"] = torch.ones_like(self.ids, dtype=torch.bool)
        td["masks", "all_response_mask"] = td["loss_mask"].clone()
        zeros = torch.zeros(V**2, 1, dtype=torch.float64)
        td["log_probs", "full"] = torch.cat([zeros, self.gen], -1)
        td["temperature"] = torch.ones(V**2)
        # Each token weighs 1 / (2 V^2) in the step: so each response counts by its probability.
        chance = self.gen.sum(-1).exp() * 2 * V**2
        td["advantage"] = (self.reward * chance).unsqueeze(-1) * td["loss_mask"]
        self.model.zero_grad()
        optimizer = Record(self.model.parameters())
        objective = GRPOObjective(leash=leash(0.0))
        metrics = make_update(self.policy, objective, optimizer)(verb(td))
        return torch.cat(optimizer.grads).double(), metrics


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def a_bfloat16_generator_is_corrected() -> None:
    model = six_tokens(8, 0)
    half = copy.deepcopy(model).bfloat16()
    case = Enumerated(half, model)
    assert float(case.gen.sum(-1).exp().sum()) == pytest.approx(1, abs=1e-6)
    want = case.true_gradient()

    def unweighted(batch):  # what taking pi_old for the one that sampled comes to
        return ImportanceSampling(policy=case.policy)(batch).exclude("policy_weight")

    plain, metrics = case.expected_gradient(unweighted)
    expected = float((case.gen - case.log_probs(model).detach()).abs().mean())
    assert metrics["kl/mismatch"] == pytest.approx(expected, rel=1e-3)
    assert metrics["kl/mismatch"] > 1e-3
    errors = {"none": off(plain, want)}
    for level in ("token", "sequence"):
        verb = ImportanceSampling(policy=case.policy, level=level, limit=4.0)
        got, same = case.expected_gradient(verb)
        assert same["kl/mismatch"] == pytest.approx(metrics["kl/mismatch"])
        errors[level] = off(got, want)
    assert errors["none"] > 1e-3
    assert errors["token"] < errors["none"] / 1.5
    assert errors["sequence"] < 1e-5, "exact: nothing is truncated"
