"""What a chat template writes around the contents, and where the assistant speaks in it.

An *outline* is a chat rendered with unguessable placeholders for its contents and cut into pieces,
so that what the template wrote and what a message brought along can be told apart.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from policies.chats.rendering import (
    Encoder,
    Message,
    Outline,
    Piece,
    Span,
    close_turn,
    cut,
    render_template,
)
from policies.chats.templates import Template

_MAX_KEPT = 512


class Outlines:
    """The outlines of one template, with the special tokens in `variables`, kept for reuse.

    `ends` are the tokens that end a turn, as text. `label` names the template in errors.
    """

    def __init__(self, template: Template, variables: Mapping[str, Any], encoder: Encoder) -> None:
        self.template, self.label, self.ends = template.text, template.label, list[str]()
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self._variables, self._encoder = dict(variables), encoder
        self._dated = "strftime_now" in self.template
        self._nonce = secrets.token_hex(16)
        self._known: dict[str, Outline] = {}

    def text(self, messages: Sequence[Message], prompt: bool) -> tuple[str, list[Span]]:
        """Return the rendered text and the spans of its generation tags."""
        options = {"add_generation_prompt": prompt, "tagged": self.tagged}
        try:
            return render_template(messages, self.template, self._variables, **options)
        except ValueError as error:
            raise ValueError(
                f"{self.label} {error}; "
                "change the roles (env, policy.system_prompt) or set policy.chat_template=chatml"
            ) from error

    def of(self, messages: Sequence[Message], prompt: bool) -> Outline:
        """Return the outline of a chat; chats that differ in contents only share one."""
        blank = self.blank(messages)
        key = f"{prompt}{blank}"
        found = None if self._dated else self._known.get(key)
        if found is None:
            self._refuse_markup(messages)
            found = self._make(blank, prompt)
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[key] = found
        return found

    def blank(self, messages: Sequence[Message]) -> list[Message]:
        """Return the chat with a placeholder, which nobody can guess, for each content."""
        names = [f"x{self._nonce}x{i}x" for i in range(len(messages))]
        return [m | {"content": name} for m, name in zip(messages, names, strict=True)]

    def _make(self, blank: Sequence[Message], prompt: bool) -> Outline:
        text, spans = self.text(blank, prompt)
        fault = ""
        if not self.tagged:
            spans, fault = self.find_turns(blank, text)
        names = {m["content"]: m["role"] == "assistant" for m in blank}
        places = [(m.span(), names[m[0]]) for m in re.finditer("|".join(names), text)]
        for (a, b), replied in places:
            covered = [(max(a, s), min(b, e)) for s, e in spans if s < b and a < e]
            if covered and (not replied or covered != [(a, b)]):
                fault = "puts other text than the assistant's into its turns"
        if fault:  # the mask by its definition: content and end of turn
            spans = [span for span, replied in places if replied]
        pieces = cut(text, list(names), [close_turn(text, span, self.ends) for span in spans])
        return Outline(pieces, self.control_of(pieces), fault)

    def find_turns(self, messages: Sequence[Message], text: str) -> tuple[list[Span], str]:
        """Return the spans of assistant turns in `text`, or what forbids to find them.

        A turn is what rendering one more message adds to the generation prompt before it.
        """
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = self.text(messages[: i + 1], False)[0].rstrip()
            if i:
                before = self.text(messages[:i], True)[0]
            else:  # templates expect at least one message
                before = after.rpartition(message["content"])[0]
            start, stop = close_turn(after, (len(before), len(after)), self.ends)
            if not after.startswith(before):
                return [], f"writes turn {i + 1} otherwise than its own generation prompt begins it"
            if not text.startswith(after[:stop]):
                return [], f"rewrites earlier turns: turn {i + 1} changes when the chat goes on"
            spans.append((start, stop))
        return spans, ""

    def find_end_of_turn(self) -> int | None:
        """Return the token that the template writes right after a reply, if it is a control one."""
        blank = self.blank([{"role": "user"}, {"role": "assistant"}])
        tail = self.text(blank, False)[0].rpartition(blank[-1]["content"])[2]
        ids, offsets = self._encoder.encode(tail)
        for token, (start, _) in zip(ids, offsets, strict=True):
            if token in self._encoder.control:
                return token if not tail[:start].strip() else None
        return None

    def _refuse_markup(self, messages: Sequence[Message]) -> None:
        """Raise if a field other than the content, which is not spelled out, has control tokens."""
        for i, message in enumerate(messages):
            other = str({k: v for k, v in message.items() if k != "content"})
            found = self._encoder.find_control(self._encoder.encode(other)[0])
            if found:
                raise ValueError(
                    "expected no control tokens outside of contents, got "
                    f"{self._encoder.token(found[0])!r} in message {i}: {other[:100]}; "
                    "remove that markup from the data"
                )

    def control_of(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the control tokens of what the template wrote itself, in order."""
        own = [self._encoder.encode(p.text)[0] for p in pieces if p.message is None]
        return self._encoder.find_control([i for ids in own for i in ids])
