"""S1, first part: the containers, and LogProbDistribution."""

from dataclasses import fields

import torch
from support.chats import CHATS, SPOKEN, prompts, scoring
from support.policies import make_wrapper, plain_log_probs
from support.policies import prompts as env_prompts
from support.specification import TORCHRL, VLLM, close, defaults, page, refused
from support.tasks import Words
from support.wrappers import ASSISTANT, ATTENTION, PARTS, RESPONSE, generated, scored
from tensordict import TensorDict

from envs import ChatEnv
from policies import ChatHistory, History, LogProbDistribution, LogProbs, Masks, Text, Tokens
from policies.padding import pad, rows

S1 = page("S1")


def in_order(cls: type, *names: str) -> None:
    """Check that a container's first fields have these names and are None where not given."""
    assert [field.name for field in fields(cls)][: len(names)] == list(names)
    assert not any(getattr(cls(batch_size=[]), name) for name in names)


def spec_of(cls: type, keys: tuple[str, ...], *written: TensorDict) -> None:
    """Check a container's default spec as its page has it, and that it takes what is written."""
    spec = cls.default_spec((2,))
    assert set(keys) <= set(spec.keys())
    assert (spec.data_cls, spec.step_mdp_static) == (cls, True)
    assert isinstance(spec.zero(), cls)
    assert cls.default_spec().shape == ()
    assert set(cls.default_spec((2,), keys=[keys[0]]).keys()) - {"padded"} == {keys[0]}
    assert [cls.default_spec((3,)).explain(value) for value in written] == [""] * len(written)


@S1("Tokens.prompt [B, prompt length], padded on the left")
def test_Tokens_prompt_B_prompt_length_padded_on_the_left():
    dense, ragged = generated()["tokens"], generated(False)
    parts = {name: rows(ragged, ("tokens", name)) for name in PARTS}
    sizes = {name: [len(ids) for ids in part] for name, part in parts.items()}
    assert torch.equal(dense.prompt, pad(parts["prompt"], side="left"))
    assert dense.prompt.shape == (3, max(sizes["prompt"])) != (3, min(sizes["prompt"]))


@S1("Tokens.response [B, response length], padded on the right")
def test_Tokens_response_B_response_length_padded_on_the_right():
    dense, ragged = generated()["tokens"], generated(False)
    parts = {name: rows(ragged, ("tokens", name)) for name in PARTS}
    sizes = {name: [len(ids) for ids in part] for name, part in parts.items()}
    assert torch.equal(dense.response, pad(parts["response"], side="right"))
    assert dense.response.shape == (3, max(sizes["response"])) != (3, min(sizes["response"]))


@S1("Tokens.full [B, prompt length + response length]")
def test_Tokens_full_B_prompt_length_response_length():
    dense, ragged = generated()["tokens"], generated(False)
    parts = {name: rows(ragged, ("tokens", name)) for name in PARTS}
    assert dense.full.shape[-1] == dense.prompt.shape[-1] + dense.response.shape[-1]
    both = zip(parts["prompt"], parts["response"], strict=True)
    close(parts["full"], [torch.cat(pair) for pair in both])


@S1("Tokens.assistant: the assistant tokens")
def test_Tokens_assistant():
    told = zip(rows(scored(False), ("tokens", "full")), rows(scored(False), ASSISTANT), strict=True)
    close(rows(scored(False), ("tokens", "assistant")), [ids[mask] for ids, mask in told])


@S1("padded of Tokens, Masks and LogProbs: bool")
def test_padded_of_Tokens_Masks_and_LogProbs():
    for name in ("tokens", "masks", "log_probs"):
        for make in (generated, scored):
            assert [make(p)[name].padded for p in (True, False)] == [True, False]


@S1("Tokens.default_spec: float entries", part=TORCHRL)
def test_Tokens_default_spec():
    assert Tokens.default_spec((2,))["full"].dtype is torch.int64


@S1("containers are TensorClasses with nocast")
def test_containers_are_TensorClasses_with_nocast():
    made = Tokens(full=torch.zeros(2, 3, dtype=torch.int32), padded=True, batch_size=[2])
    assert made.full.dtype is torch.int32
    assert made[0].full.shape == (3,)


@S1("Tokens(prompt, response, full, padded): the order of the fields")
def test_Tokens_prompt_response_full_padded():
    in_order(Tokens, *PARTS, "padded")


@S1("Masks(all_attention_mask, all_assistant_mask, padded): the order of the fields")
def test_Masks_all_attention_mask_all_assistant_mask_padded():
    in_order(Masks, "all_attention_mask", "all_assistant_mask", "padded")


@S1("LogProbs(prompt, response, full, padded): the order of the fields")
def test_LogProbs_prompt_response_full_padded():
    in_order(LogProbs, *PARTS, "padded")


@S1("Tokens.default_spec(shape=(-1,), keys=None)")
def test_Tokens_default_spec_shape_1_keys_None():
    spec_of(Tokens, PARTS, generated()["tokens"], scored()["tokens"])


@S1("LogProbs.default_spec(shape=(-1,), keys=None)")
def test_LogProbs_default_spec_shape_1_keys_None():
    spec_of(LogProbs, PARTS, generated()["log_probs"], scored()["log_probs"])


@S1("Masks.all_attention_mask: what the model can attend to")
def test_Masks_all_attention_mask():
    sizes = [len(ids) for ids in rows(generated(False), ("tokens", "full"))]
    assert generated()["masks"].all_attention_mask.dtype is torch.bool
    assert generated()["masks"].all_attention_mask.sum(-1).tolist() == sizes


@S1("Masks.all_assistant_mask: the tokens produced by the assistant")
def test_Masks_all_assistant_mask():
    policy = make_wrapper()
    marked = rows(scored(False), ASSISTANT)
    assert [m.tolist() for m in marked] == [policy.renderer.render(c).assistant for c in SPOKEN]
    said = [row.tolist() for row in rows(scored(False), ("tokens", "assistant"))]
    texts = policy.tokenizer.batch_decode(said, skip_special_tokens=True)
    assert texts == [chat[-1]["content"] for chat in SPOKEN]


@S1("all_assistant_mask from History.apply_chat_template's assistant_masks")
def test_all_assistant_mask_from_History_apply_chat_template():
    policy = make_wrapper()
    marked = rows(scored(False), ASSISTANT)
    asked = {"add_generation_prompt": False, "return_dict": True, "tokenizer": policy.tokenizer}
    made = History.from_chats(SPOKEN).apply_chat_template(
        return_assistant_tokens_mask=True, **asked
    )
    close(made.get("assistant_masks", as_list=True), marked)


@S1("masks have the shape of tokens.full and log_probs.full")
def test_masks_have_the_shape_of_tokens_full_and_log_probs_full():
    for td in (make(p) for make in (generated, scored) for p in (True, False)):
        keys = (("tokens", "full"), ("log_probs", "full"), ATTENTION, ASSISTANT)
        shapes = [[row.shape for row in rows(td, key)] for key in keys]
        assert shapes == [shapes[0]] * 4


@S1("Masks.default_spec(shape=(-1,), keys=None)")
def test_Masks_default_spec_shape_1_keys_None():
    names = ("all_attention_mask", "all_assistant_mask")
    spec_of(Masks, names, generated()["masks"])


@S1("ChatHistory(prompt, response, full)")
def test_ChatHistory_prompt_response_full():
    in_order(ChatHistory, *PARTS)


@S1("ChatHistory.prompt: the conversation so far; response: what the LLM generated")
def test_ChatHistory_prompt():
    said = generated()["history"]
    assert said.prompt.chats() == CHATS
    want = [[{"role": "assistant", "content": text}] for text in generated()["text"].response]
    assert said.response.chats() == want


@S1("ChatHistory.full: prompt and response")
def test_ChatHistory_full():
    said = generated()["history"]
    pairs = zip(said.prompt.chats(), said.response.chats(), strict=True)
    assert said.full.chats() == [[*a, *b] for a, b in pairs]


@S1("ChatHistory.default_spec(shape=(-1,), keys=None)")
def test_ChatHistory_default_spec_shape_1_keys_None():
    spec_of(ChatHistory, PARTS)


@S1("example: ChatHistory(prompt=history) with a wrapper")
def test_example_ChatHistory():
    history = History.from_chats([SPOKEN[0]])
    chat_history = ChatHistory(prompt=history)
    result = make_wrapper()(TensorDict(history=chat_history, batch_size=(1,)))
    assert result["history"].response.shape == (1, 1)
    assert result["history"].full.chats()[0][:2] == history.chats()[0]


@S1("TransformersWrapper uses ChatHistory in input_mode='history'")
def test_TransformersWrapper_uses_ChatHistory_in_input_mode():
    said = generated()["history"]
    assert isinstance(said, ChatHistory)


@S1("ChatEnv uses ChatHistory for its state")
def test_ChatEnv_uses_ChatHistory_for_its_state():
    env = ChatEnv(Words(2), group_size=2, max_turns=2)
    td = env.reset(env_prompts(2, turns=2))
    after = env.step(make_wrapper()(td))["next"]["history"]
    assert isinstance(td["history"], ChatHistory)
    assert isinstance(after, ChatHistory)
    assert [len(chat) for chat in after.prompt.chats()] == [3] * 4


@VLLM
@S1("vLLMWrapper uses ChatHistory in input_mode='history'")
def test_vLLMWrapper_uses_ChatHistory_in_input_mode_history():
    from policies import vLLMWrapper
    from policies.models.find import find_model

    policy = vLLMWrapper(str(find_model("tiny").folder), generate_kwargs={"max_tokens": 4})
    out = policy(prompts())
    assert isinstance(out["history"], ChatHistory)


@VLLM
@S1("vLLMWrapper generates and scores")
def test_vLLMWrapper_generates_and_scores():
    from policies import vLLMWrapper
    from policies.models.find import find_model

    policy = vLLMWrapper(str(find_model("tiny").folder), generate_kwargs={"max_tokens": 4})
    out = policy(prompts())
    assert policy.get_new_version(generate=False, inplace=False)(out)["log_probs"] is not None


@S1("LogProbs.prompt: padded on the left, 0 where generation does not score")
def test_LogProbs_prompt():
    got = generated()["log_probs"].prompt
    assert got.shape == generated()["tokens"].prompt.shape
    assert not got.any()
    again = scoring(pad_output=False, inplace=False)(generated(False).copy())
    assert all((row[1:] < 0).all() for row in rows(again, ("log_probs", "prompt")))


@S1("LogProbs.response: padded on the right")
def test_LogProbs_response():
    found = {name: rows(generated(False), ("log_probs", name)) for name in PARTS}
    assert torch.equal(generated()["log_probs"].response, pad(found["response"], side="right"))
    assert all((row < 0).all() for row in found["response"])


@S1("LogProbs.full: across prompt and response")
def test_LogProbs_full():
    for make, keep in ((generated, RESPONSE), (scored, ATTENTION)):
        for i, ids in enumerate(rows(make(False), ("tokens", "full"))):
            want = plain_log_probs(make_wrapper(), ids, 1.0) * rows(make(False), keep)[i]
            close(rows(make(False), ("log_probs", "full"))[i], want)


@S1("LogProbs.assistant: those of the assistant")
def test_LogProbs_assistant():
    pairs = zip(rows(scored(False), ("log_probs", "full")), rows(scored(False), ASSISTANT),
                strict=True)  # fmt: skip
    close(rows(scored(False), ("log_probs", "assistant")), [v[m] for v, m in pairs])


@S1("Text(prompt, response, full)")
def test_Text_prompt_response_full():
    in_order(Text, *PARTS)
    made = Text(["a", "b"], ["c", "d"], ["ac", "bd"], batch_size=[2])
    assert (made[1].prompt, made[1].response, made[1].full) == ("b", "d", "bd")


@S1("Text of a wrapper: prompt, response and the text across both")
def test_Text_of_a_wrapper():
    said = generated()["text"]
    ids = [row.tolist() for row in rows(generated(False), ("tokens", "full"))]
    assert said.full == make_wrapper().tokenizer.batch_decode(ids)
    for whole, a, b in zip(said.full, said.prompt, said.response, strict=True):
        assert whole.startswith(a + b)


@S1("Text.default_spec(shape=(-1,), keys=None)")
def test_Text_default_spec_shape_1_keys_None():
    said = generated()["text"]
    spec_of(Text, PARTS, said)


@S1("LogProbDistribution(log_probs, mask=None)")
def test_LogProbDistribution_log_probs_mask_None():
    defaults(LogProbDistribution, "log_probs, mask=None")


@S1("LogProbDistribution.log_prob: the pre-computed ones, 0 outside the mask")
def test_LogProbDistribution_log_prob():
    values, mask = torch.randn(2, 3), torch.tensor([[True, False, True], [False, True, True]])
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(LogProbDistribution(values).log_prob(ids), values)
    assert torch.equal(LogProbDistribution(values, mask).log_prob(ids), values * mask)


@S1("LogProbDistribution: a value of another shape is a ValueError")
def test_LogProbDistribution_ValueError():
    values = torch.randn(2, 3)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    refused(ValueError, ("(2, 2)", "(2, 3)"), LogProbDistribution(values).log_prob, ids[:, 1:])


@S1("LogProbDistribution.sample and entropy: NotImplementedError")
def test_LogProbDistribution_sample_and_entropy_NotImplementedError():
    values = torch.randn(2, 3)
    for method in (LogProbDistribution(values).sample, LogProbDistribution(values).entropy):
        refused(NotImplementedError, "", method)


@S1("LogProbDistribution: batch_shape [batch], event_shape [seq_len]")
def test_LogProbDistribution():
    values = torch.randn(2, 3)
    two, one = LogProbDistribution(values), LogProbDistribution(values[0])
    assert (two.batch_shape, two.event_shape) == ((2,), (3,))
    assert (one.batch_shape, one.event_shape) == ((3,), ())
