"""Compare answers as texts, words or LaTeX; numbers in them by their value (numbers.py).

The `reward` of a task (envs/tasks/) calls these functions.

All comparisons except `similarity` are exact: a right answer in another form may get no reward, a
wrong one never gets any. Symbolic equality needs the package math-verify.
"""

import re
import unicodedata
from collections.abc import Callable
from difflib import SequenceMatcher
from fractions import Fraction

from envs.answers.extraction import final_answer
from envs.answers.numbers import NUMBER, bare, exactly, last_number, ungroup
from policies.optional_packages import EXTRAS

# Characters that are written in several ways, and LaTeX without meaning.
SAME = str.maketrans(
    {**dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"), "\u2018": "'", "\u2019": "'"}
    | dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
)
POWERS = ("<super>", "<sub>", "<fraction>")  # NFKC would write 5\u00b2 as 52
TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
CURRENCY = "[$\u20ac\u00a3\u00a5\u20b9]"
MONEY = {"dollar": "$", "euro": "\u20ac", "yen": "\u00a5", "rupee": "\u20b9"}  # pound: a weight too
# The text between the $ of a formula, by pandoc's rule: $x$ is one, "$5 or $6" is not.
FORMULA = re.compile(r"(?<![\\$])\$\$?(?=[^\s$])((?:\\.|[^$\\]){1,200})(?<=\S)\$\$?(?!\d)")
IGNORED = re.compile(rf"\\(?:left|right)(?![a-zA-Z])|\\[!,;:()\[\]]|\\?{CURRENCY}")
LETTERS = re.compile(r"\\?[^\W\d_]+")
# **5**, "5", `5`; not the star of 2*3 and the prime of x', which follow a letter or digit.
MARKED = re.compile(
    r"(?<![\w*'\"`)\]}])(\*{1,3}|__?|[\"'`])(?=\S)(.{1,200}?)(?<=\S)\1(?![\w*'\"`])"
)
AROUND_WORDS = '.,;:!?"*`()[]{}<>'
AT_THE_END = ".,;:?"  # removed from a formula's end; ! is a factorial, brackets are sets, intervals
INFINITY = {"inf", "infty", "infinity", "oo"}  # letters that are not words
# Blanks that do not count. Others do: 1 2 is not 12, and 1, 234 is not 1,234.
BLANK = re.compile(r"(?<![\d,\s])\s+|(?<![,\s])\s+(?!\d)")
FRACTION = re.compile(r"(-?)\\[dt]?frac(?:(\d)(\d)|\{(-?\d+)\}\{(\d+)\})")
VALUE = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?(?:/0*[1-9]\d*)?"
)
LONGEST = 500  # maximum characters of a parsed expression


def plain(text: str) -> str:
    """Normalise a text: no case, no emphasis, quotes and full stops, single spaces.

    In a text with words no other punctuation counts. In a text without words, such as an interval
    or a formula, punctuation counts and spaces do not. A number is replaced by its value: 1,000.0
    becomes 1000.

    >>> plain(" The  **New York**!") == plain("the new york"), plain("$18.50"), plain("C++")
    (True, '37/2', 'c++')
    >>> plain("5!"), plain("<.5>"), plain("(0, 1]."), plain("5\u00b2"), plain(r"\\frac{3}{4}")
    ('5!', '<.5>', '(0,1]', '5\u00b2', '3/4')
    """
    text = _spell(text)
    words = text.split()
    if any(_is_word(word.strip(AROUND_WORDS)) for word in words):
        return " ".join(map(_plain_word, words))
    return _formula(text)


def same_text(answer: str, right: str) -> bool:
    """Return whether two plain texts are equal, and one of them does not name another currency.

    >>> same_text("$5", "5"), same_text("$5", "\u20ac5")
    (True, False)
    """
    return plain(answer) == plain(right) and same_currency(answer, right)


def same_currency(answer: str, right: str) -> bool:
    """Return whether two texts share a currency, or one of them names none."""
    ours, theirs = map(_currencies, (answer, right))
    return not ours or not theirs or bool(ours & theirs)


def _currencies(text: str) -> set[str]:
    """Return the currency signs of a text, also those of words behind a number: 5 euros."""
    text = FORMULA.sub(r"\1", text)
    words = re.findall(r"(?i)\d\s*(dollar|euro|yen|rupee)s?\b", text)
    return {*re.findall(CURRENCY, text), *(MONEY[word.lower()] for word in words)}


def similarity(answer: str, right: str) -> float:
    """Return the similarity of two plain texts, from 0 to 1 (difflib's ratio).

    An answer over twice as long gets 0: its ratio is below 2/3, and the cost is quadratic.

    >>> similarity("Jane Austin", "jane austen"), similarity("no " * 9**6, "yes")
    (0.9090909090909091, 0.0)
    """
    if len(answer) > 2 * len(right) + 20 or len(answer) > LONGEST:
        return float(answer == right)
    if not same_currency(answer, right):
        return 0.0
    return SequenceMatcher(None, plain(answer), plain(right), autojunk=False).ratio()


def holds_words(answer: str, right: str) -> bool:
    """Return whether a text contains the right answer as whole words.

    The letters A and I are also an article and a pronoun, so they count only at the end, before
    punctuation and after "option", "choice" or "answer is".

    >>> holds_words("Yes, it is.", "yes"), holds_words("Yesterday", "yes"), holds_words("no.", "")
    (True, False, False)
    >>> [holds_words(text, "A") for text in ("A town", "(A) Lima", "It is A.", "Option A fits")]
    [False, True, True, True]
    """
    words, target = [list(map(_plain_word, _spell(text).split())) for text in (answer, right)]
    if target in (["a"], ["i"]):
        before, behind = r"\b(?:option|choice|answer is:?) ", r"(?:\W*$|[*\"'`]*[).:,\]*])"
        pattern = rf"\b{target[0]}{behind}|{before}{target[0]}\b"
        return re.search(pattern, answer, re.IGNORECASE) is not None
    if not same_currency(answer, right):
        return False
    places = range(len(words) - len(target) + 1) if target else ()
    return any(words[i] == target[0] and words[i : i + len(target)] == target for i in places)


def same_answer(answer: str, right: str) -> bool:
    """Return whether a final answer is the right one: the same number, else the same text.

    >>> same_answer("so 18 dollars", "$18.0"), same_answer("18 euros", "$18")
    (True, False)
    """
    number = last_number(right)
    rest = NUMBER.sub("", bare(right))
    if number is not None and not re.sub(r"[\s%.]|[a-zA-Z]{3,}", "", rest):
        return last_number(answer) == number and same_currency(answer, right)
    return bool(right) and same_text(answer, right)


def same_mathematics(answer: str, solution: str, *, symbolic: bool = False) -> bool:
    r"""Return whether an answer equals the boxed answer of a solution, as in MATH.

    It must be the same number, else the same LaTeX without spacing. `symbolic` also uses
    math-verify, which reads other forms, names and units.

    >>> same_mathematics("1/2", r"so \boxed{\dfrac{1}{2}}"), same_mathematics("x+1", r"\boxed{x}")
    (True, False)
    """
    right = final_answer(solution)
    if symbolic:
        return symbolic_check()(answer, right)
    if max(len(answer), len(right)) > LONGEST:
        return answer == right
    return bool(answer) and same_text(final_answer(answer), right)


def _spell(text: str) -> str:
    """Return a text without case, emphasis, quotes and LaTeX's spacing, with one form per sign."""
    if not text.isascii():
        text = "".join(
            c
            if unicodedata.decomposition(c).startswith(POWERS)
            else unicodedata.normalize("NFKC", c)
            for c in ungroup(text)
        )
        text = unicodedata.normalize("NFC", text).translate(SAME)
    text = text.replace("{,}", ",")
    if "\\" in text:  # \Delta is not \delta
        text = TEXT.sub(r"\1", text.replace("\\ ", " "))
        text = text.replace("\\{", "{").replace("\\}", "}").replace("dfrac", "frac")
        text = LETTERS.sub(lambda m: m[0] if m[0][0] == "\\" else m[0].casefold(), text)
    else:
        text = text.casefold()
    text = IGNORED.sub("", text)
    for _ in range(3):  # marks may be nested: **"5"**
        text = MARKED.sub(r"\2", text)
    return text


def _is_word(text: str) -> bool:
    """Return whether a text is a word of two or more letters: Paris, well-known; not x or 5!."""
    if text.isalpha():
        return len(text) > 1 and text not in INFINITY
    shape = ["x" if unicodedata.category(c)[0] in "LM" else c for c in text]
    return "xx" in "".join(shape) and {*shape} <= {*"x-'"}


def _plain_word(word: str) -> str:
    core = word.strip(AROUND_WORDS)
    return core if _is_word(core) else _formula(word)


def _formula(text: str) -> str:
    """Return a formula without spaces; a number or fraction of integers as its value."""
    text = text.strip()
    text = text.rstrip(AT_THE_END) or text
    text = BLANK.sub("", re.sub(r"\\?%$", "", text))
    if not re.search("[,;]", text) and text.count("(") == text.count(")"):
        text = text.strip("()") or text  # (5) is 5; (0,1) is no list
    value = _number(text)
    return re.sub(r"(?<=,)\s+", "", text) if value is None else str(value)


def _number(text: str) -> Fraction | None:
    """Return the exact value of a number or fraction of integers without spaces, else None."""
    if len(text) > LONGEST:
        return None
    if match := FRACTION.fullmatch(text):
        sign, over, under = match[1], match[2] or match[4], match[3] or match[5]
        return Fraction(int(f"{sign}{over}".replace("--", "")), int(under)) if int(under) else None
    return exactly(text.replace(",", "")) if VALUE.fullmatch(text) else None


def symbolic_check() -> Callable[[str, str], bool]:
    """Return math-verify's comparison of LaTeX answers; raise ImportError without the package."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["math_verify"]) from error
    return lambda answer, right: bool(verify(parse(f"${right}$"), parse(f"${answer}$")))
