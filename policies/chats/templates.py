"""A chat template, and which one holds for a tokenizer.

An explicit template comes before a name, a name before an added template whose keywords are in the
tokenizer's name, that before the tokenizer's own, that before ChatML with a warning. The named ones
are in known_templates.py.

Left out on purpose: guessing a family from a model's name. The tokenizer's own template is exact.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Template:
    """A Jinja text and what to call it in errors.

    `tokens` stand in for the special tokens where there is no tokenizer; `inverse_parser` is a
    user's own way from text to messages; `keywords` select it by a tokenizer's name.
    """

    text: str
    label: str = "the given chat template"
    tokens: Mapping[str, str] = field(default_factory=dict)
    inverse_parser: Callable[[str], Any] | None = None
    keywords: tuple[str, ...] = ()


# What a template is given with every chat, and what is left out on purpose.
GIVEN = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
SETTING = r"\{%-? set (\w+) = .*? %\}\n"  # as `with_variables` writes it
ADDED: dict[str, Template] = {}  # by add_chat_template
_WARNED: set[Any] = set()  # names of tokenizers that have no template; those without a name


def find_template(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None
) -> Template:
    """Return the template that holds; `tokenizer` may be None if one of the others is given.

    `chat_template` is a Jinja text, a file or a name. Raises ValueError for an unknown name.
    """
    if chat_template is None and chat_template_name is None and tokenizer is not None:
        if (own := _find_own(tokenizer)) is not None:
            return own
        key = tokenizer.name_or_path or tokenizer
        if key not in _WARNED:
            _WARNED.add(key)
            warnings.warn(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so that chats are "
                "written as ChatML; name a template by chat_template or chat_template_name "
                "('chatml' for this one)",
                stacklevel=4,
            )
    from policies.chats.known_templates import named_template

    return named_template(tokenizer, chat_template, chat_template_name)


def with_variables(text: str, variables: Mapping[str, Any]) -> str:
    """Return a template with variables that it reads set in its first lines.

    Whoever renders by it has them too, as they are saved with it. ValueError for one that it does
    not read.

    >>> with_variables("{{ 'no' if enable_thinking is false }}", {"enable_thinking": False})
    "{%- set enable_thinking = false %}\\n{{ 'no' if enable_thinking is false }}"
    """
    begin = re.match(f"({SETTING})*", text)
    own, text = (begin[0], text[begin.end() :]) if begin else ("", text)
    before = {m[1]: m[0] for m in re.finditer(SETTING, own)}
    for name, value in variables.items():
        if name in GIVEN or not re.search(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", text):
            raise ValueError(
                f"policy.chat_template_kwargs.{name}: the chat template reads no such variable; "
                "look at its Jinja text for what it takes, as enable_thinking"
            )
        before[name] = f"{{%- set {name} = {_jinja(value)} %}}\n"
    return "".join(before.values()) + text


def _jinja(value: Any) -> str:
    """Return a plain value in Jinja."""
    if isinstance(value, Mapping):
        pairs = [f"{_jinja(str(key))}: {_jinja(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_jinja, value))}]"
    if isinstance(value, str):
        return json.dumps(value).replace("%", "\\u0025").replace("{", "\\u007b")
    return "none" if value is None else json.dumps(value)


def require_template(tokenizer: Any) -> None:
    """Raise ValueError where a tokenizer has no template: training is not to guess one."""
    if _find_own(tokenizer) is None:
        raise ValueError(
            f"expected a chat template, the tokenizer {tokenizer.name_or_path!r} has none; "
            "set policy.chat_template=chatml (or to a Jinja template)"
        )


def _find_own(tokenizer: Any) -> Template | None:
    """Return the added template that a tokenizer's name selects, or the one it brings along."""
    path = str(tokenizer.name_or_path).lower()
    for template in reversed(ADDED.values()):
        if any(word in path for word in template.keywords):
            return template
    if not tokenizer.chat_template:
        return None
    return Template(
        tokenizer.get_chat_template(), f"the chat template of {tokenizer.name_or_path!r}"
    )
