"""Hide secrets in everything a run writes: configurations, names, reports, errors, W&B.

A text is hidden if its key ends in one of `_NAME`. The value of an environment variable is hidden
wherever it occurs, if the variable's name contains one of `_NAME` or ends in _PASS, _PAT, _PWD or
_KEY. Keys of a configuration may end in _key without a secret: reward_key, answer_key.
"""

import os
import re
from typing import Any

HIDDEN = "<hidden>"
_NAME = r"(?:token|secret|passw(?:or)?d|passphrase|(?:api|access)[_-]?key)s?"
_KEY = re.compile(rf"(?i){_NAME}$")
_PLACE = r"(?!.*_(?:file|path|dir)$)"  # HF_TOKEN_PATH is the path of a file, not a secret
_VARIABLE = re.compile(rf"(?i){_NAME}(?![a-z]){_PLACE}|_(?:pass|pat|pwd|key)$")
_SHORTEST = 8  # characters; shorter values occur inside ordinary words
# name=value, except ${...} and counts, as in max_new_tokens=16 or =choice(16,32)
_COUNT = r"\$\{|null\b|choice\(|range\(|\[?[\d.]+(?![\w.])"
_PAIR = re.compile(rf"(?i)(\b[\w.-]*{_NAME}(?:=|['\"]: ?)['\"]?)(?!{_COUNT})[^\s,'\"}})\]]{{4,}}")
_URL = re.compile(r"(:/{1,2}[^/\s:@]*:)[^/\s@]+@")  # one slash in a path that was a URL


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
    return bool(value and not value.startswith("${") and _KEY.search(name))


def hide_values(node: Any) -> Any:
    """Return texts, at any depth, without the values of secret environment variables."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name)}
    secrets = sorted((v for v in values if len(v) >= _SHORTEST), key=len, reverse=True)
    return _without(node, secrets) if secrets else node


def _without(node: Any, secrets: list[str]) -> Any:
    if isinstance(node, dict):
        return {key: _without(value, secrets) for key, value in node.items()}
    if isinstance(node, list):
        return [_without(value, secrets) for value in node]
    for secret in secrets if isinstance(node, str) else ():
        node = node.replace(secret, HIDDEN)
    return node


def redact_text(text: str) -> str:
    """Return `text` with secrets of the environment, of URLs and of `name=value` hidden.

    >>> redact_text("kl.coeff=0.1,env.api_key=sk-123 of https://me:hf_1@hub")
    'kl.coeff=0.1,env.api_key=<hidden> of https://me:<hidden>@hub'
    """
    text = _URL.sub(rf"\1{HIDDEN}@", hide_values(text))
    return _PAIR.sub(rf"\1{HIDDEN}", text)
