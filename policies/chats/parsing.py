"""Text back to messages: a chat template read backwards.

What a template writes before and after a content of each role is learned by rendering chats whose
contents nobody can guess; so every template that writes a turn the same way wherever it stands can
be read, its contents exact to the last blank. A text cannot tell what a message brought along from
what the template wrote: a content with the markup of a turn in it is an error, or, forged well,
turns of its own. So environments and training keep messages and never read texts back.

Left out on purpose: contents that a template changes, and templates that write a turn otherwise
once the chat goes on; give those an `inverse_parser` (policies/chats/templates.py).
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from policies.chats.rendering import Message, render_template
from policies.chats.templates import find_template
from policies.chats.tool_markup import readings


@dataclass(frozen=True)
class Turn:
    """What the template writes before and after a content."""

    opener: str
    closer: str


@dataclass(frozen=True)
class Format:
    """The turns of a template, by role; a role "" stands for any, its name inside the opener."""

    label: str
    template: str
    variables: dict[str, str]
    start: str  # before the first turn
    turns: dict[str, Turn]
    prompt: str  # the generation prompt
    _name: str = field(default="", repr=False)  # the made-up role in the opener of ""

    def write(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the chat as the template writes it."""
        options = {"add_generation_prompt": add_generation_prompt}
        return render_template(messages, self.template, self.variables, **options)[0]

    def __call__(self, text: str) -> list[Message]:
        """Return the messages of a text with `is_complete`; ValueError where it does not fit."""
        if not text:
            raise ValueError("expected a text with a message in it, got an empty one")
        return self._parse(text)

    def reply(self, text: str) -> list[Message]:
        """Return the messages of what follows a generation prompt, the assistant's first.

        Whatever a model may write is one: if the markup of turns in it does not fit, all of it is
        the content.
        """
        try:
            return self._parse(text, reply=True)
        except ValueError:
            core = self.turns["assistant"].closer.rstrip()
            content, closed = self._without_filler(text, 0, reply=True)
            if core and content.rstrip().endswith(core):
                content, closed = content.rstrip().removesuffix(core), True
            return [{"role": "assistant", "content": content, "is_complete": closed}]

    def _parse(self, text: str, *, reply: bool = False) -> list[Message]:
        done: list[Message] = []
        place = len(self.start) if text.startswith(self.start) and not reply else 0
        while place < len(text) or (reply and not done):
            if reply and not done:
                role, begin = "assistant", self._rest_of_opener(text)
            else:
                role, begin = self._open(text, place, done)
            stop, after, complete = self._close(text, begin, role, reply=reply)
            self._check_inside(text, begin, stop)
            done += self._read(role, text[begin:stop], complete, done)
            filled = re.compile(rf"\s*{self._filler(reply=reply)}").match(text, after)
            place = len(text) if filled else after
        return done

    def _open(self, text: str, place: int, done: list[Message]) -> tuple[str, int]:
        """Return the role of the turn that begins at `place`, and where its content begins."""
        last = done[-1]["role"] if done else ""
        for role, turn in self._by_length:
            if turn.opener and text.startswith(turn.opener, place):
                return role, place + len(turn.opener)
        if "" in self.turns and (found := self._openers[-1].match(text, place)):
            return found[1], found.end()
        answers = last not in ("", "assistant")
        bare = self.turns["assistant"].opener
        if answers and bare.startswith(self.prompt) and text.startswith(self.prompt, place):
            return "assistant", place + len(self.prompt)
        if not self.turns["user"].opener:
            return "assistant" if answers else "user", place
        if not done and "system" in self.turns and not self.turns["system"].opener:
            return "system", place
        known = [turn.opener.replace(self._name, "...") for turn in self.turns.values()]
        raise self._misfit(text, place, f"one of {known}")

    def _rest_of_opener(self, text: str) -> int:
        """Return how much of the assistant's opener a reply begins with: its " " after "Bot:"."""
        opener = self.turns["assistant"].opener
        rest = opener.removeprefix(self.prompt) if opener.startswith(self.prompt) else ""
        return len(rest) if text.startswith(rest) else 0

    def _close(self, text: str, begin: int, role: str, *, reply: bool) -> tuple[int, int, bool]:
        """Return where the content ends, where the next turn begins, and whether it was closed."""
        closer = self.turns[role if role in self.turns else ""].closer
        core, filler = closer.rstrip(), self._filler(reply=reply)
        if not core:  # white space alone ends a turn only before another, or at the end
            ahead = f"(?={self._ahead}|{filler})"
            found = re.compile(re.escape(closer) + ahead).search(text, begin)
            if found:
                return found.start(), found.end(), True
        elif (stop := text.find(core, begin)) >= 0:
            after = stop + len(core)
            if after == len(text) or re.compile(rf"\s*{filler}").match(text, after):
                return stop, after, True
            if not text.startswith(closer, stop):
                raise self._misfit(text, after, repr(closer[len(core) :]))
            return stop, stop + len(closer), True
        if role != "assistant":
            return len(text), len(text), False
        content, ended = self._without_filler(text, begin, reply=reply)
        return begin + len(content), len(text), ended

    def _without_filler(self, text: str, begin: int, *, reply: bool) -> tuple[str, bool]:
        """Return the text from `begin` without what fills it up, and whether EOS ends it."""
        rest = text[begin:]
        found = re.search(self._filler(reply=reply), rest)
        if found is None:
            return rest, False
        end = self.variables.get("eos_token", "")
        return rest[: found.start()], bool(end) and rest.startswith(end, found.start())

    def _filler(self, *, reply: bool) -> str:
        """Return a pattern of what may follow the last turn: EOS and padding up to the end.

        Where EOS alone tells one turn from the next, only a reply can be followed by more of it.
        """
        tokens = {self.variables.get(name) for name in ("eos_token", "pad_token")} - {None, ""}
        if not self.turns["user"].opener and not reply:
            tokens -= {turn.closer.rstrip() for turn in self.turns.values()}
        one = "|".join(map(re.escape, sorted(tokens))) or "(?!)"
        return rf"(?:{one})(?:\s*(?:{one}))*\s*\Z"

    def _check_inside(self, text: str, begin: int, stop: int) -> None:
        """Raise if a content holds what begins a turn, unless it is mere words ("User: ")."""
        for opener in self._openers:
            if not opener.pattern[0].isalnum() and (found := opener.search(text, begin, stop)):
                raise self._misfit(text, found.start(), "the end of the turn before it")

    def _misfit(self, text: str, place: int, expected: str) -> ValueError:
        return ValueError(
            f"the text does not fit {self.label} at character {place}: expected {expected}, got "
            f"{text[place : place + 40]!r}; name the template that wrote it (chat_template_name), "
            "and keep special tokens when decoding"
        )

    def _read(self, role: str, content: str, complete: bool, done: list[Message]) -> list[Message]:
        """Return the messages of one turn: its tool markup parsed where that renders the same."""
        options = list(readings(role, content))
        turn = self.turns[role if role in self.turns else ""]
        end = content + turn.closer
        for option in options[:-1]:
            try:
                same = self.write([*done, *option]).endswith(end)
            except ValueError:
                same = False
            if same:
                break
        else:
            option = options[-1]
        return [{**message, "is_complete": complete} for message in option]

    @cached_property
    def _by_length(self) -> list[tuple[str, Turn]]:
        named = [(role, turn) for role, turn in self.turns.items() if role]
        return sorted(named, key=lambda pair: -len(pair[1].opener))

    @cached_property
    def _openers(self) -> list[re.Pattern[str]]:
        """Return patterns of what begins a turn, that of any role last."""
        texts = [re.escape(turn.opener) for turn in self.turns.values() if turn.opener.strip()]
        return [re.compile(text.replace(self._name, r"([\w-]+)")) for text in texts]

    @cached_property
    def _ahead(self) -> str:
        """Return a pattern of what may follow a turn."""
        begins = [pattern.pattern for pattern in self._openers]
        if self.prompt:
            begins.append(re.escape(self.prompt))
        return "|".join([*begins, r"\Z"])


def find_reader(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None
) -> Callable[[str], Any]:
    """Return what turns a text into messages: a `Format`, or the template's own inverse parser."""
    template = find_template(tokenizer, chat_template, chat_template_name)
    if template.inverse_parser is not None:
        return template.inverse_parser
    variables = template.tokens if tokenizer is None else tokenizer.special_tokens_map
    tokens = tuple(sorted((k, v) for k, v in variables.items() if isinstance(v, str)))
    return _learn(template.label, template.text, tokens)


@lru_cache(maxsize=64)
def _learn(label: str, template: str, tokens: tuple[tuple[str, str], ...]) -> Format:
    """Return the turns of a template. Raises ValueError if it cannot be read backwards."""
    variables = dict(tokens)
    around = _Around(template, variables)
    chat, pair = around("user", "assistant", "user"), around("user", "assistant")
    if (
        chat is None
        or pair is None
        or not (chat[1].startswith(chat[3]) and chat[2].startswith(pair[2]))
    ):
        raise ValueError(
            f"{label} cannot be read backwards: it changes contents, or writes a turn otherwise "
            "once the chat goes on; give it an inverse_parser by add_chat_template"
        )
    user = Turn(chat[2].removeprefix(pair[2]), chat[3])
    said = Turn(chat[1].removeprefix(chat[3]), pair[2])
    turns, start = {"user": user, "assistant": said}, chat[0].removesuffix(user.opener)
    system = around("system", "user")
    if system is not None and system[1].endswith(user.opener):
        if not system[0].startswith(start):  # a default system message stands there
            bos = variables.get("bos_token", "")
            start = bos if system[0].startswith(bos) else ""
        opener = system[0].removeprefix(start)
        turns["system"] = Turn(opener, system[1].removesuffix(user.opener))
    name = f"r{secrets.token_hex(8)}"
    for role in ("tool", name):
        inside = around("user", "assistant", role, "assistant")
        if inside and inside[2].startswith(said.closer) and inside[3].endswith(said.opener):
            opener = inside[2].removeprefix(said.closer).removesuffix("<tool_response>\n")
            closer = inside[3].removesuffix(said.opener).removeprefix("\n</tool_response>")
            if opener not in (user.opener, said.opener) and (role == "tool" or role in opener):
                turns["" if role == name else role] = Turn(opener, closer)
    return Format(label, template, variables, start, turns, around.prompt(), name)


class _Around:
    """Find out what a template writes around contents."""

    def __init__(self, template: str, variables: dict[str, str]) -> None:
        self._template, self._variables = template, variables

    def __call__(self, *roles: str) -> list[str] | None:
        """Return the texts before, between and after the contents of a chat with these roles.

        None if the template refuses it, or does not write each content once and in this order.
        """
        names = [f"x{secrets.token_hex(8)}x" for _ in roles]
        chat = [{"role": r, "content": n} for r, n in zip(roles, names, strict=True)]
        try:
            text = render_template(chat, self._template, self._variables)[0]
        except ValueError:
            return None
        if re.findall("|".join(names), text) != names:
            return None
        return re.split("|".join(names), text)

    def prompt(self) -> str:
        """Return the generation prompt, "" if there is none."""
        chat = [{"role": "user", "content": "x"}]
        given = (chat, self._template, self._variables)
        plain = render_template(*given)[0]
        asked = render_template(*given, add_generation_prompt=True)[0]
        return asked.removeprefix(plain) if asked.startswith(plain) else ""
