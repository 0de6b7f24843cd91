"""History and the containers: shapes, ragged batches, growing chats, rendering."""

import contextlib
import pickle
import time

import pytest
import torch
from tensordict import TensorDict, lazy_stack, list_to_stack, set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policies.chat_template import Renderer
from policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.history import History

ASK = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo"}
SHORT, LONG = [ASK], [{"role": "system", "content": "Be kind"}, ASK, REPLY]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(params=["default", True], autouse=True)
def list_setting(request):
    """Run every test under each tensordict setting, and see that it is left alone."""
    given = contextlib.nullcontext()
    if request.param != "default":
        given = set_list_to_stack(request.param)
    with given:
        before = list_to_stack()
        yield
        assert list_to_stack() == before


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


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

    def test_more_dimensions(self):
        history = History.from_chats([[SHORT, LONG], [LONG, SHORT]])
        assert history.ndim == 3
        assert history.chats() == [SHORT, LONG, LONG, SHORT]

    def test_replies(self):
        history = History.from_replies(["a", "b"], [True, False])
        assert history.shape == (2, 1)
        assert history.get("is_complete") == [[True], [False]]
        assert history.chats() == [[{"role": "assistant", "content": t}] for t in "ab"]

    def test_message_by_message(self):
        history = lazy_stack([History(**m, batch_size=[]) for m in LONG])
        assert history.messages() == LONG

    def test_padding_messages_are_no_messages(self):
        history = History.from_chats(SHORT)
        history.extend(History(role="<none>", content="", batch_size=[2]))
        assert history.shape == (3,)
        assert history.messages() == SHORT

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

    def test_a_copy_through_pickle(self):
        history = History.from_chats([SHORT, LONG])
        assert pickle.loads(pickle.dumps(history)).chats() == [SHORT, LONG]

    @pytest.mark.parametrize(
        ("chats", "message"),
        [
            ([], "got an empty list"),
            ([[]], "got an empty list"),
            ([ASK, "Hi"], "message 1: expected a dict, got str"),
            ([{"role": "user"}], "message 0: expected 'content' to be a str, got NoneType"),
            ([{"role": 1, "content": ""}], "message 0: expected 'role' to be a str, got int"),
            ([ASK | {"name": "x"}], r"message 0: got the fields \['name'\]"),
        ],
    )
    def test_malformed_chats(self, chats, message):
        with pytest.raises(ValueError, match=message):
            History.from_chats(chats)

    def test_fields_that_are_none_do_not_count(self):
        history = History.from_chats([ASK | {"name": None, "tool_calls": None}])
        assert history.messages() == [ASK]

    def test_messages_needs_one_chat(self):
        with pytest.raises(ValueError, match=r"of shape \[T\], got \[2, 1\]; use chats"):
            History.from_replies(["a", "b"], [True, True]).messages()

    def test_256_chats_take_less_than_100_ms(self):
        chats = [[m | {"content": f"{i}"} for m in LONG[: 2 + i % 2]] for i in range(256)]
        times = []
        for _ in range(3):
            start = time.perf_counter()
            History.from_chats(chats)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.1


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

    def test_append_a_chat(self):
        history = History.from_chats([SHORT, LONG])
        history.append(History.from_chats(LONG), dim=0)
        assert history.chats() == [SHORT, LONG, LONG]

    def test_extend_a_chat(self):
        history = History.from_chats(SHORT)
        assert history.extend(History.from_chats([REPLY, ASK])) is history
        assert history.messages() == [ASK, REPLY, ASK]

    def test_extend_by_chats_is_the_default(self):
        history = History.from_chats([SHORT, LONG])
        history.extend(History.from_chats([LONG]))
        assert history.chats() == [SHORT, LONG, LONG]

    @pytest.mark.parametrize("dim", [1, -1])
    def test_extend_each_chat_by_its_reply(self, dim):
        history = History.from_chats([SHORT, LONG])
        replies = History.from_replies(["a", "b"], [False, True])
        full = history.extend(replies, inplace=False, dim=dim)
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
        with pytest.raises(RuntimeError, match="must have as many dimensions as self"):
            batch.extend(chat)
        with pytest.raises(RuntimeError, match="one dimension less than self"):
            batch.append(batch)
        with pytest.raises(RuntimeError, match="as many rows as self has, 2; got 3"):
            batch.append(chat)
        with pytest.raises(RuntimeError, match="expected dim within the shape"):
            batch.extend(batch, dim=2)

    def test_an_unsqueezed_message_can_grow(self):
        chat = History(**ASK, batch_size=[]).unsqueeze(0)
        assert chat.append(History(**REPLY, batch_size=[])).messages() == [ASK, REPLY]


class TestRendering:
    def test_text(self, tokenizer):
        text = "<|im_start|>user\nHi<|im_end|>\n"
        history = History.from_chats(SHORT)
        assert history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False) == text
        batch = History.from_chats([SHORT, LONG])
        texts = batch.apply_chat_template(tokenizer=Renderer(tokenizer))
        assert texts[0] == text + "<|im_start|>assistant\n"
        assert len(texts) == 2

    def test_ids(self, tokenizer):
        ids = History.from_chats([SHORT]).apply_chat_template(tokenizer=tokenizer, tokenize=True)
        options = {"add_generation_prompt": True, "return_dict": False}
        assert ids == [tokenizer.apply_chat_template(SHORT, **options)]

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

    def test_padding_one_chat(self, tokenizer):
        options = {"tokenizer": tokenizer, "return_dict": True}
        one = History.from_chats(SHORT).apply_chat_template(padding=True, **options)
        assert one["input_ids"].shape == one["assistant_masks"].shape
        assert one["input_ids"].ndim == 1

    def test_template_by_name(self, tokenizer):
        tokenizer = pickle.loads(pickle.dumps(tokenizer))
        tokenizer.chat_template = None
        history = History.from_chats(SHORT)
        text = history.apply_chat_template(tokenizer=tokenizer, chat_template="chatml")
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    def test_a_mask_without_assistant_is_an_error(self, tokenizer):
        with pytest.raises(ValueError, match="no token in the assistant mask"):
            History.from_chats(SHORT).apply_chat_template(
                tokenizer=tokenizer, return_assistant_tokens_mask=True
            )

    @pytest.mark.parametrize(
        "options",
        [
            {"return_dict": True, "tokenize": False},
            {"return_assistant_tokens_mask": True, "return_dict": False},
            {"padding": True},
            {"return_tensors": "np"},
        ],
    )
    def test_options_that_contradict(self, options, tokenizer):
        with pytest.raises(ValueError, match="return_"):
            History.from_chats(SHORT).apply_chat_template(tokenizer=tokenizer, **options)

    def test_a_renderer_has_its_own_template(self, tokenizer):
        with pytest.raises(ValueError, match="chat_template=None with a Renderer"):
            History.from_chats(SHORT).apply_chat_template(
                tokenizer=Renderer(tokenizer), chat_template="chatml"
            )

    def test_padding_needs_rows(self, tokenizer):
        with pytest.raises(ValueError, match=r"\[T\] or \[B, T\] for padding"):
            History.from_chats([[SHORT]]).apply_chat_template(
                tokenizer=tokenizer, padding=True, return_dict=True
            )


def make_tokens(size):
    ids = torch.arange(size)
    return Tokens(prompt=ids[:1], response=ids[1:], assistant=ids[1:], full=ids, padded=False)


class TestContainers:
    def test_fields_are_none_by_default(self):
        for container in (Tokens, LogProbs, Masks, ChatHistory, Text):
            empty = container(batch_size=[2])
            assert all(getattr(empty, f) is None for f in container.__dataclass_fields__)

    def test_padded_batch(self):
        full = torch.arange(6).reshape(2, 3)
        tokens = Tokens(full=full, response=full[:, 1:], padded=True, batch_size=[2])
        td = TensorDict(tokens=tokens, batch_size=[2])
        assert td["tokens", "full"] is tokens.full
        assert td["tokens"].padded is True
        assert td[1]["tokens"].response.tolist() == [4, 5]
        assert isinstance(td["tokens"], Tokens)

    def test_ragged_batch(self):
        td = lazy_stack([TensorDict(tokens=make_tokens(n)) for n in (3, 5)])
        assert isinstance(td.get("tokens"), Tokens)
        rows = td.get(("tokens", "full"), as_list=True)
        assert [r.tolist() for r in rows] == [[0, 1, 2], [0, 1, 2, 3, 4]]
        options = {"as_padded_tensor": True, "padding_value": -1}
        left = td.get(("tokens", "full"), padding_side="left", **options)
        assert left.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
        right = td.get(("tokens", "response"), padding_side="right", **options)
        assert right.tolist() == [[1, 2, -1, -1], [1, 2, 3, 4]]
        assert [row.padded for row in td.get("tokens").unbind(0)] == [False, False]

    def test_ragged_container_inside_a_dense_tensordict(self):
        td = TensorDict(batch_size=[2])
        td.set("tokens", lazy_stack([make_tokens(3), make_tokens(5)]))
        td.set("reward", torch.zeros(2))
        assert [len(r) for r in td.get(("tokens", "full"), as_list=True)] == [3, 5]
        assert td[1]["tokens", "assistant"].tolist() == [1, 2, 3, 4]
        assert td.get("tokens")[0].prompt.tolist() == [0]

    def test_masks_and_log_probs(self):
        rows = [torch.tensor([True, False]), torch.tensor([True, True, False])]
        masks = lazy_stack([Masks(all_response_mask=r, padded=False) for r in rows])
        padded = masks.get("all_response_mask", as_padded_tensor=True, padding_value=False)
        assert padded.dtype == torch.bool
        assert padded.tolist() == [[True, False, False], [True, True, False]]
        values = [torch.tensor([-1.0]), torch.tensor([-2.0, -3.0])]
        log_probs = lazy_stack([LogProbs(response=v, assistant=v, padded=False) for v in values])
        sums = [v.sum().item() for v in log_probs.get("assistant", as_list=True)]
        assert sums == [-1.0, -5.0]

    def test_histories(self):
        prompt = History.from_chats([SHORT, LONG])
        response = History.from_replies(["a", "b"], [True, True])
        full = prompt.extend(response, inplace=False, dim=1)
        history = ChatHistory(prompt=prompt, response=response, full=full, batch_size=[2])
        td = TensorDict(history=history, batch_size=[2])
        assert td["history", "prompt"].chats() == [SHORT, LONG]
        assert td["history"].full.chats()[0] == [*SHORT, {"role": "assistant", "content": "a"}]
        assert td[1]["history"].prompt.messages() == LONG
        again = lazy_stack([td[1], td[0]])
        assert again["history", "prompt"].chats() == [LONG, SHORT]

    def test_texts(self):
        text = Text(prompt=["a", "bc"], batch_size=[2])
        assert text.prompt == ["a", "bc"]
        assert text[1].prompt == "bc"
        assert TensorDict(text=text, batch_size=[2])["text", "prompt"] == ["a", "bc"]
