"""The containers: dense and ragged access, a chat as messages, text and tokens, specs."""

from importlib.metadata import version

import pytest
import torch
from contracts import make_policy
from tensordict import TensorDict, lazy_stack

from policies.chats.chat_template import Renderer
from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.padding import is_ragged, rows

pytestmark = [
    pytest.mark.usefixtures("list_setting"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
ASK = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Yo"}
PARTS = ("prompt", "response", "full")


def ragged(*sizes: int) -> Tokens:
    return lazy_stack([Tokens(full=torch.arange(size), padded=False) for size in sizes])


WHERE = {
    "in a dense TensorDict": (lambda stack: TensorDict(a=stack, batch_size=[2]), ("a",)),
    "in a lazy stack": (lambda s: lazy_stack([TensorDict(a=r) for r in s.unbind(0)]), ("a",)),
}


@pytest.mark.parametrize("where", WHERE)
def test_every_documented_way_to_read_ragged_rows(where):
    place, path = WHERE[where]
    td, key = place(ragged(3, 5)), (*path, "full")
    expected = [[0, 1, 2], [0, 1, 2, 3, 4]]
    lists = [td.get(key, as_list=True), rows(td, key)]
    lists += [td.get(key, as_nested_tensor=True, layout=torch.jagged).unbind()]
    assert [[row.tolist() for row in found] for found in lists] == [expected] * 3
    options = {"as_padded_tensor": True, "padding_value": -1}
    left = td.get(key, padding_side="left", **options)
    assert left.tolist() == [[-1, -1, 0, 1, 2], expected[1]]
    right = td.get(key, padding_side="right", **options)
    assert right.tolist() == [[0, 1, 2, -1, -1], expected[1]]


def test_stacks_of_stacks_and_dense_data_are_read_by_the_same_helpers():
    td = TensorDict(a=lazy_stack([ragged(3, 5), ragged(2, 4)]), batch_size=[2, 2])
    sizes = [[len(row) for row in chat] for chat in rows(td, ("a", "full")) or ()]
    assert sizes == [[3, 5], [2, 4]]
    full = torch.arange(6).reshape(2, 3)
    td = TensorDict(tokens=Tokens(full=full, padded=True, batch_size=[2]), batch_size=[2])
    assert [row.tolist() for row in rows(td, ("tokens", "full")) or ()] == full.tolist()
    assert rows(td, ("tokens", "prompt")) is None


# The views of a chat.

OLD = version("tensordict").startswith("0.14.")
CHATS = [
    ([ASK], [REPLY]),
    ([{"role": "system", "content": "Sort"}, {"role": "user", "content": "1 2\n\n "}], [REPLY]),
]


@pytest.fixture
def tokenizer():
    return make_policy().tokenizer


def chats(*fields: str) -> ChatHistory:
    prompt, reply = (History.from_chats([pair[i] for pair in CHATS]) for i in (0, 1))
    full = prompt.extend(reply, inplace=False, dim=1)
    known = {"prompt": prompt, "response": reply, "full": full}
    return ChatHistory(**{name: known[name] for name in fields or known}, batch_size=[2])


def test_history_text_and_tokens_are_views_of_each_other(tokenizer):
    history = chats()
    text, tokens = history.to_text(tokenizer), history.to_tokens(tokenizer)
    render = tokenizer.apply_chat_template
    prompts = [render(p, tokenize=False, add_generation_prompt=True) for p, _ in CHATS]
    assert text.prompt == prompts
    assert text.full == [render([*p, *r], tokenize=False) for p, r in CHATS]
    assert text.full == [a + b for a, b in zip(text.prompt, text.response, strict=True)]
    assert [tokenizer.decode(row) for row in rows(tokens, "assistant")] == ["Yo<|im_end|>"] * 2
    assert is_ragged(tokens)
    assert tokens.padded is False
    for name in PARTS:
        ids = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in text.get(name)]
        for made in (tokens, text.to_tokens(tokenizer)):
            assert [row.tolist() for row in rows(made, name)] == ids
        assert tokens.to_text(tokenizer).get(name) == text.get(name)
        assert text.to_history(tokenizer).get(name).chats() == history.get(name).chats()
    assert tokens.to_history(tokenizer).full.chats() == history.full.chats()


def test_padded_tokens_are_read_by_their_mask(tokenizer):
    td = TensorDict(history=chats("prompt"), stream=torch.arange(2), batch_size=[2])
    out = make_policy().get_new_version(pad_output=True)(td)
    mask = out["masks", "all_attention_mask"]
    assert not mask.all()  # there is padding
    text = out["tokens"].to_text(tokenizer, attention_mask=mask)
    assert text.prompt == chats("prompt").to_text(tokenizer).prompt
    assert text.full == out["text", "full"]
    assert text.full == [a + b for a, b in zip(text.prompt, text.response, strict=True)]
    with pytest.raises(ValueError, match="attention_mask"):
        out["tokens"].to_text(tokenizer)


def test_other_templates_batches_and_renderers(tokenizer):
    one = chats()[0].to_text(tokenizer, chat_template_name="falcon")
    assert one.full == "User: Hi\n\nAssistant: Yo\n\n"
    assert one.response == " Yo\n\n"
    assert one.to_history(None, "falcon").response.messages() == [REPLY]
    deep, renderer = lazy_stack([chats(), chats()]), Renderer(tokenizer)
    assert deep.to_text(renderer).full == [chats().to_text(renderer).full] * 2
    wrong = ChatHistory(prompt=chats().prompt, full=chats().response, batch_size=[2])
    with pytest.raises(ValueError, match="prompt"):
        wrong.to_tokens(tokenizer)


def test_chats_made_one_by_one_without_a_batch_size_are_read(tokenizer):
    texts = chats("prompt").to_text(tokenizer).prompt
    bare = [ChatHistory(prompt=History.from_chats(prompt)) for prompt, _ in CHATS]
    assert lazy_stack(bare).to_text(tokenizer).prompt == texts
    single = [ChatHistory(prompt=History.from_chats([prompt])) for prompt, _ in CHATS]
    assert lazy_stack(single).to_text(tokenizer).prompt == [[text] for text in texts]


# Specs.


@pytest.mark.parametrize("form", [{}, {"pad_output": False}, {"layout": torch.jagged}])
@pytest.mark.parametrize("generate", [True, False])
def test_default_specs_fit_what_a_wrapper_writes(form, generate):
    history, stream = chats("prompt" if generate else "full"), torch.arange(2)
    more = {"num_samples": 2} if generate and not OLD else {}  # 0.14 reshapes no uneven chats
    policy = make_policy().get_new_version(generate=generate, inplace=False, **form, **more)
    out = policy(TensorDict(history=history, stream=stream, batch_size=[2]))
    kinds = {"tokens": Tokens, "log_probs": LogProbs, "masks": Masks}
    for name, kind in {**kinds, "text": Text, "history": ChatHistory}.items():
        for batch in (tuple(out.batch_size), (-1,) * out.ndim):
            assert kind.default_spec(batch).explain(out.get(name)) == ""


def test_default_specs_name_what_does_not_fit():
    ids = torch.zeros(2, 3)
    floats = Tokens(full=ids, padded=True, batch_size=[2])
    tokens = Tokens(full=ids.long(), padded=True, batch_size=[2])
    assert Tokens.default_spec((2,)).explain(floats).startswith("full: expected torch.int64")
    assert Tokens.default_spec((3,)).explain(tokens).startswith("full: expected shape [3, -1]")
    assert Tokens.default_spec((2,), keys=["assistant"]).explain(tokens) == "assistant: missing"
