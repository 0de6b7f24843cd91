"""Keep secrets out of everything a run writes: configs, names, reports, W&B.

What an environment variable with a secret's name holds is hidden wherever it turns up, and the
value of a name with one of these words: token, secret, password, passphrase, credential, cookie,
webhook, key (of several keys: api_keys), or that ends with auth, authorization, pw, sig, jwt,
_pass, _pwd, _pat, _signature; apiKey and --api-key are names too. A number counts something
(max_new_tokens: 16), as does a term (key: 3x+1), but for a password or secret. How both stand in a
text: redacted_text.py. Left out: guessing other secrets by their look.
"""

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

HIDDEN = "<hidden>"
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")  # the words of a name
_OF_KEYS = "api|access|account|auth|encryption|license|master|private|secret|shared|signing|ssh"
_SECRET = re.compile(  # of a name's words, in lower case with _ between them
    rf"(?:(?:^|_)key|(?:{_OF_KEYS})_?keys?)\d*(?=_|$)"
    r"|(?:token|secret|password|passwd|passphrase|credential|cookie|webhook)s?\d*(?=_|$)"
    r"|(?:^|_)(?:auth|authori[sz]ation|pw|sig|jwt)$"
    r"|._(?:pass|pwd|pat|signature)$"  # DB_PASS; not PWD, the folder that a shell is in
)
NUMBERS_TOO = re.compile(r"secret|pass(?:word|wd|phrase)|(?:^|_)pw$")
_NONE = re.compile(  # special tokens, a count, the name of a variable, KeyError
    r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|mask|stop|start|end|special|image|audio|video)_tokens?$"
    r"|(?:max|min|num|new|prompt|batch|total|prefer)_(?:\w+_)?tokens$"
    r"|tokens?_(?:s|per_\w+|ids?|types?|counts?)$|_variable$|(?:error|exception)$"
)
_OF_DATA = re.compile(  # keys of rows and batches: data_key=question
    r"(?:^|_)(?:full|data|text|tokens|masks?|input|history|logits|temperature|prompt|rewards?|done"
    r"|advantage|probs?|answer|question|response|group|value|target|label|sort|past|cache)_key$"
)
_PLAIN = {"", "null", "none", "true", "false", "value", "nan", "inf"}  # as in key=value
_SIGNS = r"+*/^=\xd7\xf7"
_TERM = rf"[($€£]*(?:\d{{1,6}}(?:\.\d{{1,6}})?[a-z]?|[a-z](?=[-{_SIGNS}])|(?<=[-{_SIGNS}(])[a-z])"
_COUNT = re.compile(  # 12, 1.2k, $5, 12/s; 4x, 3x+1, 2*(3+4), 10-20; [], </s>, <|im_end|>
    r"[-+~<>=]*[$€£]?[\d.]+(?:e[-+]?\d+)?(?:[%kmgb]|/s|/\d+)?"
    rf"|[-+~<>=]*{_TERM}(?:\)*(?:[{_SIGNS}]\(?|\(|-(?!\d{{4}})){_TERM}){{0,3}}\)*"
    r"|\W*|</?\w{1,8}>|<\|\w+\|>",
    re.I,
)
_ENDS = " \t\r\n[](){}'\"\\.;:!?`"
_REFERENCE = re.compile(r"['\"]?\$\{[\w.:]+\}?['\"]?")  # ${oc.env:NAME} is where it stands
WORD = re.compile(r"['\"]?[A-Za-z][A-Za-z_.-]*+['\"]?[.,;:)]*")
_FROM_ENVIRONMENT = re.compile(r"oc\.env:(\w+)")


def redact(value: Any, *, name: str = "") -> Any:
    """Return `value` (dict, list or leaf) with every secret replaced by `<hidden>`.

    >>> redact({"policy": {"api_key": "sk-123", "max_new_tokens": 16}})
    {'policy': {'api_key': '<hidden>', 'max_new_tokens': 16}}
    """
    if isinstance(value, dict):
        return {
            key: redact(item, name=str(key) if words_of_secret(str(key)) else name)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(item, name=name) for item in value]
    if is_secret(name, value) or str(value) in environment_secrets():
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with `secrets`, those of the environment, of URLs and of `name=value` hidden.

    >>> redact_text("kl.coeff=0.1,env.api_key=sk-123 of https://me:hf_1@hub")
    'kl.coeff=0.1,env.api_key=<hidden> of https://me:<hidden>@hub'
    """
    from trainer.runs.redacted_text import without  # here: a start without an error has no text

    return without(text, {*secrets, *environment_secrets()})


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
        named = (
            (item, str(key) if words_of_secret(str(key)) else name) for key, item in config.items()
        )
        return [secret for item, key in named for secret in secrets_of(item, name=key)]
    if isinstance(config, (list, tuple)):
        return [secret for item in config for secret in secrets_of(item, name=name)]
    looked_up = _FROM_ENVIRONMENT.findall(config) if isinstance(config, str) else []
    values = [os.environ[key] for key in looked_up if key in os.environ]
    return [*values, str(config)] if is_secret(name, config) else values


@lru_cache(4096)  # the same keys and variables, for every text of a page
def words_of_secret(name: str) -> str:
    """Return the words of a name if they say that its value is a secret, else nothing."""
    words = "_".join(filter(None, _SPLIT.split(name))).lower()
    return words if _SECRET.search(words) and not _NONE.search(words) else ""


def is_secret(name: str, value: Any) -> bool:
    words, text = words_of_secret(name), str(value)
    inside = re.sub(r"^\s*[A-Za-z_]\w*\(", "", text).strip(_ENDS)  # 8,16 or [8,16] or choice(8,16)
    if not words or isinstance(value, bool) or inside.lower() in _PLAIN:
        return False
    if _REFERENCE.fullmatch(text) or (_OF_DATA.search(words) and WORD.fullmatch(text)):
        return False
    mapping, parts = text.lstrip()[:1] == "{", inside.split(",")
    parts = (part.rpartition(":")[2] if mapping else part for part in parts)
    parts = (part.strip(_ENDS).lower() for part in parts)
    counts = all(part in _PLAIN or _COUNT.fullmatch(part) for part in parts)  # max_tokens=16,32
    return not counts or bool(NUMBERS_TOO.search(words))


def environment_secrets() -> list[str]:
    values = {value for name, value in os.environ.items() if words_of_secret(name)}
    return sorted(v for v in values if len(v) >= 4 and v.lower() not in _PLAIN)
