"""The load-balancing loss of mixtures of experts: against a slow loop, in any layout, in runs."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from support.models_table import write_checkpoint
from support.policies import padded_left, rollout
from support.updates import Record, double_policy, gradient, make_update
from tensordict import TensorDict
from torch import Tensor

from conf.api import train
from policies.load import load_policy
from policies.torchrl.transformers_wrapper import TransformersWrapper
from trainer import SFTObjective

COEFF = 0.5
PROBABILITIES = "gemma4, experts"  # its routers return them instead of logits
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", PROBABILITIES)


@dataclass(frozen=True)
class Case:
    """A policy in float64 and its batch, and what one step with the key should add."""

    policy: TransformersWrapper
    batch: TensorDict
    gradient: Tensor
    loss: float


@cache
def case(family: str) -> Case:
    """Return the mean of the loss over the kept tokens, by plain forwards of each row alone."""
    folder, again = write_checkpoint(family, Path(mkdtemp())), family == "mixtral"
    policy = load_policy(str(folder), max_new_tokens=6, gradient_checkpointing=again)
    policy.model.double().set_experts_implementation("eager")  # the others have no float64
    batch = rollout(policy, turns=2, count=2)
    batch["loss_mask"][1] = False  # a row that counts for nothing
    rows = zip(batch["tokens", "full"], batch["loss_mask"], strict=True)  # padded on the right
    read = (lambda x: x) if family == PROBABILITIES else (lambda x: x.softmax(-1))
    losses = [x for row, keep in rows for x in slow_losses(policy.model, row, keep, read)]
    mean = sum(losses) / len(losses)
    weights = [*policy.model.parameters()]
    slopes = torch.autograd.grad(mean, weights, allow_unused=True, materialize_grads=True)
    slope = torch.cat([x.flatten() for x in slopes])
    return Case(policy, batch, COEFF * slope, COEFF * float(mean.detach()))


def slow_losses(model, row: Tensor, keep: Tensor, read) -> list[Tensor]:
    """Return the loss of each kept token of a row: the mean over layers of sum_e f[e] p[e]."""
    states = [t - 1 for t in keep.nonzero().flatten().tolist()]
    body = model.model(input_ids=row[None], output_router_logits=True)
    layers = []
    for outputs in body.router_logits:  # [T, E]
        chosen = [set(outputs[s].topk(2).indices.tolist()) for s in states]
        layer = [torch.zeros(()) for _ in states]
        for e in range(4):
            f = 4 / 2 * sum(e in each for each in chosen) / max(len(states), 1)
            layer = [x + f * read(outputs[s])[e] for x, s in zip(layer, states, strict=True)]
        layers.append(layer)
    return [sum(each) / len(layers) for each in zip(*layers, strict=True)]


def is_that_of_the_loop(family: str = "qwen3_moe", batch: TensorDict | None = None, **options):
    """Check what the key adds to the gradient of a step, and loss/router."""
    want = case(family)
    rows = want.batch if batch is None else batch
    without, before = gradient(want.policy, SFTObjective(), rows)
    got, metrics = gradient(want.policy, SFTObjective(), rows, router_coeff=COEFF, **options)
    assert want.gradient.norm() > 1e-2, "a gradient of nothing shows nothing"
    assert (got - without - want.gradient).norm() / want.gradient.norm() < 1e-4
    assert metrics["loss/router"] == pytest.approx(want.loss, rel=1e-6)
    assert metrics["loss/total"] == pytest.approx(before["loss/total"] + want.loss)
    assert "loss/router" not in before


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_a_loop_over_sequences_and_experts(family):
    is_that_of_the_loop(family)


def test_no_layout_changes_the_loss(monkeypatch):
    policy, batch = case("qwen3_moe").policy, case("qwen3_moe").batch
    is_that_of_the_loop(micro_batch_tokens=1)  # row by row
    is_that_of_the_loop(batch=padded_left(batch))
    is_that_of_the_loop(batch=batch[torch.arange(len(batch) - 1, -1, -1)], micro_batch_tokens=200)
    monkeypatch.setattr(policy.scorer, "share_prompts", True)
    is_that_of_the_loop()


def test_a_model_without_experts_is_refused_before_training():
    policy = double_policy()
    record = Record(policy.model.parameters())
    with pytest.raises(ValueError, match=r"algorithm\.router_coeff"):
        make_update(policy, SFTObjective(), record, router_coeff=COEFF)


def vowels(row, response) -> float:
    return sum(letter in "aeiou" for letter in response.text) / 10


ASKED = [f"Name {n} words." for n in range(2, 12)]
SAID = [f"{' word' * n}." for n in range(2, 12)]
TAUGHT = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": said}]}
    for text, said in zip(ASKED, SAID, strict=True)
]


@pytest.mark.runs
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_experts_are_used_more_evenly_with_the_key(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_checkpoint("qwen3_moe", tmp_path / "moe")
    reward, rows = (None, TAUGHT) if algorithm == "sft" else (vowels, ASKED)

    def imbalances(coeff: float) -> list[float]:
        keys = {"algorithm.router_coeff": coeff, "optimizer.lr": 3e-3, "policy.max_new_tokens": 8}
        keys |= {"trainer.num_iterations": 8, "trainer.prompts_per_iteration": 4}
        keys |= {"eval.num_samples": 0, "eval.greedy": False, "launch.threads": 1}
        run = train(model, reward, rows, experiment=f"{algorithm}_own", **keys)
        return [row["loss/router"] / coeff for row in run.metrics[1:]]

    off, on = imbalances(1e-9), imbalances(1.0)
    assert on[0] == pytest.approx(off[0], rel=1e-5)  # the same start
    assert 1 < on[-1] < on[0]
    assert on[-1] < off[-1]
