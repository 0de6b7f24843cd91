"""Scoring and sampling against a plain transformers forward, in both layouts."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from policies import layout, token_distribution
from policies.padding import pad, pad_mask, unpad
from policies.random import fold, inverse_cdf, uniforms
from policies.sampler import Stop, sample
from policies.scorer import Scorer

V = 60
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


def make_model(kind: str = "qwen2", dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    pair = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "llama": (LlamaForCausalLM, LlamaConfig)}
    model = pair[kind][0](pair[kind][1](**SIZES)).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    return model


def make_groups(seed: int = 0) -> tuple[list[torch.Tensor], list[int]]:
    """Return 3 prompts x 4 replies as full rows, and the prompt lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows, cuts = [], []
    for size in (5, 9, 3):
        prompt = torch.randint(V, (size,), generator=generator)
        for _ in range(4):
            n = int(torch.randint(1, 7, (1,), generator=generator))
            rows.append(torch.cat([prompt, torch.randint(V, (n,), generator=generator)]))
            cuts.append(size)
    return rows, cuts


def plain(model, row: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-prob of each token by one forward and a loop; entry 0 is 0."""
    table = (model(input_ids=row[None]).logits[0] / temperature).log_softmax(-1)
    return torch.stack([table.new_zeros(())] + [table[t - 1, row[t]] for t in range(1, len(row))])


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("grouped", [False, True])
def test_scores_and_gradients_equal_a_plain_forward(kind, side, grouped) -> None:
    model = make_model(kind)
    rows, _ = make_groups()
    tokens, mask = pad(rows, side=side), pad_mask([len(r) for r in rows], side=side)
    group = torch.arange(3).repeat_interleave(4) if grouped else None
    if grouped:  # make sure that the shared layout is really the one under test
        assert layout.choose(tokens, mask, mask, group).attention_mask.ndim == 4
    coefficients = torch.randn(12, tokens.shape[1], dtype=torch.float64)

    scores = Scorer(model)(tokens, mask, temperature=0.7, group_id=group)
    (scores.log_probs * coefficients).sum().backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    want = [plain(model, row, 0.7) for row in rows]
    torch.cat([w * c[m] for w, c, m in zip(want, coefficients, mask, strict=True)]).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])

    for i, row in enumerate(want):
        torch.testing.assert_close(scores.log_probs[i][mask[i]].double(), row, atol=1e-5, rtol=0)
    assert not scores.log_probs[~mask].any()
    assert (got - expected).norm() / expected.norm() < 1e-5


def test_only_kept_tokens_are_scored() -> None:
    model = make_model()
    rows, _ = make_groups()
    tokens, mask = pad(rows), pad_mask([len(r) for r in rows])
    keep = mask & (torch.rand(mask.shape) < 0.3)
    keep[:, 0] = True  # the first token has no prediction: asking for it gives 0
    scores = Scorer(model)(tokens, mask, keep)
    for i, row in enumerate(rows):
        want = plain(model, row) * keep[i, : len(row)]
        torch.testing.assert_close(
            scores.log_probs[i, : len(row)].double(), want, atol=1e-5, rtol=0
        )


@torch.no_grad()
def test_entropy_and_exact_kl_equal_sums_over_the_vocabulary() -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    rows, _ = make_groups()
    tokens, mask = pad(rows), pad_mask([len(r) for r in rows])
    scores = Scorer(model)(tokens, mask, entropy=True, temperature=1.3, reference=Scorer(other))
    for i, row in enumerate(rows[:3]):
        p = (model(row[None]).logits[0] / 1.3).softmax(-1)
        q = (other(row[None]).logits[0] / 1.3).softmax(-1)
        for t in range(1, len(row)):
            entropy = -sum(float(x) * float(x.log()) for x in p[t - 1])
            kl = sum(
                float(x) * float((x / y).log()) for x, y in zip(p[t - 1], q[t - 1], strict=True)
            )
            assert float(scores.entropy[i, t]) == pytest.approx(entropy, abs=1e-5)
            assert float(scores.full_kl[i, t]) == pytest.approx(kl, abs=1e-5)


@pytest.mark.parametrize("sharing", [(True, False), (False, True)])
def test_each_model_lays_prompts_out_as_it_can_in_the_exact_kl(sharing, monkeypatch) -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    rows, _ = make_groups()
    tokens, mask = pad(rows), pad_mask([len(r) for r in rows])
    group = torch.arange(3).repeat_interleave(4)
    want = Scorer(model)(tokens, mask, reference=Scorer(other)).full_kl
    laid, inner = [], Scorer.hidden
    monkeypatch.setattr(
        Scorer, "hidden", lambda self, lay: laid.append(lay.attention_mask.ndim) or inner(self, lay)
    )
    mine, theirs = (
        Scorer(m, share_prompts=s) for m, s in zip((model, other), sharing, strict=True)
    )
    got = mine(tokens, mask, group_id=group, reference=theirs).full_kl
    assert laid == [4 if s else 2 for s in sharing]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_the_exact_kl_to_a_wider_embedding_is_over_the_common_tokens() -> None:
    model, other = make_model(), make_model()
    torch.manual_seed(1)
    other.resize_token_embeddings(V + 4, mean_resizing=False)
    rows, _ = make_groups()
    tokens, mask = pad(rows[:1]), pad_mask([len(rows[0])])
    with torch.no_grad():
        p, q = (m(rows[0][None]).logits[0].softmax(-1) for m in (model, other))
        for (curr, ref), (a, b) in {(model, other): (p, q), (other, model): (q, p)}.items():
            got = Scorer(curr)(tokens, mask, reference=Scorer(ref)).full_kl
            for t in range(1, len(rows[0])):
                want = sum(float(a[t - 1, v] * (a[t - 1, v] / b[t - 1, v]).log()) for v in range(V))
                assert float(got[0, t]) == pytest.approx(want, abs=1e-5)


def test_slices_of_the_head_change_nothing(monkeypatch) -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    rows, _ = make_groups()
    tokens, mask = pad(rows), pad_mask([len(r) for r in rows])
    temperature = torch.linspace(0.5, 1.5, 12)
    found, kept = [], []

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape)
        return x

    for size in (2**26, 7 * V):  # all tokens at once, and 7 at a time
        monkeypatch.setattr(token_distribution, "SLICE", size)
        model.zero_grad()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = Scorer(model)(
                tokens, mask, temperature=temperature, entropy=True, reference=Scorer(other)
            )
        # Between forward and backward no slice's logits are held.
        assert any(s[-1:] == (V,) for s in kept) == (size > 7 * V)
        (out.log_probs - 0.3 * out.full_kl).sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((out.log_probs, out.entropy, out.full_kl, grads))
    assert all(p.grad is None for p in other.parameters())
    for whole, sliced in zip(*found, strict=True):
        torch.testing.assert_close(sliced, whole, atol=1e-6, rtol=1e-6)


def test_logits_are_aligned() -> None:
    model = make_model()
    rows, _ = make_groups()
    tokens, mask = pad(rows, side="left"), pad_mask([len(r) for r in rows], side="left")
    logits = Scorer(model).logits(tokens, mask)
    for i, row in enumerate(rows):
        want = model(row[None]).logits[0, :-1]
        torch.testing.assert_close(logits[i][mask[i]][1:].double(), want, atol=1e-5, rtol=0)
        assert not logits[i][mask[i]][0].any()


def test_nothing_to_score_still_touches_every_parameter() -> None:
    model = make_model()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    scores = Scorer(model)(tokens, mask, torch.zeros(2, 3, dtype=torch.bool))
    scores.log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_sampled_log_probs_are_those_of_the_logits_drawn_from() -> None:
    model = make_model(dtype=torch.float32)
    rows, cuts = make_groups()
    prompts = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
    out = sample(
        model,
        pad(prompts, side="left"),
        pad_mask([len(p) for p in prompts], side="left"),
        streams=fold(0, torch.arange(12)),
        stop=Stop(frozenset([7, 8, 9])),
        max_new_tokens=8,
        temperature=0.8,
    )
    assert out.complete.any()
    assert not out.complete.all()
    for prompt, ids, values, done in zip(
        prompts,
        unpad(out.ids, out.mask),
        unpad(out.log_probs, out.mask),
        out.complete,
        strict=True,
    ):
        want = plain(model, torch.cat([prompt, ids]), 0.8)[len(prompt) :]
        torch.testing.assert_close(values, want.detach(), atol=1e-5, rtol=0)
        assert (int(ids[-1]) in (7, 8, 9)) == bool(done)
        assert not {7, 8, 9} & set(ids[:-1].tolist())
        assert bool(done) or len(ids) == 8


@torch.no_grad()
def test_greedy_takes_the_most_likely_token_and_scores_it_at_temperature_one() -> None:
    model = make_model(dtype=torch.float32)
    prompt = torch.tensor([3, 4, 5])
    streams, never = torch.zeros(1, dtype=torch.int64), Stop(frozenset())
    settings = {"streams": streams, "stop": never, "max_new_tokens": 4, "temperature": 0.0}
    out = sample(model, prompt[None], **settings)
    row = prompt
    for token, value in zip(out.ids[0], out.log_probs[0], strict=True):
        logits = model(row[None]).logits[0, -1]
        assert int(token) == int(logits.argmax())
        assert float(value) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
        row = torch.cat([row, token[None]])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        sample(make_model(), torch.zeros(1, 0, dtype=torch.int64), streams=torch.zeros(1),
               stop=Stop(frozenset()), max_new_tokens=2)  # fmt: skip


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
