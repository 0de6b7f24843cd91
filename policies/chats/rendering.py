"""The parts of rendering that know text and tokens but no chat: spelling, spans, outlines.

An *outline* is a chat rendered with unguessable placeholders for its contents and cut into pieces,
so that what the template wrote and what a message brought along can be told apart. A *control
token* is an added token of the tokenizer, special or not, other than white space.

Left out on purpose: slow tokenizers, which give no offsets.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

_RENDERING = Lock()  # threads would share the compiled template's one tracker of tagged spans
Message = dict[str, Any]
Span = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True)
class Piece:
    """A run of text written by the template, or the content of one message."""

    text: str
    message: int | None = None  # whose content it is; None = the template's own text
    assistant: bool = False  # inside the assistant mask


@dataclass(frozen=True)
class Outline:
    """What a template makes of a list of roles, whatever the contents."""

    pieces: list[Piece]
    control: list[int]  # the control tokens of the template's own text, in order
    fault: str = ""  # why the assistant mask does not fit training data


class Encoder:
    """Turn text into ids in two ways: as the tokenizer does, or with control tokens spelled out.

    Works on private copies, so that the caller's padding and truncation neither act nor change.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"expected a fast tokenizer, got {type(tokenizer).__name__}; load it with "
                "AutoTokenizer.from_pretrained(..., use_fast=True)"
            )
        added = tokenizer.added_tokens_decoder
        self.control = frozenset(i for i, t in added.items() if not t.content.isspace())
        self._whole = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._whole.no_padding()
        self._whole.no_truncation()
        self._whole.post_processor = None  # it may trim spaces off the offsets
        self._spelling: Tokenizer | None = None
        self._blanks = {t.content: i for i, t in added.items() if t.content.isspace()}
        self._renumber: dict[int | None, int] = {}

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of `text` and their spans, as `tokenizer(text)` has them."""
        encoding = self._whole.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def find_control(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens among `ids`, in order."""
        return [i for i in ids if i in self.control]

    def token(self, index: int) -> str:
        """Return the text of a token."""
        return str(self._whole.id_to_token(index))

    def spell(self, text: str) -> list[int]:
        """Return ids of `text` none of which is a control token."""
        if self._spelling is None:
            self._spelling = _without_added_tokens(self._whole)
            # what a copy keeps of the added tokens gets new ids
            self._renumber = {self._spelling.token_to_id(t): i for t, i in self._blanks.items()}
        ids = self._spelling.encode(text, add_special_tokens=False).ids
        ids = [self._renumber.get(i, i) for i in ids]
        if self.find_control(ids):
            raise ValueError(
                "expected a tokenizer that can spell out the text of its control tokens, got "
                f"token {self.find_control(ids)[0]} from the message text {text[:60]!r}; remove "
                "that markup from the data"
            )
        return ids


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that knows only white space among its added tokens.

    It encodes parts of a text, so it must not put the blank of a text's first word before each.
    """

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "Metaspace":
                node["prepend_scheme"] = "never"
            elif node.get("type") == "Prepend":
                node["prepend"] = ""
            elif node.get("type") == "ByteLevel" and "add_prefix_space" in node:
                node["add_prefix_space"] = False
            node = list(node.values())
        for value in node if isinstance(node, list) else []:
            walk(value)

    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"].isspace()]
    walk(spec["normalizer"])
    walk(spec["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(spec))


def render_template(
    messages: Sequence[Message],
    template: str,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
    tagged: bool = False,
) -> tuple[str, list[Span]]:
    """Return what a template writes, and the spans of its generation tags if it is `tagged`.

    Raises ValueError if it refuses the chat.
    """
    chat = [{k: v for k, v in m.items() if v is not None} for m in messages]
    try:
        with _RENDERING:
            rendered: Any = render_jinja_template(
                conversations=[chat],
                chat_template=template,
                return_assistant_tokens_mask=tagged,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"refuses a chat with roles {[m['role'] for m in messages]}: {error}"
        ) from error
    texts, spans = rendered
    return texts[0], spans[0] if tagged else []


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
    number = {name: i for i, name in enumerate(placeholders)}
    places = [m.span() for m in re.finditer("|".join(placeholders), text)]
    borders = sorted({0, len(text), *(b for span in [*places, *spans] for b in span)})
    parts = [(text[a:b], any(s <= a < e for s, e in spans)) for a, b in pairwise(borders)]
    return [Piece(part, number.get(part), marked) for part, marked in parts]


def fill(pieces: Sequence[Piece], contents: Sequence[str], text: str) -> list[str] | None:
    """Return the texts of the pieces of `text`; None if it is not the pieces with the contents.

    A content may have lost white space at its ends, which many templates strip.

    >>> fill([Piece("<"), Piece("x", 0), Piece(">")], [" a "], "<a>")
    ['<', 'a', '>']
    """
    for strip in (str, str.strip):
        texts = [p.text if p.message is None else strip(contents[p.message]) for p in pieces]
        if "".join(texts) == text:
            return texts
    pattern = ""
    for p in pieces:
        whole = p.text if p.message is None else contents[p.message]
        forms = [whole] if p.message is None else [f(whole) for f in _STRIPS]
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


def mark(offsets: Sequence[Span], spans: Sequence[Span], size: int) -> list[bool]:
    """Return for each token whether it overlaps one of `spans`; `size` is the text's length."""
    inside = bytearray(size)
    for start, end in spans:
        inside[start:end] = b"\1" * (end - start)
    return [1 in inside[start:end] for start, end in offsets]


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as a list; raise ValueError if there is none or one is malformed."""
    if not messages:
        raise ValueError("expected at least one message, got an empty chat")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        silent = content is None and message.get("tool_calls")
        if not isinstance(role, str) or not (isinstance(content, str) or silent):
            raise ValueError(
                f"message {i}: expected a role and a content that are str, got role {role!r} and "
                f"content of type {type(content).__name__}"
            )
        if content and content.encode(errors="ignore").decode() != content:
            raise ValueError(
                f"message {i}: expected Unicode text, got lone surrogates in {content[:40]!a}"
            )
    return [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
