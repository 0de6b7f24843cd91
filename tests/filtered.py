"""What top-k, top-p and min-p leave of a policy, token by token, by transformers' processors."""

from collections.abc import Iterator

import pytest
import torch
from contracts import G, close, expect, leash, make_policy, rollout
from steps import double_policy, gradient, scaled
from tensordict import TensorDict
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from envs.transforms import RetrieveKL
from policies.load import load_reference
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer import GRPOObjective
from trainer.advantage import GroupAdvantage

HEAT = 0.8
WARPERS = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
FILTERS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 30, "top_p": 0.95, "min_p": 0.01},
}


def filtered(policy: TransformersWrapper, **filters: float) -> TransformersWrapper:
    """Return the policy with these filters, at a temperature beside."""
    kwargs = {**policy.generate_kwargs, "temperature": HEAT, **filters}
    return policy.get_new_version(generate_kwargs=kwargs)


def tokens_of(batch: TensorDict) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield a row's number, its ids and the places in them that were sampled."""
    for i in range(batch.batch_size[0]):
        real = batch["masks", "all_attention_mask"][i]
        ids = batch["tokens", "full"][i][real]
        yield i, ids, batch["masks", "all_response_mask"][i][real].nonzero().squeeze(-1)


def kept_by_hand(policy, batch: TensorDict, filters: dict) -> dict[int, Tensor]:
    """Return by row which tokens the filters left at each sampled place, [n, V] bool."""
    found = {}
    for i, ids, places in tokens_of(batch):
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None]).logits[0, places - 1] / HEAT
        for name, value in filters.items():
            logits = WARPERS[name](value)(None, logits)
        found[i] = logits > -torch.inf
    return found


def table_of(model, ids: Tensor, places: Tensor, kept: Tensor) -> Tensor:
    """Return the log-probs [n, V] of a model over what was kept, -inf elsewhere."""
    logits = model(input_ids=ids[None]).logits[0, places - 1] / HEAT
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1)


def spread(table: Tensor) -> Tensor:
    """Return the entropy [n] of log-probs [n, V]; 0 log 0 is 0."""
    return -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)


def distance(mine: Tensor, theirs: Tensor) -> Tensor:
    """Return the KL [n] of two tables over one set."""
    out = mine == -torch.inf
    return (mine.exp() * (mine.masked_fill(out, 0.0) - theirs.masked_fill(out, 0.0))).sum(-1)


def all_is_scored_over_what_was_kept(**filters: float) -> None:
    """Log-probs, entropy and KL of the moved policy and of the reference: a loop in float64."""
    filters = filters or FILTERS["all"]
    policy = filtered(double_policy(), **filters)
    batch = rollout(policy, turns=2)
    kept = kept_by_hand(policy, batch, filters)
    first = {i: table_of(policy.model, ids, at, kept[i]) for i, ids, at in tokens_of(batch)}
    reference = scaled(policy, 0.95)
    batch = RetrieveKL(ref_model=reference, add_to_reward=False)(batch)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.02)
        scores = policy.scorer(
            batch["tokens", "full"],
            batch["masks", "all_attention_mask"],
            batch["masks", "all_response_mask"],
            temperature=batch["temperature"],
            group_id=batch["group_id"],
            entropy=True,
            reference=reference.scorer,
            support=batch["support"],
        )
    some = 0
    for i, ids, places in tokens_of(batch):
        inside = batch["masks", "all_response_mask"][i]
        mine = table_of(policy.model, ids, places, kept[i]).detach()
        theirs = table_of(reference.model, ids, places, kept[i]).detach()
        said = ids[places, None]
        for what, got, table in (
            ("sampled", batch["log_probs", "full"], first[i]),
            ("reference", batch["ref_log_probs", "full"], theirs),
            ("policy", scores.log_probs, mine),
        ):
            close(got[i][inside], table.gather(-1, said).squeeze(-1), 1e-5, what)
            expect(not got[i][~inside].any(), f"{what} is not 0 elsewhere")
        close(scores.entropy[i][inside], spread(mine), 1e-6, "entropy")
        close(scores.full_kl[i][inside], distance(mine, theirs), 1e-6, "the exact KL")
        count = kept[i].sum(-1)
        expect(bool((count < kept[i].shape[-1]).any()), "the filter leaves nothing out")
        some += int((count > 1).sum())
    expect(some > 10, "more than one token should be left now and then")


def the_ratio_begins_at_one(**filters: float) -> None:
    """The update's first step: nothing has moved, and it is no step of another distribution."""
    policy = filtered(make_policy(), **(filters or FILTERS["all"]))
    batch = rollout(policy, turns=2)
    batch = RetrieveKL(ref_model=load_reference(policy), add_to_reward=False)(batch)
    batch = GroupAdvantage(group_size=G, leash=leash(0.1))(batch)
    _, metrics = gradient(policy, GRPOObjective(leash=leash(0.1)), batch)
    expect(metrics["kl/mismatch"] < 2e-6, f"kl/mismatch is {metrics['kl/mismatch']}")
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    close(batch["kl_penalty"], torch.zeros_like(batch["kl_penalty"]), 2e-5, "KL to itself")
