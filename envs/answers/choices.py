"""Multiple choice: options in a cell, the right letter, and the option that a response takes."""

import json
import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from envs.answers.comparison import plain
from envs.answers.extraction import extract_answer

TEXT_KEYS, LABEL_KEYS = ("text", "content", "option"), ("label", "key", "id")
LETTERED = re.compile(r"\(?([A-Z])[).:]\s*")  # options of AQuA: "A)21"
LATEX = re.compile(r"\\(?:text\w*|mathrm|mathbf)\s*\{([^{}]*)\}")
# A letter stands alone, before a mark or a reason; before other words, "A" is the article and "I"
# the pronoun.
MARK = r"[\W_]*(?:$|\n)|[\s*_]*[).:\]]|[,;](?! *[A-Z]\b)"
AFTER = rf"(?![\w'\u2019])(?={MARK}|[\s*_]+(?:because|since|as{{}})\b)"
FIRST = re.compile(r"[\W_]*([A-Z])" + AFTER.format("|is"))
STATED = re.compile(
    r"\b(?i:answer|option|choice|choose|is|it's)\b[\s:*_(\[\"']*([A-Z])" + AFTER.format("")
)
MARKED = re.compile(r"(?<!\w)([A-Z])[).:](?!\w)")  # "B)" of a list of options
ANSWER_IS = re.compile(r"(?i)\banswer(?:\s+is|\s*:)\s*:?\s*(.+)")


def read_options(cell: Any) -> tuple[list[str], list[str]]:
    """Return the labels of options, [] if they have none, and their texts; else ValueError.

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
    letters = ascii_uppercase[: len(texts)]
    name = str(answer).strip()
    bare = name.strip("().:").upper()
    for names in ([label.upper() for label in labels], letters):
        if bare and bare in names:
            return letters[[*names].index(bare)]
    if name in texts and not isinstance(answer, int):
        return letters[texts.index(name)]
    return letters[int(name)] if name.isdecimal() and int(name) < len(texts) else None


def chosen_letter(response: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that a response takes, or None.

    It takes one by its letter ("A", "(a)", "A) Lima", "The answer is A because ..."), or by its
    text alone or after "answer is". The article "a" and the pronoun "I" are no letters. A letter
    with the text of another option, and several options, are None.

    >>> options = {"A": "Lima", "B": "Oslo"}
    >>> texts = ("(a)", "A. Lima", "The answer is A.", "lima.", "A city.", "A. Oslo", "A. B.")
    >>> [chosen_letter(text, options) for text in texts]
    ['A', 'A', 'A', 'A', None, None, None]
    """
    text = LATEX.sub(r"\1", extract_answer(response)[0]).strip()
    for part in (text, *ANSWER_IS.findall(text)[-1:]):
        bare = re.sub(r"[\W_]", "", part).upper()
        same = [letter for letter, option in options.items() if plain(part) == plain(option)]
        if bare in options or same:
            return bare if bare in options else same[0]
    stated = [*STATED.finditer(text)]
    match = stated[-1] if stated else FIRST.match(text)
    if match is None or match[1] not in options:
        return None
    rest = text[match.end(1) :].lstrip(").:,;]*_ ")
    others = {letter: plain(option) for letter, option in options.items() if letter != match[1]}
    listed = others.keys() & {*MARKED.findall(rest)}
    return None if listed or plain(rest.partition("\n")[0]) in others.values() else match[1]
