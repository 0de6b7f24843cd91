"""History: chats in, chats out; growing; rendering."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letters import letters

from policies.chats.chat_template import Renderer
from policies.chats.history import History

ASK = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo"}
SHORT, LONG = [ASK], [{"role": "system", "content": "Be kind"}, ASK, REPLY]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "b"}}]
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.text("aé \n<|"),
    },
    optional={"tool_calls": st.just(CALLS), "tool_responses": st.just(["1", "2"])},
)
CHAT = st.lists(MESSAGES, min_size=1, max_size=4)
pytestmark = pytest.mark.usefixtures("list_setting")


@pytest.fixture(scope="module")
def tokenizer():
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return letters(["<|im_end|>", "<|im_start|>"], CHATML, **names)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(CHAT, CHAT), min_size=1, max_size=3))
def test_chats_come_out_as_they_went_in_and_grow_as_lists_do(pairs):
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    history, more = History.from_chats(first), History.from_chats(second)
    assert history.chats() == first
    assert [row.messages() for row in history.unbind(0)] == first
    for dim in (1, -1):
        longer = history.extend(more, inplace=False, dim=dim)
        assert longer.chats() == [a + b for a, b in pairs]
    assert history.extend(more, inplace=False).chats() == first + second
    heads = History.from_chats([chat[0] for chat in second])
    assert history.append(heads, inplace=False).chats() == [[*a, b[0]] for a, b in pairs]
    assert history.chats() == first
    assert history.extend(more, dim=1) is history
    assert history.chats() == longer.chats()


def test_a_batch_is_ragged_and_keeps_which_replies_were_cut():
    history = History.from_chats([SHORT, LONG])
    assert [row.shape for row in history.unbind(0)] == [(1,), (3,)]
    assert history.get("role", as_list=True) == [["user"], ["system", "user", "assistant"]]
    replies = History.from_chats([[REPLY | {"is_complete": done}] for done in (False, True)])
    full = history.extend(replies, inplace=False, dim=1)
    assert full.get("is_complete") == [[True, False], [True] * 4]
    deep = History.from_chats([[SHORT], [LONG]])
    deep.extend(History.from_chats([[LONG], [SHORT]]), dim=1)
    assert [row.chats() for row in deep.unbind(0)] == [[SHORT, LONG], [LONG, SHORT]]


@pytest.mark.parametrize(
    "chats",
    [[], "hello", [ASK, "Hi"], [{"role": "user"}], [{"role": 1, "content": ""}], [ASK | {"x": 1}]],
)
def test_malformed_chats_are_refused(chats):
    with pytest.raises(ValueError, match="expected"):
        History.from_chats(chats)


@pytest.mark.parametrize(
    ("history", "grow", "more", "options"),
    [
        (History(**ASK, batch_size=[]), "append", History(**ASK, batch_size=[]), {}),
        (History.from_chats([SHORT, LONG]), "extend", History.from_chats(LONG), {}),
        (History.from_chats([SHORT, LONG]), "append", History.from_chats([SHORT, LONG]), {}),
        (History.from_chats([SHORT]), "extend", History.from_chats([SHORT]), {"dim": 2}),
    ],
)
def test_dimensions_must_fit(history, grow, more, options):
    with pytest.raises((RuntimeError, ValueError), match=r"expected|zip"):
        getattr(history, grow)(more, **options)


def test_stacked_messages_are_rendered_as_text_and_padding_ones_are_not(tokenizer):
    history = torch.stack([History(**message) for message in LONG])
    history.extend(History(role="<none>", content="x", batch_size=[2]))
    assert history.messages() == LONG
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in LONG)
    named = {"tokenizer": tokenizer, "chat_template_name": "chatml_format"}
    assert history.apply_chat_template(add_generation_prompt=False, **named) == text
    batch = History.from_chats([SHORT, LONG]).apply_chat_template(tokenizer=Renderer(tokenizer))
    assert batch[1] == text + "<|im_start|>assistant\n"


def test_masks_of_ragged_and_padded_batches(tokenizer):
    other = [ASK, REPLY, ASK, {"role": "assistant", "content": "longer"}]
    batch = History.from_chats([LONG, other])
    options = {"tokenizer": tokenizer, "add_generation_prompt": False}
    td = batch.apply_chat_template(return_dict=True, **options)
    ids, masks = (td.get(k, as_list=True) for k in ("input_ids", "assistant_masks"))
    said = [tokenizer.decode(i[m]) for i, m in zip(ids, masks, strict=True)]
    assert said == ["Yo<|im_end|>", "Yo<|im_end|>longer<|im_end|>"]
    dense = batch.apply_chat_template(return_tensors="pt", padding=True, **options)
    for row, i, m in zip(dense.unbind(0), ids, masks, strict=True):
        assert row["input_ids"][row["attention_mask"]].tolist() == i.tolist()
        assert row["assistant_masks"][row["attention_mask"]].tolist() == m.tolist()
        assert not row["assistant_masks"][~row["attention_mask"]].any()
    assert dense["attention_mask"].all(-1).tolist() != [True, True]
    assert dense["attention_mask"][:, 0].all()  # padded on the right


def test_only_a_chat_with_a_reply_needs_an_assistant_mask(tokenizer):
    options = {"tokenizer": tokenizer, "return_assistant_tokens_mask": True}
    td = History.from_chats([SHORT, LONG]).apply_chat_template(**options)
    assert [m.any().item() for m in td.get("assistant_masks", as_list=True)] == [False, True]
    wrong = CHATML.replace("{% endfor %}", "{% endfor %}{% generation %}{% endgeneration %}")
    with pytest.raises(ValueError, match="assistant mask"):
        History.from_chats(LONG).apply_chat_template(chat_template=wrong, **options)
