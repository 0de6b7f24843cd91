"""The policy as a TensorDict module: what it generates and scores, its distributions and versions;
how it is asked to generate, and which arguments and inputs are refused.

Expected log-probs come from one plain forward per sequence. What the pages of the specification
say about each argument is tried in tests/specification.
"""

import copy
import math

import pytest
import torch
from support.chats import CHATS, SPOKEN, TEXTS, prompts, same, scoring, sequences, spoken
from support.policies import make_wrapper, plain_log_probs
from support.policies import prompts as env_prompts
from support.tasks import Words
from tensordict import TensorDict
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from envs.chat_env import ChatEnv
from policies.load import load_policy, load_reference
from policies.padding import rows
from policies.sampler import Filters
from policies.torchrl.transformers_wrapper import TransformersWrapper
from policies.transformers_policy import TransformersPolicy
from trainer import GRPOLoss
from trainer.collect import collect

ATTENTION, RESPONSE = ("masks", "all_attention_mask"), ("masks", "all_response_mask")


def test_with_the_settings_of_a_run_a_wrapper_is_the_policy_of_a_run():
    policy = make_wrapper().get_new_version(text_key=None)
    parts = {"tokenizer": policy.tokenizer, "renderer": policy.renderer, "limits": policy.limits}
    bare = TransformersPolicy(policy.scorer, **parts, text_key=None)
    assert (bare.in_keys, {*bare.out_keys}) == (policy.in_keys, {*policy.out_keys})
    later = prompts().update(prompts("tokens"))  # a turn that continues the ids
    for td in (prompts(), later):
        done, alone = policy(td.clone()), bare(td.clone())
        assert_equal(alone, done)
        assert alone["history"].full.chats() == done["history"].full.chats()
    settings = {"generate": False, "inplace": False, "log_probs_key": "ref_log_probs"}
    settings |= {"text_key": None, "score_mask_key": RESPONSE, "micro_batch_tokens": 30}
    scored = policy.get_new_version(**settings)
    bare = TransformersPolicy(policy.scorer, **parts, **settings)
    ids = done.select("tokens", "masks", "temperature")
    want = scored(ids, temperature_key="temperature")
    assert (want["ref_log_probs"].full < 0).any()
    got = bare(ids, temperature_key="temperature")
    for key in (("tokens", "full"), ("ref_log_probs", "full"), ATTENTION, RESPONSE):
        assert torch.equal(got[key], want[key]), key


def assert_equal(got: TensorDict, want: TensorDict) -> None:
    """Compare the tensors of two TensorDicts to the bit."""
    assert set(got.keys(True, True)) == set(want.keys(True, True))
    for key in want.keys(True, True):
        assert torch.equal(got[key], want[key]), key


# Generation.


def test_the_end_of_turn_is_kept_when_it_is_the_padding_token():
    tokenizer = copy.deepcopy(make_wrapper().tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    plain = make_wrapper().get_new_version(num_samples=40)
    out = plain.get_new_version(tokenizer=tokenizer)(prompts())[0]
    same(out, plain(prompts())[0])
    assert any(ids[-1] == tokenizer.eos_token_id for ids, *_ in sequences(out))


def test_without_streams_torchs_generator_fixes_the_responses():
    policy, drawn = make_wrapper().get_new_version(inplace=False), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([ids.tolist() for ids, *_ in sequences(policy(prompts().exclude("stream")))])
    assert drawn[0] == drawn[1] != drawn[2]


def test_responses_follow_their_prompt_as_text_without_the_end_of_turn_and_may_be_empty():
    policy = make_wrapper()
    end = policy.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    out = policy.get_new_version(num_samples=128)(prompts()).reshape(-1)
    responses = [ids[mask] for ids, _, mask in sequences(out)]
    ended = [int(response[-1]) in end for response in responses]
    assert {int(r[-1]) for r in responses} > set(end), "the seed brings both ends and cut responses"
    assert min(map(len, responses)) == 1, "the seed brings a response that ends at once"
    bodies = [
        response[:-1] if e else response for response, e in zip(responses, ended, strict=True)
    ]
    asked, said = zip(*(chat[-2:] for chat in out["history", "full"].chats()), strict=True)
    assert [message["content"] for message in asked] == [t for t in TEXTS for _ in range(128)]
    texts = policy.tokenizer.batch_decode([body.tolist() for body in bodies])
    assert list(said) == [{"role": "assistant", "content": text} for text in texts]
    assert [flags[-1] for flags in out["history", "full"].get("is_complete")] == ended


# Where results go.


@pytest.mark.parametrize("padded", [True, False])
def test_the_callers_data_is_not_changed(padded):
    td, kwargs = prompts("tokens"), {"max_new_tokens": 3, "stop": ["x"]}
    before, asked = td.clone(), copy.deepcopy(kwargs)
    options = {"input_mode": "tokens", "inplace": False, "pad_output": padded}
    policy = make_wrapper().get_new_version(generate_kwargs=kwargs, num_samples=2, **options)
    out = policy(td).reshape(-1)
    assert (td == before).all()
    assert kwargs == asked
    kept, scorer = out.clone(), scoring(**options)
    for read in (scorer, scorer.get_dist, scorer._get_sft_dist, scorer.log_prob):
        read(out)
    assert set(out.keys(True)) == set(kept.keys(True))
    same(out, kept)
    kwargs["max_new_tokens"] = 1  # what the caller does later is the caller's
    assert policy.get_new_version().max_new_tokens == 3


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("scored_padded", [True, False])
def test_scoring_in_place_keeps_prompts_and_responses(padded, scored_padded):
    td = make_wrapper().get_new_version(pad_output=padded)(prompts())
    want, responses, texts = sequences(td), td["history", "response"].chats(), td["text"].clone()
    out = scoring(pad_output=scored_padded)(td)
    assert out["history", "prompt"].chats() == CHATS
    assert out["history", "response"].chats() == responses
    for field in ("prompt", "response", "full"):
        assert out["text"].get(field) == texts.get(field)
    # Where sequences are padded left, prompts have no columns.
    asked = rows(out, ("tokens", "prompt")) if padded or not scored_padded else [None] * 3
    parts = zip(sequences(out), want, rows(out, ("tokens", "response")), asked, strict=True)
    for (ids, _, mask), (whole, _, sampled), response, prompt in parts:
        assert torch.equal(ids, whole)
        assert torch.equal(mask, sampled)
        assert torch.equal(response[: int(mask.sum())], ids[mask])
        assert prompt is None or torch.equal(prompt[-int((~mask).sum()) :], ids[~mask])


# Versions.


def test_a_new_version_keeps_what_was_changed_but_not_what_another_direction_or_mode_reads():
    policy = make_wrapper()
    before = copy.copy(policy._settings)
    changed = {"pad_output": False, "num_samples": 4, "log_probs_key": "x", "max_batch_size": 3}
    changed |= {"generate_kwargs": {"max_new_tokens": 2}, "input_key": ("history", "prompt")}
    policy = policy.get_new_version(**changed).get_new_version()
    assert policy._settings == before | changed
    assert make_wrapper()._settings == before
    assert policy.get_new_version(generate=False).in_keys == [("history", "full")]
    assert policy.get_new_version(input_mode="tokens").in_keys == [("tokens", "prompt")]
    assert policy.get_new_version(generate=False, input_key="x").in_keys == ["x"]
    packed = policy.get_new_version(generate=False, pad_model_input=False)
    assert packed.get_new_version(generate=True).pad_model_input is None


def test_versions_share_one_scorer_and_what_load_policy_knows():
    bare = TransformersWrapper(make_wrapper().model, tokenizer=make_wrapper().tokenizer)
    assert bare.get_new_version(generate=False).scorer is bare.scorer
    loaded = load_policy("tiny", autocast="bfloat16", system_prompt="Sort.")
    version = loaded.get_new_version(generate=False)
    assert version.scorer.autocast is torch.bfloat16
    assert (version.files, version.source, version.system_prompt) == (loaded.files, "auto", "Sort.")
    other = loaded.get_new_version(model=make_wrapper().model)
    assert other.system_prompt == "Sort."
    assert not hasattr(other, "files")  # the weights are from elsewhere


# Scoring.


@pytest.mark.parametrize("padded", [True, False])
def test_the_response_of_a_chat_starts_with_the_first_token_of_the_assistant(padded):
    out = scoring(pad_output=padded)(spoken())
    for chat, response in zip(SPOKEN, rows(out, ("log_probs", "response")), strict=True):
        done = make_wrapper().renderer.render(chat)
        want = plain_log_probs(make_wrapper(), torch.tensor(done.ids), 1.0).float()
        want = want[done.assistant.index(True) :]
        torch.testing.assert_close(response[: len(want)], want, atol=1e-5, rtol=0)


DROPS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAMES = ("hermes", "qwen", "llama", "deepseek", "falcon")
NAMED = {name: {"chat_template_name": name} for name in NAMES}


@pytest.mark.parametrize("template", [*NAMED.values(), {"chat_template": DROPS}])
def test_a_wrapper_scores_what_it_generated_under_every_template(template):
    """Templates put blanks, plain words or nothing around a response, or leave thoughts out."""
    hot = {"max_new_tokens": 30, "temperature": 1.5}
    policy = make_wrapper().get_new_version(generate_kwargs=hot, num_samples=4, **template)
    td = policy(prompts())
    scored = policy.get_new_version(generate=False)(td)
    for a, b in zip(*(rows(x, ("log_probs", "response")) for x in (td, scored)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_log_prob_scores_anew_with_a_gradient_and_only_what_is_asked():
    td = make_wrapper()(prompts())
    whole, stored = td["log_probs"].full.clone(), td["log_probs"].response.clone()
    td["log_probs"].response.fill_(7.0)  # stale values are not believed
    filled = scoring(pad_output=False).log_prob(td.copy(), as_padded_tensor=True)
    for got in (scoring().log_prob(td), filled):
        torch.testing.assert_close(got, stored, atol=1e-5, rtol=0)
        assert got.requires_grad
    part = scoring(score_mask_key=RESPONSE)(td)["log_probs"].full
    torch.testing.assert_close(part, whole, atol=1e-5, rtol=0)


# Distributions.


def test_the_assistant_mask_is_found_again_for_the_ids_of_its_own_history_alone():
    policy, td = scoring(pad_output=False, inplace=False), spoken()
    first = policy._get_rlhf_dist(td)  # writes the ids
    again = policy._get_rlhf_dist(td)
    assert torch.equal(again.mask, first.mask)
    assert torch.equal(again.logits, first.logits)
    rows(td, ("tokens", "full"))[1][2] += 1
    with pytest.raises(ValueError, match="all_assistant_mask"):
        policy._get_rlhf_dist(td)


# Fields that the sampler follows.


def asked(policy=None, **kwargs) -> TransformersWrapper:
    """Return a version of the policy with more generate_kwargs."""
    policy = policy or make_wrapper().get_new_version(inplace=False)
    return policy.get_new_version(generate_kwargs={**policy.generate_kwargs, **kwargs})


def check_processed(out, process) -> int:
    """Compare log-probs of responses with processed logits; return how many differ from plain."""
    moved = 0
    for ids, values, mask in sequences(out):
        for t in range(int((~mask).sum()), len(ids)):
            with torch.no_grad():
                logits = make_wrapper().model(input_ids=ids[None, :t]).logits[:, -1].float()
            want, plain = (x.log_softmax(-1)[0, ids[t]] for x in (process(ids[:t], logits), logits))
            torch.testing.assert_close(values[t], want, atol=1e-4, rtol=0)
            moved += bool((want - plain).abs() > 1e-3)
    return moved


def test_filters_and_their_log_probs_are_those_of_transformers():
    kwargs = {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 30, "top_p": 0.9}
    processors = [
        *(RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)),
        *(TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)),
    ]
    policy = make_wrapper().get_new_version(inplace=False, num_samples=4)
    out = asked(policy, min_p=0.02, **kwargs)(prompts()).reshape(-1)
    process = LogitsProcessorList(processors)
    moved = check_processed(out, lambda ids, logits: process(ids[None], logits))
    assert moved > 10, "the filters should matter"


def test_a_stop_text_ends_a_response_and_stays_in_it():
    policy = make_wrapper().get_new_version(num_samples=8)
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
    policy = make_wrapper().get_new_version(inplace=False)
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
    policy, env = asked(make_wrapper(), **{name: value}), ChatEnv(Words())
    with pytest.raises(ValueError, match=name):
        collect(env_prompts(1), env, policy)
    with pytest.raises(ValueError, match=name):
        GRPOLoss(policy.get_new_version(generate=False))(make_wrapper()(env.reset(env_prompts(1))))
    assert collect(env_prompts(1), env, policy, learn=False)["loss_mask"].any()


def test_filters_of_the_configuration_reach_the_policy_and_its_reference():
    filters = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
    policy = load_policy("tiny", **filters)
    assert policy.limits.filters == load_reference(policy).limits.filters == Filters(**filters)


def test_prompts_over_the_limit_are_refused_by_number():
    sizes = [len(make_wrapper().renderer.render(c, add_generation_prompt=True).ids) for c in CHATS]
    limit = {"max_new_tokens": 1, "max_prompt_tokens": max(sizes)}
    assert asked(**limit)(prompts())["tokens"].response.shape == (3, 1)
    with pytest.raises(ValueError, match="prompt 2"):
        asked(**limit | {"max_prompt_tokens": max(sizes) - 1})(prompts())


def other_prompts() -> TensorDict:
    """Return a rollout whose prompts are not what its sequences start with."""
    td = make_wrapper()(prompts()).select("tokens", "masks")
    td["tokens"].prompt.add_(1)
    return td


def short_mask() -> TensorDict:
    """Return a rollout whose response mask lacks a column."""
    td = make_wrapper()(prompts()).select("tokens", "masks")
    td["masks"].all_response_mask = td["masks"].all_response_mask[:, 1:]
    return td


REFUSED = [
    ("num_samples", lambda: make_wrapper().get_new_version(num_samples=3, inplace=True)),
    ("chat_template_name", lambda: make_wrapper().get_new_version(chat_template_name="nobody's")),
    ("log_probs", lambda: scoring(log_probs_key=None)),
    ("min_new_tokens", lambda: asked(min_new_tokens=9, max_new_tokens=3)),
    ("temperature", lambda: asked(temperature=math.nan)),
    ("typical_p", lambda: asked(stop=["x"], typical_p=0.5)),
    ("history.*prompt", lambda: make_wrapper()(prompts().select("stream"))),
    ("all_response_mask", lambda: scoring()(short_mask())),
    ("prompt", lambda: scoring()(other_prompts())),
    ("input_mode", lambda: scoring(input_mode="text").log_prob(spoken("text"))),
    ("equal lengths", lambda: scoring().get_dist(spoken(), as_padded_tensor=False)),
]


@pytest.mark.parametrize(("key", "call"), REFUSED)
def test_arguments_and_inputs_that_do_not_fit_are_refused(key, call):
    with pytest.raises((ValueError, TypeError), match=key):
        call()
