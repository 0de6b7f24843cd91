"""Compare answers as texts, words or LaTeX; numbers in them by their value (numbers.py).

Comparisons but `similarity` are exact: a right answer in another form may earn nothing, a wrong one
never earns.
Left out on purpose: symbolic equality; math-verify does it if installed.
"""

import re
import unicodedata
from collections.abc import Callable
from difflib import SequenceMatcher
from fractions import Fraction

from envs.answers.extraction import final_answer
from envs.answers.numbers import NUMBER, bare, exactly, last_number
from policies.optional_packages import EXTRAS

# LaTeX without meaning, words in LaTeX, and numbers after `_plain`.
IGNORED = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|\\?\$|\\?%$")
BLANK = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # one between digits counts: "1 2" is not 12
WORDS = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"(-?)\\[dt]?frac(?:(\d)(\d)|\{(-?\d+)\}\{(\d+)\})")
VALUE = re.compile(
    r"-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?:/0*[1-9]\d*)?"
)
EDGES = ".,;:!?\"'`*()[]{}<>\u2018\u2019\u201c\u201d\u00ab\u00bb"
LONGEST = 500  # maximum characters of a parsed expression


def plain(text: str) -> str:
    """Normalise a text: no case, no punctuation around words, single spaces.

    A number is its value: 1,000.0 is 1000.

    >>> plain(" The  \u201cNew York\u201d.") == plain("the new york"), plain("$18.50"), plain("C++")
    (True, '37/2', 'c++')
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    words = [word.strip(EDGES) or word for word in text.split()]
    bare = " ".join(words).lstrip("$\u20ac\u00a3")
    value = last_number(bare) if NUMBER.fullmatch(bare) else None
    return " ".join(words) if value is None else str(value)


def similarity(answer: str, right: str) -> float:
    """Return the similarity of two plain texts, from 0 to 1 (difflib's ratio).

    0 for an answer over twice as long: the ratio is below 2/3, and its cost is quadratic.

    >>> similarity("Jane Austin", "jane austen"), similarity("no " * 9**6, "yes")
    (0.9090909090909091, 0.0)
    """
    if len(answer) > 2 * len(right) + 20 or len(answer) > LONGEST:
        return float(answer == right)
    return SequenceMatcher(None, plain(answer), plain(right), autojunk=False).ratio()


def holds_words(answer: str, right: str) -> bool:
    """Return whether a text contains the right answer as whole words.

    >>> holds_words("Yes, it is.", "yes"), holds_words("Yesterday", "yes"), holds_words("no.", "")
    (True, False, False)
    """
    words, target = [[plain(word) for word in text.split()] for text in (answer, right)]
    places = range(len(words) - len(target) + 1) if target else ()
    return any(words[i] == target[0] and words[i : i + len(target)] == target for i in places)


def same_answer(answer: str, right: str) -> bool:
    """Return whether a final answer is the right one: the same number, else the same text.

    >>> same_answer("so 18 dollars", "$18.0"), same_answer("Blue.", "blue")
    (True, True)
    """
    number = last_number(right)
    rest = NUMBER.sub("", bare(right))
    if number is not None and not re.sub(r"[\s%.]|[a-zA-Z]{3,}", "", rest):
        return last_number(answer) == number
    return bool(_words(right)) and _words(answer) == _words(right)


def same_mathematics(answer: str, solution: str, *, symbolic: bool = False) -> bool:
    r"""Return whether an answer is the boxed one of a solution, as in MATH.

    Plain: the same number, else the same LaTeX without spacing. `symbolic` uses math-verify, which
    knows other forms, names and units.

    >>> same_mathematics("1/2", r"so \boxed{\dfrac{1}{2}}"), same_mathematics("x+1", r"\boxed{x}")
    (True, False)
    """
    right = final_answer(solution)
    if symbolic:
        return symbolic_check()(answer, right)
    if max(len(answer), len(right)) > LONGEST:
        return answer == right
    one, other = _plain(final_answer(answer)), _plain(right)
    value = _number(one)
    return bool(one) and (one == other or (value is not None and value == _number(other)))


def _words(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def _plain(text: str) -> str:
    """Return an answer without spacing and meaningless signs; a word without case."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\ ", " ").strip().rstrip(".")
    text = BLANK.sub("", WORDS.sub(r"\1", IGNORED.sub("", text)).strip())
    return text.casefold() if re.fullmatch(r"[a-zA-Z]{3,}", text) else text.replace("dfrac", "frac")


def _number(text: str) -> Fraction | None:
    """Return the exact value of a plain number or fraction of integers, else None."""
    if match := FRACTION.fullmatch(text):
        sign, over, under = match[1], match[2] or match[4], match[3] or match[5]
        return Fraction(int(f"{sign}{over}".replace("--", "")), int(under)) if int(under) else None
    return exactly(text.replace(",", "")) if VALUE.fullmatch(text) else None


def symbolic_check() -> Callable[[str, str], bool]:
    """Return math-verify's comparison of LaTeX answers; ImportError without the package."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["math_verify"]) from error
    return lambda answer, right: bool(verify(parse(f"${right}$"), parse(f"${answer}$")))
