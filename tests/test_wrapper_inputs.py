"""What a wrapper reads where a td holds more than one view of a chat, padded or ragged.

Ids win only while they are those of the history beside them, and padding is never a token.
Expected log-probs come from one plain forward per sequence.
"""

import pytest
import torch
from contracts import make_policy, plain_log_probs
from tensordict import TensorDict, lazy_stack
from wrapped import SPOKEN, policy_ids, prompts, scoring, sequences, spoken

from policies.chats.containers import ChatHistory, Masks, Tokens
from policies.chats.history import History
from policies.padding import rows


def histories(field: str, chats) -> ChatHistory:
    return ChatHistory(**{field: History.from_chats(chats)}, batch_size=[len(chats)])


DROPS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORMS = {
    "dense": lambda td: td,
    "lazy stack": lambda td: td.to_lazystack(0),
    "stack of two widths": lambda td: lazy_stack([*wider(td[:1]).unbind(0), *td[1:].unbind(0)]),
}


def wider(td: TensorDict) -> TensorDict:
    """Return a td with a column of padding more on each side of what is as long as the ids."""
    width = td["tokens", "full"].shape[-1]
    fill = make_policy().pad_token_id

    def more(key, value):
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.shape[1] != width:
            return value
        column = torch.full_like(value[:, :1], fill if value.dtype == torch.int64 else 0)
        return torch.cat([column, value, column], -1)

    return td.named_apply(more, nested_keys=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["history", "tokens"])
@pytest.mark.parametrize("equal", [True, False])
def test_padding_is_no_token_however_the_rows_are_held(form, mode, equal):
    chosen = [1, 1, 1] if equal else [0, 1, 2]
    td = make_policy()(prompts()[chosen])
    assert not td["masks"].all_attention_mask.all() or equal
    want = sequences(td)
    keys = ["tokens", "masks", "log_probs"]
    held = td.select(*keys) if form != "stack of two widths" else td.select(
        ("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_response_mask")
    )  # fmt: skip
    given = FORMS[form](held)
    score = scoring(input_mode=mode, inplace=False)
    for policy in (score, score.get_new_version(pad_output=False)):
        out = policy(given)
        keep = rows(out, ("masks", "all_attention_mask"))
        assert [int(m.sum()) for m in keep or ()] == [len(ids) for ids, *_ in want]
        values, found = rows(out, ("log_probs", "full")), rows(out, ("tokens", "full"))
        responses = rows(out, ("masks", "all_response_mask"))
        for i, (ids, _, response) in enumerate(want):
            assert torch.equal(found[i][keep[i]], ids)
            assert torch.equal(responses[i][keep[i]], response)
            plain = plain_log_probs(make_policy(), ids, 1.0).float()
            torch.testing.assert_close(values[i][keep[i]], plain, atol=1e-5, rtol=0)
    dist = score._get_sft_dist(given) if form != "stack of two widths" else score.get_dist(
        given, mask_key=("masks", "all_response_mask")
    )  # fmt: skip
    assert dist.mask.sum(-1).tolist() == [int(response.sum()) for *_, response in want]


def test_prompts_that_lie_elsewhere_in_a_lazy_stack_are_an_error():
    td = make_policy()(prompts()).select("tokens", "masks").to_lazystack(0)
    rows(td, ("tokens", "prompt"))[0].add_(1)
    with pytest.raises(ValueError, match=r"prompts at .* other ids"):
        scoring()._get_sft_dist(td)


# Ids beside a history.


@pytest.mark.parametrize("padded", [True, False])
def test_ids_win_over_another_chat_beside_them_unless_they_are_taken_out(padded):
    policy = make_policy().get_new_version(pad_output=padded, inplace=False)
    td = policy(prompts())
    score = policy.get_new_version(generate=False)
    others = [[{"role": "user", "content": "Tell"}, *chat[1:]] for chat in SPOKEN]
    replaced = td.copy().set("history", histories("full", others))
    kept, real = rows(score(replaced), ("tokens", "full")), ("masks", "all_attention_mask")
    for (ids, *_), row, keep in zip(sequences(td), kept, rows(td, real), strict=True):
        assert torch.equal(row[keep], ids)
    fresh = score(replaced.select("history"))
    anew = score.get_new_version(prefer_tokens=False)(replaced.exclude("masks"))
    for i, chat in enumerate(others):
        for out in (fresh, anew):
            keep = rows(out, real)[i]
            assert rows(out, ("tokens", "full"))[i][keep].tolist() == policy_ids(chat)


def test_ids_that_no_rendering_gives_win():
    """Sampled ids are often others than the tokenizer's for the same words, over many turns."""
    policy = make_policy().get_new_version(inplace=False)
    renderer, tokenizer = policy.renderer, policy.tokenizer
    ids, chats = [], []
    for chat in SPOKEN:
        spelled = [*renderer.render(chat[:1], add_generation_prompt=True).ids]
        spelled += [tokenizer.convert_tokens_to_ids(c) for c in chat[1]["content"] if c != " "]
        said = tokenizer.decode(
            spelled[len(renderer.render(chat[:1], add_generation_prompt=True).ids) :]
        )
        reply = {"role": "assistant", "content": said}
        spelled = renderer.extend(
            spelled, [*chat[:1], reply], [{"role": "user", "content": "more"}]
        )
        ids.append(torch.tensor(spelled))
        chats.append([*chat[:1], reply, {"role": "user", "content": "more"}])
    assert any(row.tolist() != renderer.render(chat, add_generation_prompt=True).ids
               for row, chat in zip(ids, chats, strict=True))  # fmt: skip
    td = TensorDict(batch_size=[3]).set("history", histories("prompt", chats))
    td.set("tokens", lazy_stack([Tokens(prompt=row) for row in ids]))
    out = policy(td)
    for (found, _, mask), row in zip(sequences(out), ids, strict=True):
        assert torch.equal(found[~mask], row)
    scored = policy.get_new_version(generate=False)(out)  # cut replies and other ends included
    for (found, values, mask), whole in zip(
        sequences(out), sequences(td_of(scored, out)), strict=True
    ):
        assert torch.equal(found, whole[0])
        torch.testing.assert_close(values[mask], whole[1][mask], atol=1e-5, rtol=0)


def td_of(scored: TensorDict, out: TensorDict) -> TensorDict:
    """Return the scored tokens and log-probs under the masks of the rollout."""
    return scored.select("tokens", "log_probs").set("masks", out["masks"])


# Keys.


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_the_input_key_may_name_the_container(mode):
    for policy, td in ((make_policy(), prompts(mode)), (scoring(), spoken(mode))):
        policy = policy.get_new_version(input_mode=mode, inplace=False)
        named = policy.get_new_version(input_key=mode)
        a, b = (p(td)["log_probs"].full for p in (policy, named))
        assert named.in_keys == [mode]
        torch.testing.assert_close(a, b)
        moved = td.copy().rename_key_(mode, "mine")
        torch.testing.assert_close(
            policy.get_new_version(input_key="mine")(moved)["log_probs"].full, a
        )


@pytest.mark.parametrize("name", ["qwen", "llama", "deepseek", "falcon", "thoughts dropped"])
def test_a_wrapper_scores_what_it_generated_under_every_template(name):
    """Templates put blanks, plain words or nothing around a reply, or leave thoughts out."""
    chosen = (
        {"chat_template": DROPS} if name == "thoughts dropped" else {"chat_template_name": name}
    )
    hot = {"max_new_tokens": 30, "temperature": 1.5}
    policy = make_policy().get_new_version(generate_kwargs=hot, inplace=False, **chosen)
    score = policy.get_new_version(generate=False)
    asked = [[{"role": "user", "content": f"Sort {i} 1"}] for i in range(8)]
    td = policy(TensorDict(batch_size=[8]).set("history", histories("prompt", asked)))
    scored = rows(score(td), ("log_probs", "response"))
    for mine, theirs in zip(rows(td, ("log_probs", "response")), scored, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_a_mask_of_other_lengths_in_a_lazy_stack_is_an_error():
    score = scoring(input_mode="tokens")
    parts = [
        TensorDict(
            tokens=Tokens(full=torch.tensor([5, 6, 7, 0, 0])),
            masks=Masks(all_attention_mask=torch.ones(size, dtype=torch.bool)),
        )
        for size in (3, 5)
    ]
    with pytest.raises(ValueError, match=r"\[5, 5\], got \[3, 5\]"):
        score(lazy_stack(parts))
