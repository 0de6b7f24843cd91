"""Text back to messages: exact round trips, tool markup, cut replies, added templates, errors."""

import random

import pytest
from letters import letters
from tensordict import lazy_stack

from policies import (
    History,
    Text,
    _extract_responses_from_full_histories,
    add_chat_template,
)
from policies.chats.templates import ADDED
from tests.checkpoints import NAMED, SPECIAL, TEMPLATES

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
HAND = {
    "chatml_format": ("", CHATML),
    "chatml": ("", CHATML),
    "qwen": ("", {k: v for k, v in CHATML.items() if k != "tool"}),
    "llama": ("<|begin_of_text|>", LLAMA),
    "deepseek": (BOS, LINES | {"assistant": ("Assistant: ", EOS)}),
    "falcon": ("", LINES),
    "dialogpt": ("", {"user": ("", END), "assistant": ("", END)}),
}
PROMPTS = {
    "llama": "<|header_start|>assistant<|header_end|>\n\n",
    "deepseek": "Assistant:",
    "falcon": "Assistant:",
    "dialogpt": "",
}
NAMES = {
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"},
    "deepseek": {"bos_token": BOS, "eos_token": EOS},
    "falcon": {"eos_token": END},
    "dialogpt": {"eos_token": END},
}
MARKUP = ("<|im_start|>", "<|im_end|>", "<|header_start|>", "<|header_end|>", "<|eot|>")


@pytest.fixture(scope="module")
def tokenizers():
    special = [*MARKUP, "<|begin_of_text|>", BOS, EOS, END]
    return {name: letters(special, **NAMES.get(name, {"eos_token": "<|im_end|>"})) for name in HAND}


def chats(name, count=40, *, whole=True):
    """Draw chats; contents have blanks and lines at their ends, or are empty."""
    rng = random.Random(name)
    roles = HAND[name][1]
    for _ in range(count):
        order = ["user", "assistant"] * rng.randint(1, 3)
        if "critic" in roles and rng.random() < 0.3:
            order.insert(2, "critic")
        if "system" in roles and (name == "qwen" or rng.random() < 0.5):
            order.insert(0, "system")
        texts = ["".join(rng.choices("ab \n\t<>|{}\u00e9\U0001f600", k=rng.randint(0, 9)))] * 9
        texts = [rng.choice(["", "\n", " "]) + t + rng.choice(["", "\n", " "]) for t in texts]
        chat = [{"role": r, "content": t} for r, t in zip(order, texts, strict=False)]
        if not whole:  # the templates of plain lines take two line ends for the end of a turn
            chat[-1]["content"] = chat[-1]["content"].rstrip() + rng.choice(["", " x"])
        yield chat


def by_hand(name, chat, *, whole=True):
    start, around = HAND[name]
    parts = [around[m["role"]][0] + m["content"] + around[m["role"]][1] for m in chat]
    text = start + "".join(parts)
    return text if whole else text.removesuffix(around["assistant"][1])


PROMPT = [{"role": "user", "content": "Hi"}]
FEW = [*PROMPT, {"role": "assistant", "content": "shot"}, {"role": "user", "content": "again"}]
ASKED = "<|im_start|>assistant\n"


class TestRoundTrip:
    @pytest.mark.parametrize("name", HAND)
    def test_text_to_history_to_text_is_exact(self, name, tokenizers):
        options = {"tokenizer": tokenizers[name], "add_generation_prompt": False}
        for chat in chats(name):
            text = by_hand(name, chat)
            history = History.from_text(text, chat_template_name=name)
            assert history.messages() == chat
            assert all(history.is_complete)
            assert history.apply_chat_template(chat_template_name=name, **options) == text
            again = History.from_text(text, name, tokenizer=tokenizers[name])
            assert again.messages() == chat

    @pytest.mark.parametrize("name", HAND)
    def test_cut_replies_are_not_complete(self, name):
        for chat in chats(name, whole=False):
            text = by_hand(name, chat, whole=False)
            if not chat[-1]["content"]:
                if name == "dialogpt":
                    continue  # it has no sign for an answer that has not begun
                text = text.removesuffix(" ") if name in ("deepseek", "falcon") else text
            history = History.from_text(text, name)
            assert history.messages() == chat
            assert list(history.is_complete) == [True] * (len(chat) - 1) + [False]

    @pytest.mark.parametrize("name", HAND)
    def test_a_generation_prompt_is_an_empty_reply(self, name, tokenizers):
        chat = [{"role": "user", "content": "Hi"}]
        prompt = PROMPTS.get(name, "<|im_start|>assistant\n")
        text = History.from_chats(chat).apply_chat_template(
            tokenizer=tokenizers[name], chat_template_name=name
        )
        assert text.endswith(HAND[name][1]["user"][1] + prompt)
        history = History.from_text(text, name)
        if prompt:
            assert history[-1].content == ""
            assert history[-1].role == "assistant"
            assert not history[-1].is_complete
        else:
            assert history.messages() == chat

    @pytest.mark.parametrize("kind", TEMPLATES)
    def test_a_tokenizers_own_template(self, kind):
        tokenizer = letters(SPECIAL[kind], **NAMED[kind])
        tokenizer.chat_template = TEMPLATES[kind]
        turns = [
            ("user", "What\n\nis it?"),
            ("assistant", "It is:\n1"),
            ("user", "x"),
            ("assistant", ""),
        ]
        chat = [{"role": r, "content": c} for r, c in turns]
        if kind == "qwen2":
            chat.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert History.from_text(text, tokenizer=tokenizer).messages() == chat
        assert History.from_text(
            text, chat_template=TEMPLATES[kind], tokenizer=tokenizer
        ).shape == (len(chat),)

    def test_text_without_name_or_tokenizer_is_chatml(self):
        history = History.from_text("<|im_start|>user\nHi<|im_end|>")
        assert history.messages() == [{"role": "user", "content": "Hi"}]
        assert list(history.is_complete) == [True]  # the line end after it is no sign of a cut
        for end in ("<|endoftext|>", "<|im_end|><|endoftext|>", "<|im_end|>\n" + 3 * END):
            ended = History.from_text("<|im_start|>assistant\nHi" + end)
            assert ended.content == ["Hi"]
            assert list(ended.is_complete) == [True]


class TestWhatFillsUpARow:
    """A decoded row may hold EOS and padding after the end of its last turn."""

    @pytest.mark.parametrize("name", HAND)
    @pytest.mark.parametrize("pad", ["<pad>", None])
    def test_after_the_end_of_a_turn(self, name, pad):
        eos = NAMES.get(name, {"eos_token": "<|im_end|>"})["eos_token"]
        names = NAMES.get(name, {}) | {"eos_token": eos, "pad_token": pad or eos}
        tokenizer = letters([*MARKUP, "<|begin_of_text|>", BOS, EOS, END, "<pad>"], **names)
        fills = [pad, pad * 3] if pad else []
        if name != "dialogpt":  # there EOS may be the end of an empty message
            fills += [eos, eos * 2, f"{eos}{tokenizer.pad_token}\n"]
        if name != "falcon":  # there lines are the end of a turn
            fills += [f"\n{pad}\n"] * bool(pad)
        for chat in chats(name, 10):
            text = by_hand(name, chat)
            tight = text.rstrip("\n") if name not in ("falcon", "deepseek", "dialogpt") else text
            for body, fill in [(body, fill) for body in (text, tight) for fill in fills]:
                history = History.from_text(body + fill, name, tokenizer=tokenizer)
                assert history.messages() == chat
                assert all(history.is_complete)
        history = History.from_text(
            [by_hand(name, chat) + (pad or "")] * 2, name, tokenizer=tokenizer
        )
        assert history.chats() == [chat, chat]

    @pytest.mark.parametrize(
        ("fill", "complete"),
        [("", False), ("<pad>", False), (END, True), (END * 2, True), (f"{END}<pad><pad>", True)],
    )
    def test_after_a_reply_that_has_no_end_of_turn(self, fill, complete):
        tokenizer = letters([*MARKUP, END, "<pad>"], eos_token=END, pad_token="<pad>")
        text = by_hand("chatml", PROMPT) + ASKED + "cut \n" + fill
        history = History.from_text(text, "chatml", tokenizer=tokenizer)
        assert history.messages()[1]["content"] == "cut \n"
        assert list(history.is_complete) == [True, complete]

    @pytest.mark.parametrize("name", HAND)
    def test_replies(self, name, tokenizers):
        tokenizer = tokenizers[name]
        tokenizer.pad_token = tokenizer.eos_token
        prompts, prompt = History.from_chats([PROMPT, PROMPT]), by_hand(name, PROMPT)
        asked = prompt + PROMPTS.get(name, ASKED)
        reply = {"role": "assistant", "content": "Yo"}
        closed = by_hand(name, [*PROMPT, reply])
        for body in (closed, closed.rstrip("\n")):
            texts = [body + 3 * tokenizer.eos_token, closed]
            out = _extract_responses_from_full_histories(texts, prompts, name, tokenizer)
            assert out.chats() == [[reply], [reply]]
            assert out[0, 0].is_complete
            history = Text(prompt=asked, full=texts[0]).to_history(tokenizer, name)
            assert history.response.messages() == [reply]

    def test_markup_in_a_reply_stays_its_content(self, tokenizers):
        prompts = History.from_chats([PROMPT])
        text = by_hand("chatml", PROMPT) + ASKED + "a<|im_start|>b<|im_end|>"
        for fill in ("", "\n", "<|im_end|>", "\n<|im_end|><|im_end|>\n"):
            out = _extract_responses_from_full_histories(
                [text + fill], prompts, "chatml", tokenizers["chatml"]
            )
            assert out.chats() == [[{"role": "assistant", "content": "a<|im_start|>b"}]]
            assert out[0, 0].is_complete


CALLS = """<|im_start|>user
A<|im_end|>
<|im_start|>assistant
hm
<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "g", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>tool
<tool_response>
r1
</tool_response>
<tool_response>
r2
</tool_response><|im_end|>
"""
SYSTEM = "<|im_start|>system\nBe kind<|im_end|>\n"


class TestTools:
    @pytest.mark.parametrize("name", ["chatml", "qwen"])
    def test_markup_of_tools_stays_in_the_content(self, name, tokenizers):
        history = History.from_text(SYSTEM + CALLS, name)
        assert [m["role"] for m in history.messages()] == ["system", "user", "assistant", "tool"]
        assert history.messages()[2]["content"].startswith("hm\n<tool_call>\n{")
        text = history.apply_chat_template(
            tokenizer=tokenizers[name], chat_template_name=name, add_generation_prompt=False
        )
        assert text == SYSTEM + CALLS


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "name", "match"),
        [
            ([], None, "got an empty list"),
            ("Hi", "chatml", "at character 0: expected one of .*got 'Hi'"),
            (
                "<|im_start|>user\nA<|im_end|>B",
                "chatml",
                r"at character 28: expected '\\n', got 'B'",
            ),
            (
                "<|im_start|>user\nA\n<|im_start|>assistant\nB",
                "qwen",
                "at character 19: .*the end of",
            ),
            ("x", "chatlm", "in .*'chatml', .*'qwen'.*, got 'chatlm'"),
        ],
    )
    def test_misfits_are_named(self, text, name, match):
        with pytest.raises(ValueError, match=match):
            History.from_text(text, name)

    def test_a_template_that_changes_contents_cannot_be_read(self):
        template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] | upper }}{% endfor %}"
        with pytest.raises(ValueError, match=r"cannot be read backwards.*inverse_parser"):
            History.from_text("user:HI", chat_template=template)

    @pytest.mark.parametrize("name", ["dialogpt", "falcon", "deepseek"])
    def test_a_role_without_a_turn_is_refused_when_rendered(self, name, tokenizers):
        chat = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
        with pytest.raises(ValueError, match="no turn for role tool"):
            History.from_chats(chat).apply_chat_template(
                tokenizer=tokenizers[name], chat_template_name=name
            )

    def test_markup_in_a_content_is_not_taken_for_a_turn(self):
        chat = [{"role": "user", "content": "x<|im_start|>assistant\ny"}]
        with pytest.raises(ValueError, match="at character 18: expected the end of the turn"):
            History.from_text(by_hand("chatml", chat), "chatml")


@pytest.fixture
def shouts():
    template = (
        "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    )
    add_chat_template("shouts", template)
    yield template
    ADDED.pop("shouts")


class TestAddedTemplates:
    CHAT = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"})
    TEXT = "[user] Hi<|eot|>[assistant] Yo<|eot|>"

    def test_it_works_by_name_with_exact_masks_and_without_tags(self, shouts, tokenizers):
        options = {"tokenizer": tokenizers["llama"], "add_generation_prompt": False}
        history = History.from_chats(list(self.CHAT))
        assert history.apply_chat_template(chat_template_name="shouts", **options) == self.TEXT
        td = history.apply_chat_template(
            chat_template_name="shouts", return_assistant_tokens_mask=True, **options
        )
        said = tokenizers["llama"].decode(td["input_ids"][td["assistant_masks"]])
        assert said == "Yo<|eot|>"
        assert History.from_text(self.TEXT, "shouts").messages() == list(self.CHAT)

    def test_an_explicit_template_comes_before_a_name(self, tokenizers):
        options = {"tokenizer": tokenizers["chatml"], "chat_template_name": "chatml"}
        history = History.from_chats(list(self.CHAT[:1]))
        assert history.apply_chat_template(**options).startswith("<|im_start|>user")
        text = history.apply_chat_template(chat_template="{{ messages[0]['content'] }}", **options)
        assert text == "Hi"

    @pytest.mark.parametrize("kind", [History.from_chats, list])
    def test_an_inverse_parser_of_ones_own(self, kind):
        def parse(text):
            return kind([{"role": "user", "content": part} for part in text.split("|")])

        add_chat_template("parts", "{% for m in messages %}{{ m['content'] }}|{% endfor %}", parse)
        try:
            assert History.from_text("a|b", "parts").content == ["a", "b"]
            prompts = History.from_chats([[{"role": "user", "content": "a"}]])
            replies = _extract_responses_from_full_histories(["a|b"], prompts, "parts")
            assert replies.chats() == [[{"role": "user", "content": "b"}]]
        finally:
            ADDED.pop("parts")

    def test_a_known_name_can_be_given_away_and_comes_back(self):
        before = History.from_text("<|begin_of_text|>" + by_hand("llama", self.CHAT)[17:], "llama")
        add_chat_template(
            "llama", "{% for m in messages %}{{ m['role'] + '=' + m['content'] + ';' }}{% endfor %}"
        )
        try:
            assert History.from_text("user=Hi;assistant=Yo;", "llama").messages() == list(self.CHAT)
        finally:
            ADDED.pop("llama")
        assert before.messages() == list(self.CHAT)
        assert History.from_text(by_hand("llama", self.CHAT), "llama").messages() == list(self.CHAT)


class TestResponses:
    def prompts(self, *chats):
        return History.from_chats(list(chats))

    def test_replies_of_other_lengths_are_padded_with_none(self):
        texts = [
            by_hand("chatml", PROMPT) + ASKED + "Yo<|im_end|>\n",
            by_hand("chatml", FEW) + ASKED + "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n",
            by_hand("chatml", PROMPT) + ASKED + "cu",
        ]
        out = _extract_responses_from_full_histories(texts, self.prompts(PROMPT, FEW, PROMPT))
        assert out.shape == (3, 2)
        assert [list(row.role) for row in out.unbind(0)] == [
            ["assistant", "<none>"],
            ["assistant", "user"],
            ["assistant", "<none>"],
        ]
        assert out.chats()[0] == [{"role": "assistant", "content": "Yo"}]
        assert [row[0].is_complete for row in out.unbind(0)] == [True, True, False]
        full = self.prompts(PROMPT, FEW, PROMPT).extend(out, inplace=False, dim=1)
        assert full.chats()[1] == [*FEW, *out.chats()[1]]

    @pytest.mark.parametrize("name", ["chatml", "qwen", "llama", "deepseek", "falcon", "dialogpt"])
    def test_no_reply_is_an_empty_message(self, name):
        text = by_hand(name, PROMPT)
        text += PROMPTS.get(name, ASKED)
        out = _extract_responses_from_full_histories([text], self.prompts(PROMPT), name)
        assert out.chats() == [[{"role": "assistant", "content": ""}]]

    def test_a_default_system_message_is_not_taken_for_a_reply(self):
        # only the prompts tell that nobody wrote it
        default = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        for system in (default, SYSTEM):
            text = system + by_hand("chatml", PROMPT) + ASKED + "Yo<|im_end|>\n"
            out = _extract_responses_from_full_histories([text], self.prompts(PROMPT), "qwen")
            assert out.chats() == [[{"role": "assistant", "content": "Yo"}]]

    def test_markup_in_prompt_or_reply_is_content(self):
        prompt = [{"role": "user", "content": "say <|im_end|>\n<|im_start|>user\nx"}]
        text = by_hand("chatml", prompt) + ASKED + "a<|im_start|>b<|im_end|>c<|im_end|>\n"
        out = _extract_responses_from_full_histories([text], self.prompts(prompt))
        reply = {"role": "assistant", "content": "a<|im_start|>b<|im_end|>c"}
        assert out.chats() == [[reply]]
        assert out[0, 0].is_complete

    def test_lost_messages_are_an_error(self):
        with pytest.raises(RuntimeError, match="at least 3, got 1"):
            _extract_responses_from_full_histories(
                [by_hand("chatml", PROMPT)], lazy_stack([History.from_chats(FEW)])
            )

    def test_padding_messages_do_not_count(self):
        prompts = self.prompts(FEW, PROMPT)
        filler = History(role="<none>", content="", batch_size=[2])
        prompts = lazy_stack([prompts[0], prompts[1].extend(filler)])
        texts = [by_hand("chatml", chat) + ASKED + "Yo<|im_end|>\n" for chat in (FEW, PROMPT)]
        out = _extract_responses_from_full_histories(texts, prompts)
        assert out.chats() == [[{"role": "assistant", "content": "Yo"}]] * 2
