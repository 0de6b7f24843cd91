"""S1, second part: LLMWrapperBase and its arguments, on the tiny model."""

import gc
import inspect
from functools import partial

import pytest
import torch
from support.chats import CHATS, SPOKEN, prompts, same, spoken
from support.policies import make_wrapper
from support.policies import prompts as env_prompts
from support.specification import TORCHRL, close, defaults, page, raises, refused, warned
from support.tasks import Words
from support.wrappers import (
    ATTENTION,
    KINDS,
    checkpoint,
    fresh,
    generated,
    no_template,
    plain,
    score,
    scored,
)
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase
from transformers import GenerationConfig, LogitsProcessorList, SuppressTokensLogitsProcessor

from envs import ChatEnv
from policies import ChatHistory, History, LLMWrapperBase, Text, TransformersWrapper, vLLMWrapper
from policies.padding import rows
from trainer import LLMCollector

S1 = page("S1")


MODES = ("history", "text", "tokens")


KEYS = ("history", "text", "tokens", "masks", "log_probs")


def asked(return_log_probs: bool = True, **kwargs) -> TransformersWrapper:
    """Return a version with other generate_kwargs."""
    kwargs = {"max_new_tokens": 4, **kwargs}
    return fresh(generate_kwargs=kwargs, return_log_probs=return_log_probs)


@S1("LLMWrapperBase(model, *, tokenizer, input_mode, ...): arguments and defaults")
def test_LLMWrapperBase_model_tokenizer_input_mode():
    text = """model, tokenizer=None, input_mode='history', input_key=None,
        attention_mask_key='attention_mask', generate=True, generate_kwargs=None,
        tokenizer_kwargs=None, pad_output=False, inplace=None, device=None, layout=None,
        num_samples=None, chat_template_name=None, chat_template=None, return_log_probs=None,
        history_key='history', text_key='text', tokens_key='tokens', masks_key='masks',
        log_probs_key='log_probs'"""
    for cls in (LLMWrapperBase, TransformersWrapper):
        defaults(cls, text)
    refused(TypeError, "", TransformersWrapper, make_wrapper().model, make_wrapper().tokenizer)


@S1("the wrappers are LLMWrapperBase, that is a TensorDictModuleBase")
def test_the_wrappers_are_LLMWrapperBase_TensorDictModuleBase():
    for cls in (TransformersWrapper, vLLMWrapper):
        assert issubclass(cls, LLMWrapperBase)
        assert issubclass(cls, TensorDictModuleBase)


@S1("promise: support for different input modalities (history, text, tokens)")
def test_promise():
    for mode in MODES:
        same(fresh(input_mode=mode)(prompts(mode)), fresh()(prompts()))


@S1("attributes: generate, pad_output, inplace, layout, num_samples, device, *_key, in_keys")
def test_attributes():
    policy = fresh(pad_output=False, layout=torch.jagged)
    found = (policy.generate, policy.pad_output, policy.inplace, policy.layout, policy.num_samples)
    assert found == (True, False, False, torch.jagged, None)
    assert policy.device == torch.device("cpu")
    assert [getattr(policy, f"{name}_key") for name in KEYS] == list(KEYS)
    assert (policy.in_keys, score().in_keys) == ([("history", "prompt")], [("history", "full")])


@S1("arg model: an object, a name or a folder")
def test_arg_model():
    policy = make_wrapper()
    named = TransformersWrapper(str(checkpoint("qwen2")), generate_kwargs={"max_new_tokens": 2})
    assert named(prompts())["text"].response
    given = TransformersWrapper(policy.model, tokenizer=policy.tokenizer)
    assert (given.model, given.tokenizer) == (policy.model, policy.tokenizer)


@S1("arg tokenizer: an object or a name; without one only tokens are read")
def test_arg_tokenizer():
    policy = make_wrapper()
    named = TransformersWrapper(str(checkpoint("qwen2")), generate_kwargs={"max_new_tokens": 2})
    own = TransformersWrapper(policy.model, tokenizer=str(checkpoint("qwen2")), generate=False)
    assert own.tokenizer.get_vocab() == named.tokenizer.get_vocab()
    refused(ValueError, "tokenizer", TransformersWrapper, policy.model)
    ids = TransformersWrapper(policy.model, input_mode="tokens", generate=False)
    assert ids(generated().select("tokens", "masks"))["log_probs"] is not None


@S1("arg chat_template_name: chatml_format, qwen")
def test_arg_chat_template_name():
    system = "<|im_start|>system\nYou are a helpful assistant"
    for name in ("chatml_format", "qwen"):
        text = fresh(chat_template_name=name)(prompts())["text"].prompt[0]
        assert text.startswith(system) == (name == "qwen")


@S1("arg chat_template: its Jinja text")
def test_arg_chat_template():
    jinja = "{% for m in messages %}Q{{ m['content'] }}A{% endfor %}"
    assert fresh(chat_template=jinja)(prompts())["text"].prompt[0] == f"Q{CHATS[0][0]['content']}A"


@S1("arg device: where the model is")
def test_arg_device():
    assert TransformersWrapper("tiny", device="cpu", generate=False).device == torch.device("cpu")
    assert fresh(device="cpu")(prompts())["tokens"].full.device == torch.device("cpu")


@S1("arg device: a model object elsewhere is moved", part=TORCHRL)
def test_arg_device_a_model_object_elsewhere_is_moved():
    refused(ValueError, "move it there", fresh, device="cuda:7")


@S1("arg tokenizer: one without a chat template")
def test_arg_tokenizer_one_without_a_chat_template():
    model, tokenizer = no_template()
    settings = {"generate": False, "inplace": False, "pad_output": True}
    policy = warned(partial(TransformersWrapper, model, tokenizer=tokenizer, **settings), "ChatML")
    ids = policy(spoken())["tokens"].full
    assert "user\nSort 3" in tokenizer.decode(ids[0])


@pytest.mark.gpu
@S1("arg device: cuda, inputs in and outputs back")
def test_arg_device_cuda_inputs_in_and_outputs_back():
    policy = TransformersWrapper("tiny", device="cuda", pad_output=True, inplace=False)
    assert policy.device.type == "cuda"
    assert policy(prompts())["tokens"].full.device.type == "cpu"


@S1("arg input_mode: history, text or tokens, which is in_keys[0]")
def test_arg_input_mode():
    for mode in MODES:
        assert fresh(input_mode=mode).in_keys == [(mode, "prompt")]
    texts = [make_wrapper().renderer.text(chat, add_generation_prompt=True) for chat in CHATS]
    assert fresh()(prompts())["text"].prompt == texts
    with raises(ValueError, *MODES, "'words'"):
        fresh(input_mode="words")


@S1("arg input_key: any key, also nested")
def test_arg_input_key():
    texts = [make_wrapper().renderer.text(chat, add_generation_prompt=True) for chat in CHATS]
    td, plain = prompts(), fresh()(prompts())
    chats = td.pop("history").prompt
    for key in ("chat", ("deep", "chat")):
        same(fresh(input_key=key)(td.copy().set(key, chats)), plain)
    td.set("q", Text(full=texts, batch_size=[3]))
    same(fresh(input_mode="text", input_key=("q", "full"))(td), plain)


@S1("arg attention_mask_key, used in tokens mode")
def test_arg_attention_mask_key_used_in_tokens_mode():
    td, plain = prompts(), fresh()(prompts())
    td = prompts("tokens").rename_key_("attention_mask", "keep")
    same(fresh(input_mode="tokens", attention_mask_key="keep")(td), plain)


@S1("arg tokenizer_kwargs: for texts")
def test_arg_tokenizer_kwargs():
    kwargs = {"truncation": True, "max_length": 4}
    cut = score(input_mode="text", tokenizer_kwargs=kwargs)(spoken("text"))
    assert cut["tokens"].full.shape == (3, 4)


@S1("arg tokenizer_kwargs: for histories", part=TORCHRL)
def test_arg_tokenizer_kwargs_for_histories():
    kwargs = {"truncation": True, "max_length": 4}
    refused(ValueError, "input_mode='text'", score, tokenizer_kwargs=kwargs)
    score(tokenizer_kwargs={"padding": True})


@S1("arg input_key: defaults to the input_mode name")
def test_arg_input_key_defaults_to_the_input_mode_name():
    plain = fresh()(prompts())
    for mode in MODES:
        same(fresh(input_mode=mode, input_key=mode)(prompts(mode)), plain)


@S1("input_mode='history' reads the history: a second turn in place", part=TORCHRL)
def test_input_mode_history_reads_the_history():
    more = History.from_chats([[{"role": "user", "content": f"And {i}?"}] for i in range(3)])
    for prefer in (False, True):
        policy = fresh(inplace=True, prefer_tokens=prefer)
        td = policy(prompts())
        longer = td["history"].full.extend(more, inplace=False, dim=1)
        td["history"] = ChatHistory(prompt=longer, batch_size=[3])
        texts = policy(td)["text"].prompt
        assert [f"And {i}?" in text for i, text in enumerate(texts)] == [not prefer] * 3


@S1("input_mode='history' reads the history: scoring another one", part=TORCHRL)
def test_input_mode_history_reads_the_history_scoring_another_one():
    chats = [[*chat[:1], {"role": "assistant", "content": "else"}] for chat in SPOKEN]
    for prefer in (False, True):
        policy = score(inplace=True, prefer_tokens=prefer)
        td = policy(spoken())
        td["history"] = ChatHistory(full=History.from_chats(chats), batch_size=[3])
        td = policy(td)
        pairs = zip(rows(td, ("tokens", "full")), rows(td, ATTENTION), strict=True)
        want = [policy.renderer.render(chat).ids for chat in (SPOKEN if prefer else chats)]
        assert [ids[mask].tolist() for ids, mask in pairs] == want


@S1("a lazy stack of single ChatHistories is read")
def test_a_lazy_stack_of_single_ChatHistories_is_read():
    one = [TensorDict(history=ChatHistory(full=History.from_chats([chat])[0])) for chat in SPOKEN]
    out = score(pad_output=False)(lazy_stack(one))
    close(rows(out, ("log_probs", "full")), rows(scored(False), ("log_probs", "full")))


@S1("padding of dense ids is padding in a lazy stack too")
def test_padding_of_dense_ids_is_padding_in_a_lazy_stack_too():
    td = generated().select("tokens", "masks")
    got = score(pad_output=False)(td.copy().to_lazystack(0))
    values = zip(rows(got, ("log_probs", "full")), rows(got, ATTENTION), strict=True)
    want = score(pad_output=False)(td.copy())
    close([v[mask] for v, mask in values], rows(want, ("log_probs", "full")))


def as_generated(log_probs: bool, **kwargs) -> None:
    """Check that greedy responses are those of the model's own generate."""
    kwargs = {"max_new_tokens": 4, "do_sample": False, **kwargs}
    out, given = asked(log_probs, **kwargs)(prompts()), prompts("tokens")
    want = make_wrapper().model.generate(
        given["tokens"].prompt,
        attention_mask=given["attention_mask"].long(),
        eos_token_id=sorted(make_wrapper().stop_ids),
        pad_token_id=make_wrapper().pad_token_id,
        **kwargs,
    )
    keep = out["masks"].all_attention_mask
    assert torch.equal(out["tokens"].full[keep], want[:, : keep.shape[-1]][keep])


@S1("arg generate: True generates, False scores")
def test_arg_generate():
    assert fresh().generate
    out = score()(spoken())
    close(out["log_probs"].full, plain(make_wrapper(), out, ATTENTION))


@S1("arg return_log_probs: None, True, False; scoring needs them")
def test_arg_return_log_probs():
    for value, there in ((None, True), (True, True), (False, False)):
        policy = fresh(return_log_probs=value)
        assert ("log_probs" in policy(prompts())) == there == ("log_probs" in policy.out_keys)
    refused(ValueError, "return_log_probs", score, return_log_probs=False)


@S1("arg generate_kwargs: max_new_tokens, do_sample; greedy is model.generate's")
def test_arg_generate_kwargs():
    as_generated(True)


@S1("arg generate_kwargs: temperature, top_k, top_p, min_p, repetition_penalty")
def test_arg_generate_kwargs_temperature_top_k_top_p_min_p():
    greedy = asked(do_sample=False)(prompts())["tokens"].full
    assert torch.equal(asked(top_k=1)(prompts())["tokens"].full, greedy)
    for kwargs in ({"temperature": 0.1}, {"top_p": 0.5}, {"min_p": 0.3}):
        assert (asked(repetition_penalty=1.5, **kwargs)(prompts())["log_probs"].full <= 0).all()


@S1("arg generate_kwargs: processors whose log-probs can be followed")
def test_arg_generate_kwargs_processors_whose_log_probs_can_be():
    more = {"suppress_tokens": [5, 6], "typical_p": 0.9, "no_repeat_ngram_size": 2}
    for name, value in {**more, "bad_words_ids": [[7]], "eos_token_id": 3}.items():
        assert asked(**{name: value})(prompts())["text"].response
    refused(ValueError, ("max_new_tokns", "max_new_tokens"), asked, max_new_tokns=3)


@S1("arg generate_kwargs: num_beams without log-probs")
def test_arg_generate_kwargs_num_beams_without_log_probs():
    as_generated(False, num_beams=2)
    refused(ValueError, "num_beams", asked, num_beams=2, do_sample=False)


@S1("arg generate_kwargs: logits_processor, stopping_criteria, generation_config")
def test_arg_generate_kwargs_logits_processor_stopping_criteria():
    others = [i for i in range(make_wrapper().model.config.vocab_size) if i != 9]
    only = LogitsProcessorList([SuppressTokensLogitsProcessor(others)])
    nine = asked(False, logits_processor=only)(prompts())["tokens"].response
    assert nine.unique().tolist() == [9]
    at_once = [lambda ids, scores, **_: torch.ones(len(ids), dtype=torch.bool)]
    assert asked(False, stopping_criteria=at_once)(prompts())["tokens"].response.shape == (3, 1)
    config = GenerationConfig(max_new_tokens=2, do_sample=False)
    short = fresh(generate_kwargs={"generation_config": config}, return_log_probs=False)
    assert short(prompts())["tokens"].response.shape[-1] <= 2


@S1("arg pad_output: True is a uniform length, False (default) is ragged")
def test_arg_pad_output():
    sizes = [len(row) for row in generated(False).get(("tokens", "full"), as_list=True)]
    assert len(set(sizes)) == 3
    assert generated()["tokens"].full.shape == (3, max(sizes))


@S1("arg layout: nested outputs when pad_output=False")
def test_arg_layout():
    for layout in (torch.strided, torch.jagged):
        full = fresh(pad_output=False, layout=layout)(prompts())["tokens"].full
        assert full.is_nested
        assert full.layout is layout


@S1("arg inplace: True, False, 'empty'; None is True unless there are several samples")
def test_arg_inplace():
    for inplace in (True, False, "empty", None):
        td = prompts().set("extra", torch.zeros(3))
        out = fresh(inplace=inplace)(td)
        assert (out is td) == ("extra" in out) == (inplace in (True, None))


@S1("arg num_samples")
def test_arg_num_samples():
    many = fresh(num_samples=4, inplace=None)(prompts())
    assert many.batch_size == (3, 4)
    assert len({tuple(row.tolist()) for row in many["tokens"].response[0]}) > 1


@S1("args history_key, text_key, tokens_key, masks_key, log_probs_key")
def test_args_history_key_text_key_tokens_key_masks_key():
    for name in KEYS:
        moved = fresh(**{f"{name}_key": ("my", name)}, input_key=("history", "prompt"))
        assert ("my", name) in moved.out_keys
        assert ("my", name) in moved(prompts()).keys(True)
        silent = fresh(**{f"{name}_key": None}, input_key=("history", "prompt"))
        assert name not in silent(prompts())


@S1("forward(tensordict, tensordict_out)")
def test_forward_tensordict_tensordict_out():
    td, out = prompts(), TensorDict({"mine": torch.ones(3)}, [3])
    assert fresh()(td, tensordict_out=out) is out
    assert set(td.keys()) == {"history", "stream"}


@S1("forward is TensorDictSequential's: more keyword arguments", part=TORCHRL)
def test_forward_is_TensorDictSequential():
    refused(TypeError, "", fresh(), prompts(), max_new_tokens=3)


@S1("any number of batch dimensions")
def test_any_number_of_batch_dimensions():
    for shape in ((), (3, 1)):
        td = prompts()[0] if shape == () else prompts().reshape(*shape)
        assert fresh()(td).batch_size == score()(fresh()(td)).batch_size == shape


@S1("promise: consistent output structure (Text, Tokens, Masks, LogProbs)")
def test_promise_LogProbs():
    texts = [make_wrapper().renderer.text(chat) for chat in SPOKEN]
    heard = [score()(spoken()), score(input_mode="text")(spoken("text"))]
    for out in (fresh()(prompts()), *heard):
        assert {key: type(out.get(key, None)) for key in KINDS} == KINDS
    assert all(out["text"].full == texts for out in heard)


@S1("outputs are exactly out_keys, generating and scoring")
def test_outputs_are_exactly_out_keys_generating_and_scoring():
    for mode in MODES:
        for policy, td in ((fresh(input_mode=mode), prompts(mode)),
                           (score(input_mode=mode), spoken(mode))):  # fmt: skip
            assert set(policy(td).keys()) == set(policy.out_keys), mode


@S1("a temperature found in the input changes no scores unless asked")
def test_a_temperature_found_in_the_input_changes_no_scores():
    hot = score()(spoken().set("temperature", torch.full((3,), 0.5)))
    close(hot["log_probs"].full, scored()["log_probs"].full)


@S1("get_new_version(**kwargs): altered arguments, the same weights")
def test_get_new_version_kwargs():
    policy = fresh()
    other = policy.get_new_version(generate=False, log_probs_key="ref", pad_output=False)
    assert other.model is policy.model
    assert (other.generate, other.log_probs_key, other.pad_output) == (False, "ref", False)
    assert (policy.generate, policy.log_probs_key, policy.pad_output) == (True, "log_probs", True)


@S1("get_new_version: every argument of the constructor, none by position")
def test_get_new_version():
    policy = fresh()
    with raises(ValueError, "pad_input", *inspect.signature(TransformersWrapper).parameters):
        policy.get_new_version(pad_input=True)
    refused(TypeError, "", policy.get_new_version, False)


@S1("collector: None if it does not exist")
def test_collector():
    assert fresh().collector is None


@S1("register_collector is called by LLMCollector, and holds it weakly")
def test_register_collector_is_called_by_LLMCollector_and_holds():
    mine = make_wrapper.__wrapped__()
    data = {"dataloader": [env_prompts(1)], "dialog_turns_per_batch": 1}
    collector = LLMCollector(ChatEnv(Words()), policy=mine, **data)
    assert mine.collector is collector
    del collector
    gc.collect()
    assert mine.collector is None
