"""Decoding: buffers of fixed size, with and without a CUDA graph, against a growing cache."""

from typing import ClassVar

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from policies import decoding, sampler
from policies.decoding import Decoding, GraphDecoding, fits_graph
from policies.models.fast.layers import replace_layers
from policies.random import fold
from policies.sampler import Stop, sample

V = 97
STOP = Stop(frozenset(range(4)))  # with random weights a token in 24 ends a response


class Plain(GraphDecoding):
    """The buffers of a graph, with a forward instead of the graph; notes their sizes."""

    sizes: ClassVar[set[tuple[int, int]]] = set()  # rows, tokens

    def _step(self) -> None:
        self.sizes.add((len(self.ids), self.mask.shape[-1]))
        self.out = self._forward()


def make_model(dtype: torch.dtype = torch.float32, **more) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=V, **sizes, **heads, **more)).eval().to(dtype)
    replace_layers(model)
    return model


def draw(model, monkeypatch, kind, *, max_new_tokens: int = 90, rows: int = 24):
    """Sample responses to two prompts of 3 and 7 tokens, which some rows share."""
    prompts = torch.arange(14).reshape(2, 7).repeat_interleave(rows // 2, 0) + 20
    attention = torch.ones_like(prompts, dtype=torch.bool)
    attention[: rows // 2, :4] = False
    monkeypatch.setattr(sampler, "decode", kind)
    device = model.device
    return sample(
        model,
        prompts.to(device),
        attention.to(device),
        stop=STOP,
        streams=fold(3, torch.arange(rows)),
        max_new_tokens=max_new_tokens,
    )


def test_the_bytes_of_a_row_cover_its_cache():
    model, ids = make_model(torch.float64), torch.arange(12).reshape(2, 6)
    layers = Decoding(model, ids, torch.ones_like(ids).bool()).cache.layers
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / len(ids)
    logits = decoding.LOGITS * 4 * model.config.vocab_size
    assert decoding.row_bytes(model, 6) == decoding.GROWTH * cache + logits


@pytest.mark.parametrize(("room", "few"), [(8, 24), (128, 4)])
def test_buffers_give_the_responses_of_a_growing_cache(monkeypatch, room, few):
    model = make_model(torch.float64)
    monkeypatch.setattr(decoding, "ROOM", room)
    monkeypatch.setattr(decoding, "FEW", few)
    monkeypatch.setattr(Plain, "sizes", set())
    want, got = (draw(model, monkeypatch, kind) for kind in (Decoding, Plain))
    assert 1 in want.lengths, "rows end at once"
    assert want.lengths.max() > 60, "and late"
    rows, tokens = ({size[i] for size in Plain.sizes} for i in (0, 1))
    if room == 8:
        assert len(tokens) > 3, "buffers grow with the responses"
    else:
        assert len(tokens) == len(rows) > 1, "without growth they change when half have ended"
        assert min(rows) <= few
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.complete, want.complete)
    torch.testing.assert_close(got.log_probs, want.log_probs)


def test_graphs_are_for_models_whose_steps_are_all_alike():
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    assert fits_graph(make_model())
    assert not fits_graph(make_model(rope_parameters=scaled))
    assert not fits_graph(make_model(**sliding))
    assert not fits_graph(make_model(attn_implementation="eager")), "it adds the mask"
    assert not fits_graph(torch.nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_graph_gives_the_log_probs_of_a_growing_cache(monkeypatch, autocast):
    model = make_model().cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        want, got, again = (draw(model, monkeypatch, kind) for kind in
                            (Decoding, decoding.decode, decoding.decode))  # fmt: skip
    assert torch.equal(got.ids, again.ids)
    assert torch.equal(got.log_probs, again.log_probs)
    limit, compared = 0.03 if autocast else 1e-4, 0
    for i, (one, two) in enumerate(zip(got.ids.tolist(), want.ids.tolist(), strict=True)):
        count = min(got.lengths[i], want.lengths[i])
        parted = [n for n in range(count) if one[n] != two[n]]  # by rounding
        end = parted[0] if parted else count
        both = got.log_probs[i, :end], want.log_probs[i, :end]
        torch.testing.assert_close(*both, atol=limit, rtol=0)
        compared += end
    assert compared > 0.5 * want.lengths.sum()
