"""Find the text that a template writes between an assistant turn and the next one.

The ids of a chat never change: the next prompt is the ids so far plus this text, encoded by
`Renderer.extend` (renderer.py). The text is found on a *stand-in chat*, whose contents are
placeholders, because many templates rewrite earlier turns (they drop thoughts, or close the last
turn differently). If tool results follow, the stand-in's last assistant turn has tool calls,
because templates read the tool's name from the call.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from policies.chats.messages import Message
from policies.chats.outlines import Marker, Outlines
from policies.chats.pieces import Piece, count_same, cut, fill
from policies.chats.tool_calls import CALL_ID, make_call


class LostTurn(ValueError):
    """The next turn cannot be found; the message says what the template does with the chat."""


@dataclass(frozen=True)
class Gap:
    """The text from a turn's last content to the next response, for any contents.

    `start` is the place in `text`, in characters, where ids without an end of turn go on. `ends`
    maps the last token of other ids to their place.
    """

    text: str
    start: int
    ends: dict[int, int]
    contents: list[str]  # placeholders, by message

    def start_after(self, ids: Sequence[int]) -> int:
        """Return the place in `text` from which `ids` go on."""
        return self.ends.get(ids[-1], self.start) if ids else self.start


@dataclass(frozen=True)
class StandIn:
    """A chat of placeholders: `size` messages before the gap, which end in the word `anchor`."""

    chat: list[Message]
    size: int
    anchor: str

    @classmethod
    def of(
        cls, outlines: Outlines, messages: Sequence[Message], new: Sequence[Message]
    ) -> "StandIn":
        """Return the stand-in for `messages` and `new` ones."""
        chat = [dict(message) for message in (*messages, *new)]
        anchor = outlines.placeholder("end")
        for i, message in enumerate(chat):
            if message["role"] == "assistant":
                results = list(takewhile(lambda m: m["role"] == "tool", chat[i + 1 :]))
                calls = _calls(results, anchor) if outlines.writes["tool_calls"] else []
                chat[i] = {"role": "assistant", "content": ""}
                chat[i] |= {"tool_calls": calls} if calls else {}
        blank = outlines.blank(chat)
        last = blank[len(messages) - 1]
        anchor = anchor if last.get("tool_calls") else last["content"]
        return cls(blank, len(messages), anchor)

    def find_gap(self, outlines: Outlines) -> Gap:
        """Return the gap; raise LostTurn if the template drops the turn or a new message.

        `if_followed` begins with the end of the turn (ChatML: `<|im_end|>`), then opens the next
        role. Its common start with `if_last` is the end of the turn; the ids may have it already.
        """
        if_last, if_followed = self._texts_after_turn(outlines)
        contents = [message["content"] for message in self.chat]
        called = bool(self.chat[self.size - 1].get("tool_calls"))  # their markup is in the text
        markers = outlines.control_markers(if_followed)
        common = count_same(if_last.rstrip(), if_followed)
        for marker in markers:
            if marker.start < common < marker.stop:
                common = marker.start  # the common text must not end inside a marker
        closing = closing_markers(if_followed[:common], markers)
        if closing:
            start = closing[-1].start if called else 0
            return Gap(if_followed, start, {m.token: m.stop for m in closing}, contents)
        # The next role's token ends the turn (GLM), or the last turn has another end (gpt-oss).
        start = common if called else 0
        opening = next((m for m in markers if m.stop > common), None)
        if opening is None:
            return Gap(if_followed, start, {}, contents)
        last_turn = [m.token for m in outlines.control_markers(if_last) if m.stop > common]
        ends = dict.fromkeys([opening.token, *last_turn], opening.stop)
        return Gap(if_followed, start, ends, contents)

    def _texts_after_turn(self, outlines: Outlines) -> tuple[str, str]:
        """Return the text after the turn if the chat stops there, and if it goes on."""
        alone = outlines.text(self.chat[: self.size], False)[0]
        before, after = self._after(alone), self._after(outlines.text(self.chat, True)[0])
        if before is None or after is None:
            raise LostTurn(f"drops message {self.size - 1} (assistant) when the chat goes on")
        for i, message in enumerate(self.chat[self.size :], self.size):
            if message["content"].lower() not in after.lower():
                raise LostTurn(f"drops message {i} ({message['role']})")
        return before, after

    def fill(
        self, outlines: Outlines, gap: Gap, chat: Sequence[Message], start: int
    ) -> tuple[list[Piece], list[str] | None, str]:
        """Return the gap from `start` on with the contents of `chat`: pieces, texts, full text.

        The gap may contain earlier messages: Mistral writes the system prompt before the last user
        message. The texts are None if the template changes contents.
        """
        pairs = zip(self.chat, chat, strict=True)
        chat = [blank if m["role"] == "assistant" else m for blank, m in pairs]
        text = self._after(outlines.text(chat, True)[0]) or ""
        if text[:start] != gap.text[:start]:
            raise LostTurn(f"ends message {self.size - 1} otherwise for other messages after it")
        if outlines.nonce in text.lower():  # a placeholder of the stand-in
            raise LostTurn("writes a turn of the assistant again in a later one")
        pieces = cut(gap.text[start:], gap.contents, [])
        return pieces, fill(pieces, chat, text[start:]), text[start:]

    def _after(self, text: str) -> str | None:
        """Return the text after the last anchor, which a template may write in capitals."""
        places = [match.end() for match in re.finditer(self.anchor, text, re.IGNORECASE)]
        return text[places[-1] :] if places else None


def closing_markers(text: str, markers: Sequence[Marker]) -> list[Marker]:
    """Return the markers at the end of a text, with nothing but white space between them."""
    closing, end = list[Marker](), len(text)
    for marker in reversed([m for m in markers if m.stop <= len(text)]):
        if text[marker.stop : end].strip():
            break
        closing.insert(0, marker)
        end = marker.start
    return closing


def _calls(results: Sequence[Message], anchor: str) -> list[Message]:
    """Return the tool calls that the results answer."""
    calls = [make_call(result.get("name", "tool"), {"x": anchor}) for result in results]
    ids = [result.get("tool_call_id", CALL_ID) for result in results]
    return [call | {"id": call_id} for call, call_id in zip(calls, ids, strict=True)]
