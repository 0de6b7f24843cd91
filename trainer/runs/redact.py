"""Hide secrets in everything a run writes: configurations, names, reports, errors, W&B.

A text under a key whose name ends in token, secret, password or api_key is hidden, and so is the
value of an environment variable with such a name, wherever it occurs.
"""

import os
import re
from typing import Any

HIDDEN = "<hidden>"
_NAME = r"(?:token|secret|password|api[_-]?key)s?"
_SECRET = re.compile(rf"(?i)(?:^|[_.-]|[a-z0-9]){_NAME}$")
# name=value, but for ${...} and for counts, as in max_new_tokens=16 or =choice(16,32)
_COUNT = r"\$\{|null\b|choice\(|range\(|\[?[\d.]+(?![\w.])"
_PAIR = re.compile(rf"(?i)(\b[\w.-]*{_NAME}(?:=|['\"]: ?)['\"]?)(?!{_COUNT})[^\s,'\"}})\]]{{4,}}")
_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def redact(value: Any, *, name: str = "") -> Any:
    """Return `value` (dict, list or leaf) with every secret replaced by `<hidden>`.

    >>> redact({"policy": {"api_key": "sk-123", "max_new_tokens": 16, "token": "${oc.env:T}"}})
    {'policy': {'api_key': '<hidden>', 'max_new_tokens': 16, 'token': '${oc.env:T}'}}
    """
    if isinstance(value, dict):
        return {key: redact(item, name=str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name=name) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret(name, value) else redact_text(value)


def is_secret(name: str, value: str) -> bool:
    """Return whether a text under a key is a plain-text secret."""
    return bool(value and not value.startswith("${") and _SECRET.search(name))


def redact_text(text: str) -> str:
    """Return `text` with secrets of the environment, of URLs and of `name=value` hidden.

    >>> redact_text("kl.coeff=0.1,env.api_key=sk-123 of https://me:hf_1@hub")
    'kl.coeff=0.1,env.api_key=<hidden> of https://me:<hidden>@hub'
    """
    of_environment = (value for name, value in os.environ.items() if _SECRET.search(name))
    for secret in sorted(of_environment, key=len, reverse=True):
        if len(secret) >= 8:  # shorter secrets occur inside ordinary words
            text = text.replace(secret, HIDDEN)
    text = _URL.sub(rf"\1{HIDDEN}@", text)
    return _PAIR.sub(rf"\1{HIDDEN}", text)
