"""What a wrapper reads where a td holds more than one view of a chat, padded or ragged.

Ids win, whatever stands beside them, and padding is never a token. Expected log-probs come from one
plain forward per sequence.
"""

import pytest
import torch
from contracts import make_policy, plain_log_probs
from tensordict import TensorDict, lazy_stack
from wrapped import CHATS, prompts, scoring, sequences

from policies.chats.containers import ChatHistory, Tokens
from policies.chats.history import History
from policies.padding import rows

ATTENTION, RESPONSE = ("masks", "all_attention_mask"), ("masks", "all_response_mask")


def histories(chats) -> TensorDict:
    """Return prompts that are histories."""
    td = TensorDict(batch_size=[len(chats)])
    return td.set("history", ChatHistory(prompt=History.from_chats(chats), batch_size=[len(chats)]))


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


def test_ids_that_no_rendering_gives_are_generated_from_and_scored():
    """Sampled ids are often others than the tokenizer's for the same words, over many turns."""
    policy = make_policy().get_new_version(inplace=False)
    renderer, tokenizer = policy.renderer, policy.tokenizer
    ids, chats = [], []
    for (ask,) in CHATS:
        letters = [tokenizer.convert_tokens_to_ids(c) for c in ask["content"] if c != " "]
        begin = renderer.render([ask], add_generation_prompt=True).ids
        said = {"role": "assistant", "content": tokenizer.decode(letters)}
        more = [{"role": "user", "content": "more"}]
        ids.append(torch.tensor(renderer.extend([*begin, *letters], [ask, said], more)))
        chats.append([ask, said, *more])
        assert ids[-1].tolist() != renderer.render(chats[-1], add_generation_prompt=True).ids
    td = histories(chats).set("tokens", lazy_stack([Tokens(prompt=row) for row in ids]))
    out = policy(td)
    scored = policy.get_new_version(generate=False)(out)
    again = scored.select("tokens", "log_probs").set("masks", out["masks"])
    for (found, values, mask), (whole, scores, _), row in zip(
        sequences(out), sequences(again), ids, strict=True
    ):
        assert torch.equal(found[~mask], row)
        assert torch.equal(found, whole)
        torch.testing.assert_close(values[mask], scores[mask], atol=1e-5, rtol=0)


DROPS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAMED = {name: {"chat_template_name": name} for name in ("qwen", "llama", "deepseek", "falcon")}


@pytest.mark.parametrize("template", [*NAMED.values(), {"chat_template": DROPS}])
def test_a_wrapper_scores_what_it_generated_under_every_template(template):
    """Templates put blanks, plain words or nothing around a reply, or leave thoughts out."""
    hot = {"max_new_tokens": 30, "temperature": 1.5}
    policy = make_policy().get_new_version(generate_kwargs=hot, inplace=False, **template)
    td = policy(histories([[{"role": "user", "content": f"Sort {i} 1"}] for i in range(8)]))
    scored = policy.get_new_version(generate=False)(td)
    for a, b in zip(*(rows(x, ("log_probs", "response")) for x in (td, scored)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
