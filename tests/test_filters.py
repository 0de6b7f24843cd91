"""Top-k, top-p and min-p in training: everything is over the tokens that the sampler kept."""

import math
from dataclasses import replace

import pytest
import torch
from contracts import G, Words, leash, make_policy, rollout
from contracts import prompts as env_prompts
from enumeration import V, small
from filtered import (
    FILTERS,
    all_is_scored_over_what_was_kept,
    distance,
    filtered,
    kept_by_hand,
    spread,
    table_of,
    the_ratio_begins_at_one,
    tokens_of,
)
from steps import COEFF, HIGH, LOW, double_policy, grad_of, gradient, scaled
from tensordict import TensorDict

import policies.token_distribution
from conf.compose import compose_checked
from conf.start import set_up
from envs.chat_env import ChatEnv
from envs.transforms import RetrieveKL
from policies import ChatHistory, History
from policies.distributions.sequences import LLMMaskedCategorical
from policies.filters import Filters
from policies.load import load_policy, load_reference
from policies.padding import rows
from policies.scorer import Scorer
from policies.support import Support, decode, encode
from policies.value_head import Critic
from trainer import GRPOLoss, GRPOObjective
from trainer.advantage import GroupAdvantage
from trainer.collect import collect
from trainer.dynamic_sampling import swap
from trainer.losses import kl_term
from trainer.runs.saved_configs import as_today


@pytest.mark.parametrize("name", FILTERS)
def test_policy_and_reference_are_scored_over_what_was_kept(name):
    all_is_scored_over_what_was_kept(**FILTERS[name])


@pytest.mark.parametrize("name", FILTERS)
def test_the_ratio_of_the_weights_that_sampled_is_one(name):
    the_ratio_begins_at_one(**FILTERS[name])


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 200])
def test_what_is_stored_is_what_was_kept_in_the_fewest_bytes(vocabulary):
    draw = torch.Generator().manual_seed(vocabulary)
    share = torch.linspace(0, 1, 60)[:, None]
    kept = torch.rand(60, vocabulary, generator=draw) <= share
    kept[:, 0] = True
    sizes, words = encode(kept)
    assert torch.equal(decode(sizes, words, vocabulary), kept)
    fewest = kept.sum(-1).clamp(max=math.ceil(vocabulary / 32))
    assert torch.equal(sizes.abs(), fewest.masked_fill(kept.all(-1), 0).int())
    wider = decode(sizes, words, vocabulary + 40)
    assert torch.equal(wider[:, :vocabulary], kept)
    assert not wider[~kept.all(-1), vocabulary:].any()
    narrow = decode(sizes, words, max(vocabulary - 5, 1))
    assert torch.equal(narrow, kept[:, : narrow.shape[1]])


# The gradient, by brute force.


def slow(policy, reference, batch, kept, estimator: str, entropy: float):
    """Return the gradient of the clipped loss with its KL, token by token over what was kept."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i, ids, places in tokens_of(batch):
        real = batch["masks", "all_attention_mask"][i]
        gen, advantage = (batch[k][i][real][places] for k in (("log_probs", "full"), "advantage"))
        mine = table_of(policy.model, ids, places, kept[i])
        theirs = table_of(reference.model, ids, places, kept[i]).detach()
        curr, ref = (t.gather(-1, ids[places, None]).squeeze(-1) for t in (mine, theirs))
        r = (curr - gen).exp()
        total = total - torch.minimum(r * advantage, r.clamp(1 - LOW, 1 + HIGH) * advantage).sum()
        if estimator == "full":
            total = total + COEFF * distance(mine, theirs).sum()
        else:
            gap = ref - curr
            total = total + COEFF * (gap.exp() - 1 - gap).sum()
        total, count = total - entropy * spread(mine).sum(), count + len(places)
    policy.model.zero_grad()
    (total / count).backward()
    found = grad_of(policy).clone()
    policy.model.zero_grad()
    return found


@pytest.mark.parametrize("estimator", ["k3", "full"])
@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_the_gradient_is_that_of_the_filtered_distributions(name, estimator, monkeypatch):
    policy = filtered(double_policy(), **FILTERS[name])
    batch = rollout(policy, turns=2, count=2)
    kept = kept_by_hand(policy, batch, FILTERS[name])
    reference = scaled(policy, 0.95)
    batch = RetrieveKL(ref_model=reference, add_to_reward=False)(batch)
    batch = GroupAdvantage(group_size=G, leash=leash(COEFF))(batch)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.02)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(COEFF, estimator=estimator))
    want = slow(policy, reference, batch, kept, estimator, entropy=0.3)
    options = {"reference": reference.scorer, "entropy_coeff": 0.3}
    for more in ({}, {"micro_batch_tokens": 60}, {"packing": True}):
        got, _ = gradient(policy, objective, batch, **options, **more)
        assert torch.isfinite(got).all()
        assert (got - want).norm() / want.norm() < 1e-5, more
    monkeypatch.setattr(policies.token_distribution, "SLICE", 400 * 3)  # three tokens at a time
    got, _ = gradient(policy, objective, batch, **options)
    assert (got - want).norm() / want.norm() < 1e-5


def test_the_critic_sees_no_filter():
    policy = filtered(make_policy.__wrapped__(), top_k=3)
    batch = rollout(policy, count=2)
    policy.scorer.critic = Critic(policy.scorer)
    torch.nn.init.constant_(policy.scorer.critic.head.weight, 0.01)
    given = batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["loss_mask"]
    over = policy.scorer(*given, support=batch["support"])
    whole = policy.scorer(*given)
    assert torch.equal(over.values, whole.values)
    assert not torch.equal(over.log_probs, whole.log_probs)
    assert over.values.any()


@pytest.mark.parametrize("filters", [Filters(top_k=3), Filters(top_p=0.7), Filters(min_p=0.2)])
def test_k1_and_k3_are_on_average_the_exact_kl_of_the_two_over_what_was_kept(filters):
    """All tokens that may follow a prompt, each weighed by the chance to be drawn."""
    policy, reference = (Scorer(small(seed).double()) for seed in (0, 1))
    ids = torch.stack([torch.full((V,), 2), torch.arange(V)], -1)
    every = torch.ones_like(ids, dtype=torch.bool)
    told = torch.tensor([[False, True]]).expand_as(ids)
    logits = policy.logits(ids, every)[:, 1].detach()  # the same row V times
    kept = filters.cut(logits) > -torch.inf
    assert 1 < int(kept[0].sum()) < V
    sizes, words = encode(kept)
    parts = list(words.split(sizes.abs().tolist()))
    support = Support.of_rows(torch.stack([0 * sizes, sizes], -1), parts)
    with torch.no_grad():
        curr = policy(ids, every, told, reference=reference, support=support)
        ref = reference(ids, every, told, support=support).log_probs[:, 1]
    mine, drawn = curr.log_probs[:, 1], kept[0]
    chance = mine.exp()[drawn]
    assert float(chance.sum()) == pytest.approx(1)
    p, q = (
        s.logits(ids, every)[0, 1].detach().masked_fill(~drawn, -torch.inf).softmax(-1)[drawn]
        for s in (policy, reference)
    )
    exact = float((p * (p / q).log()).sum())
    assert exact > 0.01
    assert float(curr.full_kl[0, 1]) == pytest.approx(exact, rel=1e-6)
    for name in ("k1", "k3"):
        mean = (chance * kl_term(mine, ref, name)[drawn]).sum()
        assert float(mean) == pytest.approx(exact, rel=1e-6), name


# The batch.


def test_prompts_and_what_others_say_are_over_the_whole_vocabulary():
    policy = filtered(make_policy(), top_k=4)
    batch = rollout(policy, turns=2)
    sizes, words = batch["support"].sizes, batch["support"].words
    sampled = batch["masks", "all_response_mask"]
    assert not sizes[~sampled].any()
    assert (sizes[sampled] == 4).all()
    assert words.shape[1] == 4 * int(sampled.sum(-1).max()), "k ids a sampled token"
    assert "support" not in rollout(make_policy(), turns=2)


def test_batches_of_other_widths_are_put_together():
    policy = filtered(make_policy(), top_p=0.9)
    batch, fresh = rollout(policy, turns=2, count=2), rollout(policy, count=1)
    take = torch.tensor([True] * G + [False] * G)
    both = swap(batch, fresh, take)
    width = batch["tokens", "full"].shape[1]
    assert both["support"].sizes.shape == (2 * G, width)
    for i in range(2 * G):
        source, row = (fresh, i) if take[i] else (batch, i)
        size = source["support"].sizes.shape[1]
        assert torch.equal(both["support"].sizes[i, :size], source["support"].sizes[row])
        assert torch.equal(both["support"].row_words()[i], source["support"].row_words()[row])


def test_what_cannot_be_scored_again_is_refused_with_a_reason():
    env = ChatEnv(Words())
    for kwargs in ({"repetition_penalty": 1.2}, {"min_new_tokens": 2, "top_p": 0.9}):
        name = next(iter(kwargs))
        with pytest.raises(ValueError, match=rf"\['{name}'\].*only change samples: drop them"):
            collect(env_prompts(1), env, filtered(make_policy(), **kwargs))

    class Silent(type(make_policy())):
        keeps_support = False

    mute = filtered(Silent(make_policy().scorer, tokenizer=make_policy().tokenizer), top_k=3)
    with pytest.raises(ValueError, match=r"\['top_k'\] of a Silent only change samples"):
        collect(env_prompts(1), env, mute)


# The library: one rollout, the same numbers.


def said(policy):
    texts = ["Sort 3", "Sort the digits 4 4 2 8 7", "Write"]
    chats = History.from_chats([[{"role": "user", "content": t}] for t in texts])
    td = TensorDict(history=ChatHistory(prompt=chats, batch_size=[3]), batch_size=[3])
    return policy(td.set("stream", torch.arange(3)))


def moved(policy):
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.05)
    return policy.get_new_version(generate=False, inplace=False)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", FILTERS)
def test_a_wrapper_scores_over_what_was_kept_whoever_moved_since(name, padded):
    policy = filtered(make_policy.__wrapped__(), **FILTERS[name])
    policy = policy.get_new_version(pad_output=padded)
    td = said(policy)
    own = policy.get_new_version(generate=False, inplace=False)
    for new, old in zip(own.log_prob(td, as_list=True),
                        rows(td, ("log_probs", "response")), strict=True):  # fmt: skip
        torch.testing.assert_close(new, old[old != 0], atol=1e-5, rtol=0)
    score = moved(policy)
    told = score.log_prob(td, as_list=True)
    dist = score._get_sft_dist(td)
    keep = [rows(td, ("support", "sizes"))[i] != 0 for i in range(3)]
    assert any(k.any() for k in keep)
    for i, ids in enumerate(rows(td, ("tokens", "full"))):
        real = rows(td, ("masks", "all_attention_mask"))[i]
        reply = ids[rows(td, ("masks", "all_response_mask"))[i]]
        assert torch.isfinite(told[i]).all(), "nothing is left out that was drawn"
        table = dist.logits[i][dist.mask[i]].log_softmax(-1)
        got = table.gather(-1, reply[:, None]).squeeze(-1)
        torch.testing.assert_close(got, told[i], atol=1e-5, rtol=0)
        place = real.nonzero().squeeze(-1)
        assert len(place) == int(real.sum())
    assert isinstance(dist, LLMMaskedCategorical)
    assert torch.isfinite(dist.entropy()).all()
    stale = policy.get_new_version(generate_kwargs={"max_new_tokens": 3})(td)
    assert "support" not in stale, "of other replies"


def test_threads_and_samples_keep_their_own():
    policy = filtered(make_policy(), top_p=0.9)
    one = said(policy)
    queued = said(policy.get_new_version(min_batch_size=1))
    many = said(policy.get_new_version(num_samples=2, inplace=False))
    assert torch.equal(one["support"].words, queued["support"].words)
    assert torch.equal(one["support"].sizes, queued["support"].sizes)
    assert many["support"].sizes.shape == many["tokens"].full.shape
    score = policy.get_new_version(generate=False, inplace=False)
    with torch.no_grad():
        alone = score(one)["log_probs"].full
        both = score.get_new_version(min_batch_size=1)(one)["log_probs"].full
    torch.testing.assert_close(both, alone)


def test_the_public_loss_has_the_numbers_of_the_trainer():
    policy = filtered(make_policy.__wrapped__(), top_k=6, top_p=0.95)
    batch = rollout(policy, count=2)
    reference = scaled(policy, 0.9)
    batch = RetrieveKL(ref_model=reference, add_to_reward=False)(batch)
    batch = GroupAdvantage(group_size=G, leash=leash(COEFF))(batch)
    score = moved(policy)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(COEFF))
    options = {"clip_epsilon": (LOW, HIGH), "kl_to_ref_coeff": COEFF, "masking_strategy": "rlhf"}
    loss = GRPOLoss(score, **options, kl_to_inference_coeff=0.0, entropy_coeff=0.5)
    out = loss(batch)
    (out.loss_objective + out.loss_kl_to_ref + out.loss_entropy).backward()
    got, told = grad_of(policy).clone(), out.detach()
    policy.model.zero_grad()
    want, metrics = gradient(policy, objective, batch, entropy_coeff=0.5)
    assert float(told.loss_objective) == pytest.approx(metrics["loss/policy"], abs=1e-5)
    assert float(told.loss_kl_to_ref) == pytest.approx(metrics["loss/kl"], rel=1e-4)
    assert float(told.entropy) == pytest.approx(metrics["policy/entropy"], rel=1e-4)
    assert float(told.kl_approx) == pytest.approx(metrics["kl/behaviour"], abs=1e-5)
    assert math.isfinite(float(told.kl_to_inference))
    assert (got - want).norm() / want.norm() < 1e-3
    with pytest.raises(ValueError, match=r"expected `support`.* drop them"):
        loss(batch.exclude("support"))


# Runs.


def test_the_keys_reach_the_policy_and_older_runs_have_none():
    set_up()
    words = ["policy.top_k=5", "policy.top_p=0.9", "policy.min_p=0.1"]
    keys = compose_checked(["experiment=grpo_tiny", *words])["policy"]
    chosen = {name: keys[name] for name in ("top_k", "top_p", "min_p")}
    policy = load_policy("tiny", **chosen)
    assert policy.limits.filters == replace(Filters(), **chosen)
    assert load_reference(policy).limits.filters == policy.limits.filters
    older = {k: v for k, v in keys.items() if k not in chosen}
    again = as_today({"policy": older, "algorithm": {}})["policy"]
    assert load_policy("tiny", **{k: again[k] for k in chosen}).limits.filters == Filters()
    with pytest.raises(ValueError, match=r"policy.top_p .*from 0 to 1"):
        compose_checked(["experiment=grpo_tiny", "policy.top_p=1.1"])
    for word in ("top_k=1", "top_p=0", "min_p=1"):
        with pytest.raises(ValueError, match=rf"policy.{word} leaves one token"):
            compose_checked(["experiment=grpo_tiny", f"policy.{word}"])
    with pytest.raises(ValueError, match=r"only changes samples.* top_p and min_p are scored"):
        compose_checked(["experiment=grpo_tiny", "policy.repetition_penalty=1.1"])
