"""The containers: dense and ragged access, other views of a chat, specs, the page's example."""

from importlib.metadata import version

import pytest
import torch
from contracts import make_policy
from tensordict import TensorDict, lazy_stack

from policies.chats.chat_template import Renderer
from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.padding import is_ragged, nested, rows

pytestmark = pytest.mark.usefixtures("list_setting")
ASK = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo"}
SHORT, LONG = [ASK], [{"role": "system", "content": "Be kind"}, ASK, REPLY, ASK]


def make_tokens(size):
    ids = torch.arange(size)
    return Tokens(prompt=ids[:1], response=ids[1:], assistant=ids[1:], full=ids, padded=False)


class TestContainers:
    def test_fields_by_place_are_those_of_the_page(self):
        a, b, c, d = torch.arange(4).unsqueeze(-1).unbind()
        for cls in (Tokens, LogProbs):
            made = cls(a, b, c, False, d)
            found = [made.prompt, made.response, made.full, made.assistant]
            assert [v.item() for v in found] == [0, 1, 2, 3]
            assert made.padded is False
        masks = Masks(a, b, True, c)
        found = [masks.all_attention_mask, masks.all_assistant_mask, masks.all_response_mask]
        assert [v.item() for v in found] == [0, 1, 2]
        assert masks.padded is True
        text = Text("p", "r", "f")
        assert (text.prompt, text.response, text.full) == ("p", "r", "f")
        chats = [History.from_chats([message]) for message in (ASK, REPLY, ASK)]
        made = ChatHistory(*chats)
        assert made.response.messages() == [REPLY]
        assert made.full.messages() == [ASK]

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


def ragged(*sizes):
    return lazy_stack([make_tokens(size) for size in sizes])


WHERE = {
    "bare": (lambda stack: stack, ()),
    "in a dense TensorDict": (lambda stack: TensorDict(a=stack, batch_size=[2]), ("a",)),
    "in a lazy stack": (lambda s: lazy_stack([TensorDict(a=r) for r in s.unbind(0)]), ("a",)),
    "nested twice": (lambda s: TensorDict({("next", "a"): s}, batch_size=[2]), ("next", "a")),
}
STRIDED = "ignore:The PyTorch API of nested tensors:UserWarning"


@pytest.mark.filterwarnings(STRIDED)
class TestRaggedAccess:
    @pytest.mark.parametrize("where", WHERE)
    def test_every_documented_way_to_read_rows(self, where):
        place, path = WHERE[where]
        td, key = place(ragged(3, 5)), (*path, "full")
        expected = [[0, 1, 2], [0, 1, 2, 3, 4]]
        assert [row.tolist() for row in td.get(key, as_list=True)] == expected
        assert [row.tolist() for row in rows(td, key)] == expected
        options = {"as_padded_tensor": True, "padding_value": -1}
        left = td.get(key, padding_side="left", **options)
        assert left.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
        right = td.get(key, padding_side="right", **options)
        assert right.tolist() == [[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]
        for layout in (torch.strided, torch.jagged):
            for got in (
                td.get(key, as_nested_tensor=True, layout=layout),
                nested(td, key, layout=layout),
            ):
                assert got.layout == layout
                assert [row.tolist() for row in got.unbind()] == expected

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_stacks_of_stacks(self, layout):
        # tensordict refuses as_nested_tensor here; `nested` takes the rows one after the other
        td = TensorDict(a=lazy_stack([ragged(3, 5), ragged(2, 4)]), batch_size=[2, 2])
        lists = td.get(("a", "full"), as_list=True)
        assert [[len(row) for row in part] for part in lists] == [[3, 5], [2, 4]]
        got = nested(td, ("a", "full"), layout=layout)
        assert [len(row) for row in got.unbind()] == [3, 5, 2, 4]
        assert td["a"].padded is False

    def test_dense_data_is_read_by_the_same_helpers(self):
        full = torch.arange(6).reshape(2, 3)
        td = TensorDict(tokens=Tokens(full=full, padded=True, batch_size=[2]), batch_size=[2])
        assert [row.tolist() for row in rows(td, ("tokens", "full"))] == full.tolist()
        got = nested(td, ("tokens", "full")).unbind()
        assert [row.tolist() for row in got] == full.tolist()
        assert rows(td, ("tokens", "prompt")) is None
        with pytest.raises(ValueError, match="expected rows at 'x', got keys"):
            nested(td, "x")

    def test_padded_is_one_bool_for_the_whole_batch(self):
        stack = ragged(3, 5)
        moved = [
            stack,
            stack[:1],
            stack.clone(),
            TensorDict(a=stack, batch_size=[2]).to("cpu")["a"],
        ]
        assert [tokens.padded for tokens in moved] == [False] * 4
        dense = Masks(all_attention_mask=torch.ones(2, 3, dtype=torch.bool), padded=True)
        assert torch.stack([dense, dense]).padded is True
        assert LogProbs.from_tensordict(TensorDict(full=torch.zeros(2)).lock_()).padded is None


OLD = version("tensordict").startswith("0.14.")
CHATS = [
    ([ASK], [{"role": "assistant", "content": "Yo"}]),
    ([{"role": "system", "content": "Sort"}, {"role": "user", "content": "1 2\n\n "}], [REPLY]),
]


@pytest.fixture
def tokenizer():
    return make_policy().tokenizer


def spoken(*fields):
    prompt, reply = (History.from_chats([pair[i] for pair in CHATS]) for i in (0, 1))
    known = {
        "prompt": prompt,
        "response": reply,
        "full": prompt.extend(reply, inplace=False, dim=1),
    }
    return ChatHistory(**{name: known[name] for name in fields or known}, batch_size=[2])


def ids_by_transformers(tokenizer, messages, *, prompt=False):
    options = {"add_generation_prompt": prompt, "return_dict": False}
    return tokenizer.apply_chat_template(messages, **options)


def as_lists(tokens, name):
    return [row.tolist() for row in rows(tokens, name)]


class TestViews:
    def test_history_to_tokens_as_transformers_tokenises(self, tokenizer):
        tokens = spoken().to_tokens(tokenizer)
        prompt = [ids_by_transformers(tokenizer, p, prompt=True) for p, _ in CHATS]
        full = [ids_by_transformers(tokenizer, [*p, *r]) for p, r in CHATS]
        assert as_lists(tokens, "prompt") == prompt
        assert as_lists(tokens, "full") == full
        assert as_lists(tokens, "response") == [
            f[len(p) :] for p, f in zip(prompt, full, strict=True)
        ]
        assert [tokenizer.decode(row) for row in rows(tokens, "assistant")] == ["Yo<|im_end|>"] * 2
        assert is_ragged(tokens)
        assert tokens.padded is False

    def test_history_to_text_and_back(self, tokenizer):
        history = spoken()
        text = history.to_text(tokenizer)
        assert text.prompt == [
            tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True)
            for p, _ in CHATS
        ]
        assert text.response == ["Yo<|im_end|>\n"] * 2
        assert text.full == [a + b for a, b in zip(text.prompt, text.response, strict=True)]
        again = text.to_history(tokenizer)
        for name in ("prompt", "response", "full"):
            assert again.get(name).chats() == history.get(name).chats()

    def test_text_to_tokens_and_back(self, tokenizer):
        text = spoken().to_text(tokenizer)
        tokens = text.to_tokens(tokenizer)
        for name in ("prompt", "response", "full"):
            expected = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in text.get(name)]
            assert as_lists(tokens, name) == expected
        assert tokens.to_text(tokenizer).full == text.full
        assert tokens.to_history(tokenizer).full.chats() == [[*p, *r] for p, r in CHATS]

    def test_padded_tokens_are_read_by_their_mask(self, tokenizer):
        td = TensorDict(history=spoken("prompt"), stream=torch.arange(2), batch_size=[2])
        out = make_policy().get_new_version(pad_output=True)(td)
        mask = out["masks", "all_attention_mask"]
        assert not mask.all()  # there is padding
        text = out["tokens"].to_text(tokenizer, attention_mask=mask)
        expected = spoken("prompt").to_text(tokenizer).prompt
        assert text.prompt == expected
        assert text.full == out["text", "full"]
        assert text.full == [a + b for a, b in zip(text.prompt, text.response, strict=True)]
        with pytest.raises(ValueError, match=r"expected attention_mask=.* for padded tokens"):
            out["tokens"].to_text(tokenizer)
        with pytest.raises(ValueError, match="of the width of full"):
            out["tokens"].to_text(tokenizer, attention_mask=mask[:, 1:])

    def test_other_templates_batches_and_renderers(self, tokenizer):
        one = spoken()[0].to_text(tokenizer, chat_template_name="falcon")
        assert one.full == "User: Hi\n\nAssistant: Yo\n\n"
        assert one.response == " Yo\n\n"
        assert one.to_history(None, "falcon").response.messages() == [REPLY]
        deep = lazy_stack([spoken(), spoken()])
        renderer = Renderer(tokenizer)
        assert deep.to_text(renderer).full == [spoken().to_text(renderer).full] * 2

    def test_a_full_chat_that_does_not_go_on_from_its_prompt(self, tokenizer):
        prompt, full = History.from_chats([[ASK]]), History.from_chats([[REPLY]])
        with pytest.raises(ValueError, match="to start with the prompt"):
            ChatHistory(prompt=prompt, full=full, batch_size=[1]).to_tokens(tokenizer)

    def test_the_prompt_of_a_page_example_gets_a_new_turn(self, tokenizer):
        history = History.from_chats(
            [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]]
        )
        chat_history = ChatHistory(prompt=history)
        result = make_policy()(TensorDict(history=chat_history, batch_size=(1,)))
        assert result["history"].response.shape == (1, 1)
        said = result["history"].full.chats()[0]
        assert said[:2] == history.chats()[0]
        assert said[2] == result["history"].response.chats()[0][0]
        ids = ids_by_transformers(tokenizer, history.chats()[0], prompt=True)
        assert as_lists(result["tokens"], "prompt") == [ids]
        assert ChatHistory(prompt=history).to_tokens(tokenizer).prompt.tolist() == [ids]


ENDS = {
    "chatml_format": "Yo<|im_end|>",
    "qwen": "Yo<|im_end|>",
    "llama": "Yo<|eot|>",
    "deepseek": " Yo<|im_end|>",  # the end token of this tokenizer
    "falcon": " Yo\n\n",
    "dialogpt": "Yo<|im_end|>",
}


class TestFaults:
    @pytest.mark.parametrize("name", ENDS)
    def test_the_end_of_a_turn_is_the_assistants(self, name, tokenizer):
        td = History.from_chats([ASK, REPLY, ASK, REPLY]).apply_chat_template(
            tokenizer=tokenizer,
            chat_template_name=name,
            add_generation_prompt=False,
            return_assistant_tokens_mask=True,
        )
        assert tokenizer.decode(td["input_ids"][td["assistant_masks"]]) == 2 * ENDS[name]

    @pytest.mark.parametrize("mode", ["history", "text", "tokens"])
    @pytest.mark.parametrize("generate", [True, False])
    def test_default_specs_fit_what_a_wrapper_writes(self, mode, generate, tokenizer):
        for pair in (CHATS, [CHATS[0], CHATS[0]]):  # rows of unequal and of equal length
            said = [p if generate else [*p, *r] for p, r in pair]
            field = "prompt" if generate else "full"
            chats = ChatHistory(**{field: History.from_chats(said)}, batch_size=[2])
            given = {"history": chats}
            given |= {"text": chats.to_text(tokenizer), "tokens": chats.to_tokens(tokenizer)}
            td = TensorDict({mode: given[mode], "stream": torch.arange(2)}, batch_size=[2])
            shapes = [{"pad_output": True}, {"pad_output": False}, {"layout": torch.jagged}]
            for shape in (*shapes, *([{"num_samples": 2}] if generate else [])):
                if OLD and "num_samples" in shape and mode == "history" and pair == CHATS:
                    continue  # tensordict 0.14 cannot reshape a stack of uneven chats
                policy = make_policy().get_new_version(input_mode=mode, generate=generate, **shape)
                out = policy(td)
                names = {"tokens": Tokens, "log_probs": LogProbs, "masks": Masks}
                names |= {"text": Text, "history": ChatHistory}
                found = {n: out.get(n) for n in names if out.get(n, None) is not None}
                assert set(found) >= {"tokens", "log_probs", "masks"}
                for name, value in found.items():
                    for batch in (tuple(out.batch_size), (-1,) * out.ndim):
                        assert names[name].default_spec(batch).explain(value) == ""
                if mode == "history" and not generate:
                    for name, cls in (("tokens", Tokens), ("log_probs", LogProbs)):
                        spec = cls.default_spec((2,), keys=["full", "assistant"])
                        assert spec.explain(found[name]) == ""

    def test_default_specs_refuse_what_a_wrapper_does_not_write(self):
        ids = torch.zeros(2, 3)
        tokens = Tokens(full=ids, padded=True, batch_size=[2])
        assert Tokens.default_spec((2,)).explain(tokens).startswith("full: expected torch.int64")
        tokens = Tokens(full=ids.long(), padded=True, batch_size=[2])
        assert Tokens.default_spec((3,)).explain(tokens).startswith("full: expected shape [3, -1]")
        named = Tokens.default_spec((2,), keys=["full", "assistant"])
        assert named.explain(tokens) == "assistant: missing"

    def test_a_stack_of_chats_made_one_by_one_renders(self, tokenizer):
        singles = [ChatHistory(prompt=History.from_chats([prompt])) for prompt, _ in CHATS]
        bare = [ChatHistory(prompt=History.from_chats(prompt)) for prompt, _ in CHATS]
        expected = spoken("prompt").to_text(tokenizer).prompt
        stack = lazy_stack(singles)
        assert stack.to_text(tokenizer).prompt == [[text] for text in expected]
        ids = [
            [row.tolist() for row in part] for part in rows(stack.to_tokens(tokenizer), "prompt")
        ]
        assert ids == [[tokenizer(text)["input_ids"]] for text in expected]
        assert lazy_stack(bare).to_text(tokenizer).prompt == expected
        stream = torch.arange(2)
        td = TensorDict(history=spoken("prompt"), stream=stream, batch_size=[2])
        want = make_policy()(td)
        for made in (stack, lazy_stack(bare)):
            out = make_policy()(TensorDict(history=made, stream=stream, batch_size=[2]))
            assert out["text"].full == want["text"].full

    def test_an_example_of_a_history_is_a_chat(self, tokenizer):
        example = ChatHistory.default_spec((2, -1), keys=["prompt"]).zero().prompt
        assert isinstance(example, History)
        text = "<|im_start|>user\na string<|im_end|>\n<|im_start|>assistant\n"
        assert example.apply_chat_template(tokenizer=tokenizer) == [[text], [text]]
