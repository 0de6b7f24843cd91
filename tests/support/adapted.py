"""Policies with a LoRA adapter, and the reference that the adapter leaves behind."""

import torch
from contracts import attended, plain_log_probs, rollout

from policies.load import load_policy, load_reference
from policies.models import lora


def make(*, adapter: bool = True, double: bool = False, **options):
    """Return a policy on the tiny model with random weights, the same ones every time."""
    options = {"max_new_tokens": 6, **options}
    policy = load_policy("tiny", lora={"r": 4, "alpha": 8} if adapter else None, **options)
    generator = torch.Generator().manual_seed(0)
    for name, p in policy.model.named_parameters():
        if p.ndim > 1 and ".lora_" not in name:
            p.data = (torch.randn(p.shape, generator=generator) * 0.2).to(p.dtype)
    if double:
        policy.model.double()
    return policy


def shake(policy, seed: int = 0, scale: float = 0.2) -> None:
    """Move the adapter away from its start."""
    generator = torch.Generator().manual_seed(seed)
    for p in lora.trained_weights(policy.model).values():
        p.data += (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def flat(batch, key) -> torch.Tensor:
    return batch[key][batch["masks", "all_attention_mask"]]


def with_the_adapter_off_it_is_the_start_policy(pad_model_input: bool = True) -> None:
    """Compare with plain forwards of a model that never had an adapter."""
    start, policy = make(adapter=False, double=True), make(double=True)
    batch = rollout(policy)  # groups of one prompt: the shared layout
    reference = load_reference(policy)
    shake(policy)
    ids, masks = batch["tokens"].full, batch["masks"]
    pack = {} if pad_model_input else {"pack": True}
    keys = (masks.all_attention_mask, masks.all_response_mask, 1.0, batch["group_id"])
    scored = reference._log_probs(ids, *keys, **pack)  # [B, T]
    wanted = [plain_log_probs(start, ids, 1.0) * response for ids, response, *_ in attended(batch)]
    gap = scored[masks.all_attention_mask] - torch.cat(wanted)
    assert gap.abs().max() < 3e-6  # the last step is float32
    mine = policy.get_new_version(generate=False, inplace=False)(batch)
    moved = [plain_log_probs(policy, ids, 1.0) for ids, *_ in attended(batch)]
    assert (flat(mine, ("log_probs", "full")) - torch.cat(moved)).abs().max() < 1e-5
    assert (torch.cat(moved) - torch.cat(wanted)).abs().max() > 0.1
