"""The containers: dense and ragged access, a chat as messages, text and tokens, specs.

And History: chats in, chats out; growing; rendering.
"""

from importlib.metadata import version

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import byte_tokenizer
from support.policies import make_wrapper
from tensordict import TensorDict, lazy_stack

from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.chats.renderer import Renderer
from policies.padding import is_ragged, pad, pad_mask, rows
from policies.torchrl.specs import Composite, NonTensor, Unbounded

pytestmark = [
    pytest.mark.usefixtures("list_setting"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
ASK = {"role": "user", "content": "Hi"}
RESPONSE = {"role": "assistant", "content": "Yo"}
SHORT, LONG = [ASK], [{"role": "system", "content": "Be kind"}, ASK, RESPONSE]
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
    optional={
        "tool_calls": st.just(CALLS),
        "tool_responses": st.just(["1", "2"]),
        "tools": st.just([{"function": {"name": "add"}}]),
        "reasoning_content": st.text("hm "),
    },
)
CHAT = st.lists(MESSAGES, min_size=1, max_size=4)
PARTS = ("prompt", "response", "full")


def ragged(*sizes: int) -> Tokens:
    return lazy_stack([Tokens(full=torch.arange(size), padded=False) for size in sizes])


@pytest.mark.parametrize("lazy", [False, True])
def test_every_documented_way_to_read_ragged_rows(lazy):
    td, key = TensorDict(a=ragged(3, 5), batch_size=[2]), ("a", "full")
    td = lazy_stack(list(td.unbind(0))) if lazy else td
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
    assert [[len(row) for row in chat] for chat in rows(td, ("a", "full"))] == [[3, 5], [2, 4]]
    full = torch.arange(6).reshape(2, 3)
    td = TensorDict(tokens=Tokens(full=full, padded=True, batch_size=[2]), batch_size=[2])
    assert [row.tolist() for row in rows(td, ("tokens", "full")) or ()] == full.tolist()
    assert rows(td, ("tokens", "prompt")) is None


# The views of a chat.

OLD = version("tensordict").startswith("0.14.")
CHATS = [
    ([ASK], [RESPONSE]),
    ([{"role": "system", "content": "Sort"}, {"role": "user", "content": "1 2\n\n "}], [RESPONSE]),
]


@pytest.fixture
def tokenizer():
    return make_wrapper().tokenizer


def chats(*fields: str) -> ChatHistory:
    prompt, response = (History.from_chats([pair[i] for pair in CHATS]) for i in (0, 1))
    full = prompt.extend(response, inplace=False, dim=1)
    known = {"prompt": prompt, "response": response, "full": full}
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
    out = make_wrapper().get_new_version(pad_output=True)(td)
    mask = out["masks", "all_attention_mask"]
    assert not mask.all()  # there is padding
    text = out["tokens"].to_text(tokenizer, attention_mask=mask)
    assert text.prompt == chats("prompt").to_text(tokenizer).prompt
    assert text.full == out["text", "full"]
    assert text.full == [a + b for a, b in zip(text.prompt, text.response, strict=True)]
    with pytest.raises(ValueError, match="attention_mask"):
        out["tokens"].to_text(tokenizer)


# Specs.


@pytest.mark.parametrize("form", [{}, {"pad_output": False}, {"layout": torch.jagged}])
@pytest.mark.parametrize("generate", [True, False])
def test_default_specs_fit_what_a_wrapper_writes(form, generate):
    history, stream = chats("prompt" if generate else "full"), torch.arange(2)
    more = {"num_samples": 2} if generate and not OLD else {}  # 0.14 reshapes no uneven chats
    policy = make_wrapper().get_new_version(generate=generate, inplace=False, **form, **more)
    out = policy(TensorDict(history=history, stream=stream, batch_size=[2]))
    kinds = {"tokens": Tokens, "log_probs": LogProbs, "masks": Masks}
    for name, kind in {**kinds, "text": Text, "history": ChatHistory}.items():
        for batch in (tuple(out.batch_size), (-1,) * out.ndim):
            assert kind.default_spec(batch).explain(out.get(name)) == ""


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "a: "),
        ({"a": torch.zeros(2, 3, 1)}, "a: "),
        ({"b": TensorDict(batch_size=[2])}, "b: c: "),
        ({"b": torch.zeros(2)}, "b: "),
        ({"t": torch.zeros(2)}, "t: "),
    ],
)
def test_what_does_not_fit_is_named(change, place):
    spec = Composite({"a": Unbounded((2, -1)), "t": NonTensor((2,))}, shape=(2,))
    spec["b", "c"] = Unbounded((2,), dtype=torch.bool)
    good = TensorDict(
        {"a": torch.zeros(2, 5), ("b", "c"): torch.ones(2, dtype=torch.bool), "t": ["x", "y"]},
        batch_size=[2],
    )
    assert spec.explain(good) == ""
    ((key, value),) = change.items()
    assert spec.explain(good.set(key, value)).startswith(place)


# History.


@pytest.fixture(scope="module")
def chatml():
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return byte_tokenizer(["<|im_end|>", "<|im_start|>"], CHATML, **names)


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


def test_a_batch_is_ragged_and_keeps_which_responses_were_cut():
    history = History.from_chats([SHORT, LONG])
    assert history.get("role", as_list=True) == [["user"], ["system", "user", "assistant"]]
    responses = History.from_chats([[RESPONSE | {"is_complete": done}] for done in (False, True)])
    full = history.extend(responses, inplace=False, dim=1)
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


def test_stacked_messages_are_rendered_as_text_and_padding_ones_are_not(chatml):
    history = torch.stack([History(**message) for message in LONG])
    history.extend(History(role="<none>", content="x", batch_size=[2]))
    assert history.messages() == LONG
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in LONG)
    named = {"tokenizer": chatml, "chat_template_name": "chatml_format"}
    assert history.apply_chat_template(add_generation_prompt=False, **named) == text
    batch = History.from_chats([SHORT, LONG]).apply_chat_template(tokenizer=Renderer(chatml))
    assert batch[1] == text + "<|im_start|>assistant\n"


def test_masks_of_ragged_and_padded_batches(chatml):
    other = [ASK, RESPONSE, ASK, {"role": "assistant", "content": "longer"}]
    batch = History.from_chats([LONG, other])
    options = {"tokenizer": chatml, "add_generation_prompt": False}
    td = batch.apply_chat_template(return_dict=True, **options)
    ids, masks = (td.get(k, as_list=True) for k in ("input_ids", "assistant_masks"))
    said = [chatml.decode(i[m]) for i, m in zip(ids, masks, strict=True)]
    assert said == ["Yo<|im_end|>", "Yo<|im_end|>longer<|im_end|>"]
    dense = batch.apply_chat_template(return_tensors="pt", padding=True, **options)
    real = pad_mask([len(row) for row in ids])  # on the right
    assert torch.equal(dense["attention_mask"], real)
    assert torch.equal(dense["input_ids"][real], torch.cat(ids))
    assert torch.equal(dense["assistant_masks"], pad(masks))


def test_only_a_chat_with_a_response_needs_an_assistant_mask(chatml):
    options = {"tokenizer": chatml, "return_assistant_tokens_mask": True}
    td = History.from_chats([SHORT, LONG]).apply_chat_template(**options)
    assert [m.any().item() for m in td.get("assistant_masks", as_list=True)] == [False, True]
    wrong = CHATML.replace("{% endfor %}", "{% endfor %}{% generation %}{% endgeneration %}")
    with pytest.raises(ValueError, match="assistant mask"):
        History.from_chats(LONG).apply_chat_template(chat_template=wrong, **options)
