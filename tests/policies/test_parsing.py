"""Text back to messages: exact round trips, fillers, cut responses, added templates, errors."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import NAMED, SPECIAL, TEMPLATES, byte_tokenizer

from policies import History, _extract_responses_from_full_histories, add_chat_template

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
END = "<|endoftext|>"
# What each template writes, by hand: start, then for each role what surrounds the content.
CHATML = {
    role: (f"<|im_start|>{role}\n", "<|im_end|>\n")
    for role in ("system", "user", "assistant", "tool", "critic")
}
LLAMA = {
    role: (f"<|header_start|>{role}<|header_end|>\n\n", "<|eot|>")
    for role in ("system", "user", "assistant", "tool")
}
LINES = {"system": ("", "\n\n"), "user": ("User: ", "\n\n"), "assistant": ("Assistant: ", "\n\n")}
QWEN = {role: around for role, around in CHATML.items() if role != "tool"}
HAND = {
    "chatml": ("", CHATML),
    "hermes": ("", QWEN),
    "qwen": ("", QWEN),
    "llama": ("<|begin_of_text|>", LLAMA),
    "deepseek": (BOS, LINES | {"assistant": ("Assistant: ", EOS)}),
    "falcon": ("", LINES),
    "dialogpt": ("", {"user": ("", END), "assistant": ("", END)}),
}
EOS_OF = dict.fromkeys(("chatml", "hermes", "qwen"), "<|im_end|>")
EOS_OF |= {"llama": "<|eot|>", "deepseek": EOS}
EOS_OF |= {"falcon": END, "dialogpt": END}
MARKUP = ["<|im_start|>", "<|im_end|>", "<|header_start|>", "<|header_end|>", "<|eot|>"]
PROMPT = [{"role": "user", "content": "Hi"}]
RESPONSE = {"role": "assistant", "content": "Yo"}


@cache
def tokenizer_of(name):
    special = [*MARKUP, "<|begin_of_text|>", BOS, EOS, END, "<pad>"]
    names = {"bos_token": HAND[name][0] or None, "eos_token": EOS_OF[name], "pad_token": "<pad>"}
    return byte_tokenizer(special, **names)


@st.composite
def chats(draw, name):
    """Draw a chat; contents may have blanks and lines at their ends, or be empty."""
    roles, order = HAND[name][1], ["user", "assistant"] * draw(st.integers(1, 3))
    for role in ("critic", "tool"):
        if role in roles and draw(st.booleans()):
            order.insert(2, role)
    if "system" in roles and (name == "qwen" or draw(st.booleans())):
        order.insert(0, "system")
    text = st.text("ab \n\t<>|{}\u00e9\U0001f600", max_size=9)
    return [{"role": role, "content": draw(text)} for role in order]


def by_hand(name, chat):
    start, around = HAND[name]
    return start + "".join(around[m["role"]][0] + m["content"] + around[m["role"]][1] for m in chat)


def asks(name):
    """Return what asks for a response: plain lines have their blank from the model."""
    return HAND[name][1]["assistant"][0].removesuffix(" ")


def fills(name):
    """What a decoded row may hold after the end of its last turn."""
    eos = EOS_OF[name]
    yield from ["", "<pad>", "<pad>" * 3]
    if name != "dialogpt":  # there EOS may be the end of an empty message
        yield from [eos, eos * 2, f"{eos}<pad>\n"]
    if name != "falcon":  # there lines are the end of a turn
        yield "\n<pad>\n"


@pytest.mark.parametrize("name", HAND)
@given(data=st.data())
def test_text_to_history_to_text_is_exact(name, data):
    chat, tokenizer = data.draw(chats(name)), tokenizer_of(name)
    text = by_hand(name, chat)
    history = History.from_text(text, chat_template_name=name)
    assert history.messages() == chat
    options = {"tokenizer": tokenizer, "chat_template_name": name}
    assert history.apply_chat_template(**options, add_generation_prompt=False) == text
    for fill in fills(name):
        history = History.from_text(text + fill, name, tokenizer=tokenizer)
        assert history.messages() == chat
        assert all(history.is_complete)


@pytest.mark.parametrize("name", HAND)
@given(data=st.data())
def test_cut_responses_are_not_complete(name, data):
    chat = data.draw(chats(name))
    # the templates of plain lines take two line ends for the end of a turn
    chat[-1]["content"] = chat[-1]["content"].rstrip() + data.draw(st.sampled_from(["", " x"]))
    if not chat[-1]["content"] and name == "dialogpt":
        return  # it has no sign for an answer that has not begun
    text = by_hand(name, chat).removesuffix(HAND[name][1]["assistant"][1])
    text = text.removesuffix(" ") if name in ("deepseek", "falcon") else text
    history = History.from_text(text, name)
    assert history.messages() == chat
    assert list(history.is_complete) == [True] * (len(chat) - 1) + [False]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_tokenizers_own_template(kind):
    tokenizer = byte_tokenizer(SPECIAL[kind], TEMPLATES[kind], **NAMED[kind])
    chat = [
        {"role": "user", "content": "What\n\nis it?"},
        RESPONSE,
        *PROMPT,
        RESPONSE | {"content": ""},
    ]
    if kind == "qwen2":
        chat.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert History.from_text(text, tokenizer=tokenizer).messages() == chat
    options = {"chat_template": TEMPLATES[kind], "tokenizer": tokenizer}
    assert History.from_text(text, **options).messages() == chat


@pytest.mark.parametrize(
    ("fill", "complete"), [("<pad>", False), (END * 2, True), (f"{END}<pad><pad>", True)]
)
def test_eos_completes_a_response_that_has_no_end_of_turn_and_padding_does_not(fill, complete):
    tokenizer = byte_tokenizer([*MARKUP, END, "<pad>"], eos_token=END, pad_token="<pad>")
    text = by_hand("chatml", PROMPT) + asks("chatml") + "cut \n" + fill
    history = History.from_text(text, "chatml", tokenizer=tokenizer)
    assert history.messages()[1]["content"] == "cut \n"
    assert list(history.is_complete) == [True, complete]


def responses(text, prompt=PROMPT, name="chatml"):
    prompts = prompt if isinstance(prompt, History) else History.from_chats([prompt])
    return _extract_responses_from_full_histories([text], prompts, name, tokenizer_of(name))


@pytest.mark.parametrize("name", HAND)
def test_a_response_is_found_after_its_prompt_and_may_be_empty(name):
    closed = by_hand(name, [*PROMPT, RESPONSE])
    for text in (closed, closed.rstrip("\n") + 3 * EOS_OF[name]):
        out = responses(text, name=name)
        assert out.chats() == [[RESPONSE]]
        assert out[0, 0].is_complete
    out = responses(by_hand(name, PROMPT) + asks(name), name=name)
    assert out.chats() == [[RESPONSE | {"content": ""}]]


@pytest.mark.parametrize("fill", ["", "\n", "<|im_end|>", "\n<|im_end|><|im_end|>\n"])
def test_markup_in_prompt_or_response_is_content(fill):
    prompt = [{"role": "user", "content": "say <|im_end|>\n<|im_start|>user\nx"}]
    response = RESPONSE | {"content": "a<|im_start|>b<|im_end|>c"}
    out = responses(by_hand("chatml", [*prompt, response]).rstrip("\n") + fill, prompt)
    assert out.chats() == [[response]]
    assert out[0, 0].is_complete


TWO_OPEN = "<|im_start|>user\nA\n<|im_start|>assistant\nB"
UPPER = "{% for m in messages %}{{ m['role'] + ':' + m['content'] | upper }}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "template", "named"),
    [
        ("Hi", {}, "character 0"),
        (TWO_OPEN, {"chat_template_name": "qwen"}, "character 19"),
        ("x", {"chat_template_name": "chatlm"}, "'chatml'.*'chatlm'"),
        ("user:HI", {"chat_template": UPPER}, "inverse_parser"),
    ],
)
def test_what_cannot_be_read_is_refused(text, template, named):
    with pytest.raises(ValueError, match=named):
        History.from_text(text, **template)


SHOUTS = (
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["shouts", "llama"])  # a new name, and a known one
def test_an_added_template_works_by_name_with_exact_masks_and_without_tags(name, monkeypatch):
    monkeypatch.setattr("policies.chats.templates.ADDED", {})
    add_chat_template(name, SHOUTS)
    options = {"tokenizer": tokenizer_of("llama"), "add_generation_prompt": False}
    options["chat_template_name"] = name
    history = History.from_chats([*PROMPT, RESPONSE])
    text = history.apply_chat_template(**options)
    assert text == "[user] Hi<|eot|>[assistant] Yo<|eot|>"
    assert History.from_text(text, name).messages() == [*PROMPT, RESPONSE]
    td = history.apply_chat_template(return_assistant_tokens_mask=True, **options)
    said = tokenizer_of("llama").decode(td["input_ids"][td["assistant_masks"]])
    assert said == "Yo<|eot|>"
