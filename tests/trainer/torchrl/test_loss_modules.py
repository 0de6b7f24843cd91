"""The public losses against loops over tokens in float64; that GRPOLoss is the road's objective is
a row of the specification (card.py)."""

import math
from functools import partial

import pytest
import torch
from support.chats import SPOKEN, spoken
from support.policies import make_wrapper, plain_log_probs, rollout
from tensordict import TensorDict
from torch import Tensor, nn

from policies.chats.containers import Masks, Tokens
from policies.load import load_reference
from policies.torchrl.sequences import LLMMaskedCategorical
from policies.torchrl.transformers_wrapper import TransformersWrapper
from trainer.torchrl.loss_modules import DAPO, CISPOLoss, GRPOLoss
from trainer.torchrl.sft_loss import SFTLoss

CLIP = {"clip_epsilon": (0.2, 0.28)}  # those of DAPO


# On an actor that is a table of logits.

B, T, V = 4, 23, 5
SAMPLED = 4  # of each row: 17 % of the tokens


class Table(nn.Module):
    """An actor whose log-probs are those of a table [B, T, V], whatever it reads."""

    masks_key, tokenizer, in_keys = "masks", None, [("history", "full")]

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
        self.logits = nn.Parameter(logits)

    def dist(self, td: TensorDict) -> LLMMaskedCategorical:
        return LLMMaskedCategorical(self.logits, td["masks", "all_assistant_mask"])

    _get_sft_dist = _get_rlhf_dist = _get_generic_dist = dist

    def forward(self, td: TensorDict) -> TensorDict:
        log_probs = self.logits.log_softmax(-1).gather(-1, td["tokens", "full"][..., None])
        return td.set(("log_probs", "full"), log_probs.squeeze(-1))


def table_batch() -> tuple[Table, TensorDict]:
    """Return the actor and a batch whose generator and reference are other models."""
    actor, generator = Table(), torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (B, T), generator=generator)
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[:, -SAMPLED:] = True
    mask[0, -2:] = False  # rows differ in length
    curr = actor.logits.detach().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    td = TensorDict(batch_size=[B])
    td["tokens"] = Tokens(full=tokens, padded=True, batch_size=[B])
    td["masks"] = Masks(all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask,
                        padded=True, batch_size=[B])  # fmt: skip
    for name in ("log_probs", "ref_log_probs"):
        noise = torch.randn(B, T, generator=generator, dtype=torch.float64)
        td[name, "full"] = curr - 0.7 * noise
    td["advantage"] = torch.randn(B, 1, generator=generator, dtype=torch.float64)
    return actor, td


def loop(td: TensorDict, term) -> tuple[list[tuple[int, Tensor]], Tensor]:
    """Return (row, term(curr, gen, ref, A, log p)) of each kept token, and the logits."""
    logits = Table().logits
    out = []
    for i, t in td["masks", "all_assistant_mask"].nonzero().tolist():
        given = logits[i, t].log_softmax(-1)
        curr = given[td["tokens", "full"][i, t]]
        gen, ref = (td[n, "full"][i, t] for n in ("log_probs", "ref_log_probs"))
        out.append((i, term(curr, gen, ref, td["advantage"][i, 0], given)))
    return out, logits


def same(actor: Table, got: Tensor, want: Tensor, logits: Tensor) -> None:
    """Assert that value and gradient are those of the loop."""
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)
    grad = torch.autograd.grad(got, actor.logits, retain_graph=True)[0]
    exact = torch.autograd.grad(want, logits, retain_graph=True)[0]
    torch.testing.assert_close(grad, exact, atol=1e-7, rtol=1e-5)


def ratio(curr, gen, *_):
    return float((curr - gen).exp().detach())


def grpo(curr, gen, ref, advantage, given):
    r = (curr - gen).exp()
    return -torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage)


def cispo(curr, gen, ref, advantage, given):
    return -min(max(ratio(curr, gen), 0.8), 1.28) * advantage * curr


def k3(other: Tensor, curr: Tensor) -> Tensor:
    return (other - curr).exp() - (other - curr) - 1


LOSSES = {
    "loss_entropy": lambda curr, gen, ref, a, given: 0.01 * (given.exp() * given).sum(),
    "loss_kl_to_ref": lambda curr, gen, ref, a, given: 0.3 * k3(ref, curr),
    "loss_kl_to_inference": lambda curr, gen, ref, a, given: 0.2 * k3(gen, curr),
}


@pytest.mark.parametrize("column", [False, True])  # [B, T, 1] in place of [B, T]
@pytest.mark.parametrize(
    ("kind", "term", "clip"), [(GRPOLoss, grpo, CLIP), (DAPO, grpo, {}), (CISPOLoss, cispo, CLIP)]
)
def test_losses_and_gradients_are_those_of_a_slow_loop_over_the_kept_tokens(
    kind, term, clip, column
):
    actor, td = table_batch()
    given, ref, end = td.clone(), ("ref_log_probs", "full"), (..., None) if column else ...
    for key in ("advantage", ("log_probs", "full"), ref):
        given[key] = given[key][end]
    given["next"] = given.select("ref_log_probs")
    del given["ref_log_probs"]
    fixed = [given[key].requires_grad_() for key in ("advantage", ("next", *ref))]
    out = kind(actor, kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.2, **clip)(given)
    for name, each in {"loss_objective": term, **LOSSES}.items():
        terms, logits = loop(td, each)
        same(actor, getattr(out, name), sum(t for _, t in terms) / len(terms), logits)
    losses = sum(getattr(out, name) for name in ("loss_objective", *LOSSES))
    everyone = partial(torch.autograd.grad, inputs=[actor.logits, *fixed], allow_unused=True)
    grads = everyone(out.sum(reduce=True), retain_graph=True)
    torch.testing.assert_close(grads[0], everyone(losses)[0])
    assert grads[1:] == (None, None)
    ratios = [r for _, r in loop(td, ratio)[0]]
    assert float(out.kl_approx) == pytest.approx(-sum(map(math.log, ratios)) / len(ratios))
    assert float(out.kl_to_ref) == pytest.approx(float(out.loss_kl_to_ref.detach()) / 0.3)
    if kind is CISPOLoss:
        clipped = sum(not 0.8 <= r <= 1.28 for r in ratios) / len(ratios)
        assert float(out.clip_fraction) == pytest.approx(clipped)
        assert 0 < clipped < 1
    ess = sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios)
    assert float(out.ESS) == pytest.approx(ess, rel=1e-5)


def test_aggregation_and_reduction_do_what_they_say():
    actor, td = table_batch()
    terms, logits = loop(td, grpo)
    rows = [[t for i, t in terms if i == row] for row in range(B)]
    means = [sum(row) / len(row) for row in rows]
    total = sum(t for _, t in terms)
    wanted = {
        ("token_mean", "mean"): total / len(terms),
        ("token_mean", "sum"): total,
        ("prompt_mean", None): sum(means) / B,
        ("prompt_mean", "sum"): sum(means),
        ("constant", None): total / (B * 40),
        (None, "mean"): total / len(terms),
    }
    settings = {**CLIP, "entropy_bonus": False, "max_tokens": 40}
    for (aggregation, reduction), want in wanted.items():
        loss = GRPOLoss(actor, aggregation=aggregation, reduction=reduction, **settings)(td)
        assert loss.loss_objective.shape == ()
        same(actor, loss.loss_objective, want, logits)
    each = GRPOLoss(actor, reduction="none", **settings)(td).loss_objective
    mask = td["masks", "all_assistant_mask"]
    assert not each[~mask].any()
    torch.testing.assert_close(each[mask], torch.stack([t for _, t in terms]))


@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
def test_tokens_far_from_the_generator_are_dropped_and_a_constant_divisor_stays(aggregation):
    actor, td = table_batch()
    terms, logits = loop(td, grpo)
    far = [0.5 * math.log(r) ** 2 for _, r in loop(td, ratio)[0]]
    row = terms[0][0]  # a threshold that empties this row
    limit = 0.99 * min(d for (i, _), d in zip(terms, far, strict=True) if i == row)
    near = [t for (_, t), d in zip(terms, far, strict=True) if d <= limit]
    assert 0 < len(near) < len(terms)
    settings = {**CLIP, "entropy_bonus": False, "aggregation": aggregation, "max_tokens": 40}
    got = GRPOLoss(actor, kl_mask_threshold=limit, **settings)(td).loss_objective
    same(actor, got, sum(near) / (len(near) if aggregation == "token_mean" else B * 40), logits)


def test_a_batch_without_a_token_counts_nothing():
    actor, td = table_batch()
    td["loss_mask"] = torch.zeros(B, T).bool()
    out = GRPOLoss(actor, kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1)(td)
    assert {float(v.detach()) for v in out.values()} == {0.0}
    assert not torch.autograd.grad(out.sum(reduce=True), actor.logits)[0].any()


@pytest.mark.parametrize(("kind", "name"), [(GRPOLoss, "ref_log_probs"), (SFTLoss, "ref_log_prob")])
def test_keys_can_be_set(kind, name):
    actor, td = table_batch()
    loss = kind(actor, kl_to_ref_coeff=0.1)
    want = loss(td).kl_to_ref
    td["elsewhere", "ref"] = td.pop("ref_log_probs")["full"]
    loss.set_keys(**{name: ("elsewhere", "ref")})
    assert float(loss(td).kl_to_ref) == float(want)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_imitation_and_its_gradient_are_those_of_a_slow_loop(normalize, reduction):
    actor, td = table_batch()
    terms, logits = loop(td, lambda curr, *_: -curr)
    rows = [[t for row, t in terms if row == i] for i in range(B)]
    want = torch.stack([sum(row) / (len(row) if normalize else 1) for row in rows])
    want = {"mean": want.mean(), "sum": want.sum(), "none": want}[reduction]
    got = SFTLoss(actor, None, None, reduction, normalize)(td).loss_sft
    assert got.shape == want.shape
    same(actor, got.sum(), want.sum(), logits)


def test_settings_and_data_that_a_loss_cannot_use_are_named():
    for name, settings in {
        "clip_epsilon": {"clip_epsilon": (1.0, 0.2)},
        "max_tokens": {"aggregation": "constant"},
        "aggregation": {"aggregation": "median"},
    }.items():
        with pytest.raises(ValueError, match=name):
            GRPOLoss(Table(), **settings)
    with pytest.raises(ValueError, match="kl_to_ref_coeff"):
        SFTLoss(Table(), loss_function="minor_sft", kl_to_ref_coeff=0.1)
    actor, td = table_batch()
    with pytest.raises(KeyError, match="advantage"):
        GRPOLoss(actor)(td.exclude("advantage"))
    td["masks"].all_assistant_mask[1] = False  # TorchRL refuses only a batch where all are empty
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        SFTLoss(actor)(td)
    td["log_probs", "full"].requires_grad_(True)
    with pytest.raises(RuntimeError, match="detach"):
        GRPOLoss(actor)(td)


# On a real policy.


@pytest.fixture
def policy() -> TransformersWrapper:
    """Return a policy of this test alone, which samples at another temperature than 1."""
    return make_wrapper.__wrapped__(temperature=0.7)


def scaled(policy: TransformersWrapper, factor: float) -> None:
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(factor)


def assistants(policy: TransformersWrapper) -> list[Tensor]:
    """Return the log-probs of the assistant's tokens of each chat, by plain forwards."""
    made = [policy.renderer.render(chat) for chat in SPOKEN]
    return [plain_log_probs(policy, torch.tensor(r.ids), 0.7)[r.assistant] for r in made]


@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_the_masking_strategy_picks_the_tokens(policy, strategy):
    batch = rollout(policy).exclude("loss_mask")
    batch["advantage"] = torch.ones(len(batch), 1)
    scaled(policy, 1.03)  # the policy has moved since
    real, sampled = (batch["masks", f"all_{name}_mask"] for name in ("attention", "response"))
    want = []  # with A = 1 the loss is minus the mean clipped ratio of the tokens
    for i, ids in enumerate(batch["tokens", "full"]):
        values = plain_log_probs(policy, ids[real[i]], 0.7)
        keep = sampled[i][real[i]] if strategy != "generic" else torch.ones_like(ids[real[i]]) > 0
        keep = keep & (torch.arange(len(keep)) > 0)  # nothing predicts the first token
        before = batch["log_probs", "full"][i][real[i]]
        want += (values - before).exp().clamp(max=1.2)[keep].tolist()
    actor, before = policy.get_new_version(generate=False, inplace=True), set(batch.keys(True))
    out = GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False)(batch)
    assert set(batch.keys(True)) == before
    assert float(out.loss_objective.detach()) == pytest.approx(-sum(want) / len(want), rel=1e-4)
    assert out.entropy is out.loss_entropy is out.kl_to_ref is out.kl_to_inference is None


@pytest.mark.parametrize(("padded", "ref_padded"), [(True, False), (True, True), (False, False)])
def test_imitation_and_its_kl_are_those_of_plain_forwards(policy, padded, ref_padded):
    td = spoken()
    actor = policy.get_new_version(generate=False, pad_output=padded)
    reference = load_reference(policy).get_new_version(score_mask_key=None, pad_output=ref_padded)
    scaled(reference, 0.9)
    with torch.no_grad():
        td["ref_log_probs"] = reference(td.copy())["ref_log_probs"]
    out = SFTLoss(actor, kl_to_ref_coeff=0.1, reduction="none")(td)
    want = torch.stack([-values.mean() for values in assistants(policy)])
    torch.testing.assert_close(out.loss_sft.detach().double(), want, atol=1e-4, rtol=1e-4)
    curr, ref = (torch.cat(assistants(p)) for p in (policy, reference))
    assert float(out.kl_to_ref) == pytest.approx(float(k3(ref, curr).mean()), rel=1e-3)
    if ref_padded:  # nothing tells a ragged actor where this padding is
        ragged_actor = actor.get_new_version(pad_output=False)
        with pytest.raises(ValueError, match="ref_log_probs"):
            SFTLoss(ragged_actor, kl_to_ref_coeff=0.1)(td)
