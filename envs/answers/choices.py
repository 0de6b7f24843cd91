"""Multiple choice: options in a cell, the right letter, and the option that a response chooses."""

import json
import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from envs.answers.comparison import plain
from envs.answers.extraction import extract_answer

TEXT_KEYS, LABEL_KEYS = ("text", "content", "option"), ("label", "key", "id")
LETTERED = re.compile(r"\(?([A-Z])[).:]\s*")  # options as in AQuA: "A)21"
LATEX = re.compile(r"\\(?:text\w*|mathrm|mathbf)\s*\{([^{}]*)\}")
LETTER = re.compile(r"(?<![\w'\u2019])([A-Z])(?![\w'\u2019])")
# Before a word in lower case "A" is the article and "I" the pronoun, unless a reason follows.
REASON = r"[\s*_]+(?:because|since|as|is (?:correct|right|the))\b"
PROSE = re.compile(rf"(?!{REASON}| (?:or|and)\b) +[a-z]")
END = re.compile(rf"[\W_]*(?:$|\n)|[\s*_]*[).:\],;]| +[-\u2013] |{REASON}")
BEFORE = r"\b(?i:answer|option|choice|choose|is|it's)\b[\s:*_(\[\"']*"  # before a stated letter
STATED = re.compile(BEFORE + r"([A-Z])(?![\w'\u2019])")
NEGATION = re.compile(r"(?i)(?:\bnot|n't)[\s*_(\"]*$")
ANSWER_IS = re.compile(r"(?i)\banswer(?:\s+is|\s*:)\s*:?\s*(.+)")


def read_options(cell: Any) -> tuple[list[str], list[str]]:
    """Return the labels of options, [] if they have none, and their texts; else raise ValueError.

    A cell is a list of texts, {text: [...], label: [...]}, a list of {text, label}, or
    {A: ..., B: ...}; each also as JSON.

    >>> read_options({"text": ["Lima", "Oslo"], "label": ["1", "2"]})
    (['1', '2'], ['Lima', 'Oslo'])
    """
    cell = json.loads(cell) if isinstance(cell, str) else cell
    labels, texts = [], cell
    if isinstance(cell, Mapping):
        filled = {key: value for key, value in cell.items() if value is not None}
        labels, texts = list(filled), list(filled.values())
        if isinstance(cell.get("text"), list):
            labels, texts = cell.get("label") or [], cell["text"]
    elif isinstance(cell, list) and cell and all(isinstance(each, Mapping) for each in cell):
        labels = [next((each[key] for key in LABEL_KEYS if key in each), None) for each in cell]
        texts = [next((each[key] for key in TEXT_KEYS if key in each), None) for each in cell]
        labels = [] if None in labels else labels
    known = isinstance(texts, list) and 2 <= len(texts) <= len(ascii_uppercase)
    if not known or not all(isinstance(each, str | int | float) for each in texts):
        raise ValueError("no options")
    texts = [str(each).strip() for each in texts]
    lettered = [LETTERED.match(text) for text in texts]
    if [match and match[1] for match in lettered] == [*ascii_uppercase[: len(texts)]]:
        texts = [LETTERED.sub("", text, count=1) for text in texts]
    return [str(label) for label in labels], texts


def right_letter(answer: Any, labels: list[str], texts: list[str]) -> str | None:
    """Return the letter of the right option, by its label, letter, text or index from 0, or None.

    >>> [right_letter(answer, [], ["Lima", "Oslo"]) for answer in (1, "b", "Oslo", "Rome")]
    ['B', 'B', 'B', None]
    """
    letters = [*ascii_uppercase[: len(texts)]]
    name = str(answer).strip().removesuffix(".0")  # an index in a column of floats
    if lettered := LETTERED.match(name):  # "B) Oslo"
        label, text = lettered[1], name[lettered.end() :].strip()
        name = label if text in ("", *texts) else name
    bare = name.strip("().:").upper()
    for names in ([label.upper() for label in labels], letters):
        if bare and bare in names:
            return letters[[*names].index(bare)]
    if name in texts and not isinstance(answer, int | float):
        return letters[texts.index(name)]
    return letters[int(name)] if name.isdecimal() and int(name) < len(texts) else None


def chosen_letter(response: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that a response chooses, or None.

    The response is only the option's text, or only its letter; or the option is the last letter
    after "answer is", "option" and the like, or the only letter in the response ("A) Lima", "So I
    pick A."). A letter followed by another letter, or by the text of another option, gives None.

    >>> options = {"A": "Lima", "B": "Oslo"}
    >>> texts = ("(a)", "A. Lima", "The answer is A.", "lima.", "A city.", "A. Oslo", "A. B.")
    >>> [chosen_letter(text, options) for text in texts]
    ['A', 'A', 'A', 'A', None, None, None]
    """
    text = LATEX.sub(r"\1", extract_answer(response)[0]).strip()
    for part in (text, *ANSWER_IS.findall(text)[-1:]):
        bare = re.sub(r"[\W_]", "", part).upper() if part is text else ""
        same = [letter for letter, option in options.items() if plain(part) == plain(option)]
        if bare in options or same:
            return bare if bare in options else same[0]
    named = _letters(text, options)
    stated = [match for match in STATED.finditer(text) if END.match(text, match.end(1))]
    match = stated[-1] if stated else named[-1] if len({m[1] for m in named}) == 1 else None
    if match is None or match[1] not in options or not END.match(text, match.end(1)):
        return None
    rest = text[match.end(1) :].lstrip(").:,;]*_-\u2013 ")
    negated = NEGATION.search(text[: match.start(1)])
    others = {letter: plain(option) for letter, option in options.items() if letter != match[1]}
    says_other = plain(rest.partition("\n")[0]) in others.values()
    named_behind = any(m.start(1) > match.start(1) and m[1] != match[1] for m in named)
    return None if negated or says_other or named_behind else match[1]


def _letters(text: str, options: Mapping[str, str]) -> list[re.Match[str]]:
    """Return the letters of options in a text, without the article and the pronoun."""
    letters = [match for match in LETTER.finditer(text) if match[1] in options]
    return [m for m in letters if not (m[1] in "AI" and PROSE.match(text, m.end()))]
