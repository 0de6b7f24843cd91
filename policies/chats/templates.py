"""The chat templates that have a name, those that a user adds, and which one holds for a tokenizer.

An explicit template comes before a name, a name before an added template whose keywords are in the
tokenizer's name, that before the tokenizer's own.

Left out on purpose: guessing a family from a model's name. The tokenizer's own template is exact.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError


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


_ALIASES = {"chatml": "chatml_format"}
_ADDED: dict[str, Template] = {}


def names() -> list[str]:
    """Return the names of the templates that there are, "chatml" among them."""
    return sorted({*_ALIASES, *_known(), *_ADDED})


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Give a chat template a name, for this process; `remove_chat_template` takes it away again.

    `template` is a Jinja text or a file; without generation tags the assistant mask comes from
    rendering prefixes. `inverse_parser` turns a text into a History or a list of messages; None
    reads it by the turns that the template writes. A tokenizer whose name or path contains one of
    the keywords (in any case) gets this template unless another is asked for.
    A name that is taken is given away anew. Raises ValueError if the template cannot be parsed.
    """
    if not isinstance(template_name, str) or not re.fullmatch(r"[\w.-]+", template_name):
        raise ValueError(f"expected a name of letters, digits, _ . or -, got {template_name!r}")
    _ADDED[template_name] = Template(
        read_template(template),
        f"chat template {template_name!r}",
        inverse_parser=inverse_parser,
        keywords=tuple(word.lower() for word in model_family_keywords or ()),
    )


def remove_chat_template(template_name: str) -> None:
    """Take away an added template; a known one of the same name holds again. ValueError if none."""
    if template_name not in _ADDED:
        raise ValueError(f"expected an added template ({sorted(_ADDED)}), got {template_name!r}")
    del _ADDED[template_name]


def _known() -> dict[str, Template]:
    from policies.chats.known_templates import KNOWN

    return KNOWN


def _named(name: str) -> Template | None:
    return _ADDED.get(name) or _known().get(_ALIASES.get(name, name))


def read_template(chat_template: str) -> str:
    """Return the Jinja text of a name, of a file, or the given text; ValueError for others.

    >>> read_template("falcon")[:26], read_template("{{ messages[0]['content'] }}")[:11]
    ('{% for message in messages', '{{ messages')
    """
    known = _named(chat_template)
    text = chat_template if known is None else known.text
    if "{" not in text:
        try:
            text = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"expected a Jinja template, a file that holds one, or one of {names()}, "
                f"got {chat_template!r} ({error})"
            ) from None
    try:
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)  # a tag of transformers
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"expected a Jinja template, got an error in line {error.lineno}: {error.message}"
        ) from None
    return text


def find_template(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None
) -> Template:
    """Return the template that holds; `tokenizer` may be None if one of the others is given.

    `chat_template` is a Jinja text, a file or a name. Raises ValueError for an unknown name and
    where there is no template.
    """
    if chat_template_name is not None and _named(chat_template_name) is None:
        raise ValueError(f"expected chat_template_name in {names()}, got {chat_template_name!r}")
    asked = chat_template_name if chat_template is None else chat_template
    found = None if asked is None else _named(asked)
    if asked is None and tokenizer is not None:
        path = str(tokenizer.name_or_path).lower()
        added = reversed(_ADDED.values())
        found = next((t for t in added if any(word in path for word in t.keywords)), None)
    if found is not None:
        return _with_end(found, tokenizer)
    if asked is not None:
        return Template(read_template(asked))
    if tokenizer is None:
        return _known()["chatml_format"]
    if not tokenizer.chat_template:
        raise ValueError(
            f"expected a chat template, the tokenizer {tokenizer.name_or_path!r} has none; "
            "set policy.chat_template=chatml (or to a Jinja template)"
        )
    label = f"the chat template of {tokenizer.name_or_path!r}"
    return Template(tokenizer.get_chat_template(), label)


def _with_end(template: Template, tokenizer: Any) -> Template:
    """Return ChatML with an end of turn that the tokenizer has; any other template as it is."""
    if tokenizer is None or template.text != _known()["chatml_format"].text:
        return template
    if "<|im_end|>" in tokenizer.get_added_vocab():
        return template
    if tokenizer.eos_token is None:
        raise ValueError(
            f"expected a tokenizer with the token <|im_end|> or an EOS token for {template.label}, "
            f"{tokenizer.name_or_path!r} has neither; add one"
        )
    text = template.text.replace("'<|im_end|>'", "eos_token")
    return Template(text, template.label, template.tokens)
