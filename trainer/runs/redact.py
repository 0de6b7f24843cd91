"""Keep secrets out of everything a run writes: configs, names, reports, W&B.

A value is hidden when its name has the word key, token, secret, password or the like (`api_key`,
`apiKey`, `DB_PASS`; not `max_new_tokens: 16`), and wherever the value of an environment variable
with such a name turns up, as are passwords in URLs and what follows in those of webhooks. Takes
linear time: a policy may have written the text. Left out: guessing other secrets by their look.
"""

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

HIDDEN = "<hidden>"
_WORD = re.compile(
    r"(?i)(?:(?<![a-z])|(?<=api)|(?<=access)|(?<=private))(key)$"
    r"|(token|secret|password|passwd|passphrase|credential|webhook)s?$"
)
_LAST = {"pass", "pwd", "pat"}  # DB_PASS; not PWD, the folder that a shell is in
_ROLE = re.compile(r"(?i)(pad|eos|bos|unk|stop|start|end|special)_tokens?$")  # of a tokenizer
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
_SEVERAL = re.compile(r"(?:\w+\(|\[)?([^()\[\]]*)[)\]]?")  # 8,16 or [8,16] or choice(8,16)
_PLAIN = {"", "null", "none", "true", "false"}
# A name is all of its letters, tried once (the `+`): from each of them would take quadratic time.
_NAME = re.compile(r"(?<![\w.+/@-])([\w.+/@-]++)(?:=|['\"]?:\s*+)")
_VALUE = re.compile(r"[^,\s&}\]]++(?:,[^,\s&}\]=]++(?!=))*+")  # or several, a,b
_URL = re.compile(r"(\w:/{1,2}(?:[^/\s:@]*+:)?)[^/\s]+@")  # the password may hold : and @
_HOOK = re.compile(r"(?i)(://[^\s'\"]{0,99}hooks?[\w.]{0,99}/)[^\s'\"]++")
_BEARER = re.compile(r"(?i)\b(bearer )\S{8,}")
_FROM_ENVIRONMENT = re.compile(r"oc\.env:(\w+)")


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


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with `secrets`, those of the environment, of URLs and of `name=value` hidden.

    >>> redact_text("kl.coeff=0.1,env.api_key=sk-123 of https://me:hf_1@hub")
    'kl.coeff=0.1,env.api_key=<hidden> of https://me:<hidden>@hub'
    """
    for secret in sorted({*secrets, *_environment_secrets()}, key=len, reverse=True):
        if len(secret) >= 8:  # shorter ones occur inside ordinary words
            text = text.replace(secret, HIDDEN)
    text = _HOOK.sub(rf"\1{HIDDEN}", _URL.sub(rf"\1{HIDDEN}@", text))
    text, out, place = _BEARER.sub(rf"\1{HIDDEN}", text), [], 0
    for named in _NAME.finditer(text):
        name = named[1][-200:]
        if named.start() < place or not _words(name):  # a value only where it is wanted
            continue
        if (value := _VALUE.match(text, named.end())) and _is_secret(name, value[0]):
            out += [text[place : value.start()], HIDDEN]
            place = value.end()
    return "".join([*out, text[place:]])


def redact_word(word: str) -> str:
    """Return an override `key=value` with its value hidden if that is a secret.

    >>> redact_word("policy.max_new_tokens=choice(8, 16)"), redact_word("env.api_key=a,b")
    ('policy.max_new_tokens=choice(8, 16)', 'env.api_key=<hidden>')
    """
    key, sign, value = word.partition("=")
    return f"{key}{sign}{redact({key: value})[key]}"


def secrets_of(config: Any, *, name: str = "") -> list[str]:
    """List the secrets of a configuration: by name, and whatever it takes from the environment.

    >>> secrets_of({"tracker": {"api_key": "sk-12345"}, "seed": 0})
    ['sk-12345']
    """
    if isinstance(config, dict):
        named = ((item, str(key) if _words(str(key)) else name) for key, item in config.items())
        return [secret for item, key in named for secret in secrets_of(item, name=key)]
    if isinstance(config, (list, tuple)):
        return [secret for item in config for secret in secrets_of(item, name=name)]
    looked_up = _FROM_ENVIRONMENT.findall(config) if isinstance(config, str) else []
    values = [os.environ[key] for key in looked_up if key in os.environ]
    return [*values, str(config)] if _is_secret(name, config) else values


@lru_cache(4096)  # the same keys and variables, for every text of a page
def _words(name: str) -> list[str]:
    """List the words of `name` that say its value is a secret, in lower case."""
    if name.endswith(("Error", "Exception")) or _ROLE.search(name):  # KeyError: 'a'
        return []
    words = _SPLIT.split(name)
    last = {words[-1].lower()} & _LAST if len(words) > 1 else ()
    found = (_WORD.search(word) for word in words)
    return [*last, *((match[1] or match[2]).lower() for match in found if match)]


def _is_secret(name: str, value: Any) -> bool:
    words = _words(name)
    if not words or isinstance(value, bool) or str(value).lower() in _PLAIN:
        return False
    several = _SEVERAL.fullmatch(str(value).strip())
    parts = [part.strip().lower() for part in several[1].split(",")] if several else [str(value)]
    counts = all(part in _PLAIN or _NUMBER.fullmatch(part) for part in parts)  # max_tokens=16,32
    return not counts or bool({"secret", "password", "passwd"} & {*words})


def _environment_secrets() -> list[str]:
    values = {value for name, value in os.environ.items() if _words(name)}
    return sorted(v for v in values if len(v) >= 4 and v.lower() not in _PLAIN)
