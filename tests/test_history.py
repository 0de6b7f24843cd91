"""History: shapes, ragged batches, growing chats, rendering."""

import pytest
import torch
from letters import letters
from tensordict import TensorDict

from policies.chats.chat_template import Renderer
from policies.chats.history import History

ASK = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo"}
SHORT, LONG = [ASK], [{"role": "system", "content": "Be kind"}, ASK, REPLY]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


pytestmark = pytest.mark.usefixtures("list_setting")


@pytest.fixture(scope="module")
def tokenizer():
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return letters(["<|im_end|>", "<|im_start|>"], CHATML, **names)


def replies(*texts, complete):
    pairs = zip(texts, complete, strict=True)
    said = ({"role": "assistant", "content": t, "is_complete": c} for t, c in pairs)
    return History.from_chats([[message] for message in said])


class TestMaking:
    def test_one_chat(self):
        history = History.from_chats(LONG)
        assert history.shape == (3,)
        assert list(history.role) == ["system", "user", "assistant"]
        assert list(history.content) == ["Be kind", "Hi", "Yo"]
        assert list(history.is_complete) == [True] * 3
        assert history[1].content == "Hi"
        assert history.messages() == LONG

    def test_batches_may_be_ragged(self):
        history = History.from_chats([SHORT, LONG])
        assert history.ndim == 2
        assert history.shape[0] == 2
        assert [row.shape for row in history.unbind(0)] == [(1,), (3,)]
        assert history.chats() == [SHORT, LONG]
        assert history.get("role", as_list=True) == [["user"], ["system", "user", "assistant"]]
        assert history[1].messages() == LONG

    def test_the_example_of_the_original_stacks_messages(self, tokenizer):
        turns = [("system", "CONTENT\nThis is the setup"), ("user", "first"), ("assistant", "it")]
        history = torch.stack([History(role=role, content=content) for role, content in turns])
        assert history.role == ["system", "user", "assistant"]
        text = history.apply_chat_template(tokenizer=tokenizer, chat_template_name="chatml_format")
        said = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns]
        assert text == "".join(said) + "<|im_start|>assistant\n"

    def test_tool_fields(self):
        call = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "b"}}]
        chat = [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "content": "3", "tool_responses": ["1", "2"]},
        ]
        history = History.from_chats([chat, SHORT])
        chat[1]["content"] = ""
        assert history.chats() == [chat, SHORT]
        assert history[0].tool_calls == [None, call, None]
        longer = history.extend(history, inplace=False, dim=1)
        assert longer.chats() == [[*chat, *chat], [*SHORT, *SHORT]]

    @pytest.mark.parametrize(
        ("chats", "message"),
        [
            ([], r"a chat \(a list of dicts\) or a list of chats, got \[\]"),
            ("hello", r"a chat \(a list of dicts\) or a list of chats, got 'hello'"),
            ([ASK, "Hi"], "message 1: expected a dict, got str"),
            ([{"role": "user"}], "message 0: expected 'content' to be a str, got NoneType"),
            ([{"role": 1, "content": ""}], "message 0: expected 'role' to be a str, got int"),
            ([ASK | {"name": "x"}], r"message 0: got the fields \['name'\]"),
        ],
    )
    def test_malformed_chats(self, chats, message):
        with pytest.raises(ValueError, match=message):
            History.from_chats(chats)


class TestGrowing:
    def test_append_a_message(self):
        history = History.from_chats(SHORT)
        assert history.append(History(**REPLY, batch_size=[])) is history
        assert history.messages() == [ASK, REPLY]

    def test_append_a_message_to_each_chat(self):
        history = History.from_chats([SHORT, LONG])
        longer = history.append(History.from_chats([ASK, REPLY]), inplace=False)
        assert history.chats() == [SHORT, LONG]
        assert longer.chats() == [[*SHORT, ASK], [*LONG, REPLY]]
        history.append(History.from_chats([ASK, REPLY]))
        assert history.chats() == longer.chats()

    def test_extend_by_chats_is_the_default(self):
        history = History.from_chats([SHORT, LONG])
        history.extend(History.from_chats([LONG]))
        assert history.chats() == [SHORT, LONG, LONG]

    @pytest.mark.parametrize("dim", [1, -1])
    def test_extend_each_chat_by_its_reply(self, dim):
        history = History.from_chats([SHORT, LONG])
        said = replies("a", "b", complete=[False, True])
        full = history.extend(said, inplace=False, dim=dim)
        assert full.chats() == [
            [*SHORT, {"role": "assistant", "content": "a"}],
            [*LONG, {"role": "assistant", "content": "b"}],
        ]
        assert full.get("is_complete") == [[True, False], [True] * 4]
        assert history.chats() == [SHORT, LONG]

    def test_extend_along_a_middle_dimension(self):
        history = History.from_chats([[SHORT], [LONG]])
        history.extend(History.from_chats([[LONG], [SHORT]]), dim=1)
        assert [row.chats() for row in history.unbind(0)] == [[SHORT, LONG], [LONG, SHORT]]

    @pytest.mark.parametrize("grow", ["append", "extend"])
    def test_a_single_message_cannot_grow(self, grow):
        message = History(**ASK, batch_size=[])
        with pytest.raises(RuntimeError, match=r"Call unsqueeze\(dim=0\) first"):
            getattr(message, grow)(message)

    def test_dimensions_must_fit(self):
        chat, batch = History.from_chats(LONG), History.from_chats([SHORT, LONG])
        with pytest.raises(RuntimeError, match="2 dimensions of the new history"):
            batch.extend(chat)
        with pytest.raises(RuntimeError, match="1 dimensions of the new history"):
            batch.append(batch)
        with pytest.raises(RuntimeError, match="expected 2 rows, got 3"):
            batch.append(chat)
        with pytest.raises(RuntimeError, match=r"expected dim=2 within \[2, -1\]"):
            batch.extend(batch, dim=2)


class TestRendering:
    def test_text(self, tokenizer):
        text = "<|im_start|>user\nHi<|im_end|>\n"
        history = History.from_chats(SHORT)
        assert history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False) == text
        batch = History.from_chats([SHORT, LONG])
        texts = batch.apply_chat_template(tokenizer=Renderer(tokenizer))
        assert texts[0] == text + "<|im_start|>assistant\n"
        assert len(texts) == 2

    def test_masks(self, tokenizer):
        td = History.from_chats(LONG).apply_chat_template(
            tokenizer=tokenizer, add_generation_prompt=False, return_assistant_tokens_mask=True
        )
        assert isinstance(td, TensorDict)
        assert td["assistant_masks"].dtype == torch.bool
        assert td["attention_mask"].all()
        assert tokenizer.decode(td["input_ids"][td["assistant_masks"]]) == "Yo<|im_end|>"

    def test_masks_of_ragged_batches(self, tokenizer):
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
        assert dense["attention_mask"][:, -1].tolist() != [True, True]  # padded on the right
        assert dense["attention_mask"][:, 0].all()

    def test_only_a_chat_with_a_reply_needs_an_assistant_mask(self, tokenizer):
        options = {"tokenizer": tokenizer, "return_assistant_tokens_mask": True}
        td = History.from_chats([SHORT, LONG]).apply_chat_template(**options)
        assert [m.any().item() for m in td.get("assistant_masks", as_list=True)] == [False, True]
        wrong = CHATML.replace("{% endfor %}", "{% endfor %}{% generation %}{% endgeneration %}")
        with pytest.raises(ValueError, match="no token in the assistant mask"):
            History.from_chats(LONG).apply_chat_template(chat_template=wrong, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"return_dict": True, "tokenize": False},
            {"return_assistant_tokens_mask": True, "return_dict": False},
            {"padding": "max_length"},
        ],
    )
    def test_options_that_contradict_or_are_unknown(self, options, tokenizer):
        match = "|".join(["return_", *options])
        with pytest.raises(ValueError, match=match):
            History.from_chats(SHORT).apply_chat_template(tokenizer=tokenizer, **options)

    def test_padding_messages_are_not_rendered(self, tokenizer):
        history = History.from_chats(SHORT)
        text = history.apply_chat_template(tokenizer=tokenizer)
        history.extend(History(role="<none>", content="x", batch_size=[2]))
        assert history.shape == (3,)
        assert history.messages() == SHORT
        assert history.apply_chat_template(tokenizer=tokenizer) == text
