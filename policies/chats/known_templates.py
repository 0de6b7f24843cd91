"""The chat templates that have a name, and those that a user adds; read when one is asked for.

Each known one writes a turn the same way whatever follows, has no white space stripped, and refuses
roles that it cannot write.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from policies.chats.templates import ADDED, Template

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _PROMPT
)
# A default system message; calls and results of tools in turns of their own. A content that has
# its calls written out already is not given them twice.
QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "{{ '<|im_start|>tool' }}{% endif %}"
    "{% for result in message['tool_responses'] or [content] %}"
    "{{ '\n<tool_response>\n' + result + '\n</tool_response>' }}{% endfor %}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ content }}"
    "{% if message['tool_calls'] and '<tool_call>' not in content %}"
    "{% for entry in message['tool_calls'] %}{% set call = entry['function'] or entry %}"
    "{{ '\n' if content or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' }}"
    "{{ call['arguments'] if call['arguments'] is string else call['arguments'] | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + _PROMPT
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)


def _lines(start: str, system: str, user: str, assistant: str, prompt: str) -> str:
    """Return a template of plain lines; each argument is the Jinja expression of one turn."""
    return (
        f"{start}{{% for message in messages %}}{{% set content = message['content'] %}}"
        f"{{% if message['role'] == 'user' %}}{{{{ {user} }}}}"
        "{% elif message['role'] == 'assistant' %}" + assistant + "{% elif message['role'] == "
        f"'system' and loop.first %}}{{{{ {system} }}}}"
        "{% else %}{{ raise_exception('no turn for role ' + message['role'] + ' here') }}"
        "{% endif %}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


_SAID = "{{{{ 'Assistant:' }}}}{{% generation %}}{{{{ ' ' + content + {} }}}}{{% endgeneration %}}"
FALCON = _lines(
    "", "content + '\n\n'", "'User: ' + content + '\n\n'", _SAID.format("'\n\n'"), "Assistant:"
)
DEEPSEEK = _lines(
    "{{ bos_token }}",
    "content + '\n\n'",
    "'User: ' + content + '\n\n'",
    _SAID.format("eos_token"),
    "Assistant:",
)
DIALOGPT = _lines(
    "",
    "raise_exception('no turn for role system here')",
    "content + eos_token",
    "{% generation %}{{ content + eos_token }}{% endgeneration %}",
    "",
)

_GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_DEEPSEEK = {
    "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
_LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"}
KNOWN = {
    name: Template(text, f"chat template {name!r}", tokens)
    for name, text, tokens in (
        ("chatml_format", CHATML, {"eos_token": "<|endoftext|>"}),
        ("qwen", QWEN, {"eos_token": "<|endoftext|>"}),
        ("llama", LLAMA, _LLAMA),
        ("deepseek", DEEPSEEK, _DEEPSEEK),
        ("falcon", FALCON, _GPT2),
        ("dialogpt", DIALOGPT, _GPT2),
    )
}
_ALIASES = {"chatml": "chatml_format"}


def names() -> list[str]:
    """Return the names of the templates that there are, "chatml" among them."""
    return sorted({*_ALIASES, *KNOWN, *ADDED})


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
    ADDED[template_name] = Template(
        read_template(template),
        f"chat template {template_name!r}",
        inverse_parser=inverse_parser,
        keywords=tuple(word.lower() for word in model_family_keywords or ()),
    )


def remove_chat_template(template_name: str) -> None:
    """Take away an added template; a known one of the same name holds again. ValueError if none."""
    if template_name not in ADDED:
        raise ValueError(f"expected an added template ({sorted(ADDED)}), got {template_name!r}")
    del ADDED[template_name]


def _named(name: str) -> Template | None:
    return ADDED.get(name) or KNOWN.get(_ALIASES.get(name, name))


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


def named_template(tokenizer: Any, text: str | None, name: str | None) -> Template:
    """Return the template of a text, file or name, or else of a name; ChatML without any."""
    if name is not None and _named(name) is None:
        raise ValueError(f"expected chat_template_name in {names()}, got {name!r}")
    asked = next(given for given in (text, name, "chatml") if given is not None)
    return _with_end(_named(asked) or Template(read_template(asked)), tokenizer)


def _with_end(template: Template, tokenizer: Any) -> Template:
    """Return ChatML with an end of turn that the tokenizer has; any other template as it is."""
    if tokenizer is None or template.text != CHATML:
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
