"""Texts without their secrets, see trainer/runs/redact.py: by value, and by name.

A value is found as it is, escaped any number of times (repr, JSON, a URL), line by line, or folded
at its blanks. So are passwords of URLs, and what follows in those of webhooks. By name: a name, a
separator and a value, where

  a separator  is = or : (also ==, :=, =>, %3D), with blanks, after quotes however escaped
               ({"x": "{\\"token\\": ...}"}) or a bracket (environ["TOKEN"] = ...); after --name
               blanks will do.
  a value      is what stands in quotes or brackets, of the headers authorization and cookie the
               rest of the line, else all up to a blank, comma, & or closing bracket, or several of
               them, a,b; the scheme of a header (Bearer) goes along.

Prose (nats per token: the ..., a cookie: sweet) and lines of code (token=read(path)) stay as they
are; after a password or secret prose begins with a word like `the` or `is`.
Takes linear time: a policy may have written the text. Left out: blocks of YAML, which is hidden
before it is written.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

from trainer.runs.redact import HIDDEN, NUMBERS_TOO, WORD, is_secret, words_of_secret

# A name is all of its letters, tried once (the `+`): from each of them would take quadratic time.
_NAME = re.compile(
    r"(?<![\w.+/@-])(?:"
    r"(?P<flag>--?[A-Za-z][\w-]*+)(?:\\*+['\"],)?+[ \t]++(?![-\s=:])"
    r"|(?P<name>[\w.+/@-]++)(?P<quote>\\*+['\"])?+\]?+"
    r"(?P<sign>[ \t]*+(?:=>|[:=]?=)[ \t]*+|[ \t]*+:\s*+|%3[Dd]))"
)
_QUOTED = re.compile(r"[bruf]{0,2}(\\{0,7})('''|\"\"\"|['\"]).{0,8192}?(?<!\\)\1\2", re.DOTALL)
_VALUES = (
    _QUOTED,
    re.compile(r"[bruf]{0,2}\\*+['\"][^\n]*+"),  # cut off before the quotes end
    re.compile(r"[\[({][^\[\](){}]{0,8192}+[\])}]"),
    re.compile(
        r"(?:(?i:basic|bearer|digest|negotiate|token|apikey)[ \t]++)?+"
        r"[^,\s&}\]]++(?:,[^,\s&}\]=]++(?!=))*+"
    ),
)
_HEADER, _LINE = (
    re.compile(r"(?:authori[sz]ation|cookie)$"),
    re.compile(r"(?:[^\r\n'\"]++|(?<==)\"[^\r\n\"]*+\")++"),
)
_SENTENCE = re.compile(r"[A-Za-z]+[,;:]? +[a-z]|\[[\w.]+\]\(")  # nats per token: the policy ...
_PROSE = re.compile(  # Secret: the model ...; but no "password: swordfish for user"
    r"(?i)(?:an?|the|this|that|these|it|is|are|was|were|has|have|had|do|does|not?|must|should|can"
    r"|cannot|could|may|will|would|to|of|in|on|at|for|from|by|with|as|if|when|where|how|what|why"
    r"|who|which|you|your|we|our|i|my|he|she|they|their|there|here|and|or|but|so|then)"
    r"(?:['\u2019][a-z]{1,3})? +[a-z]"
)
_CODE = re.compile(r"[\[({*]*+[A-Za-z_.]++[(\[]|lambda\b")  # token=read(...), of a traceback
_URL = re.compile(r"(\w:/{1,2}(?:[^/\s:@]*+:)?)[^/\s]+@")  # the password may hold : and @
_HOOK = re.compile(r"(?i)(://[^\s'\"]{0,99}hooks?[\w.]{0,99}/)[^\s'\"]++")
_BEARER = re.compile(r"(?i)\b(bearer(?:[ \t]|%20)++)\S{8,}")
_ALSO_WORDS = ("key", "tokens", "cookie", "cookies")  # key: value, a cookie: chocolate
_BLANKS = r"(?:\s|\\++(?:[nrt]|(?=\s))|\+|%20|%0[AaDd9])++"  # where a text was folded


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text with some secrets, those of URLs and of `name=value` hidden."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret.strip()) >= 8:  # shorter ones occur inside ordinary words
            text = _as_written(secret).sub(HIDDEN, text)
    text = _HOOK.sub(rf"\1{HIDDEN}", _URL.sub(rf"\1{HIDDEN}@", text))
    text, out, place = _BEARER.sub(rf"\1{HIDDEN}", text), [], 0
    for named in _NAME.finditer(text):
        if named.start() < place or not (name := _name_of(named, text)):
            continue
        value = _value(text, named, name)
        if value and is_secret(name, value[0]):
            out += [text[place : value.start()], HIDDEN]
            place = value.end()
    return "".join([*out, text[place:]])


def _name_of(named: re.Match[str], text: str) -> str:
    r"""Return the words of a secret's name in a text, without the end of a \n or %20 before it."""
    name, before = (named["flag"] or named["name"])[-200:], text[named.start() - 1 : named.start()]
    escaped = {"\\": 1, "%": 2}.get(before, 0)
    return words_of_secret(name) or (words_of_secret(name[escaped:]) if escaped else "")


def _value(text: str, named: re.Match[str], name: str) -> re.Match[str] | None:
    """Return the value that follows a name; None of what is prose or code."""
    place, sign = named.end(), named["sign"] or ""
    found = next(filter(None, (form.match(text, place) for form in _VALUES)), None)
    if found and not _QUOTED.match(text, place) and ":" in sign and _HEADER.search(name):
        pair = "=" in text[place : place + 200].partition("\n")[0]  # id=..., of no kind to eat
        if pair or not name.endswith("cookie"):
            return _LINE.match(text, place)
    if not found or named["quote"] or named["flag"]:
        return found
    loose, strong = sign[:1] in " \t:", NUMBERS_TOO.search(name)
    word = loose and name in _ALSO_WORDS and WORD.fullmatch(found[0])
    told = ":" in sign and (_PROSE if strong else _SENTENCE).match(text, place)
    code = (loose or not strong) and _CODE.match(found[0])
    return None if word or told or code else found


@lru_cache(256)
def _as_written(secret: str) -> re.Pattern[str]:
    """Return what finds a secret, or a long line of it, escaped any number of times or folded."""
    lines = [line for line in secret.splitlines() if len(line.strip()) >= 8 and line[:5] != "-----"]
    found = (_BLANKS.join(map(_letters, part.split())) for part in (secret, *lines))
    return re.compile("|".join(found))


def _letters(word: str) -> str:
    word = re.sub(r"\\+", r"\\", word)  # any number of them is one
    pattern = "".join(map(_letter, word))  # the first one takes all backslashes before it, once
    return rf"(?<!\\){pattern}" if pattern.startswith("(?:") else pattern


@lru_cache(256)
def _letter(letter: str) -> str:
    """Return a pattern of a letter, with the backslashes that escape it, or as a URL has it."""
    in_url = quote(letter, safe="", errors="replace")
    if in_url == letter:
        return re.escape(letter)
    if letter == "\\":
        return r"(?:\\++|%5[Cc])"
    code = letter.encode("utf-16-be", "surrogatepass").hex()
    by_code = r"\\++".join(f"u{code[i : i + 4]}" for i in range(0, len(code), 4))
    forms = rf"{re.escape(letter)}|(?i:{by_code}|x{ord(letter):02x})"
    return rf"(?:\\*+(?:{forms})|(?i:{in_url}))"
