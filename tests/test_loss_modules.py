"""The public losses against the trainer's own terms and against loops over tokens in float64."""

import ast
import math
from pathlib import Path

import pytest
import torch
from contracts import G, leash, make_policy, plain_log_probs, rollout
from runs import ROOT
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn

from envs.transforms import RetrieveKL
from policies.chats.containers import ChatHistory, Masks, Tokens
from policies.chats.history import History
from policies.distributions.sequences import LLMMaskedCategorical
from policies.load import load_reference
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.advantage import GroupAdvantage
from trainer.losses import token_weights
from trainer.objectives import GRPOObjective, SFTObjective
from trainer.torchrl.loss_modules import DAPO, CISPOLoss, GRPOLoss
from trainer.torchrl.sft_loss import SFTLoss

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
    batch = GroupAdvantage(group_size=G, leash=leash(COEFF))(batch)
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
    weight = token_weights(
        mask,
        aggregation,
        total_tokens=mask.sum(),
        total_rows=mask.any(-1).sum(),
        max_tokens=MOST,
    )
    terms = GRPOObjective(clip_low=0.1, clip_high=0.3, leash=leash(COEFF))(scores, batch)
    losses = {k: (weight * v).sum() for k, v in terms.loss.items()}
    means = {k: float((v * mask).sum() / mask.sum()) for k, v in terms.means.items()}
    return losses, means, weight


def grad(policy, loss) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(policy.model.parameters()), retain_graph=True)
    return torch.cat([p.flatten() for p in parts])


@pytest.mark.parametrize(
    ("aggregation", "column", "under_next"),
    [("token_mean", False, True), ("sequence_mean", True, False), ("constant", True, True)],
)
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
        value = getattr(out, name)
        torch.testing.assert_close(value, want, atol=2e-6, rtol=1e-4)
        got, exact = grad(policy, value), grad(policy, want)
        assert (got - exact).norm() / exact.norm() < 1e-4
    assert float(out.clip_fraction) == pytest.approx(means["policy/clip_fraction"], abs=1e-6)
    assert float(out.kl_approx) == pytest.approx(means["kl/behaviour"], abs=1e-5)
    assert float(out.entropy) == pytest.approx(means["policy/entropy"], rel=1e-4)
    if aggregation == "token_mean":
        kl = float(losses["kl"].detach()) / COEFF
        assert float(out.kl_to_ref) == pytest.approx(kl, abs=1e-5)
        assert float(out.loss_entropy.detach()) == pytest.approx(-0.02 * float(out.entropy))
    assert 0 < float(out.ESS) <= 1


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
    assert out.entropy is out.loss_entropy is out.kl_to_ref is out.kl_to_inference is None
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
    got = out.loss_objective * keep.sum()
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("padded", [True, False])
def test_the_rlhf_strategy_reads_histories_alone(policy, padded):
    td = TensorDict({"advantage": torch.tensor([[1.0], [-2.0]])}, batch_size=[2])
    td["history"] = ChatHistory(full=History.from_chats(CHATS), batch_size=[2])
    actor = policy.get_new_version(generate=False, pad_output=padded)
    with torch.no_grad():
        td["log_probs"] = actor(td.copy())["log_probs"].select("full")
    before = set(td.keys(True))
    out = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)(td)
    assert set(td.keys(True)) == before
    sizes = [sum(policy.renderer.render(chat).assistant) for chat in CHATS]
    # At ratio 1 the loss is minus the mean advantage of the assistant's tokens.
    want = -(1.0 * sizes[0] - 2.0 * sizes[1]) / sum(sizes)
    assert float(out.loss_objective.detach()) == pytest.approx(want, abs=1e-4)


def test_a_batch_without_a_token_counts_nothing(policy):
    batch = moved(policy)
    batch["loss_mask"][:] = False
    actor = policy.get_new_version(generate=False, inplace=False)
    out = GRPOLoss(actor, kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1)(batch)
    values = {k: float(v.detach()) for k, v in out.items()}
    assert values == dict.fromkeys(values, 0.0)
    assert {"ESS", "clip_fraction", "kl_approx", "entropy", "kl_to_ref"} <= set(values)
    assert not grad(policy, out.sum(reduce=True)).any()


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
        with pytest.raises(KeyError, match=f"expected .*{name}.* at the root.*set_keys"):
            GRPOLoss(actor)(batch.exclude(key))
    with pytest.raises(KeyError, match="ref_log_probs"):
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
    with pytest.raises(ValueError, match="needs max_tokens of a row, got None"):
        GRPOLoss(actor, aggregation="constant")


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_sft_loss_equals_the_trainers_terms(policy, padded, normalize):
    td = TensorDict(batch_size=[2])
    td["history"] = ChatHistory(full=History.from_chats(CHATS), batch_size=[2])
    actor = policy.get_new_version(
        generate=False, pad_output=padded, generate_kwargs={"temperature": 1.0}
    )
    made = {
        r: SFTLoss(actor, reduction=r, normalize_by_seq_length=normalize)(td).loss_sft
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
    # TorchRL refuses only a batch in which no sample has any.
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    td = TensorDict(batch_size=[2])
    td["tokens"] = Tokens(full=ids, padded=True, batch_size=[2])
    td["masks"] = Masks(all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask,
                        padded=True, batch_size=[2])  # fmt: skip
    actor = policy.get_new_version(generate=False)
    with pytest.raises(ValueError, match=r"samples \[1\] have none"):
        SFTLoss(actor)(td)
    assert float(SFTLoss(actor)(td[:1]).loss_sft.detach()) > 0
    for name, value in {"reduction": "max", "loss_function": "dpo", "beta": 0.0}.items():
        with pytest.raises(ValueError, match=name):
            SFTLoss(actor, **{name: value})
    with pytest.raises(ValueError, match="minor_sft takes no kl_to_ref_coeff"):
        SFTLoss(actor, loss_function="minor_sft", kl_to_ref_coeff=0.1)
    with pytest.raises(KeyError, match="ref_log_probs"):
        SFTLoss(actor, kl_to_ref_coeff=0.1)(td[:1])


# The losses on an actor that is a table of logits, against loops over tokens in float64.

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


def table_batch(shift: float | None = None) -> tuple[Table, TensorDict]:
    """Return the actor and a batch; `shift` is its log-ratio to the generator and the reference."""
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
        other = curr - (0.7 * noise if shift is None else shift)
        td[name, "full"] = other
    td["advantage"] = torch.randn(B, 1, generator=generator, dtype=torch.float64)
    return actor, td


def kept(td: TensorDict) -> list[tuple[int, int]]:
    return td["masks", "all_assistant_mask"].nonzero().tolist()


def loop(td: TensorDict, term) -> list[tuple[int, Tensor]]:
    """Return (row, term) of each kept token: term(curr, gen, ref, advantage, its logits)."""
    logits = Table().logits
    out = []
    for i, t in kept(td):
        given = logits[i, t].log_softmax(-1)
        curr = given[td["tokens", "full"][i, t]]
        gen, ref = (td[n, "full"][i, t] for n in ("log_probs", "ref_log_probs"))
        out.append((i, term(curr, gen, ref, td["advantage"][i, 0], given)))
    return out, logits


def same(actor: Table, got: Tensor, want: Tensor, logits: Tensor) -> None:
    """Assert that value and gradient are those of the loop."""
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)
    mine = torch.autograd.grad(got, actor.logits, retain_graph=True)[0]
    exact = torch.autograd.grad(want, logits, retain_graph=True)[0]
    torch.testing.assert_close(mine, exact, atol=1e-7, rtol=1e-5)


def test_masked_tokens_dilute_no_average():
    # k3 of d = ref - curr = 0.43: expm1(d) - d = 0.1073, on 14 of 92 tokens.
    actor, td = table_batch(shift=-0.43)
    td["advantage"] = torch.full((B, 1), -1.0, dtype=torch.float64)
    k3 = math.expm1(0.43) - 0.43
    out = GRPOLoss(actor, kl_to_ref_coeff=2.0, kl_to_inference_coeff=3.0, clip_epsilon=0.2)(td)
    for name, coeff in (("ref", 2.0), ("inference", 3.0)):
        assert float(getattr(out, f"kl_to_{name}")) == pytest.approx(k3, abs=1e-6)
        loss = getattr(out, f"loss_kl_to_{name}").detach()
        assert float(loss) == pytest.approx(coeff * k3, abs=1e-5)
    assert float(out.kl_approx) == pytest.approx(0.43, abs=1e-6)
    assert float(out.clip_fraction) == 1.0  # every kept ratio is exp(-0.43) = 0.65
    assert float(SFTLoss(actor, kl_to_ref_coeff=2.0)(td).kl_to_ref) == pytest.approx(k3, abs=1e-6)


def grpo(curr, gen, ref, advantage, given):
    r = (curr - gen).exp()
    return -torch.minimum(r * advantage, r.clamp(0.8, 1.3) * advantage)


def cispo(curr, gen, ref, advantage, given):
    return -min(max(float((curr - gen).exp().detach()), 0.8), 1.3) * advantage * curr


def entropy(curr, gen, ref, advantage, given):
    return 0.01 * (given.exp() * given).sum()


def k3(curr, gen, ref, advantage, given):
    return 0.3 * ((ref - curr).exp() - (ref - curr) - 1)


@pytest.mark.parametrize(("kind", "term"), [(GRPOLoss, grpo), (DAPO, grpo), (CISPOLoss, cispo)])
def test_losses_and_gradients_are_those_of_a_slow_loop(kind, term):
    actor, td = table_batch()
    out = kind(actor, clip_epsilon=(0.2, 0.3), kl_to_ref_coeff=0.3)(td)
    assert type(out).__name__ == f"{kind.__name__.removesuffix('Loss')}LossOutput"
    parts = (("loss_objective", term), ("loss_entropy", entropy), ("loss_kl_to_ref", k3))
    for name, each in parts:
        terms, logits = loop(td, each)
        same(actor, getattr(out, name), sum(t for _, t in terms) / len(terms), logits)
    whole = torch.autograd.grad(out.sum(reduce=True), actor.logits, retain_graph=True)[0]
    losses = out.loss_objective + out.loss_entropy + out.loss_kl_to_ref
    torch.testing.assert_close(whole, torch.autograd.grad(losses, actor.logits)[0])
    ratios = [float((c - g).exp().detach()) for _, (c, g) in loop(td, lambda c, g, *_: (c, g))[0]]
    if kind is CISPOLoss:
        clipped = sum(not 0.8 <= r <= 1.3 for r in ratios) / len(ratios)
        assert float(out.clip_fraction) == pytest.approx(clipped)
        assert 0 < clipped < 1
    ess = sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios)
    assert float(out.ESS) == pytest.approx(ess, rel=1e-5)


def test_aggregation_and_reduction_do_what_they_say():
    actor, td = table_batch()
    terms, logits = loop(td, grpo)
    of_row = [[t for i, t in terms if i == row] for row in range(B)]
    means = [sum(row) / len(row) for row in of_row]
    wanted = {
        ("token_mean", "mean"): sum(t for _, t in terms) / len(terms),
        ("token_mean", "sum"): sum(t for _, t in terms),
        ("prompt_mean", None): sum(means) / B,
        ("prompt_mean", "sum"): sum(means),
        (None, "mean"): sum(t for _, t in terms) / len(terms),
    }
    settings = {"clip_epsilon": (0.2, 0.3), "entropy_bonus": False}
    for (aggregation, reduction), want in wanted.items():
        loss = GRPOLoss(actor, aggregation=aggregation, reduction=reduction, **settings)(td)
        assert loss.loss_objective.shape == ()
        same(actor, loss.loss_objective, want, logits)
    for choice in ({"aggregation": "none"}, {"reduction": "none"}):
        each = GRPOLoss(actor, **choice, **settings)(td).loss_objective
        assert each.shape == (B, T)
        mask = td["masks", "all_assistant_mask"]
        assert not each[~mask].any()
        torch.testing.assert_close(each[mask], torch.stack([t for _, t in terms]))
    for name in ("aggregation", "masking_strategy", "reduction"):
        with pytest.raises(ValueError, match=f"expected {name} in .*, got 'median'"):
            GRPOLoss(actor, **{name: "median"})


def test_any_objective_of_the_trainer_may_stand_behind_the_documented_keys():
    actor, td = table_batch()
    loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.3), entropy_bonus=False)
    loss.objective = GRPOObjective(surrogate="reinforce", leash=leash(0.0))
    terms, logits = loop(td, lambda curr, gen, ref, advantage, given: -advantage * curr)
    out = loss(td)
    same(actor, out.loss_objective, sum(t for _, t in terms) / len(terms), logits)
    assert float(out.clip_fraction) == 0.0


def test_the_formulas_stand_once():
    """The public modules know how to weigh and what a token's distance is, and no loss."""
    folder = Path(GRPOLoss.__module__.replace(".", "/")).parent
    for name in ("loss_modules", "ppo_loss", "sft_loss", "loss_inputs"):
        tree = ast.parse((ROOT / folder / f"{name}.py").read_text())
        taken = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module in ("trainer.losses", "trainer.surrogates", "torch.nn")
            for alias in node.names
        }
        assert taken <= {"token_weights", "half_square"}, name


def test_dapo_is_the_clipped_surrogate_with_two_bounds():
    actor, td = table_batch()
    dapo, plain = DAPO(actor), GRPOLoss(actor, clip_epsilon=(0.2, 0.28))
    assert float(dapo(td).loss_objective.detach()) == float(plain(td).loss_objective.detach())


def test_no_gradient_reaches_the_reference_or_the_advantage():
    actor, td = table_batch()
    ref = td["ref_log_probs", "full"].clone().requires_grad_()
    advantage = td["advantage"].clone().requires_grad_()
    td["ref_log_probs", "full"], td["advantage"] = ref * 1.0, advantage * 1.0
    GRPOLoss(actor, kl_to_ref_coeff=0.3)(td).sum(reduce=True).backward()
    assert ref.grad is None
    assert advantage.grad is None
    assert actor.logits.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [GRPOLoss, CISPOLoss])
def test_a_constant_divisor_does_not_depend_on_dropped_tokens(kind):
    actor, td = table_batch()
    settings = {"clip_epsilon": (0.2, 0.3), "aggregation": "constant", "max_tokens": 40}
    term = grpo if kind is GRPOLoss else cispo
    (terms, _), (pairs, _) = loop(td, term), loop(td, lambda c, g, *_: (c, g))
    far = [0.5 * float((c - g).detach()) ** 2 for _, (c, g) in pairs]
    row = terms[0][0]  # a threshold that empties this row
    threshold = 0.99 * min(d for (i, _), d in zip(terms, far, strict=True) if i == row)
    kept = [t for (_, t), d in zip(terms, far, strict=True) if d <= threshold]
    assert len({i for i, _ in terms}) == B
    got = kind(actor, kl_mask_threshold=threshold, **settings)(td).loss_objective
    want = sum(float(t.detach()) for t in kept) / (B * 40)
    assert float(got.detach()) == pytest.approx(want, abs=1e-7)


def test_tokens_far_from_the_generator_are_dropped_from_every_average():
    actor, td = table_batch()
    terms, logits = loop(td, grpo)
    ratios = [abs(float((c - g).detach())) for _, (c, g) in loop(td, lambda c, g, *_: (c, g))[0]]
    near = [t for (_, t), d in zip(terms, ratios, strict=True) if 0.5 * d * d <= 0.1]
    assert 0 < len(near) < len(terms)
    settings = {"clip_epsilon": (0.2, 0.3), "entropy_bonus": False}
    got = GRPOLoss(actor, kl_mask_threshold=0.1, **settings)(td).loss_objective
    same(actor, got, sum(near) / len(near), logits)


def test_keys_can_be_set():
    actor, td = table_batch()
    want = GRPOLoss(actor, kl_to_ref_coeff=0.1)(td)
    moved = td.exclude("advantage", "ref_log_probs")
    moved["a"], moved["elsewhere", "ref"] = td["advantage"], td["ref_log_probs", "full"]
    loss = GRPOLoss(actor, kl_to_ref_coeff=0.1)
    assert loss.tensor_keys.advantage == "advantage"
    loss.set_keys(advantage="a", ref_log_probs=("elsewhere", "ref"))
    assert float(loss(moved).loss_objective.detach()) == float(want.loss_objective.detach())
    assert float(loss(moved).kl_to_ref) == float(want.kl_to_ref)
    with pytest.raises(ValueError, match=r"among \['advantage'.*got \['value'\]"):
        loss.set_keys(value="v")
    sft = SFTLoss(actor, kl_to_ref_coeff=0.1)
    expected = float(sft(td).kl_to_ref)
    sft.set_keys(ref_log_prob=("elsewhere", "ref"))
    assert float(sft(moved).kl_to_ref) == expected


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_minor_sft_is_the_log_sigmoid_of_the_distance_to_the_reference(normalize, reduction):
    actor, td = table_batch()
    terms, logits = loop(td, lambda curr, gen, ref, *_: torch.stack([curr, ref]))
    rows = []
    for i in range(B):
        both = [t for row, t in terms if row == i]
        curr, ref = sum(both) / (len(both) if normalize else 1)
        rows.append(-torch.log(1 / (1 + torch.exp(-0.5 * (curr - ref)))))
    want = torch.stack(rows)
    want = {"mean": want.mean(), "sum": want.sum(), "none": want}[reduction]
    loss = SFTLoss(actor, None, None, reduction, normalize, loss_function="minor_sft", beta=0.5)
    got = loss(td).loss_sft
    assert got.shape == want.shape
    same(actor, got.sum(), want.sum(), logits)


@pytest.mark.parametrize(("padded", "ref_padded"), [(True, False), (True, True), (False, False)])
def test_the_reference_of_imitation_may_be_padded_or_ragged(policy, padded, ref_padded):
    td = TensorDict(batch_size=[2])
    td["history"] = ChatHistory(full=History.from_chats(CHATS), batch_size=[2])
    actor = policy.get_new_version(generate=False, pad_output=padded)
    reference = load_reference(policy).get_new_version(score_mask_key=None, pad_output=ref_padded)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(0.9)
        td["ref_log_probs"] = reference(td.copy())["ref_log_probs"]
    out = SFTLoss(actor, kl_to_ref_coeff=0.1)(td)
    want = []
    for chat in CHATS:
        done = policy.renderer.render(chat)
        ids, mask = torch.tensor(done.ids), torch.tensor(done.assistant)
        curr, ref = (plain_log_probs(p, ids, 0.7)[mask] for p in (policy, reference))
        want += ((ref - curr).exp() - (ref - curr) - 1).tolist()
    assert float(out.kl_to_ref) == pytest.approx(sum(want) / len(want), rel=1e-3)
    if ref_padded:  # nothing tells a ragged actor where this padding is
        ragged_actor = actor.get_new_version(pad_output=False)
        with pytest.raises(ValueError, match=r"rows of .*ref_log_probs"):
            SFTLoss(ragged_actor, kl_to_ref_coeff=0.1)(td)


def test_a_tokenizer_of_its_own_renders_the_history_for_the_loss(policy):
    td = TensorDict(batch_size=[2])
    td["history"] = ChatHistory(full=History.from_chats(CHATS), batch_size=[2])
    actor = policy.get_new_version(generate=False)
    plain = SFTLoss(actor, reduction="none")(td).loss_sft
    same_one = SFTLoss(actor, policy.tokenizer, reduction="none")(td).loss_sft
    torch.testing.assert_close(same_one, plain)
    kwargs = {"chat_template": policy.tokenizer.chat_template.replace("<|im_end|>", "<|im_end|>!")}
    other = SFTLoss(actor, None, kwargs, reduction="none")(td).loss_sft
    assert (other - plain).abs().min() > 1e-3
    assert "tokens" not in td


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("strategy", ["rlhf", "generic"])
def test_one_model_as_actor_generator_and_reference_is_no_way_from_itself(policy, strategy, padded):
    score = policy.get_new_version(generate=False, pad_output=padded, inplace=False)
    with torch.no_grad():
        td = score(TensorDict(batch_size=[2]).set("history", full_histories()))
    td["next"] = TensorDict({"ref_log_probs": td["log_probs"].copy()}, batch_size=[2])
    td["history"], td["advantage"] = full_histories(), torch.ones(2, 1)
    out = GRPOLoss(score, masking_strategy=strategy, kl_to_ref_coeff=0.1)(td)
    for name, want in (("kl_to_ref", 0.0), ("kl_approx", 0.0), ("ESS", 1.0)):
        assert abs(float(out.get(name)) - want) < 1e-5, name


def full_histories() -> ChatHistory:
    return ChatHistory(full=History.from_chats(CHATS), batch_size=[2])
