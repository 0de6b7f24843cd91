"""S1, first part: the containers, and LogProbDistribution."""

from dataclasses import fields
from functools import cache

import torch
from contracts import Words, make_wrapper, plain_log_probs
from contracts import prompts as env_prompts
from tensordict import TensorDict
from wrapped import CHATS, SPOKEN, prompts, scoring, spoken

from envs import ChatEnv
from policies import ChatHistory, History, LogProbDistribution, LogProbs, Masks, Text, Tokens
from policies.padding import pad, rows
from policies.random import fold
from specification_rows.row import Page, close, defaults, refused

S1 = Page("S1")
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
RESPONSE = ("masks", "all_response_mask")
PARTS = ("prompt", "response", "full")
KINDS = {"text": Text, "tokens": Tokens, "masks": Masks, "log_probs": LogProbs}


@cache
def generated(padded: bool = True) -> TensorDict:
    """Return three responses of different lengths, as the policy writes them."""
    td = prompts().set("stream", fold(10, torch.arange(3)))
    return make_wrapper().get_new_version(pad_output=padded, inplace=False)(td)


@cache
def scored(padded: bool = True) -> TensorDict:
    """Return three scored chats."""
    with torch.no_grad():
        return scoring(pad_output=padded, inplace=False)(spoken())


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


@S1.rows()
def tokens():
    dense, ragged = generated()["tokens"], generated(False)
    parts = {name: rows(ragged, ("tokens", name)) for name in PARTS}
    sizes = {name: [len(ids) for ids in part] for name, part in parts.items()}
    yield "Tokens.prompt [B, prompt length], padded on the left"
    assert torch.equal(dense.prompt, pad(parts["prompt"], side="left"))
    assert dense.prompt.shape == (3, max(sizes["prompt"])) != (3, min(sizes["prompt"]))
    yield "Tokens.response [B, response length], padded on the right"
    assert torch.equal(dense.response, pad(parts["response"], side="right"))
    assert dense.response.shape == (3, max(sizes["response"])) != (3, min(sizes["response"]))
    yield "Tokens.full [B, prompt length + response length]"
    assert dense.full.shape[-1] == dense.prompt.shape[-1] + dense.response.shape[-1]
    both = zip(parts["prompt"], parts["response"], strict=True)
    close(parts["full"], [torch.cat(pair) for pair in both])
    yield "Tokens.assistant: the assistant tokens"
    told = zip(rows(scored(False), ("tokens", "full")), rows(scored(False), ASSISTANT), strict=True)
    close(rows(scored(False), ("tokens", "assistant")), [ids[mask] for ids, mask in told])
    yield "padded of Tokens, Masks and LogProbs: bool"
    for name in ("tokens", "masks", "log_probs"):
        for make in (generated, scored):
            assert [make(p)[name].padded for p in (True, False)] == [True, False]
    yield "Tokens.default_spec: float entries"
    assert Tokens.default_spec((2,))["full"].dtype is torch.int64
    yield "containers are TensorClasses with nocast"
    made = Tokens(full=torch.zeros(2, 3, dtype=torch.int32), padded=True, batch_size=[2])
    assert made.full.dtype is torch.int32
    assert made[0].full.shape == (3,)
    yield "Tokens(prompt, response, full, padded): the order of the fields"
    in_order(Tokens, *PARTS, "padded")
    yield "Masks(all_attention_mask, all_assistant_mask, padded): the order of the fields"
    in_order(Masks, "all_attention_mask", "all_assistant_mask", "padded")
    yield "LogProbs(prompt, response, full, padded): the order of the fields"
    in_order(LogProbs, *PARTS, "padded")
    yield "Tokens.default_spec(shape=(-1,), keys=None)"
    spec_of(Tokens, PARTS, generated()["tokens"], scored()["tokens"])
    yield "LogProbs.default_spec(shape=(-1,), keys=None)"
    spec_of(LogProbs, PARTS, generated()["log_probs"], scored()["log_probs"])


@S1.rows()
def masks():
    policy = make_wrapper()
    yield "Masks.all_attention_mask: what the model can attend to"
    sizes = [len(ids) for ids in rows(generated(False), ("tokens", "full"))]
    assert generated()["masks"].all_attention_mask.dtype is torch.bool
    assert generated()["masks"].all_attention_mask.sum(-1).tolist() == sizes
    yield "Masks.all_assistant_mask: the tokens produced by the assistant"
    marked = rows(scored(False), ASSISTANT)
    assert [m.tolist() for m in marked] == [policy.renderer.render(c).assistant for c in SPOKEN]
    said = [row.tolist() for row in rows(scored(False), ("tokens", "assistant"))]
    texts = policy.tokenizer.batch_decode(said, skip_special_tokens=True)
    assert texts == [chat[-1]["content"] for chat in SPOKEN]
    yield "all_assistant_mask from History.apply_chat_template's assistant_masks"
    asked = {"add_generation_prompt": False, "return_dict": True, "tokenizer": policy.tokenizer}
    made = History.from_chats(SPOKEN).apply_chat_template(
        return_assistant_tokens_mask=True, **asked
    )
    close(made.get("assistant_masks", as_list=True), marked)
    yield "masks have the shape of tokens.full and log_probs.full"
    for td in (make(p) for make in (generated, scored) for p in (True, False)):
        keys = (("tokens", "full"), ("log_probs", "full"), ATTENTION, ASSISTANT)
        shapes = [[row.shape for row in rows(td, key)] for key in keys]
        assert shapes == [shapes[0]] * 4
    yield "Masks.default_spec(shape=(-1,), keys=None)"
    names = ("all_attention_mask", "all_assistant_mask")
    spec_of(Masks, names, generated()["masks"])


@S1.rows()
def chat_history():
    said = generated()["history"]
    yield "ChatHistory(prompt, response, full)"
    in_order(ChatHistory, *PARTS)
    yield "ChatHistory.prompt: the conversation so far; response: what the LLM generated"
    assert said.prompt.chats() == CHATS
    want = [[{"role": "assistant", "content": text}] for text in generated()["text"].response]
    assert said.response.chats() == want
    yield "ChatHistory.full: prompt and response"
    pairs = zip(said.prompt.chats(), said.response.chats(), strict=True)
    assert said.full.chats() == [[*a, *b] for a, b in pairs]
    yield "ChatHistory.default_spec(shape=(-1,), keys=None)"
    spec_of(ChatHistory, PARTS)
    yield "example: ChatHistory(prompt=history) with a wrapper"
    history = History.from_chats([SPOKEN[0]])
    chat_history = ChatHistory(prompt=history)
    result = make_wrapper()(TensorDict(history=chat_history, batch_size=(1,)))
    assert result["history"].response.shape == (1, 1)
    assert result["history"].full.chats()[0][:2] == history.chats()[0]
    yield "TransformersWrapper uses ChatHistory in input_mode='history'"
    assert isinstance(said, ChatHistory)
    yield "ChatEnv uses ChatHistory for its state"
    env = ChatEnv(Words(2), group_size=2, max_turns=2)
    td = env.reset(env_prompts(2, turns=2))
    after = env.step(make_wrapper()(td))["next"]["history"]
    assert isinstance(td["history"], ChatHistory)
    assert isinstance(after, ChatHistory)
    assert [len(chat) for chat in after.prompt.chats()] == [3] * 4


@S1.rows(needs="vllm")
def vllm():
    from policies import vLLMWrapper
    from policies.models.find import find_model

    yield "vLLMWrapper uses ChatHistory in input_mode='history'"
    policy = vLLMWrapper(str(find_model("tiny").folder), generate_kwargs={"max_tokens": 4})
    out = policy(prompts())
    assert isinstance(out["history"], ChatHistory)
    yield "vLLMWrapper generates and scores"
    assert policy.get_new_version(generate=False, inplace=False)(out)["log_probs"] is not None


@S1.rows()
def log_probs():
    found = {name: rows(generated(False), ("log_probs", name)) for name in PARTS}
    yield "LogProbs.prompt: padded on the left, 0 where generation does not score"
    got = generated()["log_probs"].prompt
    assert got.shape == generated()["tokens"].prompt.shape
    assert not got.any()
    again = scoring(pad_output=False, inplace=False)(generated(False).copy())
    assert all((row[1:] < 0).all() for row in rows(again, ("log_probs", "prompt")))
    yield "LogProbs.response: padded on the right"
    assert torch.equal(generated()["log_probs"].response, pad(found["response"], side="right"))
    assert all((row < 0).all() for row in found["response"])
    yield "LogProbs.full: across prompt and response"
    for make, keep in ((generated, RESPONSE), (scored, ATTENTION)):
        for i, ids in enumerate(rows(make(False), ("tokens", "full"))):
            want = plain_log_probs(make_wrapper(), ids, 1.0) * rows(make(False), keep)[i]
            close(rows(make(False), ("log_probs", "full"))[i], want)
    yield "LogProbs.assistant: those of the assistant"
    pairs = zip(rows(scored(False), ("log_probs", "full")), rows(scored(False), ASSISTANT),
                strict=True)  # fmt: skip
    close(rows(scored(False), ("log_probs", "assistant")), [v[m] for v, m in pairs])
    yield "Text(prompt, response, full)"
    in_order(Text, *PARTS)
    made = Text(["a", "b"], ["c", "d"], ["ac", "bd"], batch_size=[2])
    assert (made[1].prompt, made[1].response, made[1].full) == ("b", "d", "bd")
    yield "Text of a wrapper: prompt, response and the text across both"
    said = generated()["text"]
    ids = [row.tolist() for row in rows(generated(False), ("tokens", "full"))]
    assert said.full == make_wrapper().tokenizer.batch_decode(ids)
    for whole, a, b in zip(said.full, said.prompt, said.response, strict=True):
        assert whole.startswith(a + b)
    yield "Text.default_spec(shape=(-1,), keys=None)"
    spec_of(Text, PARTS, said)


@S1.rows()
def log_prob_distribution():
    values, mask = torch.randn(2, 3), torch.tensor([[True, False, True], [False, True, True]])
    ids = torch.zeros(2, 3, dtype=torch.int64)
    yield "LogProbDistribution(log_probs, mask=None)"
    defaults(LogProbDistribution, "log_probs, mask=None")
    yield "LogProbDistribution.log_prob: the pre-computed ones, 0 outside the mask"
    assert torch.equal(LogProbDistribution(values).log_prob(ids), values)
    assert torch.equal(LogProbDistribution(values, mask).log_prob(ids), values * mask)
    yield "LogProbDistribution: a value of another shape is a ValueError"
    refused(ValueError, ("(2, 2)", "(2, 3)"), LogProbDistribution(values).log_prob, ids[:, 1:])
    yield "LogProbDistribution.sample and entropy: NotImplementedError"
    for method in (LogProbDistribution(values).sample, LogProbDistribution(values).entropy):
        refused(NotImplementedError, "", method)
    yield "LogProbDistribution: batch_shape [batch], event_shape [seq_len]"
    two, one = LogProbDistribution(values), LogProbDistribution(values[0])
    assert (two.batch_shape, two.event_shape) == ((2,), (3,))
    assert (one.batch_shape, one.event_shape) == ((3,), ())
