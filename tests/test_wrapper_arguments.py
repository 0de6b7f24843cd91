"""The arguments of a wrapper, one by one, and a wrapper of a user's own."""

import copy
import math
import warnings

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import Words, make_policy, plain_log_probs
from contracts import prompts as env_prompts
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from wrapped import CHATS, SPOKEN, prompts, same, scoring, sequences, spoken

from envs.chat_env import ChatEnv
from policies.chats.containers import ChatHistory, Text, Tokens
from policies.chats.history import History
from policies.models import find_model, load_tokenizer
from policies.padding import is_ragged, pad, pad_mask, rows, unpad
from policies.random import fold
from policies.sampler import Sampled
from policies.wrappers.transformers_wrapper import TransformersWrapper
from policies.wrappers.wrapper import LLMWrapperBase
from trainer.collect import collect


def asked(policy=None, **kwargs) -> TransformersWrapper:
    """Return a version of the policy with more generate_kwargs."""
    policy = policy or make_policy()
    return policy.get_new_version(generate_kwargs={**policy.generate_kwargs, **kwargs})


# Model, tokenizer, template.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with a model whose tokenizer adds a BOS and has no pad token."""
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama")


def test_model_and_tokenizer_may_be_names_or_folders(llama):
    td = TensorDict({"stream": fold(0, torch.arange(2))}, [2]).set(
        "history", ChatHistory(prompt=History.from_chats(CHATS[:2]), batch_size=[2])
    )
    settings = {"generate_kwargs": {"max_tokens": 4}, "inplace": False}
    by_name = TransformersWrapper(str(llama), **settings)
    given = by_name.get_new_version(model=by_name.model, tokenizer=str(llama))
    same(by_name(td), given(td))
    assert given.model is by_name.model
    assert by_name.get_new_version(generate=False).model is by_name.model
    other = by_name.get_new_version(tokenizer="tiny")
    assert other.tokenizer.get_vocab() == load_tokenizer(find_model("tiny")).get_vocab()
    with pytest.raises(ValueError, match="tokenizer for input_mode='history', got none"):
        TransformersWrapper(by_name.model)
    # Ids need no tokenizer.
    ids = TransformersWrapper(by_name.model, input_mode="tokens", **settings)
    tokens = by_name(td).select("tokens").set("stream", td["stream"])
    same(ids(tokens), by_name(td))
    counts = {"policy_version", "temperature"}
    assert set(ids.out_keys) == {"masks", "tokens", "log_probs", *counts}


def test_tokenizer_kwargs_change_the_ids_of_texts_only(llama):
    policy = TransformersWrapper(str(llama), input_mode="text", generate=False, pad_output=True)
    td = TensorDict(batch_size=[1]).set("text", Text(full=["Sort 3"], batch_size=[1]))
    plain = policy(td.clone())["tokens"].full[0].tolist()
    kwargs = {"add_special_tokens": True, "padding": True, "padding_side": "left"}
    more = policy.get_new_version(tokenizer_kwargs=kwargs)
    assert more(td.clone())["tokens"].full[0].tolist() == [policy.tokenizer.bos_token_id, *plain]
    assert policy(td.clone())["tokens"].full[0].tolist() == plain, "the parent's stay"
    with pytest.raises(ValueError, match=r"\['add_special_tokens'\] are for input_mode='text'"):
        policy.get_new_version(input_mode="history", tokenizer_kwargs=kwargs)


def test_padding_of_ids_is_the_pad_token_whatever_the_tokenizer_adds(llama):
    # Not as in TorchRL, which takes the BOS that the tokenizer puts before the pad token.
    policy = TransformersWrapper(str(llama), generate=False, pad_output=True)
    policy.tokenizer.pad_token = "<|end_of_text|>"
    policy = policy.get_new_version(inplace=False)
    td = TensorDict(batch_size=[3]).set(
        "history", ChatHistory(full=History.from_chats(SPOKEN), batch_size=[3])
    )
    out = policy(td)
    padding = out["tokens"].full[~out["masks"].all_attention_mask]
    assert set(padding.tolist()) == {policy.tokenizer.convert_tokens_to_ids("<|end_of_text|>")}
    for i, (row, mask) in enumerate(
        zip(out["tokens"].full, out["masks"].all_attention_mask, strict=True)
    ):
        want = plain_log_probs(policy, row[mask], 1.0).float()
        torch.testing.assert_close(out["log_probs"].full[i][mask], want, atol=1e-5, rtol=0)
    speak = policy.get_new_version(generate=True, generate_kwargs={"pad_token_id": 7})
    filled = speak(TensorDict(batch_size=[2]).set(
        "history", ChatHistory(prompt=History.from_chats(CHATS[1:]), batch_size=[2])
    ))  # fmt: skip
    assert set(filled["tokens"].full[~filled["masks"].all_attention_mask].tolist()) == {7}


def test_a_template_may_be_named_or_given():
    policy = make_policy().get_new_version(chat_template_name="qwen", inplace=False)
    text = policy(prompts())["text"].prompt[0]
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>")
    assert not make_policy()(prompts())["text"].prompt[0].startswith("<|im_start|>system")
    own = "{% for m in messages %}{% if m['role'] == 'user' %}Q{{ m['content'] }}A{% else %}"
    own += (
        "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    out = policy.get_new_version(chat_template=own)(prompts())
    assert out["text"].prompt[0] == f"Q{CHATS[0][0]['content']}A"
    with pytest.raises(ValueError, match="expected chat_template_name in"):
        policy.get_new_version(chat_template_name="nobody's")


def test_ids_come_first_unless_histories_are_preferred():
    policy = scoring(inplace=False, pad_output=False)
    td = spoken().set("tokens", Tokens(full=torch.arange(6).reshape(3, 2) + 40, batch_size=[3]))
    assert torch.equal(torch.stack(rows(policy(td), ("tokens", "full"))), td["tokens"].full)
    fresh = policy.get_new_version(prefer_tokens=False)(td)
    for row, chat in zip(rows(fresh, ("tokens", "full")), SPOKEN, strict=True):
        assert row.tolist() == policy.renderer.render(chat).ids


# Where outputs stand.


@pytest.mark.parametrize("name", ["history", "text", "tokens", "masks", "log_probs"])
def test_a_key_of_none_leaves_that_output_out(name):
    policy = make_policy().get_new_version(**{f"{name}_key": None}, inplace=False)
    whole = make_policy().get_new_version(inplace=False)
    out = policy(prompts())
    assert set(whole(prompts()).keys()) - set(out.keys()) == {name}
    assert name not in policy.out_keys
    if name not in ("tokens", "masks", "log_probs"):
        same(out, whole(prompts()))
    if name == "log_probs":
        assert policy.log_prob_keys == []
        with pytest.raises(ValueError, match="return_log_probs must be True when generate=False"):
            policy.get_new_version(generate=False)
    elif name in ("tokens", "masks"):
        scored = policy.get_new_version(generate=False)(spoken())
        want = scoring(inplace=False, pad_output=True)(spoken())
        assert name not in scored
        torch.testing.assert_close(scored["log_probs"].full, want["log_probs"].full)


def test_keys_may_be_nested():
    names = {f"{n}_key": ("deep", n) for n in ("text", "tokens", "masks", "log_probs", "history")}
    policy = make_policy().get_new_version(**names, inplace=False)
    td = TensorDict({"stream": prompts()["stream"]}, [3])
    out = policy(td.set(("deep", "history"), prompts()["history"]))
    same(out["deep"], make_policy()(prompts()))
    scored = scoring(**names)(out)
    torch.testing.assert_close(
        scored["deep", "log_probs"].response, make_policy()(prompts())["log_probs"].response
    )
    assert policy.log_prob_keys == [("deep", "log_probs", "full")]
    assert policy.dist_sample_keys == [("deep", "tokens", "response")]
    assert (
        scoring(**names)._get_sft_dist(out).mask.sum()
        == scored["deep", "masks", "all_response_mask"].sum()
    )


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("scored_padded", [True, False])
def test_scoring_in_place_keeps_prompts_and_responses(padded, scored_padded):
    td = make_policy().get_new_version(pad_output=padded)(prompts())
    want = {key: rows(td, ("tokens", key)) for key in ("prompt", "response")}
    mask = rows(td, ("masks", "all_response_mask"))
    keep = rows(td, ("masks", "all_attention_mask"))
    out = scoring(pad_output=scored_padded)(td)
    assert out["history", "prompt"].chats() == CHATS
    assert out["history", "response"].chats() == td["history", "response"].chats()
    for i in range(3):
        size = int(mask[i].sum())
        start = int((keep[i] & ~mask[i]).sum())
        response = rows(out, ("tokens", "response"))[i]
        if padded or not scored_padded:  # where sequences are padded left, prompts have no columns
            prompt = rows(out, ("tokens", "prompt"))[i]
            assert torch.equal(prompt[len(prompt) - start :], want["prompt"][i][-start:])
        assert torch.equal(response[:size], want["response"][i][:size])
        assert int(rows(out, ("masks", "all_response_mask"))[i].sum()) == size
    # What is in place now gives the same distribution.
    assert scoring()._get_sft_dist(out).mask.sum() == sum(int(m.sum()) for m in mask or ())


# torch warns that strided nested tensors are a prototype; whoever asks for them may know.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_unpadded_outputs_may_be_nested_tensors(layout):
    lazy = make_policy().get_new_version(pad_output=False, inplace=False)
    policy = lazy.get_new_version(layout=layout)
    out = policy(prompts())
    full = out["tokens"].full
    assert full.is_nested
    assert full.layout is layout
    same(out, lazy(prompts()))
    if layout is torch.jagged:  # one ragged size, so that fields go together
        kept = out["log_probs"].full * out["masks"].all_response_mask
        assert kept.values().sum() == out["log_probs"].full.values().sum()
    score = policy.get_new_version(generate=False, inplace=True)
    scored = score(out)
    for got, want in zip(
        rows(scored, ("log_probs", "response")), rows(lazy(prompts()), ("log_probs", "response")),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    nested = score.log_prob(out, as_nested_tensor=True, layout=layout)
    assert nested.is_nested
    values = score.get_dist(out, as_nested_tensor=True, layout=layout).log_prob(full)
    assert values.layout is layout
    for got, (_, want, mask) in zip(values.unbind(), sequences(lazy(prompts())), strict=True):
        torch.testing.assert_close(got[mask], want[mask], atol=1e-5, rtol=0)
    assert policy(prompts()[0])["tokens"].full.tolist() == full[0].tolist()


def test_outputs_may_go_to_another_td():
    out = TensorDict({"mine": torch.ones(3)}, [3])
    td = prompts()
    assert make_policy()(td, tensordict_out=out) is out
    assert "mine" in out
    assert set(td.keys()) == {"history", "stream"}
    same(out, make_policy()(prompts()))


def test_a_prompt_that_ends_in_a_reply_gets_a_new_turn():
    """Run the example of the page: no batch size given, "Hi there!" said already."""
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]
    chat_history = ChatHistory(prompt=History.from_chats([said]))
    out = make_policy()(TensorDict(history=chat_history, batch_size=(1,)))
    assert out["history"].prompt.chats() == [said]
    [[reply]] = out["history"].response.chats()
    assert reply["role"] == "assistant"
    assert out["history"].full.chats() == [[*said, reply]]


def test_no_rows_and_wrong_types_are_named():
    with pytest.raises(ValueError, match=r"at least one row, got batch_size torch.Size\(\[0\]\)"):
        make_policy()(prompts()[:0])
    td = TensorDict(batch_size=[1]).set("history", Text(prompt=["x"], batch_size=[1]))
    with pytest.raises(TypeError, match="Expected History object"):
        make_policy()(td)
    with pytest.raises(ValueError, match="pad_output must be one of"):
        make_policy().get_new_version(pad_output="yes")
    with pytest.raises(ValueError, match="inplace must be one of"):
        make_policy().get_new_version(inplace="maybe")
    with pytest.raises(ValueError, match=r"layout must be one of .*torch\.strided, torch\.jagged"):
        make_policy().get_new_version(layout=torch.sparse_coo)


def test_a_device_other_than_the_models_is_refused():
    with pytest.raises(ValueError, match="on cuda, it is on cpu"):
        make_policy().get_new_version(device="cuda")
    for padded in (True, False):
        here = make_policy().get_new_version(device="cpu", pad_output=padded)
        out = here(prompts())
        same(out, make_policy()(prompts()))
        assert out.device is None
        assert here.get_new_version(generate=False)(out)["log_probs"] is not None


@pytest.mark.gpu
def test_inputs_move_to_the_models_device_and_outputs_back():
    policy = TransformersWrapper("tiny", device="cuda", pad_output=True, inplace=False)
    out = policy(prompts())
    assert policy.device.type == "cuda"
    assert out["tokens"].full.device.type == out["log_probs"].full.device.type == "cpu"
    scored = policy.get_new_version(generate=False)(out)
    assert scored["log_probs"].full.device.type == "cpu"
    mask = out["masks"].all_response_mask
    got, want = (td["log_probs"].full[mask] for td in (scored, out))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert policy(prompts().to("cuda"))["tokens"].full.device.type == "cuda"


# How to generate.


def processed(policy, ids, start: int, processors) -> list[torch.Tensor]:
    """Return the processed distributions of a row's sampled tokens, by transformers' processors."""
    found = []
    for t in range(start, len(ids)):
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None, :t]).logits[:, -1].float()
        found.append(processors(ids[None, :t], logits).log_softmax(-1)[0])
    return found


FILTERS = {
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "penalty": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "all": (
        {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        [
            *(RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)),
            *(TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)),
        ],
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_and_their_log_probs_are_those_of_transformers(name):
    kwargs, processors = FILTERS[name]
    policy = asked(make_policy().get_new_version(inplace=False, num_samples=4), **kwargs)
    out = policy(prompts()).reshape(-1)
    moved = 0
    for ids, values, mask in sequences(out):
        start = int((~mask).sum())
        tables = processed(policy, ids, start, LogitsProcessorList(processors))
        want = torch.stack([t[i] for t, i in zip(tables, ids[start:], strict=True)])
        torch.testing.assert_close(values[start:], want, atol=1e-4, rtol=0)
        plain = plain_log_probs(policy, ids, kwargs.get("temperature", 1.0)).float()[start:]
        moved += int(((want - plain).abs() > 1e-3).sum())
    assert moved > 10, "the filter should matter"


def banning(banned: list[int]):
    """Return a processor of a user's own."""

    def ban(ids, scores):
        return scores.index_fill(-1, torch.tensor(banned), -math.inf)

    return ban


def test_processors_of_ones_own_have_log_probs_and_training_refuses_them():
    policy = make_policy().get_new_version(inplace=False)
    banned = [i for i in range(400) if i % 3 and i not in policy.stop_ids]
    mine = {"logits_processor": LogitsProcessorList([banning(banned)])}
    by_prefix = {"prefix_allowed_tokens_fn": lambda _, ids: sorted({*range(400)} - {*banned})}
    for kwargs in (mine, by_prefix):
        own = asked(policy, **kwargs, temperature=0.8)
        for ids, values, mask in sequences(own(prompts())):
            assert not {*ids[mask].tolist()} & {*banned}
            start = int((~mask).sum())
            with torch.no_grad():
                logits = policy.model(input_ids=ids[None]).logits[0, start - 1 : -1] / 0.8
            logits[:, banned] = -math.inf
            want = logits.log_softmax(-1).gather(-1, ids[start:, None]).squeeze(-1)
            torch.testing.assert_close(values[start:], want, atol=1e-4, rtol=0)
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            collect(env_prompts(1), ChatEnv(Words()), own)


def test_what_has_no_log_probs_works_where_none_are_asked_for():
    policy = make_policy().get_new_version(inplace=False, return_log_probs=False)
    beams = asked(policy, temperature=0, num_beams=3)
    out = beams(prompts())
    assert "log_probs" not in out
    assert (
        beams.get_new_version(generate=False, return_log_probs=None)(out)["log_probs"] is not None
    )
    tokens, masks = rows(out, ("tokens", "full")), out["masks"]
    for row, keep, mask in zip(
        tokens, masks.all_attention_mask, masks.all_response_mask, strict=True
    ):
        prompt = row[keep & ~mask]
        made = policy.model.generate(
            prompt[None], max_new_tokens=6, num_beams=3, do_sample=False,
            eos_token_id=sorted(policy.stop_ids), pad_token_id=policy.pad_token_id,
        )[0, len(prompt):]  # fmt: skip
        assert row[mask].tolist() == made[: int(mask.sum())].tolist()
    two = asked(
        policy, stopping_criteria=[lambda ids, _: torch.full([len(ids)], ids.shape[1] > 20)]
    )
    lengths = two(prompts())["masks"].all_response_mask.sum(-1)
    assert 0 < int(lengths.max()) < 6
    with pytest.raises(ValueError, match=r"stopping_criteria.*return_log_probs=False"):
        asked(stopping_criteria=[])


def test_a_generation_config_stands_for_its_fields():
    plain = make_policy().get_new_version(inplace=False)
    config = GenerationConfig(temperature=0.7, top_k=5, max_new_tokens=4)
    by_config = plain.get_new_version(generate_kwargs={"generation_config": config})
    named = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 4}
    same(by_config(prompts()), plain.get_new_version(generate_kwargs=named)(prompts()))
    shorter = {"generation_config": config, "max_new_tokens": 2}
    assert plain.get_new_version(generate_kwargs=shorter).max_new_tokens == 2


def test_filters_off_and_greedy_change_nothing():
    plain = make_policy().get_new_version(inplace=False)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0}
    same(
        asked(plain, **off, num_beams=1, use_cache=True, output_scores=True)(prompts()),
        plain(prompts()),
    )
    greedy = asked(plain, temperature=0)
    same(asked(greedy, top_k=3, top_p=0.5)(prompts()), greedy(prompts()))


def test_min_new_tokens_keeps_ends_away():
    policy = make_policy().get_new_version(inplace=False, num_samples=60)
    short = [int(m.sum()) for *_, m in sequences(policy(prompts())[0])]
    long = sequences(asked(policy, min_new_tokens=3)(prompts())[0])
    assert min(short) < 3
    assert min(int(mask.sum()) for *_, mask in long) >= 4, "two... and then the end"
    for ids, values, mask in long[:10]:
        start = int((~mask).sum())
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None, :start]).logits[0, -1]
        logits[sorted(policy.stop_ids)] = -math.inf
        assert values[start] == pytest.approx(logits.log_softmax(-1)[ids[start]].item(), abs=1e-5)


def test_what_only_transformers_can_do_is_handed_on_to_it():
    policy = make_policy().get_new_version(inplace=False, num_samples=8)
    banned = [i for i in range(400) if i % 4 and i not in policy.stop_ids]
    torch.manual_seed(0)
    out = asked(policy, suppress_tokens=banned, temperature=0.8)(prompts()).reshape(-1)
    assert {i for ids, _, m in sequences(out) for i in ids[m].tolist()}.isdisjoint(banned)
    for ids, values, mask in sequences(out)[:6]:
        start = int((~mask).sum())
        for t in range(start, len(ids)):
            with torch.no_grad():
                logits = policy.model(input_ids=ids[None, :t]).logits[0, -1].float()
            logits[banned] = -math.inf
            want = (logits / 0.8).log_softmax(-1)[ids[t]].item()
            assert values[t].item() == pytest.approx(want, abs=1e-4)
    greedy = policy.get_new_version(
        num_samples=None, generate_kwargs={"temperature": 0, "no_repeat_ngram_size": 1, "n": 1}
    )
    for ids, values, mask in sequences(greedy(prompts())):
        reply = ids[mask].tolist()
        assert len(set(ids.tolist()[-len(reply) :])) == len(reply)
        assert (values[mask] < 0).all()
    torch.manual_seed(0)
    same(out, asked(policy, suppress_tokens=banned, temperature=0.8)(prompts()).reshape(-1))


def test_other_names_of_wishes_are_understood():
    plain = make_policy().get_new_version(inplace=False)
    limit = plain.get_new_version(generate_kwargs={"max_new_tokens": 3, "stop": ["e"]})
    for kwargs in (
        {"max_tokens": 3, "stop_sequences": ["e"]},
        {"max_new_tokens": 3, "stop_strings": ["e"], "return_dict_in_generate": True},
    ):
        same(plain.get_new_version(generate_kwargs=kwargs)(prompts()), limit(prompts()))
    many = plain.get_new_version(num_samples=2)(prompts())
    for kwargs in ({"n": 2}, {"num_return_sequences": 2}):
        same(
            asked(plain.get_new_version(inplace=None), **kwargs)(prompts()).reshape(-1),
            many.reshape(-1),
        )
    assert asked(plain, n=1)(prompts()).batch_size == (3,)
    with pytest.raises(ValueError, match="num_samples=3 and n=2"):
        plain.get_new_version(num_samples=3, generate_kwargs={"n": 2})
    with pytest.raises(ValueError, match="2 greedy replies are all the same"):
        plain.get_new_version(num_samples=2, generate_kwargs={"do_sample": False})


def test_ends_and_special_tokens_may_be_chosen():
    plain = make_policy().get_new_version(inplace=False, num_samples=40)
    out = sequences(plain(prompts()).reshape(-1))
    end = int(out[0][0][out[0][2]][1])  # a token that some reply has inside
    cut = asked(plain, eos_token_id=end)
    assert cut.stop_ids == {end}
    for (ids, _, mask), (ids2, _, mask2) in zip(
        out, sequences(cut(prompts()).reshape(-1)), strict=True
    ):
        whole, reply = ids[mask].tolist(), ids2[mask2].tolist()
        if end in whole:
            assert reply == whole[: whole.index(end) + 1]
    assert end in out[0][0][out[0][2]].tolist()
    many = asked(plain, eos_token_id=1000000 % 400)
    texts = many(prompts()).reshape(-1)["text"].response
    bare = asked(many, skip_special_tokens=True)(prompts()).reshape(-1)["text"].response
    assert any("<|" in text for text in texts)
    assert not any("<|" in text for text in bare)


def test_training_refuses_what_its_log_probs_cannot_follow():
    for kwargs in ({"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            collect(env_prompts(1), ChatEnv(Words()), asked(**kwargs))


# Distributions.


def test_get_dist_pads_nests_or_stacks_as_asked():
    td = spoken()
    policy = scoring(pad_output=False)
    shown = TensorDict(batch_size=[3])
    dist = policy.get_dist(td.copy(), shown, "raw", padding_value=-7.0)
    assert (dist.logits[~dist.mask] == -7).all()
    assert shown["raw"] is dist.logits
    right = policy.get_dist(td.copy(), padding_side="right")
    flat = policy.get_dist(td.copy(), as_nested_tensor=True, layout=torch.jagged)
    tokens = rows(policy(td.copy()), ("tokens", "full"))
    values = flat.log_prob(torch.nested.as_nested_tensor(tokens, layout=torch.jagged))
    for i, row in enumerate(tokens):
        n = len(row)
        assert torch.equal(dist.logits[i, -n:], right.logits[i, :n])
        want = dist.logits[i, -n:].log_softmax(-1).gather(-1, row[:, None]).squeeze(-1)
        torch.testing.assert_close(values.unbind()[i], want)
        entropy = Categorical(logits=dist.logits[i, -n:]).entropy()
        torch.testing.assert_close(flat.entropy().unbind()[i], entropy)
        assert flat.sample().unbind()[i].shape == row.shape
    assert isinstance(flat, Categorical)
    one = policy.get_dist(td[:1].copy(), as_padded_tensor=False)
    assert type(one) is Categorical
    torch.testing.assert_close(one.logits, dist.logits[:1, -len(tokens[0]) :].log_softmax(-1))
    with pytest.raises(ValueError, match="rows of equal lengths"):
        policy.get_dist(td.copy(), as_padded_tensor=False)
    with pytest.raises(ValueError, match="padded logits for a mask"):
        policy.get_dist(td.copy(), mask_key=("masks", "x"), as_nested_tensor=True)


@pytest.mark.parametrize("padded", [True, False])
def test_masks_may_stand_anywhere_and_are_not_changed(padded):
    td = make_policy().get_new_version(pad_output=padded)(prompts())
    policy = scoring(pad_output=padded)
    td.set("mine", td["masks"].clone()).set("asked", td["tokens"].clone())
    before = td.clone()
    keys = {
        "_get_dist_with_prompt_mask": {"tokens_key": ("asked", "prompt")},
        "_get_dist_with_assistant_mask": {"assistant_mask_key": ("mine", "all_response_mask")},
        "_get_dist_with_attention_mask": {"attention_mask_key": ("mine", "all_attention_mask")},
        "get_dist": {"mask_key": ("mine", "all_response_mask")},
    }
    for name, given in keys.items():
        shown = TensorDict(batch_size=[3])
        named = getattr(policy, name)(td, **given, logits_key="raw", tensordict_out=shown)
        plain = getattr(policy, name)(td)
        assert shown["raw"] is named.logits
        counts = named.mask.sum(-1).tolist()
        want = {"get_dist": "all_response_mask"}.get(name)
        want = counts if want is None else [int(m.sum()) for m in rows(td, ("masks", want)) or ()]
        assert counts == want
        if name != "get_dist":
            assert torch.equal(named.mask, plain.mask)
        for key in ("all_assistant_mask", "all_attention_mask", "all_response_mask"):
            for a, b in zip(rows(td, ("masks", key)), rows(before, ("masks", key)), strict=True):
                assert torch.equal(a, b)
        assert set(td.keys(True)) == set(before.keys(True))
        key = next(iter(given)).replace("tokens_key", "attention_mask_key")
        with pytest.raises(ValueError, match=r"expected a mask at \('no', 'where'\)"):
            getattr(policy, name)(td, **{key: ("no", "where")})
    logits = policy.get_dist(td).logits
    with pytest.raises(ValueError, match="one entry a token"):
        policy._get_dist_with_custom_mask(td, torch.ones(logits.shape, dtype=torch.bool))


def test_losses_read_a_rollout_as_it_is():
    # Not as in TorchRL, where log_probs.full is None after generation.
    out = make_policy()(prompts())
    for field in ("prompt", "response", "full"):
        assert out["log_probs"].get(field) is not None
    dist = scoring()._get_sft_dist(out)
    ratio = (dist.log_prob(out["tokens"].full) - out["log_probs"].full)[dist.mask].exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_rlhf_distributions_work_wherever_outputs_go(inplace):
    # Not as in TorchRL: KeyError "log_probs" with inplace=False.
    dist = scoring(inplace=inplace)._get_rlhf_dist(spoken())
    want = [sum(scoring().renderer.render(chat).assistant) for chat in SPOKEN]
    assert dist.mask.sum(-1).tolist() == want


def test_sft_distributions_read_the_same_masks_padded_or_ragged():
    # Not as in TorchRL, which wants them in the input when padded.
    masks = []
    for padded in (True, False):
        td = make_policy().get_new_version(pad_output=padded, inplace=False)(prompts())
        td = td.exclude("masks", "history", "text", "log_probs")
        if padded:  # without masks every column of dense ids counts
            td["attention_mask"] = make_policy()(prompts())["masks"].all_attention_mask
        dist = scoring(pad_output=padded)._get_sft_dist(td)
        masks.append([int(n) for n in dist.mask.sum(-1)])
    want = [int(mask.sum()) for *_, mask in sequences(make_policy()(prompts()))]
    assert masks == [want, want]


def test_padded_prompts_that_lie_elsewhere_are_an_error_not_a_wrong_mask():
    ids = rows(make_policy().get_new_version(pad_output=False)(prompts()), ("tokens", "full"))
    ids[0] = ids[0][:-2]  # replies of one length would lie as after generation
    prompt = rows(make_policy()(prompts()), ("tokens", "prompt"))
    td = TensorDict(batch_size=[3]).set(
        "attention_mask", pad_mask(list(map(len, ids)), side="left")
    )
    fields = {"full": pad(ids, side="left"), "prompt": torch.stack(prompt)}
    td.set("tokens", Tokens(**fields, padded=True, batch_size=[3]))
    for read in (scoring()._get_sft_dist, scoring()):
        with pytest.raises(ValueError, match=r"expected the padded prompts .* first .* columns"):
            read(td)
    scoring().get_dist(td.exclude(("tokens", "prompt")))


def test_nothing_deprecated_is_called():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        td = make_policy().get_new_version(pad_output=False)(prompts())
        scoring()(td)
        scoring()._get_sft_dist(td).entropy()
    assert [str(w.message) for w in seen if "deprecat" in str(w.message).lower()] == []


# A wrapper of a user's own.


class Bigrams(LLMWrapperBase):
    """Speak by a table [V, V]: the logits of a token given the last one."""

    def _logits(self, tokens, attention):
        last = tokens.roll(1, -1)
        return self.model(last).masked_fill(~attention.unsqueeze(-1), 0.0)

    @torch.no_grad()
    def _draw(self, prompts, attention, streams):
        replies, values = [], []
        for row, stream in zip(unpad(prompts, attention), streams.tolist(), strict=True):
            generator = torch.Generator().manual_seed(stream % 2**32)
            reply, scores = [int(row[-1])], []
            while len(scores) < self.max_new_tokens and reply[-1] not in self.stop_ids:
                table = (self.model(torch.tensor(reply[-1])) / self.temperature).log_softmax(-1)
                reply.append(int(torch.multinomial(table.exp(), 1, generator=generator)))
                scores.append(table[reply[-1]])
            replies.append(torch.tensor(reply[1:]))
            values.append(torch.stack(scores))
        ended = torch.tensor([int(reply[-1]) in self.stop_ids for reply in replies])
        return Sampled.of_rows(replies, values, ended)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (3, 1)])
def test_a_wrapper_of_ones_own_has_all_of_the_base(padded, shape):
    torch.manual_seed(0)
    table = nn.Embedding(400, 400)
    kwargs = {"max_new_tokens": 5, "temperature": 0.6}
    tokenizer = copy.deepcopy(make_policy().tokenizer)
    settings = {"tokenizer": tokenizer, "pad_output": padded, "inplace": False}
    policy = Bigrams(table, generate_kwargs=kwargs, **settings)
    td = prompts()[0] if shape == () else prompts().reshape(*shape)
    out = policy(td)
    assert out.batch_size == shape
    flat = out.unsqueeze(0) if shape == () else out.reshape(-1)
    score = policy.get_new_version(generate=False)
    scored = score(out)
    scored = scored.unsqueeze(0) if shape == () else scored.reshape(-1)
    logp = (table.weight.detach() / 0.6).log_softmax(-1)
    keep = rows(scored, ("masks", "all_attention_mask"))
    for i, (ids, values, mask) in enumerate(sequences(flat)):
        want = torch.cat([torch.zeros(1), logp[ids[:-1], ids[1:]]])
        torch.testing.assert_close(values, want * mask, atol=1e-5, rtol=0)
        full = rows(scored, ("log_probs", "full"))[i][keep[i]]
        torch.testing.assert_close(full, want, atol=1e-5, rtol=0)
    assert shape == () or is_ragged(flat["tokens"]) is not padded
    assert score._get_sft_dist(out).mask.sum() == sum(m.sum() for *_, m in sequences(flat))
    assert flat["history", "full"].chats()[0][:1] == CHATS[0]
    same(flat, policy.get_new_version(batching=True)(prompts())[: len(sequences(flat))])
    with pytest.raises(NotImplementedError, match="Mute does not generate"):
        type("Mute", (Bigrams,), {"_draw": LLMWrapperBase._draw})(table, **settings)(td)
