"""The policy on real vLLM (make test-vllm): its ids, log-probs and weights against transformers.

Expected log-probs come from one plain float64 log-softmax over a transformers forward.
"""

import os
import sys

import pytest
import torch
from support.chats import prompts, sequences, spoken
from support.checkpoints import make_checkpoint
from support.policies import make_wrapper, plain_log_probs
from tensordict import TensorDict

from policies.chats.containers import Tokens
from policies.engines.vllm_engine import VLLMEngine, load_engine
from policies.engines.vllm_policy import make_vllm_generator
from policies.load import load_policy
from policies.padding import is_ragged, rows
from policies.torchrl.vllm_wrapper import vLLMWrapper
from trainer.weight_sync import weight_sync

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, of each engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
vllm_test = pytest.mark.vllm
# vLLM's own warnings, and those of what it imports, are not leash's.
pytestmark = pytest.mark.filterwarnings("default")
SMALL = {"max_num_seqs": 64, "block_size": 32}
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the weights of policies.make_wrapper."""
    path = tmp_path_factory.mktemp("policy")
    make_wrapper().model.save_pretrained(path)
    make_wrapper().tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder) -> VLLMEngine:
    return load_engine(folder, **SMALL)


@pytest.fixture
def policy(engine) -> vLLMWrapper:
    return vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 6}, pad_output=True)


def check(td: TensorDict, plain, temperature: float = 1.0) -> None:
    """Assert that the log-probs of a generated td are those of a plain forward, 0 elsewhere."""
    for ids, values, mask in sequences(td):
        assert not mask[0]
        assert mask[-1]
        want = plain_log_probs(plain, ids, temperature).float() * mask
        torch.testing.assert_close(values, want, **TOLERANCE)


# Generation and scoring.


@vllm_test
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_every_mode_generates_and_scores_as_transformers_does(policy, mode, padded):
    peer, settings = make_wrapper(), {"input_mode": mode, "pad_output": padded}
    out = policy.get_new_version(**settings)(prompts(mode))
    want = peer.get_new_version(**settings)(prompts(mode))
    check(out, peer)
    assert is_ragged(out["tokens"]) is not padded
    assert set(out.keys(True, True)) == set(want.keys(True, True))
    for (ids, _, mask), (ids2, _, mask2) in zip(sequences(out), sequences(want), strict=True):
        assert torch.equal(ids[~mask], ids2[~mask2]), "the prompt goes in and out as ids"
    out, want = (
        p.get_new_version(generate=False, **settings)(spoken(mode)) for p in (policy, peer)
    )
    for key in (("tokens", "full"), ("log_probs", "full"), ("masks", "all_attention_mask")):
        for a, b in zip(rows(out, key), rows(want, key), strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)


@vllm_test
def test_a_stream_fixes_a_row_and_responses_end_at_the_end_token_or_the_limit(policy):
    together, alone = sequences(policy(prompts())), sequences(policy(prompts()[1:2]))[0]
    assert torch.equal(together[1][0], alone[0])
    out = policy.get_new_version(num_samples=8, inplace=False)(prompts()).reshape(-1)
    responses = [ids[mask] for ids, _, mask in sequences(out)]
    ended = [int(response[-1]) in policy.stop_ids for response in responses]
    assert 0 < sum(ended) < len(ended)
    for response, end in zip(responses, ended, strict=True):
        assert end or len(response) == 6
        assert not policy.stop_ids & set(response[:-1].tolist())
    assert [bool(c[0]) for c in out["history"].response.is_complete] == ended


@vllm_test
def test_without_a_seed_for_each_row_the_draws_depend_on_the_batch_alone(
    policy, engine, monkeypatch
):
    speak, seeded = policy.get_new_version(inplace=False), policy(prompts())
    monkeypatch.setattr(engine, "seeded", False)
    first, again = speak(prompts()), speak(prompts())
    check(first, make_wrapper())
    ids = [[row[0].tolist() for row in sequences(td)] for td in (seeded, first, again)]
    assert ids[0] != ids[1] == ids[2]


@vllm_test
def test_log_probs_are_those_of_what_the_settings_leave(policy):
    greedy = {"max_new_tokens": 6, "do_sample": False}
    out = policy.get_new_version(generate_kwargs=greedy)(prompts())
    peer = make_wrapper().get_new_version(generate_kwargs=greedy)(prompts())
    for (ids, values, _), (ids2, values2, _) in zip(sequences(out), sequences(peer), strict=True):
        assert torch.equal(ids, ids2)
        torch.testing.assert_close(values, values2, **TOLERANCE)
    top = {"max_tokens": 4, "top_k": 2, "temperature": 0.7}
    for ids, values, mask in sequences(policy.get_new_version(generate_kwargs=top)(prompts())):
        assert 1 <= mask.sum() <= 4
        with torch.no_grad():
            logits = make_wrapper().model(input_ids=ids[None]).logits[0].double() / 0.7
        best, which = logits.topk(2)
        table = torch.full_like(logits, -torch.inf).scatter(-1, which, best).log_softmax(-1)
        want = table[:-1].gather(-1, ids[1:, None])[:, 0].float()
        torch.testing.assert_close(values[1:][mask[1:]], want[mask[1:]], **TOLERANCE)


@vllm_test
def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(policy):
    kwargs = {"max_new_tokens": 24, "min_new_tokens": 24}
    ids, _, mask = sequences(policy.get_new_version(generate_kwargs=kwargs)(prompts()))[0]
    sampled, decode = ids[mask], policy.tokenizer.decode
    stop = decode(sampled[3:5])
    cut = policy.get_new_version(generate_kwargs={"max_new_tokens": 24, "stop": [stop]})
    ids, _, mask = sequences(cut(prompts()))[0]
    got = ids[mask]
    assert torch.equal(got, sampled[: len(got)])
    assert stop in decode(got)
    assert stop not in decode(got[:-1])


@vllm_test
def test_what_vllm_cannot_do_is_refused(engine, policy):
    for key, value in {"num_beams": 4, "max_new_tokens": 600}.items():
        with pytest.raises(ValueError, match=f"{key}|{value}"):
            vLLMWrapper(engine, generate_kwargs={key: value})(prompts())
    with pytest.raises(NotImplementedError, match="TransformersWrapper"):
        policy.get_new_version(generate=False).get_dist(spoken())


@vllm_test
def test_scores_are_at_the_temperature_of_each_row_and_only_where_asked(policy):
    td = policy(prompts()).exclude("history", "text")
    td.set("temperature", torch.tensor([0.5, 1.0, 2.0]))
    score = policy.get_new_version(generate=False, inplace=False)
    asked = {"temperature_key": "temperature"}
    out = score(td, **asked)
    key = ("masks", "all_response_mask")
    part = score.get_new_version(score_mask_key=key)(td, **asked)
    for i, t in enumerate((0.5, 1.0, 2.0)):
        keep, mask = td["masks", "all_attention_mask"][i], td[key][i]
        want = plain_log_probs(make_wrapper(), td["tokens", "full"][i][keep], t).float()
        torch.testing.assert_close(out["log_probs", "full"][i][keep], want, **TOLERANCE)
        assert torch.equal(part["log_probs", "full"][i], out["log_probs", "full"][i] * mask)
    again = policy.get_new_version(generate=False)(spoken())  # the engine's scale is back
    peer = make_wrapper().get_new_version(generate=False)(spoken())
    torch.testing.assert_close(again["log_probs"].full, peer["log_probs"].full, **TOLERANCE)


# Weights.


@vllm_test
def test_new_weights_reach_vllm_and_what_the_old_ones_cached_is_gone(engine, policy):
    teacher = load_policy("tiny", max_new_tokens=6)
    teacher.model.load_state_dict(make_wrapper().model.state_dict())
    ids = torch.arange(3, 103)[None]  # three blocks of 32 that vLLM keeps
    td = TensorDict({"tokens": Tokens(prompt=ids, padded=True, batch_size=[1])}, batch_size=[1])
    td.set("attention_mask", torch.ones_like(ids, dtype=torch.bool))
    speak = policy.get_new_version(input_mode="tokens")
    check(speak(td.copy()), teacher)
    try:
        with torch.no_grad():
            for p in teacher.model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        done = weight_sync(teacher, speak)
        assert done.before > 0.1
        assert done.after < 1e-4
        assert speak.version == teacher.version == 1
        out = speak(td.copy())
        check(out, teacher)
        assert out["policy_version"].tolist() == [1]
        with torch.no_grad():  # a copy: later steps of the trainer do not leak into vLLM
            teacher.model.get_input_embeddings().weight.mul_(2)
        assert weight_sync(teacher, speak).before > 0.1
    finally:
        engine.update_weights(make_wrapper().model.state_dict().items())


# Models.


@vllm_test
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2"])
def test_other_families_agree_with_transformers(kind, tmp_path):
    name = str(make_checkpoint(tmp_path, kind, head=32))
    plain = load_policy(name, max_new_tokens=6)
    policy = vLLMWrapper(load_engine(name, **SMALL), generate_kwargs={"max_new_tokens": 6})
    assert policy.stop_ids == plain.stop_ids
    check(policy(prompts()), plain)
    assert weight_sync(plain, policy).after < 1e-4


@vllm_test
def test_an_engine_whose_log_probs_ignore_the_temperature_is_refused(folder):
    raw = load_engine(folder, logprobs_mode="raw_logprobs", **SMALL).llm
    check(vLLMWrapper(raw, generate_kwargs={"max_new_tokens": 4})(prompts()), make_wrapper())
    with pytest.raises(ValueError, match="processed_logprobs"):
        vLLMWrapper(raw, generate_kwargs={"temperature": 0.5})


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"\.\[vllm\]"):
        vLLMWrapper("tiny")


# A second engine in the process ends the fixture's.
@vllm_test
def test_an_engine_has_room_for_the_longest_prompt_and_its_response(tmp_path):
    """Its cache has to hold one such row, not one of all positions of the model."""
    policy = load_policy("tiny", max_prompt_tokens=40, max_new_tokens=6)
    generator = make_vllm_generator(policy, folder=tmp_path)
    prompt = Tokens(prompt=torch.arange(40)[None], padded=True, batch_size=[1])
    td = TensorDict(tokens=prompt, batch_size=[1])
    tokens = generator.get_new_version(inplace=False)(td)["tokens"]
    assert generator.scorer.llm.llm_engine.model_config.max_model_len == 46
    assert tokens.full.shape[1] > 40
