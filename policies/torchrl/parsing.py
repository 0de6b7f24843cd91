"""Parse text back to messages: the inverse of a chat template.

Rendering chats with random contents shows what a template writes before and after each content.
This works for every template that writes a turn the same way at any position. Markup inside a
content looks like the template's: it raises ValueError or, if forged well, reads as extra turns. So
environments and training keep messages and never parse texts.

Not supported: templates that change contents or earlier turns, because their text does not
determine the messages (give them an `inverse_parser`, see templates.py). Tool calls stay in the
content.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from policies.chats.jinja_template import render_template
from policies.chats.messages import Message
from policies.chats.templates import find_template, fix_date


@dataclass(frozen=True)
class TurnMarkers:
    """The template's text before and after a content."""

    opener: str
    closer: str


@dataclass(frozen=True)
class Format:
    """The turns of a template by role; the role "" stands for any role, named in the opener."""

    label: str
    template: str
    variables: dict[str, str]
    start: str  # text before the first turn
    turns: dict[str, TurnMarkers]
    prompt: str  # the generation prompt
    any_role: str  # the made-up role in the opener of ""

    def write(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the rendered chat."""
        options = {"add_generation_prompt": add_generation_prompt}
        return render_template(messages, self.template, self.variables, **options)[0]

    def read_response(self, text: str) -> list[Message]:
        """Return the messages of a text after a generation prompt, the assistant's first.

        If the text does not fit the template, all of it is the content.
        """
        try:
            return self(text, after_prompt=True)
        except ValueError:
            content, complete = self._split_filler(text, after_prompt=True)
            core = self.turns["assistant"].closer.rstrip()
            if core and content.rstrip().endswith(core):
                content, complete = content.rstrip().removesuffix(core), True
            return [{"role": "assistant", "content": content, "is_complete": complete}]

    def _split_filler(self, text: str, *, after_prompt: bool) -> tuple[str, bool]:
        """Return a text without EOS and padding at its end, and whether EOS came first of these."""
        tokens = {self.variables.get(name) for name in ("eos_token", "pad_token")} - {None, ""}
        if not self.turns["user"].opener and not after_prompt:  # EOS alone separates the turns
            tokens -= {turn.closer.rstrip() for turn in self.turns.values()}
        one = "|".join(map(re.escape, sorted(tokens))) or "(?!)"
        match = re.search(rf"({one})(?:\s*(?:{one}))*\s*\Z", text)
        if match is None:
            return text, False
        return text[: match.start()], match[1] == self.variables.get("eos_token")

    def __call__(self, text: str, *, after_prompt: bool = False) -> list[Message]:
        """Return the messages of a text with `is_complete`; raise ValueError if it does not fit.

        With `after_prompt` the text is read as if after a generation prompt.
        """
        body, ended = self._split_filler(text, after_prompt=after_prompt)
        done: list[Message] = []
        place = len(self.start) if body.startswith(self.start) and not after_prompt else 0
        while place < len(body) or not done:
            if after_prompt and not done:  # the rest of the opener: a blank after "Assistant:"
                opener, role = self.turns["assistant"].opener, "assistant"
                rest = opener.removeprefix(self.prompt) if opener.startswith(self.prompt) else ""
                begin = len(rest) if body.startswith(rest) else 0
            else:
                role, begin = self._open(body, place, done[-1]["role"] if done else "")
            stop, place, closed = self._close(body, begin, role)
            for opener in self._openers:  # inside a content only plain words ("User: ") are allowed
                inside = opener.search(body, begin, stop)
                if inside and not opener.pattern[0].isalnum():
                    raise self._misfit(body, inside.start(), "the end of the turn before it")
            complete = closed or ended
            done.append({"role": role, "content": body[begin:stop], "is_complete": complete})
            if body != text and not body[place:].strip():
                break
        return done

    def _open(self, text: str, place: int, last: str) -> tuple[str, int]:
        """Return the role of the turn at `place` and the start of its content."""
        for role, turn in sorted(self.turns.items(), key=lambda pair: -len(pair[1].opener)):
            if role and turn.opener and text.startswith(turn.opener, place):
                return role, place + len(turn.opener)
        if "" in self.turns and (match := self._openers[-1].match(text, place)):
            return match[1], match.end()
        answers = last not in ("", "assistant")
        cut = self.turns["assistant"].opener.startswith(self.prompt)
        if answers and cut and text.startswith(self.prompt, place):
            return "assistant", place + len(self.prompt)
        if not self.turns["user"].opener:
            return "assistant" if answers else "user", place
        if not last and "system" in self.turns and not self.turns["system"].opener:
            return "system", place
        known = [turn.opener.replace(self.any_role, "...") for turn in self.turns.values()]
        raise self._misfit(text, place, f"one of {known}")

    def _close(self, text: str, begin: int, role: str) -> tuple[int, int, bool]:
        """Return the end of the content, the start of the next turn, and whether it was closed."""
        closer = self.turns[role if role in self.turns else ""].closer
        core = closer.rstrip()
        if not core:  # white space ends a turn only before another turn or at the end
            begins = [pattern.pattern for pattern in self._openers]
            begins += [re.escape(self.prompt)] if self.prompt else []
            ahead = "|".join([*begins, r"\Z"])
            if match := re.compile(f"{re.escape(closer)}(?={ahead})").search(text, begin):
                return match.start(), match.end(), True
        elif (stop := text.find(core, begin)) >= 0:
            after = stop + len(core)
            if not text[after:].strip():
                return stop, min(stop + len(closer), len(text)), True
            if not text.startswith(closer, stop):
                raise self._misfit(text, after, repr(closer[len(core) :]))
            return stop, stop + len(closer), True
        return len(text), len(text), False

    def _misfit(self, text: str, place: int, expected: str) -> ValueError:
        return ValueError(
            f"the text does not fit {self.label} at character {place}: expected {expected}, got "
            f"{text[place : place + 40]!r}; name the template that wrote it (chat_template_name)"
        )

    @cached_property
    def _openers(self) -> list[re.Pattern[str]]:
        """Return the patterns of turn openers; the last one matches any role."""
        texts = [re.escape(turn.opener) for turn in self.turns.values() if turn.opener.strip()]
        return [re.compile(text.replace(self.any_role, r"([\w-]+)")) for text in texts]


def find_reader(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None
) -> Callable[[str], Any]:
    """Return the parser of a template: a `Format`, or the template's own inverse parser."""
    template = find_template(tokenizer, chat_template, chat_template_name)
    if template.inverse_parser is not None:
        return template.inverse_parser
    variables = template.tokens if tokenizer is None else tokenizer.special_tokens_map
    tokens = tuple(sorted((k, v) for k, v in variables.items() if isinstance(v, str)))
    return _learn(template.label, fix_date(template.text), tokens)


@lru_cache(maxsize=64)
def _learn(label: str, template: str, tokens: tuple[tuple[str, str], ...]) -> Format:
    """Learn the turns of a template; raise ValueError if it cannot be inverted."""
    variables = dict(tokens)

    def around(*roles: str) -> list[str]:
        """Return the texts around the contents of a chat; [] unless each content occurs once."""
        names = [f"x{secrets.token_hex(8)}x" for _ in roles]
        chat = [{"role": r, "content": n} for r, n in zip(roles, names, strict=True)]
        try:
            text = render_template(chat, template, variables)[0]
        except ValueError:
            return []
        any_name = "|".join(names)
        return re.split(any_name, text) if re.findall(any_name, text) == names else []

    chat, pair = around("user", "assistant", "user"), around("user", "assistant")
    if not (chat and pair and chat[1].startswith(chat[3]) and chat[2].startswith(pair[2])):
        raise ValueError(
            f"{label} cannot be read backwards: it changes contents, or writes a turn otherwise "
            "once the chat goes on; give it an inverse_parser by add_chat_template"
        )
    user = TurnMarkers(chat[2].removeprefix(pair[2]), chat[3])
    assistant = TurnMarkers(chat[1].removeprefix(chat[3]), pair[2])
    turns, start = {"user": user, "assistant": assistant}, chat[0].removesuffix(user.opener)
    system = around("system", "user")
    if system and system[1].endswith(user.opener):
        if not system[0].startswith(start):  # it starts with a default system message
            bos = variables.get("bos_token", "")
            start = bos if system[0].startswith(bos) else ""
        turns["system"] = TurnMarkers(
            system[0].removeprefix(start), system[1].removesuffix(user.opener)
        )
    name = f"r{secrets.token_hex(8)}"
    for role in ("tool", name):
        inside = around("user", "assistant", role, "assistant")
        if (
            inside
            and inside[2].startswith(assistant.closer)
            and inside[3].endswith(assistant.opener)
        ):
            opener = inside[2].removeprefix(assistant.closer)
            closer = inside[3].removesuffix(assistant.opener)
            if opener not in (user.opener, assistant.opener) and (role == "tool" or role in opener):
                turns["" if role == name else role] = TurnMarkers(opener, closer)
    question = [{"role": "user", "content": "x"}]
    plain = render_template(question, template, variables)[0]
    prompt = render_template(question, template, variables, add_generation_prompt=True)[0]
    prompt = prompt.removeprefix(plain) if prompt.startswith(plain) else ""
    return Format(label, template, variables, start, turns, prompt, name)
