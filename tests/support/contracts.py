"""The seven contracts of the design as functions that raise AssertionError when one is broken.

tests/house/test_mutants.py runs them on the code as it is, breaks the code in known ways and
expects them to fail. Expected values come from a plain transformers forward.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.transforms.kl import RetrieveKL
from policies.load import load_reference
from support.policies import (
    G,
    attended,
    close,
    demonstrations,
    leash,
    make_policy,
    one_process,
    padded_left,
    plain_log_probs,
    rollout,
    scaled,
)
from support.tasks import Words
from support.updates import Record
from trainer.advantage import GroupAdvantage
from trainer.objectives import GRPOObjective
from trainer.sources import Rollouts
from trainer.update import Update


def alignment() -> None:
    """Contract 1: stored log-probs are those of a plain forward, first and end token included."""
    policy = make_policy()
    batch = rollout(policy)
    scored = load_reference(policy).get_new_version(score_mask_key=None)(batch)
    ended = 0
    for i, (ids, response, log_probs, padding) in enumerate(attended(batch)):
        want = plain_log_probs(policy, ids, 1.0)
        close(log_probs, want * response, 1e-5, "generated")
        close(scored["ref_log_probs", "full"][i][: len(ids)], want, 1e-5, "scored")
        assert not padding.any(), "padding is not 0"
        assert (log_probs[response] < 0).all(), "a 0 inside"
        stopped = int(ids[-1]) in policy.stop_ids
        assert stopped != bool(batch["truncated"][i]), "a response holds the token that ended it"
        ended += stopped
    assert 0 < ended < batch.batch_size[0], "the rollout should hold ended and cut responses"


def token_in_token_out() -> None:
    """Contract 2: later turns keep the exact sampled ids; only new text is tokenised."""
    policy = make_policy()
    end, changed = policy.tokenizer.eos_token_id, 0
    for ids, response, log_probs, _ in attended(rollout(policy, turns=3)):
        want = plain_log_probs(policy, ids, 1.0) * response
        close(log_probs, want, 1e-5, "ids scored are ids sampled")
        edges = (response[1:] & ~response[:-1]).sum() + response[0]
        assert int(edges) == 3, f"expected 3 sampled runs, got {int(edges)}"
        # Every response but the last is closed exactly once before the next message.
        assert int((ids == end).sum()) >= 5, "each of 3 user turns and 2 responses is closed"
        text = policy.tokenizer.decode(ids[response])
        again = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        changed += again != ids[response].tolist()
    assert changed > 0, "the test needs responses on which decode -> encode is not the identity"


def one_temperature() -> None:
    """Contract 3: policy and reference divide by the sampling temperature; the KL starts at 0."""
    policy = make_policy(temperature=0.6)
    batch = RetrieveKL(load_reference(policy))(rollout(policy))
    for ids, response, log_probs, _ in attended(batch):
        close(log_probs, plain_log_probs(policy, ids, 0.6) * response, 1e-5, "tempered")
    close(batch["kl_penalty"], torch.zeros_like(batch["kl_penalty"]), 1e-5, "KL at the start")


def gradient(batch: TensorDict, **options) -> Tensor:
    """Return the gradient of one optimiser step on a batch, flattened."""
    policy = make_policy()
    for p in policy.model.parameters():
        p.requires_grad_(True)
    optimizer = Record(policy.model.parameters())
    rest = {"lr": lambda step: 0.0, "max_grad_norm": 0.0, "max_tokens": 6, **options}
    own = leash()
    objective = GRPOObjective(leash=own)
    Update(policy.scorer, optimizer, objective, one_process(), leash=own, **rest)(batch.clone())
    return torch.cat(optimizer.grads)


def global_normalisation() -> None:
    """Contract 4: micro-batches, padding side, order and layout do not change the gradient."""
    policy = make_policy()
    batch = RetrieveKL(scaled(policy, 0.9))(rollout(policy))
    batch = GroupAdvantage(group_size=G, leash=leash())(batch)
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        whole = gradient(batch, aggregation=aggregation)
        scale = whole.norm()
        assert float(scale) > 1e-6, "the gradient should not vanish"
        turned = batch[torch.arange(batch.batch_size[0] - 1, -1, -1)]
        others = {
            "micro-batches": gradient(batch, aggregation=aggregation, micro_batch_tokens=40),
            "left padding": gradient(padded_left(batch), aggregation=aggregation),
            "order": gradient(turned, aggregation=aggregation),
        }
        for name, other in others.items():
            gap = float((other - whole).norm() / scale)
            assert gap < 1e-5, f"{aggregation}: {name} changes the gradient by {gap}"


def masks_are_exact() -> None:
    """Contract 5: SFT learns exactly the assistant's tokens and the token that ends its turn."""
    policy = make_policy()
    batch = demonstrations(policy)
    wanted = {r["messages"][-1]["content"] + "<|im_end|>" for r in Words().demonstrations()}
    pairs = zip(batch["tokens", "full"], batch["loss_mask"], strict=True)
    learnt = {policy.tokenizer.decode(ids[mask]) for ids, mask in pairs}
    assert learnt == wanted, f"learnt {learnt}, wanted {wanted}"


def one_leash() -> None:
    """Contract 6: a 3-turn trajectory's KL is that of one scoring and is charged once."""
    policy = make_policy()
    reference = scaled(policy, 0.9)
    batch = RetrieveKL(reference)(rollout(policy, turns=3))
    batch = GroupAdvantage(group_size=G, leash=leash(0.25, "reward"))(batch)
    for i, (ids, response, _, _) in enumerate(attended(batch)):
        mine = plain_log_probs(policy, ids, 1.0)[response].sum()
        theirs = plain_log_probs(reference, ids, 1.0)[response].sum()
        close(batch["kl_penalty"][i].sum(), mine - theirs, 1e-4, "kl_penalty")
        total = batch["reward_raw"][i].sum() - 0.25 * (mine - theirs)
        close(batch["reward"][i].sum(), total, 1e-4, "reward")


def same_seed() -> None:
    """Contract 7: a row's response is a function of its stream, not of the rest of the batch."""
    policy = make_policy()
    whole = rollout(policy, count=4)
    torch.rand(7)  # another state of the global generator
    part = rollout(policy, count=2)
    for (a, *_), (b, *_) in zip(attended(whole), attended(part), strict=False):
        assert torch.equal(a, b), "a row differs with the batch"
    parts = {
        "task": Words(),
        "generator": policy,
        "runtime": one_process(),
        "prompts_per_iteration": 2,
    }
    source = Rollouts(**parts, env=ChatEnv(Words(), group_size=G))
    first = [r["answer"] for i in (0, 1) for r in source.prompts(i).get("row").tolist()]
    assert len(set(first)) == 4, "an epoch holds each row once"


CONTRACTS = (
    alignment,
    token_in_token_out,
    one_temperature,
    global_normalisation,
    masks_are_exact,
    one_leash,
    same_seed,
)
