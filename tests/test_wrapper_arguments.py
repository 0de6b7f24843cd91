"""How a wrapper is asked to generate, and which arguments and inputs are refused."""

import math

import pytest
import torch
from contracts import Words, make_policy
from contracts import prompts as env_prompts
from tensordict import TensorDict
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from wrapped import CHATS, prompts, same, scoring, sequences, spoken

from envs.chat_env import ChatEnv
from policies.chats.containers import Text
from policies.load import load_policy, load_reference
from policies.padding import rows
from policies.sampler import Filters
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer import GRPOLoss
from trainer.collect import collect


def asked(policy=None, **kwargs) -> TransformersWrapper:
    """Return a version of the policy with more generate_kwargs."""
    policy = policy or make_policy().get_new_version(inplace=False)
    return policy.get_new_version(generate_kwargs={**policy.generate_kwargs, **kwargs})


def check_processed(out, process) -> int:
    """Compare the log-probs of replies with processed logits; return how many differ from plain."""
    moved = 0
    for ids, values, mask in sequences(out):
        for t in range(int((~mask).sum()), len(ids)):
            with torch.no_grad():
                logits = make_policy().model(input_ids=ids[None, :t]).logits[:, -1].float()
            want, plain = (x.log_softmax(-1)[0, ids[t]] for x in (process(ids[:t], logits), logits))
            torch.testing.assert_close(values[t], want, atol=1e-4, rtol=0)
            moved += bool((want - plain).abs() > 1e-3)
    return moved


# Fields that the sampler follows.


def test_filters_and_their_log_probs_are_those_of_transformers():
    kwargs = {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 30, "top_p": 0.9}
    processors = [
        *(RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)),
        *(TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)),
    ]
    policy = make_policy().get_new_version(inplace=False, num_samples=4)
    out = asked(policy, min_p=0.02, **kwargs)(prompts()).reshape(-1)
    process = LogitsProcessorList(processors)
    moved = check_processed(out, lambda ids, logits: process(ids[None], logits))
    assert moved > 10, "the filters should matter"


def test_min_new_tokens_keeps_ends_away():
    policy = make_policy().get_new_version(inplace=False, num_samples=60)
    short, long = (p(prompts())[0] for p in (policy, asked(policy, min_new_tokens=3)))
    sizes = [[int(mask.sum()) for *_, mask in sequences(td)] for td in (short, long)]
    assert min(sizes[0]) < 3
    assert min(sizes[1]) >= 4, "three... and then the end"


def test_a_stop_text_ends_a_reply_and_stays_in_it():
    policy = make_policy().get_new_version(num_samples=8)
    plain = policy(prompts())[0]
    letter = next(c for c in plain["text"].response[0][2:] if c.isascii())
    stopped, decode = asked(policy, stop=[letter])(prompts())[0], policy.tokenizer.decode
    cuts = 0
    for (ids, _, mask), (ids2, _, mask2) in zip(sequences(plain), sequences(stopped), strict=True):
        whole, cut = ids[mask], ids2[mask2]
        assert torch.equal(whole[: len(cut)], cut)
        assert letter not in decode(cut[:-1])
        assert letter in decode(cut) or len(cut) == len(whole)
        cuts += len(cut) < len(whole)
    assert cuts > 0


def test_end_ids_and_special_tokens_in_the_texts_may_be_chosen():
    plain = make_policy().get_new_version(inplace=False, num_samples=40)
    whole = [ids[mask].tolist() for ids, _, mask in sequences(plain(prompts()).reshape(-1))]
    end = whole[0][1]  # a token that some reply has inside
    cut = asked(plain, eos_token_id=end)
    out = cut(prompts()).reshape(-1)
    pairs = zip(whole, sequences(out), strict=True)
    for row, (ids, _, mask) in (pair for pair in pairs if end in pair[0]):
        assert ids[mask].tolist() == row[: row.index(end) + 1]
    bare = asked(cut, skip_special_tokens=True)(prompts()).reshape(-1)
    texts = ["".join(td["text"].response) for td in (out, bare)]
    assert ["<|" in text for text in texts] == [True, False]


def test_padding_of_ids_is_the_pad_token_that_was_asked_for():
    policy = asked(pad_token_id=7)
    for out in (policy(prompts()), policy.get_new_version(generate=False)(spoken())):
        assert out["tokens"].full[~out["masks"].all_attention_mask].unique().tolist() == [7]


@pytest.mark.parametrize(
    ("kwargs", "alias"),
    [
        ({"max_new_tokens": 3}, {"max_tokens": 3}),
        ({"stop": ["e"]}, {"stop_strings": ["e"], "return_dict_in_generate": True}),
        ({"temperature": 0}, {"temperature": 0, "top_k": 3, "top_p": 0.5, "num_beams": 1}),
    ],
)
def test_other_names_and_values_that_change_nothing_are_understood(kwargs, alias):
    same(asked(**kwargs)(prompts()), asked(**alias)(prompts()))


# Fields and objects that are handed on to transformers.


def test_what_only_transformers_can_do_is_handed_on_with_its_log_probs():
    policy = make_policy().get_new_version(inplace=False)
    banned = [i for i in range(400) if i % 4 and i not in policy.stop_ids]

    def ban(ids, logits):
        return logits.index_fill(-1, torch.tensor(banned), -math.inf)

    for kwargs in (
        {"suppress_tokens": banned},
        {"logits_processor": LogitsProcessorList([ban])},
        {"prefix_allowed_tokens_fn": lambda _, ids: sorted({*range(400)} - {*banned})},
    ):
        drawn = []
        for _ in range(2):
            torch.manual_seed(0)
            drawn.append(asked(policy, temperature=0.8, **kwargs)(prompts()))
        same(*drawn)
        check_processed(drawn[0], lambda ids, logits: ban(ids, logits) / 0.8)


# What is refused.


@pytest.mark.parametrize("name", ["top_p", "min_new_tokens", "no_repeat_ngram_size"])
def test_training_refuses_what_its_log_probs_do_not_follow_and_evaluation_does_not(name):
    value = {"top_p": 0.9}.get(name, 2)
    policy, env = asked(make_policy(), **{name: value}), ChatEnv(Words())
    with pytest.raises(ValueError, match=name):
        collect(env_prompts(1), env, policy)
    with pytest.raises(ValueError, match=name):
        GRPOLoss(policy.get_new_version(generate=False))(make_policy()(env.reset(env_prompts(1))))
    assert collect(env_prompts(1), env, policy, learn=False)["loss_mask"].any()


def test_filters_of_the_configuration_reach_the_policy_and_its_reference():
    filters = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
    policy = load_policy("tiny", **filters)
    assert policy.limits.filters == load_reference(policy).limits.filters == Filters(**filters)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("num_samples", {"num_samples": 3, "inplace": True}),
        ("num_samples=3 and n=2", {"num_samples": 3, "generate_kwargs": {"n": 2}}),
        ("chat_template_name", {"chat_template_name": "nobody's"}),
        ("log_probs", {"generate": False, "log_probs_key": None}),
        ("min_batch_size", {"min_batch_size": 5, "max_batch_size": 2}),
        ("min_new_tokens", {"generate_kwargs": {"min_tokens": 3}}),
        ("min_new_tokens", {"generate_kwargs": {"min_new_tokens": 9, "max_new_tokens": 3}}),
        ("stopping_criteria", {"generate_kwargs": {"stopping_criteria": []}}),
        ("temperature", {"generate_kwargs": {"temperature": math.nan}}),
        ("typical_p", {"generate_kwargs": {"stop": ["x"], "typical_p": 0.5}}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(key, changes):
    with pytest.raises(ValueError, match=key):
        make_policy().get_new_version(**changes)


def test_prompts_over_the_limit_are_refused_by_number():
    sizes = [len(make_policy().renderer.render(c, add_generation_prompt=True).ids) for c in CHATS]
    limit = {"max_new_tokens": 1, "max_prompt_tokens": max(sizes)}
    assert asked(**limit)(prompts())["tokens"].response.shape == (3, 1)
    with pytest.raises(ValueError, match=f"prompt 2 .* {max(sizes)} tokens"):
        asked(**limit | {"max_prompt_tokens": max(sizes) - 1})(prompts())


def other_prompts(*, padded: bool) -> TensorDict:
    """Return a rollout whose prompts are not what its sequences start with."""
    td = make_policy().get_new_version(pad_output=padded)(prompts()).select("tokens", "masks")
    rows(td, ("tokens", "prompt"))[0].add_(1)
    return td


def short_mask(name: str, *, padded: bool) -> TensorDict:
    """Return a rollout whose first row, or each row, lacks an entry of a mask."""
    td = make_policy().get_new_version(pad_output=padded)(prompts()).select("tokens", "masks")
    place = td["masks"] if padded else td[0]["masks"]
    place.set(name, place.get(name)[..., 1:])
    return td


TEXT = TensorDict(history=Text(prompt=["x"], batch_size=[1]), batch_size=[1])
WRONG = [
    (lambda: make_policy()(prompts().select("stream")), "history.*prompt"),
    (lambda: make_policy()(TEXT), "History"),
    (lambda: scoring()(short_mask("all_response_mask", padded=True)), "all_response_mask"),
    (lambda: scoring()(short_mask("all_attention_mask", padded=False)), "attention_mask"),
    (lambda: scoring()(other_prompts(padded=True)), "prompt"),
    (lambda: scoring()._get_sft_dist(other_prompts(padded=False)), "prompt"),
    (lambda: scoring(input_mode="text").log_prob(spoken("text")), "input_mode"),
    (lambda: scoring().get_dist(spoken(), as_padded_tensor=False), "equal lengths"),
]


@pytest.mark.parametrize(("call", "key"), WRONG)
def test_inputs_that_do_not_fit_are_refused(call, key):
    with pytest.raises((ValueError, TypeError), match=key):
        call()
