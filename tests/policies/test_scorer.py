"""Scoring and sampling against a plain transformers forward, however the rows lie."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import make_policy

from benchmarks.measure import peak_bytes
from policies import layout
from policies.decoding import Decoding
from policies.load import load_policy
from policies.padding import pad, pad_mask
from policies.random import fold, inverse_cdf, uniforms
from policies.sampler import Stop, sample
from policies.scorer import Scorer

V = 400  # tokens of the tiny model


@cache
def model_of(scale: float = 1.0, attention: str | None = None):
    """Return the tiny model in float64 with random weights times `scale`."""
    model = load_policy("tiny", attn_implementation=attention).model.double()
    model.load_state_dict(make_policy().model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def draw_rows(sizes: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """Return full rows of random ids: for each prompt's length the lengths of its responses."""
    generator, rows = torch.Generator().manual_seed(0), []
    for size, responses in sizes:
        prompt = torch.randint(V, (size,), generator=generator)
        rows += [
            torch.cat([prompt, torch.randint(V, (n,), generator=generator)]) for n in responses
        ]
    return rows


ROWS = draw_rows([(5, [1, 6, 2, 4]), (9, [3, 1]), (3, [6, 6])])
TOKENS, MASK = pad(ROWS), pad_mask([len(r) for r in ROWS])
GROUP = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])


def plain(model, row: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-prob of each token by one forward and a loop; entry 0 is 0."""
    table = (model(input_ids=row[None]).logits[0] / temperature).log_softmax(-1)
    return torch.stack([table.new_zeros(())] + [table[t - 1, row[t]] for t in range(1, len(row))])


def flat_gradient(model, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("how", ["left", "right", "grouped", "packed", "eager"])
@settings(max_examples=12)
@given(
    sizes=st.lists(
        st.tuples(st.integers(2, 9), st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    width=st.integers(20, 60),
)
def test_scores_and_gradients_equal_a_plain_forward(how, sizes, width) -> None:
    model, rows = model_of(attention="eager" if how == "eager" else None), draw_rows(sizes)
    temperature = torch.linspace(0.5, 1.5, len(rows))
    side = "left" if how == "left" else "right"
    tokens, mask = pad(rows, side=side), pad_mask([len(r) for r in rows], side=side)
    generator = torch.Generator().manual_seed(width)
    keep = mask & (torch.rand(mask.shape, generator=generator) < 0.7)
    keep[:, 0 if side == "right" else -1] = True  # for a first token, which nothing predicts, 0
    coefficients = torch.randn(tokens.shape, dtype=torch.float64, generator=generator)
    options = {"temperature": temperature, "pack": how == "packed"}
    if how in ("grouped", "eager"):  # eager attention takes no boolean mask
        options["group_id"] = torch.repeat_interleave(torch.tensor([len(n) for _, n in sizes]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PACKED", width)
        scores = Scorer(model)(tokens, mask, keep, **options).log_probs
    alone = [plain(model, row, float(t)) for row, t in zip(rows, temperature, strict=True)]
    want = torch.zeros_like(coefficients).masked_scatter(mask, torch.cat(alone))
    torch.testing.assert_close(scores.double(), want * keep, atol=1e-5, rtol=0)
    usual = Scorer(model_of())(tokens, mask, keep, **options).log_probs  # of sdpa
    torch.testing.assert_close(scores, usual, atol=1e-5, rtol=0)
    got = flat_gradient(model, (scores * coefficients).sum())
    expected = flat_gradient(model, (want * keep * coefficients).sum())
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_a_group_shares_its_prompt_and_padding_leaves() -> None:
    chosen = layout.choose(TOKENS, MASK, MASK, GROUP)
    assert chosen.input_ids.shape == (3, 18)
    tokens = [5 + 1 + 6 + 2 + 4, 9 + 3 + 1, 3 + 6 + 6]
    assert chosen.unpadded().input_ids.shape == (1, sum(tokens))
    assert layout.full_rows(TOKENS, MASK, MASK).unpadded().input_ids.shape == (1, int(MASK.sum()))


@torch.no_grad()
@pytest.mark.parametrize("sharing", [(True, True), (True, False), (False, True)])
def test_entropy_and_exact_kl_equal_sums_over_the_vocabulary(sharing) -> None:
    model, other = model_of(), model_of(0.9)
    mine, theirs = (
        Scorer(m, share_prompts=s) for m, s in zip((model, other), sharing, strict=True)
    )
    options = {"entropy": True, "temperature": 1.3, "group_id": GROUP}
    scores = mine(TOKENS, MASK, reference=theirs, **options)
    for i, row in enumerate(ROWS):
        p, q = ((m(row[None]).logits[0, :-1] / 1.3).softmax(-1) for m in (model, other))
        for got, want in (
            (scores.entropy, -(p * p.log()).sum(-1)),
            (scores.divergence, (p * (p / q).log()).sum(-1)),
        ):
            torch.testing.assert_close(got[i, 1 : len(row)].double(), want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_exact_kl_to_a_wider_embedding_is_over_the_common_tokens() -> None:
    model, other = model_of(), copy.deepcopy(model_of())
    torch.manual_seed(1)
    other.resize_token_embeddings(V + 4, mean_resizing=False)
    tokens, mask = ROWS[0][None], torch.ones(1, len(ROWS[0]), dtype=torch.bool)
    for curr, ref in ((model, other), (other, model)):
        p, q = (m(tokens).logits[0, :-1].softmax(-1)[:, :V] for m in (curr, ref))
        got = Scorer(curr)(tokens, mask, reference=Scorer(ref)).divergence
        want = (p * (p / q).log()).sum(-1)
        torch.testing.assert_close(got[0, 1:].double(), want, atol=1e-5, rtol=0)


def test_nothing_to_score_still_touches_every_parameter() -> None:
    scores = Scorer(model_of())(TOKENS, MASK, torch.zeros_like(MASK))
    assert not flat_gradient(model_of(), scores.log_probs.sum()).any()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        sample(model_of(), torch.zeros(1, 0, dtype=torch.int64), streams=torch.zeros(1),
               stop=Stop(frozenset()), max_new_tokens=2)  # fmt: skip


@torch.no_grad()
def test_the_narrow_cache_of_autocast_changes_no_response() -> None:
    model, stop = load_policy("tiny").model, Stop(frozenset())
    prompts, cache, want = torch.arange(12).reshape(2, 6), None, []
    with torch.autocast("cpu", torch.bfloat16):
        got = sample(model, prompts, streams=torch.arange(2), stop=stop, max_new_tokens=8,
                     temperature=0)  # fmt: skip
        ids = prompts
        for _ in range(8):  # transformers' cache
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, table = out.past_key_values, out.logits[:, -1].float().softmax(-1)
            want.append(table.max(-1))
            ids = want[-1].indices[:, None]
        narrow = Decoding(model, prompts, torch.ones_like(prompts) > 0).cache.layers
    assert {layer.keys.dtype for layer in narrow} == {torch.bfloat16}
    assert torch.equal(got.ids, torch.stack([w.indices for w in want], 1))
    assert torch.equal(got.log_probs, torch.stack([w.values for w in want], 1).log())


def test_inverse_cdf_draws_the_distribution() -> None:
    probs = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3])
    u = uniforms(fold(3, torch.arange(20000)), torch.zeros(20000, dtype=torch.int64))
    drawn = inverse_cdf(probs.expand(20000, 5), u)
    share = torch.bincount(drawn, minlength=5) / 20000
    assert (share - probs).abs().max() < 0.015  # 4 standard errors
    assert share[0] == 0
    assert share[3] == 0


def test_inverse_cdf_never_overruns_the_last_token() -> None:
    largest = torch.full((3,), 1 - 2.0**-52, dtype=torch.float64)
    probs = torch.rand(3, 50000).softmax(-1)
    probs[:, -10:] = 0
    assert (inverse_cdf(probs, largest) < 50000 - 10).all()


def test_uniforms_are_uniform_and_differ_by_stream_and_position() -> None:
    stream = fold(0, torch.arange(500)[:, None].expand(500, 40)).flatten()
    position = torch.arange(40).repeat(500)
    u = uniforms(stream, position)
    assert len(u.unique()) == 20000
    counts = torch.histc(u.float(), 20, 0, 1)
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    grid = u.view(500, 40)
    correlation = torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1]
    assert correlation.abs() < 0.03


class Recurrent(torch.nn.Module):
    """What docs/debug.md asks of a network that is scored, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.base_model = object(), self.states
        self.embed, self.body = torch.nn.Embedding(V, 8), torch.nn.GRU(8, 8, batch_first=True)
        self.out = torch.nn.Linear(8, V)

    def states(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=self.body(self.embed(input_ids))[0])

    def get_output_embeddings(self):
        return self.out


def test_a_network_that_is_no_transformers_model_is_scored():
    model = Recurrent()
    scored = Scorer(model)(TOKENS, MASK, group_id=GROUP)
    for row, got in zip(ROWS, scored.log_probs, strict=True):
        table = model.out(model.states(row[None]).last_hidden_state[0]).log_softmax(-1)
        expected = table[:-1].gather(-1, row[1:, None]).squeeze(-1)
        torch.testing.assert_close(got[1 : len(row)], expected)
    scored.log_probs.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_backward_of_long_sequences_holds_less_at_once():
    ids = (torch.arange(512) % 40)[None]
    mask, kept = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    kept[:, -4:] = True
    peak = {}
    for on in (True, False):
        policy = load_policy("tiny", gradient_checkpointing=on)
        policy.scorer.train()
        policy.scorer(ids, mask, kept).log_probs.sum().backward()  # the gradients are there
        peak[on] = peak_bytes(
            lambda scorer=policy.scorer: scorer(ids, mask, kept).log_probs.sum().backward()
        )
    assert peak[True] < 0.7 * peak[False]  # there are two layers only
