"""Separate a template's text from contents, find the assistant's spans, and encode text.

An *outline* is a chat rendered with unguessable placeholders for its contents and cut into pieces
of the template's text and of contents. A *control token* is a special token, or another added
token that the template marks turns with (`Outlines.find_markers`). Contents cannot hold one; they
may hold other added tokens, such as <think> and <tool_call> where these are not special.

Left out on purpose: slow tokenizers, which give no offsets.
"""

import json
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from policies.chats.templates import Template

SECONDS = 5.0  # of computing for one chat; real templates take milliseconds
LONGEST = 1 << 20  # characters of a rendered chat that is over ten times as long as its messages
_RENDERING = threading.Lock()  # threads share the compiled template's tracker of tagged spans
CACHE_SIZE = 512
OUTSIDE = -1  # the turn of a token outside the assistant mask
CALL_ID = "call00000"  # of the form that Mistral expects
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
Message = dict[str, Any]
Span = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True)
class Piece:
    """A run of text written by the template, or the content of one message."""

    text: str
    message: int | None = None  # index of the content's message; None = the template's text
    turn: int = OUTSIDE  # which assistant turn, from 0


@dataclass(frozen=True)
class Outline:
    """The rendering of a list of roles, for any contents."""

    pieces: list[Piece]
    control: list[int]  # control tokens of the template's text, in order
    fault: str = ""  # why the assistant mask does not fit training data


@dataclass(frozen=True)
class Marker:
    """A control token in a text, at [start, stop) in characters."""

    token: int
    start: int
    stop: int


class Encoder:
    """Encode text as the tokenizer does, or with control tokens as plain text.

    Works on private copies, independent of the caller's padding and truncation settings.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"expected a fast tokenizer, got {type(tokenizer).__name__}")
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if not t.content.isspace()}
        self.added = {i: token.content for i, token in added.items()}
        self.control = frozenset(i for i, token in added.items() if token.special)
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.post_processor = None  # it may trim spaces off the offsets

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of `text` and their spans, as `tokenizer(text)` does."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def find_control(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens among `ids`, in order."""
        return [i for i in ids if i in self.control]

    @cached_property
    def _speller(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return a tokenizer without control tokens, and the ids of its added tokens.

        It encodes parts of a text, so it must not insert the blank of a first word before each.
        """
        spec = json.loads(self._tokenizer.to_str())
        ordinary = [t for t in spec["added_tokens"] if t["id"] not in self.control]
        spec["added_tokens"] = ordinary
        _add_no_blank(spec["normalizer"])
        _add_no_blank(spec["pre_tokenizer"])
        copy = Tokenizer.from_str(json.dumps(spec))
        return copy, {copy.token_to_id(t["content"]): t["id"] for t in ordinary}

    def spell(self, text: str) -> list[int]:
        """Return ids of `text` none of which is a control token."""
        speller, added = self._speller
        ids = [added.get(i, i) for i in speller.encode(text, add_special_tokens=False).ids]
        if self.find_control(ids):
            raise ValueError(f"expected no control tokens in the data, got them in {text[:60]!r}")
        return ids


def _add_no_blank(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("type") == "Metaspace":
            node["prepend_scheme"] = "never"
        elif node.get("type") == "Prepend":
            node["prepend"] = ""
        elif node.get("type") == "ByteLevel" and "add_prefix_space" in node:
            node["add_prefix_space"] = False
        node = list(node.values())
    for value in node if isinstance(node, list) else []:
        _add_no_blank(value)


@contextmanager
def bounded() -> Iterator[None]:
    """Raise TimeoutError in a block that computes for more than `SECONDS`.

    Signals reach the main thread alone; in other threads the block is not bounded. A call into C,
    such as 10**10**10, is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + SECONDS

    def look(*_: Any) -> None:  # other threads, too, advance the timer
        if time.thread_time() > end:
            raise TimeoutError(f"no end within {SECONDS:g} s of computing")

    handler = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS / 10, SECONDS / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def render_template(
    messages: Sequence[Message],
    template: str,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
    tagged: bool = False,
) -> tuple[str, list[Span]]:
    """Return the rendered text and, if `tagged`, the spans of its generation tags.

    The first message may have "tools": the template gets them as its variable `tools`.
    """
    chat = [{k: v for k, v in m.items() if v is not None and k != "tools"} for m in messages]
    try:
        with _RENDERING, bounded():
            rendered: Any = render_jinja_template(
                conversations=[chat],
                chat_template=template,
                return_assistant_tokens_mask=tagged,
                add_generation_prompt=add_generation_prompt,
                tools=messages[0].get("tools"),
                **variables,
            )
    except Exception as error:  # a template may raise anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"refuses a chat of {[m['role'] for m in messages]}: {reason}") from error
    texts, spans = rendered
    size = len(str(messages))
    if len(texts[0]) > LONGEST and len(texts[0]) > 10 * size:
        raise ValueError(f"writes {len(texts[0])} characters for a chat of {size}")
    return texts[0], spans[0] if tagged else []


def count_same(first: str, second: str) -> int:
    """Return the number of leading characters that two texts share.

    >>> count_same("abc", "abd")
    2
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def close_turn(text: str, span: Span, ends: Sequence[str]) -> Span:
    """Make `span` end right after the turn's end-of-turn token, if there is one.

    >>> close_turn("Hi<|im_end|>\\nbye", (0, 2), ["<|im_end|>"])
    (0, 12)
    >>> close_turn("Hi<|im_end|>\\nbye", (0, 13), ["<|im_end|>"])
    (0, 12)
    """
    start, stop = span
    inside = [text.rfind(e, start, stop) + len(e) for e in ends if e in text[start:stop]]
    if inside:
        return start, max(inside)
    tail = text[stop:]
    gap = len(tail) - len(tail.lstrip())
    after = [gap + len(e) for e in ends if tail.startswith(e, gap)]
    return start, stop + max(after, default=0)


def cut(text: str, placeholders: Sequence[str], spans: Sequence[Span]) -> list[Piece]:
    """Cut a text rendered with `placeholders` for contents into pieces, also at ends of `spans`.

    >>> [p.text for p in cut("<x0>", ["x0"], [(1, 4)])]
    ['<', 'x0', '>']
    """
    number = {name: i for i, name in enumerate(placeholders) if name}
    places = [m.span() for m in re.finditer("|".join(number), text)] if number else []
    borders = sorted({0, len(text), *(b for span in [*places, *spans] for b in span)})
    pieces = []
    for a, b in pairwise(borders):
        turn = next((i for i, (start, end) in enumerate(spans) if start <= a < end), OUTSIDE)
        pieces.append(Piece(text[a:b], number.get(text[a:b]), turn))
    return pieces


def fill(pieces: Sequence[Piece], messages: Sequence[Message], text: str) -> list[str] | None:
    """Return the texts of the pieces of `text`; None if it is not the pieces with the contents.

    A content may have lost white space at its ends, which many templates strip.

    >>> fill([Piece("<"), Piece("x", 0), Piece(">")], [{"content": " a "}], "<a>")
    ['<', 'a', '>']
    """
    contents = [m["content"] for m in messages]
    for strip in (str, str.strip):  # what most templates do: a fast path
        texts = [p.text if p.message is None else strip(contents[p.message]) for p in pieces]
        if "".join(texts) == text:
            return texts
    pattern = ""
    for p in pieces:
        full = p.text if p.message is None else contents[p.message]
        forms = [full] if p.message is None else [f(full) for f in _STRIPS]
        pattern += "(" + "|".join(map(re.escape, dict.fromkeys(forms))) + ")"
    match = re.fullmatch(pattern, text)
    return list(match.groups()) if match else None


_STRIPS = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda s: s.strip("\n"),
    lambda s: s.lstrip("\n"),
)


def turns_of(offsets: Sequence[Span], spans: Mapping[Span, int], size: int) -> list[int]:
    """Return for each token the turn whose span it overlaps, OUTSIDE if none.

    `spans`: the turn of each span; `size`: the text's length.

    >>> turns_of([(0, 2), (2, 4), (4, 5)], {(3, 4): 0}, 5)
    [-1, 0, -1]
    """
    turn = [OUTSIDE] * size  # of each character
    for (start, end), number in spans.items():
        turn[start:end] = [number] * (end - start)
    return [max(turn[start:end], default=OUTSIDE) for start, end in offsets]


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as a list; raise ValueError if there is none or one is malformed."""
    if not messages:
        raise ValueError("expected at least one message, got an empty chat")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        silent = content is None and message.get("tool_calls")
        if not isinstance(role, str) or not (isinstance(content, str) or silent):
            raise ValueError(f"message {i}: expected a role and a content, got {message!r:.60}")
        if content and content.encode(errors="ignore").decode() != content:
            raise ValueError(f"message {i}: got lone surrogates in {content[:40]!a}")
    return [m if m.get("content") is not None else {**m, "content": ""} for m in messages]


THOUGHTS = ("reasoning_content", "thinking", "reasoning")
WRITTEN = ("tools", "tool_calls", *THOUGHTS)  # keys whose loss is an error


def make_call(name: str, arguments: Any) -> Message:
    """Return a tool call in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": CALL_ID, "function": function}


def make_schema(name: str) -> Message:
    """Return the schema of a tool without parameters."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def with_arguments(message: Message, *, as_text: bool) -> Message:
    """Return a message whose calls have their arguments as a JSON text, or as a dict.

    >>> call = make_call("add", '{"a": 1}')
    >>> done = with_arguments({"role": "assistant", "tool_calls": [call]}, as_text=False)
    >>> done["tool_calls"][0]["function"]["arguments"]
    {'a': 1}
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            if as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not as_text and isinstance(arguments, str):
                arguments = json.loads(arguments)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}


class Outlines:
    """Cache the outlines of one template; `ends` are the tokens that end a turn."""

    def __init__(self, template: Template, variables: Mapping[str, Any], encoder: Encoder) -> None:
        self.template, self.label, self.ends = template.text, template.label, list[str]()
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self._variables, self._encoder = dict(variables), encoder
        self.dated = "strftime_now" in self.template
        self.nonce = secrets.token_hex(16)
        self._known: dict[str, Outline] = {}
        encoder.control |= self.find_markers()

    def text(
        self, messages: Sequence[Message], prompt: bool, last_turn: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the rendered text and the spans of its generation tags.

        With `last_turn` the last turn stands in the context that the model has when it writes it.
        """
        options = {"add_generation_prompt": prompt, "tagged": self.tagged}
        if any(message.get("tool_calls") for message in messages):
            messages = [with_arguments(m, as_text=self._takes_text) for m in messages]
        try:
            text, tags = render_template(messages, self.template, self._variables, **options)
        except ValueError as error:
            first = "change policy.system_prompt, or " if messages[0]["role"] == "system" else ""
            raise ValueError(f"{self.label} {error}; {first}{self.remedy}") from error
        if last_turn and not self.tagged and len(messages) > 1:
            text = self._in_context(messages, text)
        return text, tags

    def _in_context(self, messages: Sequence[Message], text: str) -> str:
        """Return the prompt of the last turn, and the turn, where `text` rewrites the prompt.

        For example, gpt-oss drops the thought of a call once its chat has a final response.
        """
        before = self.text(messages[:-1], True)[0]
        alone = [{"role": "user", "content": "x"}, messages[-1]]
        if not text.startswith(before):
            opening, turn = self.text(alone[:1], True)[0], self.text(alone, False)[0]
            if turn.startswith(opening):
                return before + turn.removeprefix(opening)
        return text

    def of(self, messages: Sequence[Message], prompt: bool, last_turn: bool = False) -> Outline:
        """Return the outline of a chat, shared by chats that differ in contents only.

        With `last_turn` its assistant mask covers the last turn alone.
        """
        blank = self.blank(messages)
        key = f"{prompt}{last_turn}{blank}"
        outline = None if self.dated else self._known.get(key)
        if outline is None:
            self.refuse_markup(messages)
            self._refuse_unwritten(messages)
            outline = self._make(blank, prompt, last_turn)
            if len(self._known) >= CACHE_SIZE:
                self._known.clear()
            self._known[key] = outline
        return outline

    def blank(self, messages: Sequence[Message]) -> list[Message]:
        """Return the chat with an unguessable placeholder for each content.

        A message of calls alone stays without content: templates write no line for it.
        """
        silent = [m.get("tool_calls") and not m.get("content") for m in messages]
        names = ["" if s else self.placeholder(str(i)) for i, s in enumerate(silent)]
        return [m | {"content": name} for m, name in zip(messages, names, strict=True)]

    def placeholder(self, name: str) -> str:
        """Return an unguessable word."""
        return f"x{self.nonce}x{name}x"

    def _make(self, blank: Sequence[Message], prompt: bool, last_turn: bool) -> Outline:
        text, tags = self.text(blank, prompt, last_turn)
        self._refuse_loss(blank, text)
        spans, fault = self.find_spans(blank, text, tags, last_turn)
        names = {m["content"]: m["role"] == "assistant" for m in blank if m["content"]}
        matches = re.finditer("|".join(names), text) if names else ()
        places = [(m.span(), names[m[0]]) for m in matches]
        for (a, b), responded in places:
            covered = [(max(a, s), min(b, e)) for s, e in spans if s < b and a < e]
            if covered and (not responded or covered != [(a, b)]):
                fault = "puts other text than the assistant's into its turns"
        if fault:  # mask by definition: content and end of turn
            spans = [span for span, responded in places if responded][-1 if last_turn else 0 :]
        contents = [m["content"] for m in blank]
        pieces = cut(text, contents, [close_turn(text, span, self.ends) for span in spans])
        return Outline(pieces, self.control_of(pieces), fault)

    def find_spans(
        self, messages: Sequence[Message], text: str, tags: list[Span], last_turn: bool
    ) -> tuple[list[Span], str]:
        """Return the spans of the assistant's turns, from tags if the template has them."""
        if self.tagged and not last_turn:
            return tags, ""
        spans, fault = self._find_turns(messages, text, last_turn)
        return (tags[-1:], "") if fault and self.tagged else (spans, fault)

    def _find_turns(
        self, messages: Sequence[Message], text: str, last_turn: bool
    ) -> tuple[list[Span], str]:
        """Return the spans that responses add to their generation prompts, or a fault."""
        spans = []
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in places[-1:] if last_turn else places:
            after = self.text(messages[: i + 1], False, last_turn)[0].rstrip()
            if i:
                before = self.text(messages[:i], True)[0]
            else:  # templates expect at least one message
                before = after.rpartition(messages[i]["content"])[0]
            if not after.startswith(before):
                return [], f"writes turn {i + 1} otherwise than its own generation prompt begins it"
            stop = self._find_end(messages[: i + 1], after, len(before))
            if not text.startswith(after[:stop]):
                return [], f"rewrites earlier turns: turn {i + 1} changes when the chat goes on"
            spans.append((len(before), stop))
        return spans, ""

    def _find_end(self, messages: Sequence[Message], text: str, start: int) -> int:
        """Return where the last turn of a text ends; it starts at `start`.

        Some templates close a chat with one more token (Phi-3): the end is the last end-of-turn
        token that also stands there when the chat goes on.
        """
        content = messages[-1]["content"]
        tail = text.rfind(content, start) + len(content) if content in text[start:] else start
        if sum(text.count(end, tail) for end in self.ends) > 1:
            later = [*messages, {"role": "user", "content": "x"}]
            same = count_same(text, self.text(later, False)[0])
            ends = [text.rfind(e, tail, same) + len(e) for e in self.ends if e in text[tail:same]]
            if ends:
                return max(ends)
        return close_turn(text, (start, len(text)), self.ends)[1]

    def rewrites_turns(self) -> bool:
        """Return whether an earlier turn changes in a longer chat, of any keys that are written."""
        thoughts = [{key: self.placeholder(key)} for key in THOUGHTS if self.writes[key]]
        tools = [{"tools": [make_schema("f")]}] if self.writes["tools"] else []
        chats = [[{"role": "user"}, {"role": "assistant"} | more] for more in ({}, *thoughts)]
        chats += [[{"role": "user"} | more, {"role": "assistant"}] for more in tools]
        chats += [[{"role": "system"}, *chats[0]]]
        return any(map(self._rewrites, chats))

    def _rewrites(self, chat: Sequence[Message]) -> bool:
        """Return whether the last turn of a chat changes when the chat goes on."""
        blank = self.blank([*chat, {"role": "user"}])
        try:
            alone, longer = (self.text(blank[:n], False)[0].rstrip() for n in (-1, None))
        except ValueError:  # a template that refuses system messages
            return False
        return not longer.startswith(alone[: self._find_end(blank[:-1], alone, 0)])

    def find_markers(self) -> frozenset[int]:
        """Return the added tokens that the template writes around the turns of each role.

        Without tags in pairs, <x> and </x>: inside of a turn they enclose thoughts, calls and
        results, and contents may hold them.
        """
        texts = self._encoder.added
        pairs = {text.replace("</", "<", 1) for text in texts.values() if text.startswith("</")}
        tags = {i for i, text in texts.items() if text.replace("</", "<", 1) in pairs}
        plain, *others = (["user", "assistant"], ["system", "user"], ["user", "assistant", "tool"])
        written = self._text_of(plain)
        for roles in others:
            with suppress(ValueError):  # a role that the template refuses
                written += self._text_of(roles)
        added = set(self._encoder.encode(written)[0]) & set(texts)
        return frozenset(added - tags)

    def _text_of(self, roles: Sequence[str]) -> str:
        """Return the text of a chat of blank messages."""
        return self.text(self.blank([{"role": role} for role in roles]), False)[0]

    def find_end_of_turn(self) -> int | None:
        """Return the control token that the template writes right after a response, or None."""
        blank = self.blank([{"role": "user"}, {"role": "assistant"}])
        text, response = self.text(blank, False)[0], blank[-1]["content"]
        tail = re.split(response, text, flags=re.IGNORECASE)[-1]  # a template may write in capitals
        ids, offsets = self._encoder.encode(tail)
        for token, (start, _) in zip(ids, offsets, strict=True):
            if token in self._encoder.control:
                return token if not tail[:start].strip() else None
        return None

    def _refuse_unwritten(self, messages: Sequence[Message]) -> None:
        """Raise if a message has a call, tools or thoughts for which the template has no place."""
        for i, message in enumerate(messages):
            for key in WRITTEN:
                if message.get(key) and not self.writes[key]:
                    raise ValueError(
                        f"message {i}, {key}: {self.label} writes no {key}; "
                        f"{self.remedy_for_tools}, or remove {key} from the row"
                    )

    @cached_property
    def writes(self) -> dict[str, bool]:
        """Return for each key of `WRITTEN` whether the template writes its value."""
        name = f"x{self.nonce}x"
        values = dict[str, Any].fromkeys(WRITTEN, name)
        call = make_call(name, "{}" if self._takes_text else {})
        values |= {"tools": [make_schema(name)], "tool_calls": [call]}
        return {key: name in self._try(key, value) for key, value in values.items()}

    @cached_property
    def _takes_text(self) -> bool:
        """Return whether the template takes arguments as text: it fails on a dict, or prints it."""
        name = f"x{self.nonce}x"
        text = self._try("tool_calls", [make_call("f", {name: 1})])
        return name not in text or f"{{'{name}'" in text

    def _try(self, key: str, value: Any) -> str:
        """Return the text of an exchange with a key, "" if the template refuses it."""
        place = 0 if key == "tools" else 1
        chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""}]
        chat[place] |= {key: value}
        try:
            return render_template(chat, self.template, self._variables, tagged=self.tagged)[0]
        except ValueError:
            return ""

    def _refuse_loss(self, blank: Sequence[Message], text: str) -> None:
        """Raise if a content is missing from the text."""
        for i, message in enumerate(blank):
            if message["content"] not in text.lower():
                beside = " beside its calls" if message.get("tool_calls") else ""
                raise ValueError(
                    f"{self.label} does not write the content{beside} of message {i} "
                    f"({message['role']}) of a chat with roles {[m['role'] for m in blank]}; "
                    f"{self.remedy}"
                )

    def refuse_markup(self, messages: Sequence[Message]) -> None:
        """Raise if a field other than the content has control tokens."""
        for i, message in enumerate(messages):
            other = str({k: v for k, v in message.items() if k != "content"})
            ids, spans = self._encoder.encode(other)
            markers = [
                span for k, span in zip(ids, spans, strict=True) if k in self._encoder.control
            ]
            if markers:
                raise ValueError(
                    f"message {i}: expected control tokens in contents alone, where they are text, "
                    f"got {other[slice(*markers[0])]!r} in another key; remove it from the row"
                )

    @cached_property
    def remedy(self) -> str:
        """Return the remedy for a template that does not fit, in the model's own tokens."""
        name = "chatml" if self._has_chatml() else "<another template of this model>"
        return f"set policy.chat_template={name}"

    @property
    def remedy_for_tools(self) -> str:
        """Return the remedy for a template without a place for tools, calls or thoughts."""
        name = "hermes" if self._has_chatml() else "<a template of this model that does>"
        return f"set policy.chat_template={name}"

    def _has_chatml(self) -> bool:
        return set(CHATML_TOKENS) <= set(self._encoder.added.values())

    def control_markers(self, text: str) -> list[Marker]:
        """Return the control tokens of a text with their places, in order."""
        pairs = zip(*self._encoder.encode(text), strict=True)
        return [Marker(i, *span) for i, span in pairs if i in self._encoder.control]

    def control_of(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the control tokens of the template's own text, in order."""
        template_ids = [self._encoder.encode(p.text)[0] for p in pieces if p.message is None]
        return self._encoder.find_control([i for ids in template_ids for i in ids])
