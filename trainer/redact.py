"""Keep secrets out of everything a run writes: configs, names, reports, W&B.

A value is hidden when its name ends a word in key, token, secret, password or credential
(`api_key`, `hf_token`, `apiKey`; not `max_new_tokens: 16`, a number), and wherever the value of an
environment variable with such a name turns up. Left out on purpose: guessing secrets by their look.
"""

import os
import re
from typing import Any

HIDDEN = "<hidden>"
_WORD = re.compile(r"(?i)(key|token|secret|password|passwd|credential)s?$")
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
_PLAIN = {"", "null", "none", "true", "false"}
_ASSIGNMENT = re.compile(r"([\w.+/@-]+)(=|:\s*)([^,\s}\]]+)")


def redact(value: Any, *, name: str = "") -> Any:
    """Return `value` (dict, list or leaf) with every secret replaced by `<hidden>`.

    >>> redact({"policy": {"api_key": "sk-123", "max_new_tokens": 16}})
    {'policy': {'api_key': '<hidden>', 'max_new_tokens': 16}}
    """
    if isinstance(value, dict):
        return {
            key: redact(item, name=str(key) if _words(str(key)) else name)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(item, name=name) for item in value]
    if _is_secret(name, value) or str(value) in _environment_secrets():
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return `text` with secret environment values and `name=value` secrets hidden.

    >>> redact_text("kl.coeff=0.1,env.api_key=sk-123")
    'kl.coeff=0.1,env.api_key=<hidden>'
    """
    for secret in _environment_secrets():
        if len(secret) >= 8:  # shorter ones occur inside ordinary words
            text = text.replace(secret, HIDDEN)

    def hide(match: re.Match[str]) -> str:
        name, sign, value = match.groups()
        return f"{name}{sign}{HIDDEN if _is_secret(name, value) else value}"

    return _ASSIGNMENT.sub(hide, text)


def _words(name: str) -> list[str]:
    """List the words of `name` that say its value is a secret, in lower case."""
    found = (_WORD.search(word) for word in _SPLIT.split(name))
    return [match.group(1).lower() for match in found if match]


def _is_secret(name: str, value: Any) -> bool:
    words = _words(name)
    if not words or isinstance(value, bool) or str(value).lower() in _PLAIN:
        return False
    is_number = _NUMBER.fullmatch(str(value)) is not None  # max_new_tokens=16, pad_token_id=2
    return not is_number or bool({"secret", "password", "passwd"} & set(words))


def _environment_secrets() -> list[str]:
    values = {value for name, value in os.environ.items() if _words(name)}
    return sorted(v for v in values if len(v) >= 4 and v.lower() not in _PLAIN)
