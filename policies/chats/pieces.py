"""Cut a rendered chat into pieces: the template's own text, and the contents of messages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.chats.messages import Message
from policies.chats.text_encoder import Span

OUTSIDE = -1  # turn number of tokens outside the assistant mask


@dataclass(frozen=True)
class Piece:
    """A span of text that the template writes, or the content of one message."""

    text: str
    message: int | None = None  # index of the content's message; None = the template's text
    turn: int = OUTSIDE  # which assistant turn, from 0


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
    """Return the text of each piece in `text`; None if `text` is not the filled pieces.

    A content may lack white space at its ends, because many templates strip it.

    >>> fill([Piece("<"), Piece("x", 0), Piece(">")], [{"content": " a "}], "<a>")
    ['<', 'a', '>']
    """
    contents = [m["content"] for m in messages]
    for strip in (str, str.strip):  # fast path: most templates do one of these
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
    turn = [OUTSIDE] * size  # character -> turn
    for (start, end), number in spans.items():
        turn[start:end] = [number] * (end - start)
    return [max(turn[start:end], default=OUTSIDE) for start, end in offsets]
