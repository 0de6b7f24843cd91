"""Every response of two tokens over a vocabulary of six, and the true gradient over them."""

import copy

import pytest
import torch
from contracts import leash
from steps import Record, make_update
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from policies.scorer import Scorer
from trainer import GRPOObjective, ImportanceSampling

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
