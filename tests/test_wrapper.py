"""The policy as a TensorDict module: what it generates and scores, its distributions and versions.

Expected log-probs come from one plain forward per sequence. What the pages of the specification
say about each argument is tried in tests/specification_rows.
"""

import copy

import pytest
import torch
from contracts import make_policy, plain_log_probs
from torch import nn
from torch.distributions import Categorical
from wrapped import CHATS, SPOKEN, TEXTS, prompts, same, scoring, sequences, spoken

from policies.load import load_policy
from policies.padding import is_ragged, rows, unpad
from policies.sampler import Sampled
from policies.wrappers.transformers_wrapper import TransformersWrapper
from policies.wrappers.wrapper import LLMWrapperBase

ATTENTION, RESPONSE = ("masks", "all_attention_mask"), ("masks", "all_response_mask")

# Generation.


def test_the_end_of_turn_is_kept_when_it_is_the_padding_token():
    tokenizer = copy.deepcopy(make_policy().tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    plain = make_policy().get_new_version(num_samples=40)
    out = plain.get_new_version(tokenizer=tokenizer)(prompts())[0]
    same(out, plain(prompts())[0])
    assert any(ids[-1] == tokenizer.eos_token_id for ids, *_ in sequences(out))


def test_without_streams_torchs_generator_fixes_the_replies():
    policy, drawn = make_policy().get_new_version(inplace=False), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([ids.tolist() for ids, *_ in sequences(policy(prompts().exclude("stream")))])
    assert drawn[0] == drawn[1] != drawn[2]


def test_replies_follow_their_prompt_as_text_without_the_end_of_turn_and_may_be_empty():
    policy = make_policy()
    end = policy.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    out = policy.get_new_version(num_samples=128)(prompts()).reshape(-1)
    replies = [ids[mask] for ids, _, mask in sequences(out)]
    ended = [int(reply[-1]) in end for reply in replies]
    assert {int(r[-1]) for r in replies} > set(end), "the seed brings both ends and cut replies"
    assert min(map(len, replies)) == 1, "the seed brings a reply that ends at once"
    bodies = [reply[:-1] if e else reply for reply, e in zip(replies, ended, strict=True)]
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
    policy = make_policy().get_new_version(generate_kwargs=kwargs, num_samples=2, **options)
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
    td = make_policy().get_new_version(pad_output=padded)(prompts())
    want, replies, texts = sequences(td), td["history", "response"].chats(), td["text"].clone()
    out = scoring(pad_output=scored_padded)(td)
    assert out["history", "prompt"].chats() == CHATS
    assert out["history", "response"].chats() == replies
    for field in ("prompt", "response", "full"):
        assert out["text"].get(field) == texts.get(field)
    # Where sequences are padded left, prompts have no columns.
    asked = rows(out, ("tokens", "prompt")) if padded or not scored_padded else [None] * 3
    parts = zip(sequences(out), want, rows(out, ("tokens", "response")), asked, strict=True)
    for (ids, _, mask), (whole, _, sampled), reply, prompt in parts:
        assert torch.equal(ids, whole)
        assert torch.equal(mask, sampled)
        assert torch.equal(reply[: int(mask.sum())], ids[mask])
        assert prompt is None or torch.equal(prompt[-int((~mask).sum()) :], ids[~mask])


# torch warns that strided nested tensors are a prototype; whoever asks for them may know.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_unpadded_outputs_and_distributions_may_be_nested_tensors(layout):
    lazy = make_policy().get_new_version(pad_output=False, inplace=False)
    policy, want = lazy.get_new_version(layout=layout), lazy(prompts())
    out = policy(prompts())
    same(out, want)
    if layout is torch.jagged:  # one ragged size, so that fields go together
        kept = out["log_probs"].full * out["masks"].all_response_mask
        assert kept.values().sum() == out["log_probs"].full.values().sum()
    score = policy.get_new_version(generate=False)
    found = score.log_prob(out, as_nested_tensor=True, layout=layout)
    assert found.layout is layout
    dist = score.get_dist(out, as_nested_tensor=True, layout=layout)
    parts = (x.unbind() for x in (dist.nested_logits, dist.entropy(), dist.sample()))
    for logits, entropy, drawn in zip(*parts, strict=True):
        torch.testing.assert_close(entropy, Categorical(logits=logits).entropy())
        assert drawn.shape == entropy.shape
    for values in (found.unbind(), rows(score(out), ("log_probs", "response"))):
        for got, response in zip(values, rows(want, ("log_probs", "response")), strict=True):
            torch.testing.assert_close(got, response, atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_inputs_move_to_the_models_device_and_outputs_back():
    policy = TransformersWrapper("tiny", device="cuda", pad_output=True, inplace=False)
    out = policy(prompts())
    scored = policy.get_new_version(generate=False)(out)
    assert {td["tokens"].full.device.type for td in (out, scored)} == {"cpu"}
    mask = out["masks"].all_response_mask
    got, want = (td["log_probs"].full[mask] for td in (scored, out))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert policy(prompts().to("cuda"))["tokens"].full.device.type == "cuda"


# Versions.


def test_a_new_version_keeps_what_was_changed_but_not_what_another_direction_or_mode_reads():
    policy = make_policy()
    before = copy.copy(policy._settings)
    changed = {"pad_output": False, "num_samples": 4, "log_probs_key": "x", "max_batch_size": 3}
    changed |= {"generate_kwargs": {"max_new_tokens": 2}, "input_key": ("history", "prompt")}
    policy = policy.get_new_version(**changed).get_new_version()
    assert policy._settings == before | changed
    assert make_policy()._settings == before
    assert policy.get_new_version(generate=False).in_keys == [("history", "full")]
    assert policy.get_new_version(input_mode="tokens").in_keys == [("tokens", "prompt")]
    assert policy.get_new_version(generate=False, input_key="x").in_keys == ["x"]
    packed = policy.get_new_version(generate=False, pad_model_input=False)
    assert packed.get_new_version(generate=True).pad_model_input is None


def test_versions_share_one_scorer_and_what_load_policy_knows():
    bare = TransformersWrapper(make_policy().model, tokenizer=make_policy().tokenizer)
    assert bare.get_new_version(generate=False).scorer is bare.scorer
    loaded = load_policy("tiny", autocast="bfloat16", system_prompt="Sort.")
    version = loaded.get_new_version(generate=False)
    assert version.scorer.autocast is torch.bfloat16
    assert (version.files, version.source, version.system_prompt) == (loaded.files, "auto", "Sort.")
    other = loaded.get_new_version(model=make_policy().model)
    assert other.system_prompt == "Sort."
    assert not hasattr(other, "files")  # the weights are from elsewhere


# Scoring.


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_padding_is_no_token_however_the_rows_lie(lazy, mode):
    td = make_policy()(prompts())
    assert not td[ATTENTION].all()
    want = sequences(td)
    given = td.select(("tokens", "full"), ATTENTION, RESPONSE)
    given = given.to_lazystack(0) if lazy else given
    for padded in (True, False):
        score = scoring(input_mode=mode, inplace=False, pad_output=padded)
        out = score(given)
        for (found, values, mask), (ids, _, response) in zip(sequences(out), want, strict=True):
            assert torch.equal(found, ids)
            assert torch.equal(mask, response)
            plain = plain_log_probs(make_policy(), ids, 1.0).float()
            torch.testing.assert_close(values, plain, atol=1e-5, rtol=0)
        dist = score.get_dist(given, mask_key=RESPONSE)
        assert dist.mask.sum(-1).tolist() == [int(response.sum()) for *_, response in want]


@pytest.mark.parametrize("padded", [True, False])
def test_the_response_of_a_chat_starts_with_the_first_token_of_the_assistant(padded):
    out = scoring(pad_output=padded)(spoken())
    for chat, response in zip(SPOKEN, rows(out, ("log_probs", "response")), strict=True):
        done = make_policy().renderer.render(chat)
        want = plain_log_probs(make_policy(), torch.tensor(done.ids), 1.0).float()
        want = want[done.assistant.index(True) :]
        torch.testing.assert_close(response[: len(want)], want, atol=1e-5, rtol=0)


DROPS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAMED = {name: {"chat_template_name": name} for name in ("qwen", "llama", "deepseek", "falcon")}


@pytest.mark.parametrize("template", [*NAMED.values(), {"chat_template": DROPS}])
def test_a_wrapper_scores_what_it_generated_under_every_template(template):
    """Templates put blanks, plain words or nothing around a reply, or leave thoughts out."""
    hot = {"max_new_tokens": 30, "temperature": 1.5}
    policy = make_policy().get_new_version(generate_kwargs=hot, num_samples=4, **template)
    td = policy(prompts())
    scored = policy.get_new_version(generate=False)(td)
    for a, b in zip(*(rows(x, ("log_probs", "response")) for x in (td, scored)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_log_prob_scores_anew_with_a_gradient_and_only_what_is_asked():
    td = make_policy()(prompts())
    whole, stored = td["log_probs"].full.clone(), td["log_probs"].response.clone()
    td["log_probs"].response.fill_(7.0)  # stale values are not believed
    filled = scoring(pad_output=False).log_prob(td.copy(), as_padded_tensor=True)
    for got in (scoring().log_prob(td), filled):
        torch.testing.assert_close(got, stored, atol=1e-5, rtol=0)
        assert got.requires_grad
    part = scoring(score_mask_key=RESPONSE)(td)["log_probs"].full
    torch.testing.assert_close(part, whole, atol=1e-5, rtol=0)


# Distributions.


def test_distributions_of_a_rollout_give_its_log_probs_at_its_temperature():
    kwargs = {**make_policy().generate_kwargs, "temperature": 0.5}
    td = make_policy().get_new_version(generate_kwargs=kwargs)(prompts())
    dist = scoring()._get_sft_dist(td)
    assert torch.equal(dist.mask, td["masks"].all_response_mask)
    got = dist.log_prob(td["tokens"].full)
    torch.testing.assert_close(got, td["log_probs"].full, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_distribution_under_the_assistant_mask_may_be_asked_for_again(side, padded):
    policy, td = scoring(pad_output=padded, inplace=False), spoken()
    first = policy._get_rlhf_dist(td, padding_side=side)
    for ask in (policy._get_rlhf_dist, policy._get_sft_dist):  # now from the ids that it wrote
        again = ask(td, padding_side=side)
        assert torch.equal(again.mask, first.mask)
        assert torch.equal(again.logits, first.logits)
    fresh = policy.log_prob(spoken(), as_list=True)
    for a, b in zip(policy.log_prob(td, as_list=True), fresh, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_only_the_ids_of_the_history_have_its_assistant_mask():
    td = scoring(pad_output=False)(spoken()).select(("tokens", "full"), "history")
    assert scoring()._get_rlhf_dist(td.copy()).mask.sum() > 0
    rows(td, ("tokens", "full"))[1][2] += 1
    with pytest.raises(ValueError, match="all_assistant_mask"):
        scoring()._get_rlhf_dist(td)


def test_responses_are_found_by_the_prompts_padded_or_ragged():
    want = [int(mask.sum()) for *_, mask in sequences(make_policy()(prompts()))]
    for padded in (True, False):
        td = make_policy().get_new_version(pad_output=padded, inplace=False)(prompts())
        td = td.exclude("masks", "history", "text", "log_probs")
        if padded:  # without masks every column of dense ids counts
            td["attention_mask"] = make_policy()(prompts())["masks"].all_attention_mask
        assert scoring(pad_output=padded)._get_sft_dist(td).mask.sum(-1).tolist() == want


# A wrapper of a user's own.


class Bigrams(LLMWrapperBase):
    """Say the likeliest token given the last one, by a table [V, V] of logits."""

    def _logits(self, tokens, attention):
        return self.model(tokens.roll(1, -1)).masked_fill(~attention.unsqueeze(-1), 0.0)

    @torch.no_grad()
    def _draw(self, prompts, attention, streams):
        table = (self.model.weight / self.temperature).log_softmax(-1)
        replies, values = [], []
        for row in unpad(prompts, attention):
            reply = [int(row[-1])]
            while len(reply) <= self.max_new_tokens and reply[-1] not in self.stop_ids:
                reply.append(int(table[reply[-1]].argmax()))
            replies.append(torch.tensor(reply[1:]))
            values.append(table[reply[:-1], reply[1:]])
        ended = torch.tensor([int(reply[-1]) in self.stop_ids for reply in replies])
        return Sampled.of_rows(replies, values, ended)


@pytest.mark.parametrize("padded", [True, False])
def test_a_wrapper_of_ones_own_has_all_of_the_base(padded):
    torch.manual_seed(0)
    table = nn.Embedding(400, 400)
    kwargs = {"max_new_tokens": 5, "temperature": 0.6}
    settings = {"tokenizer": make_policy().tokenizer, "pad_output": padded, "inplace": False}
    policy = Bigrams(table, generate_kwargs=kwargs, **settings)
    out, score = policy(prompts().reshape(3, 1)), policy.get_new_version(generate=False)
    scored = score(out).reshape(-1)
    logp = (table.weight.detach() / 0.6).log_softmax(-1)
    keys = ("masks", "all_attention_mask"), ("log_probs", "full")
    parts = zip(sequences(out.reshape(-1)), *(rows(scored, key) for key in keys), strict=True)
    for (ids, values, mask), keep, full in parts:
        want = torch.cat([torch.zeros(1), logp[ids[:-1], ids[1:]]])
        torch.testing.assert_close(values, want * mask, atol=1e-5, rtol=0)
        torch.testing.assert_close(full[keep], want, atol=1e-5, rtol=0)
    assert is_ragged(out.reshape(-1)["tokens"]) is not padded
    dist = score._get_sft_dist(out)
    assert dist.logits.shape[:-2] == (3, 1)
    assert dist.mask.sum() == sum(mask.sum() for *_, mask in sequences(out.reshape(-1)))
    same(out.reshape(-1), policy.get_new_version(batching=True)(prompts()))
    mute = type("Mute", (Bigrams,), {"_draw": LLMWrapperBase._draw})(table, **settings)
    with pytest.raises(NotImplementedError, match="Mute"):
        mute(prompts())
