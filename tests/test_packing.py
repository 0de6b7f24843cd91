"""Packed scoring (pad_model_input=False): sequences after each other in one forward, kept apart.

Expected log-probs come from one plain transformers forward per sequence.
"""

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import make_policy, plain_log_probs
from tensordict import TensorDict, lazy_stack
from transformers import MistralConfig, MistralForCausalLM

from policies import layout
from policies.chats.containers import Tokens
from policies.layout import pack_rows
from policies.padding import is_ragged, pad, pad_mask, rows
from policies.wrappers.transformers_wrapper import TransformersWrapper

SIZES = (3, 9, 1, 14, 6)


def ids(size: int = 200, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(size, (n,), generator=generator) for n in SIZES]


def ragged(sequences) -> TensorDict:
    td = TensorDict(batch_size=[len(sequences)])
    return td.set("tokens", lazy_stack([Tokens(full=row) for row in sequences]))


def scoring(model, **more) -> TransformersWrapper:
    settings = {"input_mode": "tokens", "generate": False, "pad_model_input": False, **more}
    return TransformersWrapper(model, tokenizer=None, **settings)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "gemma"])
@pytest.mark.parametrize("width", [2048, 16])
def test_packed_scores_are_those_of_each_sequence_alone(kind, width, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "PACKED", width)  # all in one row, or several rows
    policy = scoring(str(make_checkpoint(tmp_path / kind, kind)))
    td = ragged(ids())
    seen = []
    hook = policy.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    out = policy(td)
    hook.remove()
    assert seen == [torch.Size([1, sum(SIZES)] if width == 2048 else [3, 15])]
    padded = policy.get_new_version(pad_model_input=True)(td.clone())
    dist = policy.get_dist(td)
    for i, row in enumerate(ids()):
        want = plain_log_probs(policy, row, 1.0).float()
        for got in (out, padded):
            values = rows(got, ("log_probs", "full"))[i]
            torch.testing.assert_close(values, want, atol=1e-5, rtol=0)
        picked = dist.logits[i, -len(row) :].log_softmax(-1).gather(-1, row[:, None]).squeeze(-1)
        torch.testing.assert_close(picked[1:], want[1:], atol=1e-5, rtol=0)


def test_packed_tokens_see_neither_what_follows_nor_other_sequences():
    policy = scoring(make_policy().scorer)
    base = rows(policy(ragged(ids())), ("log_probs", "full"))
    changed = ids()
    changed[1][5] = (changed[1][5] + 1) % 200
    moved = rows(policy(ragged(changed)), ("log_probs", "full"))
    for i, (a, b) in enumerate(zip(base, moved, strict=True)):
        if i != 1:
            assert torch.equal(a, b), "another sequence was seen"
    assert torch.equal(base[1][:5], moved[1][:5]), "a later token was seen"
    assert (base[1][5:] != moved[1][5:]).all()
    # The first token of a sequence is predicted by nothing, the second by the first alone.
    assert all(row[0] == 0 for row in base)
    turned = rows(policy(ragged(ids()[::-1])), ("log_probs", "full"))[::-1]
    for a, b in zip(base, turned, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_packing_is_the_models_business_outputs_are_as_asked(side):
    """Dense input stays as it lies, pad_output=True pads, kept tokens and parts are honoured."""
    sequences = ids()
    td = TensorDict(batch_size=[len(SIZES)])
    td.set("tokens", Tokens(full=pad(sequences, side=side), padded=True, batch_size=[len(SIZES)]))
    td.set("attention_mask", pad_mask(SIZES, side=side))
    td.set("keep", torch.arange(max(SIZES)).remainder(3).eq(0).expand(len(SIZES), -1))
    td.set("temperature", torch.tensor([0.5, 1.0, 1.0, 2.0, 0.7]))
    make = {"pad_output": True, "score_mask_key": "keep", "inplace": False}
    packed = scoring(make_policy().scorer, **make)
    plain = packed.get_new_version(pad_model_input=True)
    small = packed.get_new_version(micro_batch_tokens=20)
    want = plain(td)["log_probs"].full
    assert (want != 0).sum() > 5
    for got in (packed(td), small(td)):
        assert not is_ragged(got["tokens"])
        torch.testing.assert_close(got["log_probs"].full, want, atol=1e-5, rtol=0)
    flipped = packed.get_new_version(pad_output=False)(td)
    assert [len(r) for r in rows(flipped, ("log_probs", "full"))] == list(SIZES)


def test_packed_gradients_are_those_of_the_padded_forward():
    policy = make_policy()
    grads = []
    for packed in (False, True):
        policy.model.zero_grad()
        scorer = scoring(policy.scorer, pad_model_input=not packed, pad_output=True)
        scorer(ragged(ids()))["log_probs"].full.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
    policy.model.zero_grad()
    assert ((grads[1] - grads[0]).norm() / grads[0].norm()) < 1e-5


def test_families_that_cannot_keep_sequences_apart_are_refused():
    config = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    mistral = MistralForCausalLM(MistralConfig(**config, **heads, sliding_window=8)).eval()
    with pytest.raises(ValueError, match="MistralForCausalLM cannot score packed sequences"):
        scoring(mistral)
    with pytest.raises(ValueError, match="pad_model_input is not supported when generate=True"):
        make_policy().get_new_version(pad_model_input=True)


def test_parts_of_packed_rows_are_bound_by_their_tokens_not_by_their_padding():
    attention = torch.arange(6) < torch.tensor([[6], [1], [1], [2], [6], [5]])
    assert pack_rows(attention, 10, padded=False) == [[0, 1, 2, 3], [4], [5]]
    assert pack_rows(attention, 10) == [[0], [1, 2, 3], [4], [5]]
    assert pack_rows(attention, 3, padded=False) == [[0], [1, 2], [3], [4], [5]]
