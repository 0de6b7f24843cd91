"""Find the assistant's spans and the control tokens in what a template writes.

An *outline* is a chat rendered with random placeholders for its contents, which no message can
imitate, and cut into pieces of template text and of contents. Chats that differ only in contents
share an outline.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from policies.chats.jinja_template import render_template
from policies.chats.messages import Message
from policies.chats.pieces import Piece, close_turn, count_same, cut
from policies.chats.templates import Template, fix_date, reads_variable
from policies.chats.text_encoder import Encoder, Span
from policies.chats.tool_calls import THOUGHTS, WRITTEN, make_call, make_schema, with_arguments

CACHE_SIZE = 512
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Outline:
    """The rendering of a list of roles, for any contents."""

    pieces: list[Piece]
    control: list[int]  # control tokens of the template's text, in order
    fault: str = ""  # reason if the assistant mask is not valid for training


@dataclass(frozen=True)
class Marker:
    """A control token in a text, at [start, stop) in characters."""

    token: int
    start: int
    stop: int


class Outlines:
    """Cache the outlines of one template; `ends` are the tokens that end a turn."""

    def __init__(self, template: Template, variables: Mapping[str, Any], encoder: Encoder) -> None:
        self.template, self.label = fix_date(template.text), template.label
        self.ends = list[str]()
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self._variables, self._encoder = dict(variables), encoder
        self.nonce = secrets.token_hex(16)
        self._known: dict[str, Outline] = {}
        encoder.control |= self.find_markers()

    def text(
        self, messages: Sequence[Message], prompt: bool, last_turn: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the rendered text and the spans of its generation tags.

        With `last_turn` earlier turns are rendered as they were when the model wrote the last turn.
        """
        options = {"add_generation_prompt": prompt, "tagged": self.tagged}
        if any(message.get("tool_calls") for message in messages):
            messages = [with_arguments(m, as_text=self._takes_text) for m in messages]
        variables = self._variables
        for more in messages[0].get("chat_template_kwargs") or ():
            variables = variables | more
        try:
            text, tags = render_template(messages, self.template, variables, **options)
        except ValueError as error:
            first = "change policy.system_prompt, or " if messages[0]["role"] == "system" else ""
            raise ValueError(f"{self.label} {error}; {first}{self.remedy}") from error
        if last_turn and not self.tagged and len(messages) > 1:
            text = self._in_context(messages, text)
        return text, tags

    def _in_context(self, messages: Sequence[Message], text: str) -> str:
        """Return the last turn after its prompt as the model saw it, if `text` changes that prompt.

        For example, gpt-oss drops the thought of a call once its chat has a final response.
        """
        before = self.text(messages[:-1], True)[0]
        variables = {"chat_template_kwargs": messages[0].get("chat_template_kwargs")}
        alone = [{"role": "user", "content": "x"} | variables, messages[-1]]
        if not text.startswith(before):
            opening, turn = self.text(alone[:1], True)[0], self.text(alone, False)[0]
            if turn.startswith(opening):
                return before + turn.removeprefix(opening)
        return text

    def of(self, messages: Sequence[Message], prompt: bool, last_turn: bool = False) -> Outline:
        """Return the outline of a chat, shared by chats that differ in contents only.

        With `last_turn` its assistant mask covers only the last turn.
        """
        blank = self.blank(messages)
        key = f"{prompt}{last_turn}{blank}"
        outline = self._known.get(key)
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

        A message with only tool calls keeps its empty content: templates write no line for it.
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
        if fault:  # no turn is found in the text: mask content and end of turn
            spans = [span for span, responded in places if responded][-1 if last_turn else 0 :]
        contents = [m["content"] for m in blank]
        pieces = cut(text, contents, [close_turn(text, span, self.ends) for span in spans])
        return Outline(pieces, self.control_of(pieces), fault)

    def find_spans(
        self, messages: Sequence[Message], text: str, tags: list[Span], last_turn: bool
    ) -> tuple[list[Span], str]:
        """Return the assistant's spans: by tags or by rendering, `last_turn` by rendering first."""
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

        Some templates (Phi-3) add a token at the end of the chat. So the turn ends at the last
        end-of-turn token that is also there when the chat goes on.
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
        """Return whether the template changes an earlier turn; try each key that it writes."""
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

        Paired tags, <x> and </x>, are excluded: they enclose thoughts, calls and results inside of
        a turn, and contents may contain them.
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
        """Raise ValueError if the template does not write a message's call, tools or thoughts."""
        for i, message in enumerate(messages):
            for key in WRITTEN:
                if message.get(key) and not self.writes[key]:
                    raise ValueError(
                        f"message {i}, {key}: {self.label} writes no {key}; "
                        f"{self.remedy_for_tools}, or remove {key} from the row (a column with "
                        "env.columns.<column>=null)"
                    )
        for name in chain.from_iterable(messages[0].get("chat_template_kwargs") or ()):
            if name in self._variables or not reads_variable(self.template, name):
                raise ValueError(
                    f"chat_template_kwargs.{name}: unknown to {self.label}; set another "
                    "policy.chat_template, or env.columns.chat_template_kwargs=null"
                )

    @cached_property
    def writes(self) -> dict[str, bool]:
        """Return {key: whether the template writes its value} for the keys in `WRITTEN`."""
        name = f"x{self.nonce}x"
        values = dict[str, Any].fromkeys(WRITTEN, name)
        call = make_call(name, "{}" if self._takes_text else {})
        values |= {"tools": [make_schema(name)], "tool_calls": [call]}
        return {key: name in self._try(key, value) for key, value in values.items()}

    @cached_property
    def _takes_text(self) -> bool:
        """Return whether the template needs arguments as JSON text: a dict fails or is printed."""
        name = f"x{self.nonce}x"
        text = self._try("tool_calls", [make_call("f", {name: 1})])
        return name not in text or f"{{'{name}'" in text

    def _try(self, key: str, value: Any) -> str:
        """Return the text of an exchange with a key, or "" if the template refuses it."""
        place = 0 if key == "tools" else 1
        chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""}]
        chat[place] |= {key: value}
        try:
            return render_template(chat, self.template, self._variables, tagged=self.tagged)[0]
        except ValueError:
            return ""

    def _refuse_loss(self, blank: Sequence[Message], text: str) -> None:
        """Raise ValueError if a content is missing from the text."""
        for i, message in enumerate(blank):
            if message["content"] not in text.lower():
                beside = " beside its calls" if message.get("tool_calls") else ""
                raise ValueError(
                    f"{self.label} does not write the content{beside} of message {i} "
                    f"({message['role']}) of a chat with roles {[m['role'] for m in blank]}; "
                    f"{self.remedy}"
                )

    def refuse_markup(self, messages: Sequence[Message]) -> None:
        """Raise ValueError if a field other than the content has control tokens."""
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
        """Return the remedy for a template that does not fit: the one with the model's tokens."""
        name = "chatml" if self._has_chatml() else "<another template of this model>"
        return f"set policy.chat_template={name}"

    @property
    def remedy_for_tools(self) -> str:
        """Return the remedy for a template that writes no tools, calls or thoughts."""
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
