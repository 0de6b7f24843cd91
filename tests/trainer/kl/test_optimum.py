"""Training ends at the optimum of reward - c KL, by enumeration of all responses.

A model of six tokens answers one prompt with one or two of them: 31 responses, each with a reward,
so the optimum of E[r] - c KL is known exactly. leash's own advantage, leash, objective and update
train it on sampled responses, and the end is measured over all 31.
"""

import itertools

import numpy as np
import pytest
import torch
from support.policies import one_process
from support.slow_maths import V, six_tokens
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2ForCausalLM

from docs.top_p import WAYS, tasks, train
from policies.scorer import Scorer
from trainer import ConstantKLController, GroupAdvantage, GRPOObjective, Leash
from trainer.update import Update

RESPONSES = 256
COEFF = 0.3  # of the tasks of docs/top_p.py
PROMPT = END = 0  # no response goes on after it: [0, 0] would be to the model what [0] is
IDS = torch.tensor(
    [[PROMPT, a, b] for a, b in itertools.product(range(V), repeat=2) if a != END or b == END]
)  # [31, 3]; a response that begins with END is over
MASK = torch.stack([torch.zeros(len(IDS)) > 0, torch.ones(len(IDS)) > 0, IDS[:, 1] != END], -1)
REWARD = torch.randn(len(IDS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def log_probs(model: torch.nn.Module) -> Tensor:
    """Return those of the tokens of every response, [31, 3] float64; 0 outside."""
    table = model(input_ids=IDS).logits[:, :-1].double().log_softmax(-1)
    chosen = table.gather(-1, IDS[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(len(IDS), 1), chosen], -1) * MASK


def small() -> Qwen2ForCausalLM:
    """Return a model that can give the 31 responses any probabilities."""
    model = six_tokens(32, 0)
    with torch.no_grad():
        model.lm_head.weight.mul_(32**-0.5)
    return model


def _batch(picked: Tensor, own: Tensor, ref: Tensor) -> TensorDict:
    """Return the picked responses as a rollout with the reference's log-probs, [256, 3]."""
    mask, rows = MASK[picked], torch.arange(len(picked))
    td = TensorDict({"loss_mask": mask, "temperature": torch.ones(len(picked))}, [len(picked)])
    td["tokens", "full"] = IDS[picked]
    td["masks", "all_attention_mask"] = mask | (torch.arange(3) == 0)
    td["log_probs", "full"], td["ref_log_probs", "full"] = own[picked].float(), ref[picked].float()
    td["kl_penalty"] = td["log_probs", "full"] - td["ref_log_probs", "full"]
    raw = torch.zeros(mask.shape)
    raw[rows, mask.sum(-1)] = REWARD[picked].float()  # at the last token
    return td.set("reward_raw", raw)


@pytest.mark.runs
@pytest.mark.parametrize("coeff", [0.3, 1.0, 3.0])
def test_k1_in_the_reward_ends_at_the_reference_reweighted(coeff):
    """By ref * exp(r / coeff) / Z; trained on fresh responses a step, the rate falling to 0."""
    model, steps = small(), 150
    leash = Leash(ConstantKLController(kl_coef=coeff), "k1", "reward")
    advantage = GroupAdvantage(group_size=RESPONSES, scale_by_std=False, leash=leash)
    update = Update(
        Scorer(model),
        torch.optim.Adam(model.parameters()),
        GRPOObjective(leash=leash),
        one_process(),
        leash=leash,
        lr=lambda step: 0.01 * (1 - step / steps),
        max_tokens=2,
        max_grad_norm=0.0,
    )
    draw, own = torch.Generator().manual_seed(0), log_probs(model)
    ref = own
    for _ in range(steps):
        picked = own.sum(-1).exp().multinomial(RESPONSES, replacement=True, generator=draw)
        update(advantage(_batch(picked, own, ref)))
        own = log_probs(model)
    chance, raised = own.sum(-1).exp(), ref.sum(-1) + REWARD / coeff
    log_z = float(raised.logsumexp(0))
    reward = float((raised - log_z).exp() @ REWARD)
    assert float(chance @ REWARD) == pytest.approx(reward, rel=0.01)
    assert float(chance @ (own - ref).sum(-1)) == pytest.approx(reward / coeff - log_z, rel=0.02)


def kept(chances: np.ndarray) -> list[int]:
    """Return the likeliest tokens that have 0.9 together."""
    tokens = []
    for token in np.argsort(-chances):
        if chances[tokens].sum() < 0.9:
            tokens.append(int(token))
    return tokens


def counts(policy: list[Tensor], reference: list[Tensor], reward: Tensor) -> list[float]:
    """Return the KL that each way of docs/top_p.py counts of one task, by a loop over responses."""
    first, second = (each.softmax(-1).numpy() for each in policy)
    ref_first, ref_second = (each.softmax(-1).numpy() for each in reference)
    joint = ref_first[:, None] * ref_second * np.exp(reward.numpy() / COEFF)
    best = joint / joint.sum()
    kl = outside = ref_outside = 0.0  # nats; outside: what the kept sets lack
    set_first = kept(first)
    for a in set_first:
        set_second = kept(second[a])
        mass = first[set_first].sum() * second[a][set_second].sum()
        ref_mass = ref_first[set_first].sum() * ref_second[a][set_second].sum()
        for b in set_second:
            chance = first[a] * second[a][b] / mass
            kl += chance * np.log(chance / (ref_first[a] * ref_second[a][b]))
            outside -= chance * np.log(mass)
            ref_outside -= chance * np.log(ref_mass)
    optimum = (best * np.log(best / (ref_first[:, None] * ref_second))).sum()
    return [optimum, kl - outside, kl - ref_outside, kl]


@pytest.mark.runs
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_training_with_top_p_counts_a_part_of_its_kl(way):
    """As docs/kl_estimators.md says of its table; training on all tokens ends at the optimum."""
    reference, reward = tasks(3)
    policy, counted = train(WAYS[way], reference, reward, COEFF)
    each = zip(zip(*policy, strict=True), zip(*reference, strict=True), reward, strict=True)
    expected = np.mean([counts(ours, theirs, earned)[way] for ours, theirs, earned in each])
    assert counted == pytest.approx(expected, abs=0.01)
