"""The policy as a TensorDict module: what goes in, what comes out, and what it leaves alone.

Expected log-probs come from one plain forward per sequence. The tests marked "not as in TorchRL"
hold for faults of the original that its pages do not promise.
"""

import copy
import inspect

import pytest
import torch
from contracts import make_policy, plain_log_probs
from tensordict import TensorDict
from torch import nn
from wrapped import (
    CHATS,
    RESPONSE_LOG_PROBS,
    SPOKEN,
    TEXTS,
    policy_ids,
    prompts,
    same,
    scoring,
    sequences,
    spoken,
)

from envs.transforms import RetrieveLogProb
from policies.chats.containers import Tokens
from policies.load import load_policy
from policies.padding import is_ragged, rows
from policies.random import fold
from policies.scorer import Scorer
from policies.wrappers.transformers_wrapper import TransformersWrapper

# Generation.


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_text_and_tokens_generate_what_the_history_does(mode):
    policy = make_policy()
    same(policy(prompts()), policy.get_new_version(input_mode=mode)(prompts(mode)))


def test_ragged_outputs_hold_what_padded_ones_do():
    padded, ragged = (
        make_policy().get_new_version(pad_output=flag)(prompts()) for flag in (True, False)
    )
    assert is_ragged(ragged["tokens"])
    assert not is_ragged(padded["tokens"])
    assert padded["tokens"].padded is True
    assert ragged["tokens"].padded is False
    same(padded, ragged)
    # A prompt is padded left, a response right, a full row is one after the other.
    tokens, mask = padded["tokens"], padded["masks", "all_attention_mask"]
    width = tokens.prompt.shape[1]
    assert torch.equal(torch.cat([tokens.prompt, tokens.response], -1), tokens.full)
    assert mask[:, width - 1].all()
    assert mask[:, width].all()
    assert not mask[:, 0].all()
    for i, row in enumerate(rows(ragged, ("tokens", "prompt"))):
        assert torch.equal(tokens.prompt[i, width - len(row) :], row)


@pytest.mark.parametrize("padded", [True, False])
def test_every_sampled_token_has_its_log_prob_the_first_and_the_last_too(padded):
    # Not as in TorchRL: there the first is 0, and full and prompt are None.
    policy = make_policy()
    out = policy.get_new_version(pad_output=padded)(prompts())
    for i, (ids, values, mask) in enumerate(sequences(out)):
        want = plain_log_probs(policy, ids, 1.0).float()
        torch.testing.assert_close(values, want * mask, atol=1e-5, rtol=0)
        response = rows(out, ("log_probs", "response"))[i][: int(mask.sum())]
        torch.testing.assert_close(response, want[mask], atol=1e-5, rtol=0)
        assert (response < 0).all()
        assert not rows(out, ("log_probs", "prompt"))[i].any()


def test_the_end_of_turn_is_kept_when_it_is_the_padding_token():
    # Not as in TorchRL: there it is taken for padding and neither stored nor trained.
    tokenizer = copy.deepcopy(make_policy().tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    policy = make_policy().get_new_version(tokenizer=tokenizer, num_samples=40)
    same(policy(prompts())[0], make_policy().get_new_version(num_samples=40)(prompts())[0])
    out = sequences(policy(prompts())[0])
    ends = [ids[mask].tolist() for ids, _, mask in out if ids[-1] == tokenizer.eos_token_id]
    assert ends
    assert all(reply.index(tokenizer.eos_token_id) == len(reply) - 1 for reply in ends)


def test_log_probs_are_those_at_the_sampling_temperature():
    policy = make_policy()
    kwargs = {**policy.generate_kwargs, "temperature": 0.3}
    out = policy.get_new_version(generate_kwargs=kwargs)(prompts())
    assert out["temperature"].tolist() == [pytest.approx(0.3)] * 3
    # The temperature travels with the batch, for whoever asks for it.
    scored = scoring(inplace=False)(out, temperature_key="temperature")
    torch.testing.assert_close(
        scoring(inplace=False)(out)["log_probs"].full,
        scoring(inplace=False)(out.exclude("temperature"))["log_probs"].full,
    )
    for i, (ids, values, mask) in enumerate(sequences(out)):
        want = plain_log_probs(policy, ids, 0.3)
        torch.testing.assert_close(values.double(), want * mask, atol=1e-5, rtol=0)
        full = scored["log_probs", "full"][i][out["masks", "all_attention_mask"][i]]
        torch.testing.assert_close(full.double(), want, atol=1e-5, rtol=0)


def test_greedy_takes_the_likeliest_token_whatever_the_stream():
    policy = make_policy()
    for kwargs in ({"temperature": 0.0}, {"do_sample": False}):
        greedy = policy.get_new_version(generate_kwargs={"max_new_tokens": 5, **kwargs})
        out = greedy(prompts().set("stream", fold(99, torch.arange(3))))
        assert out["temperature"].tolist() == [1.0] * 3
        for ids, _, mask in sequences(out):
            with torch.no_grad():
                best = policy.model(input_ids=ids[None]).logits[0].argmax(-1)
            assert torch.equal(ids[mask], best[:-1][mask[1:]])


def test_a_stream_fixes_a_row_and_without_one_the_generator_does():
    policy = make_policy().get_new_version(inplace=False)
    same(policy(prompts()), policy(prompts()))
    turned = policy(prompts()[torch.tensor([2, 0])])
    expected = [sequences(policy(prompts()))[i] for i in (2, 0)]
    for (ids, _, _), (ids2, _, _) in zip(sequences(turned), expected, strict=True):
        assert torch.equal(ids, ids2)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([ids.tolist() for ids, *_ in sequences(policy(prompts().exclude("stream")))])
    assert drawn[0] == drawn[1] != drawn[2]


def test_samples_of_a_prompt_get_a_dimension_of_their_own():
    out = make_policy().get_new_version(num_samples=3)(prompts())
    assert out.batch_size == (3, 3)
    assert out["tokens", "response"].shape[:2] == (3, 3)
    assert len({tuple(r.tolist()) for r in out["tokens", "response"].flatten(0, 1)}) > 3
    texts = [chat[-2]["content"] for chat in out["history", "full"].chats()]
    assert texts == [t for t in TEXTS for _ in range(3)]
    for inplace in (True, "empty"):
        with pytest.raises(ValueError, match="num_samples"):
            make_policy().get_new_version(num_samples=3, inplace=inplace)


def test_replies_are_read_as_text_without_the_end_of_turn_and_may_be_empty():
    policy = make_policy()
    end = policy.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    many = policy.get_new_version(num_samples=256)(prompts())
    flat = many.reshape(-1)
    replies = [ids[mask] for ids, _, mask in sequences(flat)]
    said = [chat[-1] for chat in flat["history", "full"].chats()]
    empty = [m for m, r in zip(said, replies, strict=True) if len(r) == 1]
    assert empty, "the seed should bring a reply that ends at once"
    for message, reply in zip(said, replies, strict=True):
        body = reply[:-1] if reply[-1] in end else reply
        assert message == {"role": "assistant", "content": policy.tokenizer.decode(body)}
    assert all(m["content"] == "" for m in empty)
    flags = [f[-1] for f in flat["history", "full"].get("is_complete")]
    assert flags == [int(r[-1]) in end for r in replies]
    assert all(len(r) == 6 for r in replies if r[-1] not in end)
    assert {int(r[-1]) for r in replies} > set(end), "both end-of-turn ids and cut replies"


def test_a_stop_text_ends_a_reply_and_stays_in_it():
    policy = make_policy().get_new_version(num_samples=8)
    plain = policy(prompts())[0]
    letter = next(c for c in plain["text"].response[0][2:] if c.isascii())
    kwargs = {**policy.generate_kwargs, "stop": [letter]}
    stopped = policy.get_new_version(generate_kwargs=kwargs)(prompts())[0]
    decode = policy.tokenizer.decode
    shorter = 0
    for (ids, _, mask), (ids2, _, mask2) in zip(sequences(plain), sequences(stopped), strict=True):
        whole, cut = ids[mask], ids2[mask2]
        assert torch.equal(whole[: len(cut)], cut)
        assert letter not in decode(cut[:-1])
        assert letter in decode(cut) or len(cut) == len(whole)
        shorter += len(cut) < len(whole)
    assert shorter > 0


def test_one_new_token_is_a_whole_reply():
    kwargs = {"max_new_tokens": 1}
    out = make_policy().get_new_version(generate_kwargs=kwargs)(prompts())
    assert out["tokens", "response"].shape == (3, 1)
    assert out["masks", "all_response_mask"].sum().item() == 3


def test_prompts_over_the_limit_are_refused_by_number():
    lengths = [len(make_policy().renderer.render(c, add_generation_prompt=True).ids) for c in CHATS]
    for limit in (max(lengths), max(lengths) - 1):
        kwargs = {"max_new_tokens": 1, "max_prompt_tokens": limit}
        policy = make_policy().get_new_version(generate_kwargs=kwargs)
        if limit < max(lengths):
            with pytest.raises(ValueError, match=f"prompt 2 .* {max(lengths)} tokens"):
                policy(prompts())
        else:
            policy(prompts())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seed": 3}, "unknown 'seed'"),
        ({"min_tokens": 3}, "unknown 'min_tokens'; did you mean min_new_tokens"),
        ({"num_beams": 2}, "num_beams.*return_log_probs=False"),
        ({"max_length": 9}, "max_new_tokens .*max_length"),
        ({"logprobs": True}, "unknown .logprobs."),
        ({"top_p": 1.5}, "top_p between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty > 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens <= max_new_tokens"),
        ({"temperature": float("nan")}, "temperature >= 0"),
        ({"do_sample": False, "temperature": 1.0}, "temperature must be 0"),
        ({"max_new_tokens": 0}, "max_new_tokens >= 1"),
        ({"n": 0}, "n >= 1"),
        ({"stop": ["x"], "typical_p": 0.5}, "stop or .*typical_p.*, got both"),
        ({"cache_implementation": "x", "typical_p": 0.5}, "Invalid `cache_implementation`"),
    ],
)
def test_what_cannot_be_generated_is_refused(kwargs, message):
    # Not as in TorchRL, which drops names that it does not know.
    with pytest.raises(ValueError, match=message):
        make_policy().get_new_version(generate_kwargs=kwargs)


def test_generating_twice_from_one_td_reads_the_same_prompt():
    # The second time the prompt is read from its padded ids.
    policy = make_policy()
    first = policy(prompts()).clone()
    again = policy(first.clone())
    same(first, again)
    assert not first["masks", "all_attention_mask"].all()


# Where results go.


@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (1, 3, 1)])
@pytest.mark.parametrize("padded", [True, False])
def test_any_number_of_batch_dimensions(shape, padded):
    policy = make_policy().get_new_version(pad_output=padded, inplace=False)
    score = scoring(pad_output=padded, inplace=False)
    whole = policy(prompts())
    td = prompts()[0] if shape == () else prompts().reshape(*shape)
    out = policy(td)
    assert out.batch_size == shape
    flat = out.unsqueeze(0) if shape == () else out.reshape(-1)
    for a, b in zip(sequences(flat), sequences(whole), strict=False):
        assert torch.equal(a[0], b[0])
    assert score(out).batch_size == shape
    assert score.get_dist(out).logits.shape[:-2] == shape
    assert scoring()._get_sft_dist(out).mask.sum() == sum(m.sum() for *_, m in sequences(flat))


def test_inplace_says_where_outputs_go():
    wanted = {"history", "log_probs", "masks", "policy_version", "temperature", "text", "tokens"}
    for inplace, keys, identical in (
        (True, {*wanted, "stream", "extra"}, True),
        (False, wanted, False),
        ("empty", wanted, False),
    ):
        td = prompts().set("extra", torch.zeros(3))
        out = make_policy().get_new_version(inplace=inplace)(td)
        assert set(out.keys()) == keys
        assert (out is td) is identical
        assert identical or set(td.keys()) == {"history", "stream", "extra"}


@pytest.mark.parametrize("changes", [{}, {"pad_output": False}, {"num_samples": 2}])
def test_the_callers_data_is_not_changed(changes):
    td, kwargs = prompts("tokens"), {"max_new_tokens": 3, "stop": ["x"]}
    before, asked = td.clone(), copy.deepcopy(kwargs)
    version = {"input_mode": "tokens", "inplace": False, "generate_kwargs": kwargs, **changes}
    policy = make_policy().get_new_version(**version)
    out = policy(td)
    assert (td == before).all()
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    assert kwargs == asked
    kept = out.clone()
    out = out.flatten() if out.ndim > 1 else out
    scorer = scoring(input_mode="tokens", inplace=False, pad_output=policy.pad_output)
    for read in (scorer, scorer.get_dist, scorer._get_sft_dist, scorer.log_prob):
        read(out)
    kept = kept.flatten() if kept.ndim > 1 else kept
    assert set(out.keys(True)) == set(kept.keys(True))
    same(out, kept)
    kwargs["max_new_tokens"] = 1  # what the caller does later is the caller's
    assert policy.get_new_version().max_new_tokens == 3


@pytest.mark.parametrize("lazy", [True, False])
def test_scoring_in_place_keeps_what_was_there(lazy):
    # Not as in TorchRL: there prompt and response vanish.
    td = make_policy()(prompts())
    td = td.to_lazystack(0) if lazy else td
    before = td.clone()
    out = scoring()(td)
    assert out is td
    for key in (("tokens", "prompt"), ("tokens", "response"), ("tokens", "full")):
        assert lazy or torch.equal(out[key], before[key])
    assert list(out["text"].prompt) == list(before["text"].prompt)
    assert out["history", "prompt"].chats() == CHATS
    assert out["history", "full"].chats() == before["history", "full"].chats()


@pytest.mark.parametrize("padded", [True, False])
def test_padded_and_ragged_outputs_do_not_mix_in_one_td(padded):
    td = make_policy().get_new_version(pad_output=padded)(prompts())
    kept = sequences(td)
    out = scoring(pad_output=not padded)(td)
    assert is_ragged(out["tokens"]) is padded
    masks = rows(out, ("masks", "all_attention_mask"))
    for (ids, _, _), row, mask in zip(kept, rows(out, ("tokens", "full")), masks, strict=True):
        assert torch.equal(row[mask], ids)


def test_keys_may_be_renamed():
    names = {f"{n}_key": f"my_{n}" for n in ("history", "text", "tokens", "masks", "log_probs")}
    policy = make_policy().get_new_version(**names, inplace=False)
    td = prompts().rename_key_("history", "my_history")
    out = policy(td)
    assert set(out.keys()) == {*names.values(), "policy_version", "temperature"}
    scored = scoring(**names, inplace=False)(out)
    assert set(scored.keys()) == {*names.values()}
    plain = make_policy()(prompts())
    assert torch.equal(out["my_tokens", "full"], plain["tokens", "full"])
    free = make_policy().get_new_version(input_key="chat", inplace=False)
    out = free(TensorDict({"stream": td["stream"]}, [3]).set("chat", prompts()["history"].prompt))
    assert torch.equal(out["tokens", "full"], plain["tokens", "full"])
    ids = prompts("tokens")
    ids.set("mine", ids["tokens"].prompt).set("keep", ids["attention_mask"])
    other = TensorDict({k: ids[k] for k in ("mine", "keep", "stream")}, [3])
    other.set("tokens", Tokens(prompt=torch.zeros(3, 2, dtype=torch.int64), batch_size=[3]))
    version = {"input_mode": "tokens", "input_key": "mine", "attention_mask_key": "keep"}
    same(make_policy().get_new_version(**version)(other), plain)


def test_input_that_is_missing_or_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"expected .*history.*prompt.*got keys \['stream'\]"):
        make_policy()(prompts().select("stream"))
    td = prompts("tokens")
    td["attention_mask"] = td["attention_mask"][:, 1:]
    with pytest.raises(ValueError, match="attention mask"):
        make_policy().get_new_version(input_mode="tokens")(td)
    with pytest.raises(ValueError, match="input_mode must be one of"):
        make_policy().get_new_version(input_mode="words")
    with pytest.raises(ValueError, match="return_log_probs must be True when generate=False"):
        scoring(return_log_probs=False)
    with pytest.raises(TypeError):
        make_policy()(prompts(), max_new_tokens=3)


def test_log_probs_may_be_left_out():
    out = make_policy().get_new_version(return_log_probs=False, inplace=False)(prompts())
    assert set(out.keys()) == {
        "history",
        "masks",
        "policy_version",
        "temperature",
        "text",
        "tokens",
    }


# Versions.


def test_a_new_version_takes_every_argument():
    # Not as in TorchRL, which ignores several of them without a word.
    policy = make_policy()
    arguments = set(inspect.signature(TransformersWrapper).parameters)
    tokenizer = copy.deepcopy(policy.tokenizer)
    model = Scorer(policy.model)
    changed = {
        "model": (model, lambda p: p.scorer),
        "tokenizer": (tokenizer, lambda p: p.tokenizer),
        "input_mode": ("text", lambda p: p.input_mode),
        "input_key": ("chat", lambda p: p.in_keys[0]),
        "attention_mask_key": ("keep", lambda p: p.attention_mask_key),
        "generate": (False, lambda p: p.generate),
        "generate_kwargs": ({"max_new_tokens": 2}, lambda p: p.generate_kwargs),
        "pad_output": (False, lambda p: p.pad_output),
        "inplace": ("empty", lambda p: p.inplace),
        "num_samples": (4, lambda p: p.num_samples),
        "chat_template": ("chatml", lambda p: p._settings["chat_template"]),
        "return_log_probs": (False, lambda p: p.return_log_probs),
        "history_key": ("a", lambda p: p.history_key),
        "text_key": ("b", lambda p: p.text_key),
        "tokens_key": ("c", lambda p: p.tokens_key),
        "masks_key": ("d", lambda p: p.masks_key),
        "log_probs_key": ("e", lambda p: p.log_probs_key),
        "score_mask_key": ("f", lambda p: p.score_mask_key),
        "micro_batch_tokens": (9, lambda p: p.micro_batch_tokens),
    }
    changed |= {
        "tokenizer_kwargs": ({"padding": True}, lambda p: p._settings["tokenizer_kwargs"]),
        "pad_model_input": (False, lambda p: p.pad_model_input),
        "device": ("cpu", lambda p: p._settings["device"]),
        "layout": (torch.jagged, lambda p: p.layout),
        "chat_template_name": ("qwen", lambda p: p.chat_template_name),
        "batching": (True, lambda p: p.get_batching_state()["batching_enabled"]),
        "min_batch_size": (2, lambda p: p.get_batching_state().get("min_batch_size")),
        "max_batch_size": (3, lambda p: p.get_batching_state().get("max_batch_size")),
        "batching_timeout": (0.5, lambda p: p.batching_timeout),
        "prefer_tokens": (False, lambda p: p.prefer_tokens),
    }
    assert set(changed) == arguments
    before = {k: copy.copy(v) for k, v in policy._settings.items() if isinstance(v, dict)}
    for name, (value, read) in changed.items():
        also = {"generate": False} if name == "pad_model_input" else {}
        made = policy.get_new_version(**{name: value}, **also)
        assert read(made) == value, name
        assert read(policy) != value, f"{name} changed the parent"
        assert made.model is policy.model
        # The version of a version keeps it.
        assert read(made.get_new_version()) == value, name
    assert {k: v for k, v in policy._settings.items() if isinstance(v, dict)} == before
    # Another direction reads its own field and keeps the rest.
    scorer = policy.get_new_version(generate=False)
    assert scorer.in_keys == [("history", "full")]
    packed = scorer.get_new_version(pad_model_input=False)
    assert packed.get_new_version(generate=True).pad_model_input is None


def test_an_unknown_argument_of_a_version_is_refused():
    with pytest.raises(ValueError, match=r"pad_output.*\['pad_input'\]"):
        make_policy().get_new_version(pad_input=True)


def test_a_version_of_another_direction_or_mode_reads_its_own_key():
    policy = make_policy().get_new_version(input_key=("history", "prompt"))
    assert policy.get_new_version(generate=False).in_keys == [("history", "full")]
    assert policy.get_new_version(input_mode="tokens").in_keys == [("tokens", "prompt")]
    assert policy.get_new_version(generate=False, input_key="x").in_keys == ["x"]


# Scoring.


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_scoring_equals_a_plain_forward(mode, padded):
    # Not as in TorchRL, whose packed scoring lets tokens see what comes after them.
    policy = scoring(input_mode=mode, pad_output=padded)
    out = policy(spoken(mode))
    masks = rows(out, ("masks", "all_attention_mask"))
    pairs = zip(rows(out, ("tokens", "full")), rows(out, ("log_probs", "full")), strict=True)
    for (ids, values), mask, chat in zip(pairs, masks, SPOKEN, strict=True):
        assert policy.renderer.render(chat).ids == ids[mask].tolist()
        want = plain_log_probs(make_policy(), ids[mask], 1.0).float()
        torch.testing.assert_close(values[mask], want, atol=1e-5, rtol=0)
        assert not values[~mask].any()
    assert ("masks", "all_assistant_mask") in out.keys(True) or mode != "history"


@pytest.mark.parametrize("padded", [True, False])
def test_a_scored_history_holds_its_assistant_part_and_its_response(padded):
    policy = scoring(pad_output=padded)
    out = policy(spoken())
    for i, chat in enumerate(SPOKEN):
        done = policy.renderer.render(chat)
        ids = torch.tensor(done.ids)
        inside = torch.tensor(done.assistant)
        want = plain_log_probs(make_policy(), ids, 1.0).float()
        start = done.assistant.index(True)
        for key, part in (("assistant", ids[inside]), ("response", ids[start:])):
            got = rows(out, ("tokens", key))[i]
            assert got[: len(part)].tolist() == part.tolist()
            values = rows(out, ("log_probs", key))[i][: len(part)]
            part = want[inside] if key == "assistant" else want[start:]
            torch.testing.assert_close(values, part, atol=1e-5, rtol=0)


def test_log_prob_returns_that_of_the_response():
    # Not as in TorchRL, where it is an AttributeError.
    td = make_policy()(prompts())
    stored = td["log_probs", "response"].clone()
    td["log_probs", "response"].fill_(7.0)  # stale values are not believed
    got = scoring().log_prob(td)
    torch.testing.assert_close(got, stored, atol=1e-5, rtol=0)
    assert got.requires_grad
    assert (td["log_probs", "response"] == 7.0).all()
    ragged = scoring(pad_output=False).log_prob(td, as_list=True)
    for row, want, mask in zip(ragged, stored, td["masks", "all_response_mask"], strict=True):
        torch.testing.assert_close(row, want[: int(mask.sum())], atol=1e-5, rtol=0)
    filled = scoring(pad_output=False).log_prob(td, as_padded_tensor=True)
    torch.testing.assert_close(filled, stored, atol=1e-5, rtol=0)
    with pytest.raises(RuntimeError, match="generate=False"):
        make_policy().log_prob(td)
    with pytest.raises(ValueError, match="prompt tokens or an assistant mask"):
        scoring(input_mode="text").log_prob(spoken("text"))


def test_only_asked_tokens_are_scored():
    td = make_policy()(prompts())
    out = scoring(score_mask_key=("masks", "all_response_mask"), inplace=False)(td)
    torch.testing.assert_close(out["log_probs", "full"], td["log_probs", "full"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("detach", [True, False])
def test_detach_decides_whether_a_gradient_flows(detach):
    # Not as in TorchRL, where detach=True is stored and never read.
    transform = RetrieveLogProb(scoring(log_probs_key="ref_log_probs"), detach=detach)
    out = transform(make_policy()(prompts()))
    assert out["ref_log_probs", "full"].requires_grad is not detach


# Distributions.


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_distributions_give_the_scored_log_probs(padded, inplace):
    # Not as in TorchRL: get_dist() raises, _get_rlhf_dist fails with inplace=False, _get_sft_dist
    # reads masks from other places when padded.
    temper = {**make_policy().generate_kwargs, "temperature": 0.5}
    version = {"pad_output": padded, "generate_kwargs": temper}
    td = make_policy().get_new_version(**version)(prompts())
    policy = scoring(inplace=inplace, pad_output=padded)
    dists = {
        name: getattr(policy, name)(td.copy())
        for name in ("get_dist", "_get_sft_dist", "_get_rlhf_dist", "_get_generic_dist")
    }
    names = ("_get_dist_with_prompt_mask", "_get_dist_with_assistant_mask")
    dists |= {name: getattr(policy, name)(td.copy()) for name in names}
    response = dists["_get_sft_dist"].mask
    dists["custom"] = policy._get_dist_with_custom_mask(td.copy(), response)
    dists["named"] = policy.get_dist(td.copy(), mask_key=("masks", "all_response_mask"))
    attended = {"get_dist", "_get_generic_dist"}
    for name, dist in dists.items():
        for i, (ids, _, mask) in enumerate(sequences(td)):
            want = plain_log_probs(make_policy(), ids, 0.5)
            real = policy.get_dist(td.copy()).mask[i]  # the attended tokens, in either layout
            kept = dist.mask[i][real]
            assert torch.equal(kept, torch.ones_like(mask) if name in attended else mask), name
            tokens = torch.full(real.shape, -100)
            tokens[real] = torch.where(kept, ids, -100)
            whole = torch.full((len(sequences(td)), len(real)), -100)
            whole[i] = tokens
            got = dist.log_prob(whole)[i][real]
            expected = (want * kept).float()[1:]  # the first token has no prediction
            torch.testing.assert_close(got[1:], expected, atol=1e-5, rtol=0)


def test_get_dist_works_with_its_defaults():
    td = make_policy()(prompts())
    assert torch.equal(scoring().get_dist(td).mask, td["masks", "all_attention_mask"])


def test_histories_give_distributions_over_their_assistant_turns():
    policy = scoring()
    for name in ("_get_sft_dist", "_get_rlhf_dist"):
        td = spoken()
        dist = getattr(policy, name)(td)
        for i, chat in enumerate(SPOKEN):
            done = policy.renderer.render(chat)
            real = policy.get_dist(spoken()).mask[i]
            assert dist.mask[i][real].tolist() == done.assistant
        # The documented side effect of the assistant mask, and no other.
        assert set(td.keys()) == {"history", "tokens"} if "rlhf" in name else {"history"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_distribution_under_the_assistant_mask_may_be_asked_for_again(side, padded):
    policy = scoring(pad_output=padded)
    td = spoken()
    first, again = (policy._get_rlhf_dist(td, padding_side=side) for _ in range(2))
    for dist in (again, policy._get_sft_dist(td, padding_side=side)):
        assert torch.equal(dist.mask, first.mask)
        assert torch.equal(dist.logits, first.logits)
    fresh = policy.log_prob(spoken(), as_list=True)
    for got in (policy.log_prob(td.copy(), as_list=True), rows(policy(td), RESPONSE_LOG_PROBS)):
        for a, b in zip(got, fresh, strict=True):  # a padded one is as long as the longest
            torch.testing.assert_close(a[: len(b)], b, atol=1e-5, rtol=0)


def test_only_the_ids_of_the_history_have_its_assistant_mask():
    td = scoring(pad_output=False)(spoken()).select(("tokens", "full"), "history")
    policy = scoring()
    assert policy._get_rlhf_dist(td.copy()).mask.sum() > 0
    rows(td, ("tokens", "full"))[1][2] += 1
    with pytest.raises(ValueError, match="assistant mask"):
        policy._get_rlhf_dist(td)


@pytest.mark.parametrize("padded", [True, False])
def test_the_assistant_mask_replaces_ids_that_were_not_read(padded):
    stale = scoring(pad_output=padded)(spoken())["tokens"]
    stale = stale.select("full").apply(torch.zeros_like)
    td = spoken().set("tokens", stale)
    dist = scoring(prefer_tokens=False)._get_rlhf_dist(td)
    want = [policy_ids(chat) for chat in SPOKEN]
    assert [r[-len(w) :].tolist() for r, w in zip(td["tokens", "full"], want, strict=True)] == want
    assert torch.equal(scoring()._get_rlhf_dist(td).mask, dist.mask)


def test_padding_side_is_where_ragged_rows_are_padded():
    lengths = torch.tensor([len(make_policy().renderer.render(c).ids) for c in SPOKEN])[:, None]
    index = torch.arange(int(lengths.max()))
    right = scoring().get_dist(spoken(), padding_side="right").mask
    assert torch.equal(right, index < lengths)
    left = scoring().get_dist(spoken()).mask
    assert torch.equal(left, index >= lengths.max() - lengths)
    for read in (scoring().get_dist, scoring()._get_rlhf_dist):
        with pytest.raises(ValueError, match="padding_side='right' pads ragged sequences"):
            read(make_policy()(prompts()), padding_side="right")
        with pytest.raises(ValueError, match="expected padding_side 'left' or 'right', got 'top'"):
            read(spoken(), padding_side="top")
    with pytest.raises(ValueError, match="nested logits"):
        scoring().get_dist(spoken(), layout=torch.jagged)


def test_distributions_without_their_mask_or_direction_are_refused():
    td = make_policy()(prompts())
    with pytest.raises(NotImplementedError, match="generate=False"):
        make_policy().get_dist(td)
    with pytest.raises(ValueError, match=r"expected a mask at \('masks', 'mine'\)"):
        scoring().get_dist(td, mask_key=("masks", "mine"))
    with pytest.raises(ValueError, match="assistant mask"):
        scoring(input_mode="text")._get_rlhf_dist(spoken("text"))
    with pytest.raises(ValueError, match="assistant masks need input_mode='history'"):
        scoring(input_mode="text")._get_sft_dist(spoken("text"))
    wrong = td["masks", "all_attention_mask"][:, 1:]
    with pytest.raises(ValueError, match="one entry a token"):
        scoring()._get_dist_with_custom_mask(td, wrong)


def test_the_collector_is_held_weakly():
    class Collector:
        pass

    policy, collector = make_policy().get_new_version(), Collector()
    assert policy.collector is None
    policy.register_collector(collector)
    assert policy.collector is collector
    del collector
    assert policy.collector is None


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_out_keys_are_exactly_what_is_written_and_the_words_are_those_of_the_ids(mode, padded):
    settings = {"input_mode": mode, "pad_output": padded, "inplace": False}
    policy = make_policy().get_new_version(**settings)
    said = policy(prompts(mode))
    assert set(said.keys()) == {*policy.out_keys}
    score = policy.get_new_version(generate=False)
    for td in (said, spoken(mode)):
        out = score(td)
        assert set(out.keys()) == {*score.out_keys}
        if mode == "tokens":
            assert "text" not in out
            continue
        keep, ids = (rows(out, k) for k in (("masks", "all_attention_mask"), ("tokens", "full")))
        whole = [policy.tokenizer.decode(row[mask]) for row, mask in zip(ids, keep, strict=True)]
        assert out["text"].full == whole
        if mode == "history":
            assert out["history"].full.chats() == td["history"].full.chats()
    if mode != "tokens":  # the second scoring of a generation says what the generation said
        again = score(said)["text"]
        for field in ("prompt", "response", "full"):
            assert again.get(field) == said["text"].get(field)


def test_keys_tell_what_is_written():
    policy = make_policy()
    out = policy(prompts())
    assert policy.log_prob_keys == [("log_probs", "full")]
    assert all(key in out.keys(True) for key in policy.log_prob_keys + policy.dist_sample_keys)
    assert policy.dist_params_keys == []  # a generating policy has no distributions
    for score, td in ((scoring(), spoken()), (scoring(input_mode="text"), spoken("text"))):
        shown = TensorDict(batch_size=[3])
        score.get_dist(td, shown)
        assert list(shown.keys()) == score.dist_params_keys == ["logits"]
        written = score(td).keys(True)
        assert all(key in written for key in score.log_prob_keys + score.dist_sample_keys)
    policy = policy.get_new_version()
    policy.log_prob_keys = ["mine"]
    assert policy.log_prob_keys == ["mine"]
    assert isinstance(policy.model, nn.Module)


def test_versions_share_one_scorer_and_what_load_policy_knows():
    bare = TransformersWrapper(make_policy().model, tokenizer=make_policy().tokenizer)
    assert bare.get_new_version(generate=False).scorer is bare.scorer
    loaded = load_policy("tiny", autocast="bfloat16", system_prompt="Sort.")
    version = loaded.get_new_version(generate=False)
    assert version.scorer.autocast is torch.bfloat16
    assert (version.found, version.source, version.system_prompt) == (loaded.found, "auto", "Sort.")
    other = loaded.get_new_version(model=make_policy().model)
    assert other.system_prompt == "Sort."
    assert not hasattr(other, "found")  # the weights are from elsewhere
