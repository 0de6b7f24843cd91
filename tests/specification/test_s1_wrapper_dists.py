"""S1, third part: the distributions of a scoring wrapper, its key lists, and reading responses."""

from typing import Any

import torch
from support.chats import CHATS, SPOKEN, spoken
from support.policies import make_wrapper
from support.specification import TORCHRL, close, defaults, page, raises, refused
from support.wrappers import (
    ASSISTANT,
    ATTENTION,
    RESPONSE,
    fresh,
    generated,
    plain,
    score,
    scored,
)
from tensordict import TensorDict
from torch.distributions import Categorical

from policies import ChatHistory, History, LLMMaskedCategorical, LLMWrapperBase
from policies import _extract_responses_from_full_histories as extract
from policies.padding import rows

S1 = page("S1")


FAMILY = [f"_get_dist_with_{name}_mask" for name in ("prompt", "assistant", "attention")]


FAMILY += ["get_dist", "_get_sft_dist", "_get_rlhf_dist", "_get_generic_dist"]


def right(dist: LLMMaskedCategorical, td: TensorDict, key: Any, temperature: float = 1.0) -> None:
    """Check a distribution over dense rows: its mask, and the log-probs of a plain forward."""
    assert torch.equal(dist.mask, td[key])
    got = dist.log_prob(td["tokens"].full.masked_fill(~td[key], -100))
    seen = td[ATTENTION].cumsum(-1) != 1  # the first token has no prediction
    close(got * seen, plain(make_wrapper(), td, key, temperature))


@S1("get_dist: arguments and defaults")
def test_get_dist():
    text = """tensordict, tensordict_out=None, logits_key='logits', mask_key=None,
        as_padded_tensor=None, as_nested_tensor=None, padding_value=None, padding_side='left',
        layout=None"""
    defaults(LLMWrapperBase.get_dist, text)


@S1("get_dist: by default the padding is masked")
def test_get_dist_by_default_the_padding_is_masked():
    td = generated()
    right(score().get_dist(td.copy()), td, ATTENTION)


@S1("get_dist tensordict_out, logits_key")
def test_get_dist_tensordict_out_logits_key():
    td = generated()
    out = TensorDict(batch_size=[3])
    dist = score().get_dist(td.copy(), out, "raw")
    assert out["raw"] is dist.logits


@S1("get_dist mask_key")
def test_get_dist_mask_key():
    td = generated()
    right(score().get_dist(td.copy(), mask_key=RESPONSE), td, RESPONSE)
    refused(ValueError, "expected a mask at", score().get_dist, td.copy(), mask_key="mine")


@S1("get_dist as_padded_tensor, default True")
def test_get_dist_as_padded_tensor_default_True():
    assert score(pad_output=False).get_dist(spoken()).logits.ndim == 3
    assert type(score().get_dist(spoken()[:1], as_padded_tensor=False)) is Categorical


@S1("get_dist as_nested_tensor, default False; layout")
def test_get_dist_as_nested_tensor_default_False_layout():
    ragged = scored(False).select("tokens", "masks")
    for layout in (torch.strided, torch.jagged):
        dist = score(pad_output=False).get_dist(ragged.copy(), as_nested_tensor=True, layout=layout)
        ids = torch.nested.as_nested_tensor(rows(ragged, ("tokens", "full")), layout=layout)
        found = [row[1:] for row in dist.log_prob(ids).unbind()]
        close(found, [row[1:] for row in rows(scored(False), ("log_probs", "full"))])


@S1("get_dist padding_value, default 0.0; padding_side, default left")
def test_get_dist_padding_value_default_0_0_padding_side():
    dist = score(pad_output=False).get_dist(spoken(), padding_value=-7.0)
    assert (dist.logits[~dist.mask] == -7).all()
    other = score(pad_output=False).get_dist(spoken(), padding_side="right").mask
    assert torch.equal(other, dist.mask.sort(-1, descending=True).values)


@S1("get_dist returns Categorical or LLMMaskedCategorical")
def test_get_dist_returns_Categorical_or_LLMMaskedCategorical():
    td, ragged = generated(), scored(False).select("tokens", "masks")
    assert isinstance(score().get_dist(td.copy()), LLMMaskedCategorical)
    assert isinstance(score().get_dist(ragged, as_nested_tensor=True), Categorical)


@S1("the distributions need generate=False: NotImplementedError")
def test_the_distributions_need_generate_False_NotImplementedError():
    td = generated()
    for name in FAMILY:
        with raises(NotImplementedError, "get_new_version(generate=False)"):
            getattr(fresh(), name)(td.copy())


@S1("the distributions divide by the sampling temperature")
def test_the_distributions_divide_by_the_sampling_temperature():
    td = generated()
    kwargs = {**make_wrapper().generate_kwargs, "temperature": 0.5}
    dist = score(generate_kwargs=kwargs).get_dist(td.select("tokens", "masks"))
    right(dist, td, ATTENTION, 0.5)


@S1("get_dist and its family: **kwargs, additional arguments")
def test_get_dist_and_its_family():
    for name in FAMILY:
        getattr(score(), name)(generated().copy(), spare=1)
    mask = generated()[ATTENTION]
    score()._get_dist_with_custom_mask(generated().copy(), mask, spare=1)


@S1("_get_dist_with_prompt_mask, _get_sft_dist: response tokens only")
def test_get_dist_with_prompt_mask_get_sft_dist():
    td = generated()
    for padded in (True, False):
        right(score(pad_output=padded)._get_dist_with_prompt_mask(td.copy()), td, RESPONSE)
    right(score()._get_sft_dist(td.copy()), td, RESPONSE)


@S1("_get_dist_with_prompt_mask: tokens_key, assistant_mask_key, attention_mask_key")
def test_get_dist_with_prompt_mask():
    td = generated()
    other = td.copy().set("asked", td["tokens"].clone()).set("mine", td["masks"].clone())
    keys = {"attention_mask_key": ("mine", "all_attention_mask")}
    keys |= {"assistant_mask_key": ("mine", "all_assistant_mask")}
    dist = score()._get_dist_with_prompt_mask(other, tokens_key=("asked", "prompt"), **keys)
    assert torch.equal(dist.mask, td[RESPONSE])


@S1("_get_dist_with_prompt_mask falls back to the assistant mask, else ValueError")
def test_get_dist_with_prompt_mask_falls_back_to_the_assistant_ValueError():
    right(score()._get_dist_with_prompt_mask(spoken()), scored(), ASSISTANT)
    with raises(ValueError, "all_assistant_mask"):
        score(input_mode="text")._get_dist_with_prompt_mask(spoken("text"))


@S1("_get_dist_with_assistant_mask, _get_rlhf_dist: assistant tokens, of every turn")
def test_get_dist_with_assistant_mask_get_rlhf_dist():
    for padded in (True, False):
        right(score(pad_output=padded)._get_dist_with_assistant_mask(spoken()), scored(), ASSISTANT)
    right(score()._get_rlhf_dist(spoken()), scored(), ASSISTANT)
    chat = [*SPOKEN[0], *SPOKEN[1]]
    long = ChatHistory(full=History.from_chats([chat]), batch_size=[1])
    mask = score()._get_rlhf_dist(TensorDict(history=long, batch_size=[1])).mask[0]
    assert mask.tolist() == make_wrapper().renderer.render(chat).assistant


@S1("_get_dist_with_assistant_mask writes (tokens, full) to the input")
def test_get_dist_with_assistant_mask_writes_tokens_full():
    heard = spoken()
    score()._get_dist_with_assistant_mask(heard)
    assert set(heard.keys()) == {"history", "tokens"}
    assert torch.equal(heard["tokens", "full"], scored()["tokens"].full)


@S1("_get_dist_with_assistant_mask without a mask: a ValueError that names input_mode")
def test_get_dist_with_assistant_mask_without_a_mask_ValueError():
    with raises(ValueError, "input_mode='history'"):
        score(input_mode="text")._get_dist_with_assistant_mask(spoken("text"))


@S1("_get_dist_with_attention_mask, _get_generic_dist: all valid tokens")
def test_get_dist_with_attention_mask_get_generic_dist():
    td = generated()
    right(score()._get_dist_with_attention_mask(td.copy()), td, ATTENTION)
    right(score()._get_generic_dist(td.copy()), td, ATTENTION)


@S1("_get_dist_with_custom_mask(tensordict, mask), position-level")
def test_get_dist_with_custom_mask_tensordict_mask_position():
    td = generated()
    mine = td.copy().set("mine", (torch.rand(td[ATTENTION].shape) < 0.5) & td[ATTENTION])
    right(score()._get_dist_with_custom_mask(td.copy(), mine["mine"]), mine, "mine")
    with raises(ValueError, "one entry a token"):
        score()._get_dist_with_custom_mask(td.copy(), mine["mine"].unsqueeze(-1).expand(3, -1, 400))


@S1("log_prob_keys, with a setter")
def test_log_prob_keys_with_a_setter():
    policy = fresh()
    assert policy.log_prob_keys[0] in generated().keys(True)
    policy.log_prob_keys = ["mine"]
    assert policy.log_prob_keys == ["mine"]


@S1("log_prob_keys is ['log_probs']", part=TORCHRL)
def test_log_prob_keys_is_log_probs():
    assert fresh().log_prob_keys == [("log_probs", "full")]


@S1("dist_params_keys: what get_dist writes")
def test_dist_params_keys():
    out = TensorDict(batch_size=[3])
    score().get_dist(generated().copy(), out)
    assert score().dist_params_keys == list(out.keys()) == ["logits"]


@S1("dist_sample_keys is ['tokens_response']", part=TORCHRL)
def test_dist_sample_keys_is_tokens_response():
    policy = fresh()
    assert policy.dist_sample_keys == [("tokens", "response")]


@S1("log_prob(data, **get_kwargs): that of the response; generate=True is a RuntimeError")
def test_log_prob_data_get_kwargs_RuntimeError():
    policy = fresh()
    td = generated()
    close(score().log_prob(td.copy()), td["log_probs"].response)
    lists = score(pad_output=False).log_prob(td.copy(), as_list=True)
    close(lists, rows(generated(False), ("log_probs", "response")))
    refused(RuntimeError, "generate=True", policy.log_prob, td.copy())


def texts(*responses: list[str]) -> list[str]:
    """Return whole chats as text: CHATS with messages of alternating roles behind them."""
    more = [[{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(said)]
            for said in responses]  # fmt: skip
    pairs = zip(CHATS, more, strict=True)
    return [make_wrapper().renderer.text([*chat, *added]) for chat, added in pairs]


NAME = {"chat_template_name": "chatml_format"}


@S1("_extract_responses_from_full_histories: arguments")
def test_extract_responses_from_full_histories():
    defaults(extract, "text_full, prompt_histories, chat_template_name=None, tokenizer=None")


@S1("_extract_responses_from_full_histories: all after the prompt; name or tokenizer")
def test_extract_responses_from_full_histories_all_after():
    asked, tokenizer = History.from_chats(CHATS), make_wrapper().tokenizer
    for given in (NAME, {"tokenizer": tokenizer}):
        got = extract(texts(["a"], ["b"], ["c"]), asked, **given)
        assert got.shape == (3, 1)
        assert [chat[0]["content"] for chat in got.chats()] == ["a", "b", "c"]


@S1("_extract_responses_from_full_histories: '<none>' pads rows of fewer messages")
def test_extract_responses_from_full_histories_none_pads_rows():
    asked = History.from_chats(CHATS)
    got = extract(texts(["a"], ["b", "why", "c"], ["d"]), asked, **NAME)
    assert got.shape == (3, 3)
    assert (got[0].role[1:], got[0].content[1:]) == (["<none>"] * 2, [""] * 2)
    assert [len(chat) for chat in got.chats()] == [1, 3, 1]


@S1("_extract_responses_from_full_histories: RuntimeError if messages are lost")
def test_extract_responses_from_full_histories_RuntimeError():
    twice, once = History.from_chats([SPOKEN[0] * 2]), [make_wrapper().renderer.text(CHATS[0])]
    refused(RuntimeError, "messages", extract, once, twice, **NAME)


@S1("_extract_responses_from_full_histories: a response followed by EOS or padding")
def test_extract_responses_from_full_histories_a_response():
    asked, tokenizer = History.from_chats(CHATS), make_wrapper().tokenizer
    for tail in (tokenizer.eos_token, tokenizer.pad_token, 3 * tokenizer.pad_token):
        given = [text.rstrip("\n") + tail for text in texts(["a"], ["b"], ["c"])]
        got = extract(given, asked, tokenizer=tokenizer)
        assert [chat[0]["content"] for chat in got.chats()] == ["a", "b", "c"], tail
        back = History.from_text(given, tokenizer=tokenizer)
        assert [chat[-1]["content"] for chat in back.chats()] == ["a", "b", "c"], tail
