"""A chat template, and which one holds for a tokenizer.

An explicit template comes before a name, a name before an added template whose keywords are in the
tokenizer's name, that before the tokenizer's own. The named ones are in known_templates.py.

Left out on purpose: guessing a family from a model's name. The tokenizer's own template is exact.
"""

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


ADDED: dict[str, Template] = {}  # by add_chat_template


def find_template(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None
) -> Template:
    """Return the template that holds; `tokenizer` may be None if one of the others is given.

    `chat_template` is a Jinja text, a file or a name. Raises ValueError for an unknown name and
    where there is no template.
    """
    if chat_template is None and chat_template_name is None and tokenizer is not None:
        path = str(tokenizer.name_or_path).lower()
        added = (t for t in reversed(ADDED.values()) if any(word in path for word in t.keywords))
        if (found := next(added, None)) is not None:
            return found
        if tokenizer.chat_template:
            label = f"the chat template of {tokenizer.name_or_path!r}"
            return Template(tokenizer.get_chat_template(), label)
        raise ValueError(
            f"expected a chat template, the tokenizer {tokenizer.name_or_path!r} has none; "
            "set policy.chat_template=chatml (or to a Jinja template)"
        )
    from policies.chats.known_templates import named_template

    return named_template(tokenizer, chat_template, chat_template_name)
