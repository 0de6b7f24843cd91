"""The public losses against the trainer's own terms and against loops over tokens."""

import pytest
import torch
from contracts import G, make_policy, rollout
from tensordict import TensorDict, lazy_stack

from envs.transforms import RetrieveKL
from policies.containers import ChatHistory, Masks, Tokens
from policies.history import History
from policies.load import load_reference
from policies.transformers_wrapper import TransformersWrapper
from trainer.advantage import GroupAdvantage
from trainer.kl_control import ConstantKLController
from trainer.loss_modules import GRPOLoss, SFTLoss
from trainer.losses import weights
from trainer.objectives import GRPOObjective, SFTObjective

COEFF = 0.3
MOST = 17  # tokens a row may have, for the aggregation by a constant
CHATS = [
    [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
    for a, b in (("Sort 3", "3"), ("Write", "the house with the other people"))
]


@pytest.fixture
def policy() -> TransformersWrapper:
    """Return a policy of this test alone, which samples at another temperature than 1."""
    return make_policy.__wrapped__(temperature=0.7)


def moved(policy) -> TensorDict:
    """Return a batch as `collect` makes it, with advantages; the policy has moved since."""
    batch = rollout(policy)
    reference = load_reference(policy)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(0.95)
    batch = RetrieveKL(ref_model=reference, add_to_reward=False)(batch)
    batch = GroupAdvantage(group_size=G, kl=ConstantKLController(kl_coef=COEFF))(batch)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.03)
    batch["loss_mask"][2] = False  # a filtered row
    return batch


def trainers_way(policy, batch, aggregation: str) -> tuple[dict, dict, torch.Tensor]:
    """Return losses and masked means of the trainer's objective, and its weights."""
    scores = policy.scorer(
        batch["tokens", "full"],
        batch["masks", "all_attention_mask"],
        batch["loss_mask"],
        temperature=batch["temperature"],
        entropy=True,
    )
    mask = batch["loss_mask"]
    weight = weights(
        mask,
        aggregation,
        total_tokens=mask.sum(),
        total_rows=mask.any(-1).sum(),
        max_tokens=MOST,
    )
    kl = ConstantKLController(kl_coef=COEFF)
    terms = GRPOObjective(clip_low=0.1, clip_high=0.3, kl=kl)(scores, batch)
    losses = {k: (weight * v).sum() for k, v in terms.loss.items()}
    means = {k: float((v * mask).sum() / mask.sum()) for k, v in terms.means.items()}
    return losses, means, weight


def grad(policy, loss) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(policy.model.parameters()), retain_graph=True)
    return torch.cat([p.flatten() for p in parts])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("under_next", [False, True])
def test_grpo_loss_equals_the_trainers_terms(policy, aggregation, column, under_next):
    batch = moved(policy)
    losses, means, _ = trainers_way(policy, batch, aggregation)
    given = batch.clone()
    if column:
        for key in ("advantage", ("log_probs", "full"), ("ref_log_probs", "full")):
            given[key] = given[key].unsqueeze(-1)
    if under_next:
        given["next"] = given.select("ref_log_probs")
        del given["ref_log_probs"]
    actor = policy.get_new_version(generate=False, inplace=False)
    loss = GRPOLoss(
        actor,
        clip_epsilon=(0.1, 0.3),
        aggregation=aggregation,
        entropy_coeff=0.02,
        kl_to_ref_coeff=COEFF,
        max_tokens=MOST,
    )
    out = loss(given)
    pairs = (("loss_objective", losses["policy"]), ("loss_kl_to_ref", losses["kl"]))
    for name, want in pairs:
        torch.testing.assert_close(out[name], want, atol=2e-6, rtol=1e-4)
        got, exact = grad(policy, out[name]), grad(policy, want)
        assert (got - exact).norm() / exact.norm() < 1e-4
    assert float(out["clip_fraction"]) == pytest.approx(means["policy/clip_fraction"], abs=1e-6)
    assert float(out["kl_approx"]) == pytest.approx(means["kl/behaviour"], abs=1e-5)
    if aggregation == "token_mean":
        # Not as in TorchRL, where masked positions dilute the mean.
        assert float(out["kl_to_ref"]) == pytest.approx(
            float(losses["kl"].detach()) / COEFF, abs=1e-5
        )
        assert float(out["entropy"]) == pytest.approx(means["policy/entropy"], rel=1e-4)
    assert float(out["loss_entropy"].detach()) == pytest.approx(-0.02 * float(out["entropy"]))
    assert 0 < float(out["ESS"]) <= 1


@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_masking_strategy_picks_the_tokens(policy, strategy, padded):
    batch = moved(policy).exclude("loss_mask")
    mask = batch["masks", {"generic": "all_attention_mask"}.get(strategy, "all_response_mask")]
    actor = policy.get_new_version(generate=False, inplace=False)
    if not padded:
        batch = ragged(batch)
    loss = GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False)
    batch["advantage"] = torch.ones(len(mask), 1)
    out = loss(batch)
    assert set(out.keys()) == {"loss_objective", "clip_fraction", "kl_approx", "ESS"}
    # With A = 1 the loss is minus the mean clipped ratio of these tokens.
    whole = moved(make_policy.__wrapped__(temperature=0.7))
    moved_mask = mask.clone()
    scores = policy.scorer(
        whole["tokens", "full"],
        whole["masks", "all_attention_mask"],
        temperature=whole["temperature"],
    )
    ratio = (scores.log_probs - whole["log_probs", "full"]).exp().clamp(max=1.2)
    first = whole["masks", "all_attention_mask"].int().cumsum(-1) == 1
    keep = moved_mask & ~(first & moved_mask) if strategy == "generic" else moved_mask
    want = -ratio[keep].sum()
    count = moved_mask.sum()
    got = out["loss_objective"] * count
    if strategy == "generic":  # the first token has no prediction: a uniform distribution
        got = got + (first & moved_mask).sum() / policy.scorer.model.config.vocab_size
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def ragged(batch: TensorDict) -> TensorDict:
    """Return the batch with its token-wise containers as lazy stacks."""
    out = batch.copy()
    real = batch["masks", "all_attention_mask"]
    for name in ("tokens", "masks", "log_probs", "ref_log_probs"):
        value = batch.get(name)
        fields = [k for k in value.keys() if k != "padded"]  # noqa: SIM118
        rows = [type(value)(**{k: value.get(k)[i][m] for k in fields}) for i, m in enumerate(real)]
        out.set(name, lazy_stack(rows))
    return out


def test_what_grpo_loss_cannot_use_is_named(policy):
    batch = moved(policy)
    actor = policy.get_new_version(generate=False, inplace=False)
    for key, name in (("advantage", "advantage"), ("log_probs", "log_probs")):
        with pytest.raises(ValueError, match=f"expected .*{name}.* at the root or under 'next'"):
            GRPOLoss(actor)(batch.exclude(key))
    with pytest.raises(ValueError, match="ref_log_probs"):
        GRPOLoss(actor, kl_to_ref_coeff=0.1)(batch.exclude("ref_log_probs"))
    with pytest.raises(ValueError, match="expected shape"):
        GRPOLoss(actor)(batch.clone().set("advantage", torch.ones(len(batch), 3)))
    flowing = batch.clone()
    flowing["log_probs", "full"].requires_grad_(True)
    with pytest.raises(RuntimeError, match="detach"):
        GRPOLoss(actor)(flowing)
    for wrong in ((1.0, 0.2), (-0.1, 0.2), (0.2, -0.1)):
        with pytest.raises(ValueError, match="clip_epsilon"):
            GRPOLoss(actor, clip_epsilon=wrong)
    with pytest.raises(ValueError, match="got max_tokens=None; give max_tokens"):
        GRPOLoss(actor, aggregation="constant")
    with pytest.raises(ValueError, match="masking_strategy"):
        GRPOLoss(actor, masking_strategy="all")
    with pytest.raises(ValueError, match="aggregation"):
        GRPOLoss(actor, aggregation="mean")(batch)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_sft_loss_equals_the_trainers_terms(policy, padded, normalize):
    td = TensorDict(batch_size=[2])
    td["history"] = ChatHistory(full=History.from_chats(CHATS), batch_size=[2])
    actor = policy.get_new_version(
        generate=False, pad_output=padded, generate_kwargs={"temperature": 1.0}
    )
    made = {
        r: SFTLoss(actor, reduction=r, normalize_by_seq_length=normalize)(td)["loss_sft"]
        for r in ("none", "mean", "sum")
    }
    assert set(td.keys()) == {"history"}
    want = []
    for chat in CHATS:
        done = policy.renderer.render(chat)
        ids, mask = torch.tensor([done.ids]), torch.tensor([done.assistant])
        scores = policy.scorer(ids, torch.ones_like(mask), mask)
        term = SFTObjective()(scores, TensorDict(batch_size=[1])).loss["policy"]
        want.append((term * mask).sum() / (mask.sum() if normalize else 1))
    torch.testing.assert_close(made["none"], torch.stack(want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made["mean"], sum(want) / 2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made["sum"], sum(want), atol=1e-5, rtol=1e-5)
    got, exact = grad(policy, made["mean"]), grad(policy, sum(want) / 2)
    assert (got - exact).norm() / exact.norm() < 1e-4


def test_one_sample_without_assistant_tokens_is_refused(policy):
    # Not as in TorchRL, which refuses only a batch in which no sample has any.
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    td = TensorDict(batch_size=[2])
    td["tokens"] = Tokens(full=ids, padded=True, batch_size=[2])
    td["masks"] = Masks(all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask,
                        padded=True, batch_size=[2])  # fmt: skip
    actor = policy.get_new_version(generate=False)
    with pytest.raises(ValueError, match=r"samples \[1\] have none"):
        SFTLoss(actor)(td)
    assert float(SFTLoss(actor)(td[:1])["loss_sft"].detach()) > 0
    with pytest.raises(ValueError, match="reduction"):
        SFTLoss(actor, reduction="max")
