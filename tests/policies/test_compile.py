"""policy.compile: updates by torch.compile have the gradients of eager ones."""

import pytest
import torch
from support.models_table import write_checkpoint
from support.policies import G, leash, rollout, scaled
from support.updates import Record, make_update

from envs.transforms.kl import RetrieveKL
from policies.load import load_policy
from trainer.advantage import GroupAdvantage
from trainer.objectives import GRPOObjective

LORA = {"lora": {"r": 4, "alpha": 8.0}}
CASES = {
    "checkpointing": ("tiny", "full", {"gradient_checkpointing": True}),
    "lora": ("tiny", "k3", LORA),
    "experts": ("qwen3_moe", "k3", {}),
}


def gradients(model: str, estimator: str, *, compile: bool, **options) -> torch.Tensor:
    """Return the gradient of one update on the responses of an eager policy."""
    made = {"max_new_tokens": 6, "temperature": 0.9, "source": "auto", **options}
    policy, sampler = (load_policy(model, compile=how, **made) for how in (compile, False))
    generator = torch.Generator().manual_seed(0)
    for p, other in zip(policy.model.parameters(), sampler.model.parameters(), strict=True):
        if p.ndim > 1:
            p.data = torch.randn(p.shape, generator=generator) * 0.2
            other.data = p.data.clone()
    reference = scaled(sampler, 0.95)
    batch = RetrieveKL(reference)(rollout(sampler, count=2))
    batch = GroupAdvantage(group_size=G, leash=leash())(batch)
    optimizer = Record([p for p in policy.model.parameters() if p.requires_grad])
    exact = {"reference": reference.scorer} if estimator == "full" else {}
    objective = GRPOObjective(leash=leash(0.3, estimator=estimator))
    make_update(policy, objective, optimizer, micro_batch_tokens=120, **exact)(batch)
    return torch.cat(optimizer.grads)


@pytest.mark.runs
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_update_has_the_gradient_of_an_eager_one(case, tmp_path):
    model, estimator, options = CASES[case]
    model = model if model == "tiny" else str(write_checkpoint(model, tmp_path))
    want = gradients(model, estimator, compile=False, **options)
    got = gradients(model, estimator, compile=True, **options)
    assert want.norm() > 0
    assert (got - want).norm() < 1e-5 * want.norm()


def test_a_model_whose_layers_loop_over_tokens_is_refused(tmp_path):
    model = write_checkpoint("qwen3_next", tmp_path)
    with pytest.raises(ValueError, match=r"policy\.compile=false"):
        load_policy(str(model), compile=True)
