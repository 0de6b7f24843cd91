"""Choose the chat template of a tokenizer.

Order: an explicit template, a named one, the tokenizer's own, ChatML with a warning. The named
templates are the .jinja files of this folder: each writes a turn independently of later turns,
strips no white space, and refuses roles that it cannot write. Nothing is guessed from a model's
name, because the tokenizer's own template is exact.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Template:
    """A Jinja text and its label for errors.

    `tokens` replace the special tokens if there is no tokenizer; `inverse_parser` is a user's
    function from text to messages.
    """

    text: str
    label: str = "the given chat template"
    tokens: Mapping[str, str] = field(default_factory=dict)
    inverse_parser: Callable[[str], Any] | None = None


# Variables of every chat, and unsupported ones.
RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
SETTING = r"\{%-? set (\w+) = .*? %\}\n"  # a line that `with_variables` writes
CALL = r"strftime_now\s*\(\s*(?:format\s*=\s*)?(['\"])(.*?)\1\s*\)"  # the argument is a text
_DAY: list[str | None] = [None]  # date of the run in this process
_GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_DEEPSEEK = {
    "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
KNOWN = {  # the .jinja files and their special tokens
    "chatml_format": {"eos_token": "<|endoftext|>"},
    "hermes": {"eos_token": "<|endoftext|>"},
    "qwen": {"eos_token": "<|endoftext|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"},
    "deepseek": _DEEPSEEK,
    "falcon": _GPT2,
    "dialogpt": _GPT2,
}
ADDED: dict[str, Template] = {}  # filled by add_chat_template


def find_template(
    tokenizer: Any, chat_template: str | None = None, chat_template_name: str | None = None
) -> Template:
    """Return the template to use; `chat_template` is a Jinja text, a file or a name.

    Raise ValueError for an unknown name.
    """
    if chat_template_name is not None and _named(chat_template_name) is None:
        raise ValueError(f"expected chat_template_name in {_names()}, got {chat_template_name!r}")
    chosen = chat_template_name if chat_template is None else chat_template
    if chosen is not None:
        return _with_end(_named(chosen) or Template(read_template(chosen)), tokenizer)
    if tokenizer is not None:
        if tokenizer.chat_template:
            label = f"the chat template of {tokenizer.name_or_path!r}"
            return Template(tokenizer.get_chat_template(), label)
        warnings.warn(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so that chats are "
            "written as ChatML; give chat_template='chatml' or another one",
            stacklevel=4,
        )
    return _with_end(_known("chatml_format"), tokenizer)


def with_variables(text: str, variables: Mapping[str, Any]) -> str:
    """Prepend defaults of variables to a template, so that they are saved with it.

    Raise ValueError for a variable that the template does not read.

    >>> with_variables("{{ 'no' if thinking is false }}", {"thinking": False})
    "{%- set thinking = thinking | default(False) %}\\n{{ 'no' if thinking is false }}"
    """
    before = re.match(f"({SETTING})*", text)[0]  # pyright: ignore[reportOptionalSubscript]
    text = text.removeprefix(before)
    settings = {m[1]: m[0] for m in re.finditer(SETTING, before)}
    for name, value in variables.items():
        if not reads_variable(text, name):
            raise ValueError(f"policy.chat_template_kwargs.{name}: unknown to the chat template")
        default = f"{name} | default({value!r})"  # Jinja reads Python's literals
        settings[name] = f"{{%- set {name} = {default} %}}\n"
    return "".join(settings.values()) + text


@contextmanager
def dated(day: str | None) -> Iterator[None]:
    """Make templates write this day, YYYY-MM-DD, inside the block; None = today."""
    before, _DAY[0] = _DAY[0], day
    try:
        yield
    finally:
        _DAY[0] = before


def fix_date(text: str) -> str:
    """Return a template with calls of strftime_now replaced by the day of `dated`, else today.

    transformers would read the clock in each call.

    >>> with dated("2024-07-26"):
    ...     fix_date("Today: {{ strftime_now('%d %b %Y') }}")
    "Today: {{ '26 Jul 2024' }}"
    """
    day = date.fromisoformat(_DAY[0]) if _DAY[0] else date.today()
    return re.sub(CALL, lambda call: repr(day.strftime(call[2])), text)


def reads_variable(text: str, name: str) -> bool:
    """Return whether a template reads a variable that a chat may set."""
    pattern = rf"(?<![\w.'\"]){re.escape(name)}(?!\w)"
    return name not in RESERVED and re.search(pattern, text) is not None


def require_template(tokenizer: Any) -> None:
    """Raise ValueError if a tokenizer has no template: training must not guess one."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"expected a chat template, the tokenizer {tokenizer.name_or_path!r} has none; "
            "set policy.chat_template=chatml (or to a Jinja template)"
        )


def add_chat_template(
    template_name: str, template: str, inverse_parser: Callable[[str], Any] | None = None
) -> None:
    """Register a chat template, a Jinja text or a file, under a name in this process.

    `inverse_parser` turns a text into a History or a list of messages; None learns the turns from
    the template.
    """
    label = f"chat template {template_name!r}"
    ADDED[template_name] = Template(read_template(template), label, inverse_parser=inverse_parser)


def read_template(chat_template: str) -> str:
    """Return the Jinja text of a name or a file, or a Jinja text itself; else raise ValueError.

    >>> read_template("falcon")[:27], read_template("{{ messages[0]['content'] }}")[:11]
    ('{%- for message in messages', '{{ messages')
    """
    if known := _named(chat_template):
        return known.text
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a Jinja template, a file that holds one, or one of {_names()}, "
            f"got {chat_template!r} ({error})"
        ) from None


def _names() -> list[str]:
    return sorted({"chatml", *KNOWN, *ADDED})


def _named(name: str) -> Template | None:
    if name in ADDED:
        return ADDED[name]
    name = "chatml_format" if name == "chatml" else name
    return _known(name) if name in KNOWN else None


def _known(name: str) -> Template:
    text = Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")
    return Template(text, f"chat template {name!r}", KNOWN[name])


def _with_end(template: Template, tokenizer: Any) -> Template:
    """Return ChatML or hermes with an end of turn that the tokenizer has; others unchanged."""
    adapted = [_known(name).text for name in ("chatml_format", "hermes")]
    if tokenizer is None or template.text not in adapted:
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
