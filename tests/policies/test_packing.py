"""Packed scoring (pad_model_input=False): sequences after each other in one forward, kept apart.

tests/policies/test_scorer.py compares packed scores and their gradients with plain forwards.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint
from support.policies import make_wrapper
from tensordict import TensorDict, lazy_stack
from transformers import MistralConfig, MistralForCausalLM

from policies import layout
from policies.chats.containers import Tokens
from policies.layout import pack_rows
from policies.padding import is_ragged, pad, pad_mask, rows
from policies.torchrl.transformers_wrapper import TransformersWrapper

SIZES = (3, 9, 1, 14, 6)


def ids(sizes=SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(200, (n,), generator=generator) for n in sizes]


def ragged(sequences) -> TensorDict:
    td = TensorDict(batch_size=[len(sequences)])
    return td.set("tokens", lazy_stack([Tokens(full=row) for row in sequences]))


def scoring(model, **more) -> TransformersWrapper:
    options = {"input_mode": "tokens", "generate": False, "pad_model_input": False, **more}
    return TransformersWrapper(model, tokenizer=None, **options)


def scored(policy, sequences) -> list[torch.Tensor]:
    return rows(policy(ragged(sequences)), ("log_probs", "full"))


@pytest.fixture(scope="module", params=["qwen2", "llama", "gpt2", "gemma"])
def family(request, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return scoring(str(folder), inplace=False)


@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 14), min_size=1, max_size=5), width=st.sampled_from([16, 64]))
def test_packed_scores_are_those_of_padded_rows_in_every_family(family, sizes, width):
    sequences = ids(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PACKED", width)  # tokens in a row
        packed = scored(family, sequences)
    padded = scored(family.get_new_version(pad_model_input=True), sequences)
    for got, want in zip(packed, padded, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_packing_is_the_models_business_outputs_are_as_asked(side):
    """Dense input stays as it lies, pad_output=True pads, kept tokens and parts are honoured."""
    td = TensorDict(batch_size=[len(SIZES)])
    td.set("tokens", Tokens(full=pad(ids(), side=side), padded=True, batch_size=[len(SIZES)]))
    td.set("attention_mask", pad_mask(SIZES, side=side))
    td.set("keep", torch.arange(max(SIZES)).remainder(3).eq(0).expand(len(SIZES), -1))
    td.set("temperature", torch.tensor([0.5, 1.0, 1.0, 2.0, 0.7]))
    make = {"pad_output": True, "score_mask_key": "keep", "inplace": False}
    packed = scoring(make_wrapper().scorer, **make)
    want = packed.get_new_version(pad_model_input=True)(td)["log_probs"].full
    assert (want != 0).sum() > 5
    for got in (packed(td), packed.get_new_version(micro_batch_tokens=20)(td)):
        assert not is_ragged(got["tokens"])
        torch.testing.assert_close(got["log_probs"].full, want, atol=1e-5, rtol=0)
    flipped = packed.get_new_version(pad_output=False)(td)
    assert [len(r) for r in rows(flipped, ("log_probs", "full"))] == list(SIZES)


def test_families_that_cannot_keep_sequences_apart_are_refused():
    config = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    mistral = MistralForCausalLM(MistralConfig(**config, **heads, sliding_window=8)).eval()
    with pytest.raises(ValueError, match="pad_model_input"):
        scoring(mistral)
    with pytest.raises(ValueError, match="pad_model_input"):
        make_wrapper().get_new_version(pad_model_input=True)


def test_parts_of_packed_rows_are_bound_by_their_tokens_not_by_their_padding():
    attention = torch.arange(6) < torch.tensor([[6], [1], [1], [2], [6], [5]])
    assert pack_rows(attention, 10, padded=False) == [[0, 1, 2, 3], [4], [5]]
    assert pack_rows(attention, 10) == [[0], [1, 2, 3], [4], [5]]
    assert pack_rows(attention, 3, padded=False) == [[0], [1, 2], [3], [4], [5]]
