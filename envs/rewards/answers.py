"""Is this answer right? Pure functions of texts; numbers are compared as in tasks/math_words.py.

What cannot be compared exactly is not the same: a right answer in another form may earn nothing, a
wrong one never does.
Left out on purpose: symbolic equality by ourselves; math-verify does it where it is installed.
"""

import ast
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from fractions import Fraction

from envs.tasks.math_words import (
    ANSWER_TAG,
    NUMBER,
    exactly,
    final_answer,
    last_number,
    same_answer,
    split_thoughts,
)
from policies.optional_packages import EXTRAS

# LaTeX: what says nothing (a blank between digits does), words, units, "x =", and fractions.
IGNORED = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|\\?\$|\\?%$|\^(?:\\circ|\{\\circ\})$")
BLANK = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
WORDS = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
UNIT = re.compile(rf"(?<=[\w)}}])(?:\s*{WORDS.pattern}|(?<=[\d)}}])\s+([a-zA-Z]{{2,}}))$")
NO_UNITS = {"dozen", "hundred", "thousand", "million", "billion", "trillion", "pi", "percent"}
NAME = re.compile(r"([a-zA-Z])\s*=\s*(?!=)")
PLAIN = re.compile(r"(?<![\w^/*.)}])(?:(\d+)\s+)?(\d+)/(\d+)(?![\w^(!./])")
PART = r"\s*(?:\{([^{}]+)\}|([a-zA-Z\d]))"
FRACTION = re.compile(rf"(?:(?<![\w^.)}}])(\d+)\s*)?\\[dt]?frac{PART}{PART}")
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RATIO = rf"(?:(\d+)\+(?=.*/))?({DECIMAL}|\(-?{DECIMAL}\))(?:/({DECIMAL}|\(-?{DECIMAL}\)))?"
VALUE = re.compile(rf"(-?)(?:{RATIO}|\({RATIO}\))")  # as _plain writes numbers, no sums or products
END = r"(?=\s*[,;]\s*[A-Za-z]|\s+[A-Za-z]|\s*$)"  # of a value in a Countdown solution
TARGET = re.compile(rf"target\s*=\s*(-?\d+){END}")
NUMBERS = re.compile(rf"numbers\s*=\s*(\d+(?:[,\s]+\d+)*){END}")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
UNREADABLE = (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError)
EDGES = ".,;:!?\"'`*()[]{}<>\u2018\u2019\u201c\u201d\u00ab\u00bb"
LONGEST = 500  # characters of an expression that is worth parsing


def tagged(text: str) -> tuple[str, str]:
    """Return what stands in the first <think> and in the last <answer> outside of it, "" without.

    >>> tagged("<think>6 * 7</think> <answer>41</answer> no, <answer>42</answer>")
    ('6 * 7', '42')
    """
    thought, said = split_thoughts(text)
    answers = ANSWER_TAG.findall(said)
    return thought, answers[-1].strip() if answers else ""


def plain(text: str) -> str:
    """Return the words of a text, without case, punctuation around them and spacing.

    A number is its value: 1,000.0 is 1000.

    >>> plain(" The  \u201cNew York\u201d.") == plain("the new york"), plain("$18.50"), plain("C++")
    (True, '37/2', 'c++')
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    words = [word.strip(EDGES) or word for word in text.split()]
    bare = " ".join(words).lstrip("$\u20ac\u00a3")
    value = last_number(bare) if NUMBER.fullmatch(bare) else None
    return " ".join(words) if value is None else str(value)


def similarity(said: str, right: str) -> float:
    """Return how alike two answers are as plain texts, from 0 to 1 (difflib's ratio).

    0 where one is over twice as long as the other: their ratio is below 2/3, and costs its square.

    >>> similarity("Jane Austin", "jane austen"), similarity("no " * 9**6, "yes")
    (0.9090909090909091, 0.0)
    """
    if len(said) > 2 * len(right) + 20 or len(said) > LONGEST:
        return float(said == right)
    return SequenceMatcher(None, plain(said), plain(right), autojunk=False).ratio()


def holds_words(said: str, right: str) -> bool:
    """Return whether a text says an answer as whole words somewhere.

    >>> holds_words("Yes, it is.", "yes"), holds_words("Yesterday", "yes"), holds_words("no.", "")
    (True, False, False)
    """
    words, asked = [[plain(word) for word in text.split()] for text in (said, right)]
    places = range(len(words) - len(asked) + 1) if asked else ()
    return any(words[i] == asked[0] and words[i : i + len(asked)] == asked for i in places)


def same_number(said: str, solution: str) -> bool:
    """Return whether an answer is the final one of a solution, as in GSM8K.

    >>> same_number("72 clips", "48 + 24 = 72 #### 72"), same_number("322", "#### 72")
    (True, False)
    """
    return same_answer(said, final_answer(solution))


def same_mathematics(said: str, solution: str, *, symbolic: bool = False) -> bool:
    r"""Return whether an answer is the boxed one of a solution, as in MATH.

    Plain: the same number, else the same LaTeX without spacing; units and "x =" count
    only if both have them. `symbolic` asks math-verify.

    >>> same_mathematics("1/2", r"so \boxed{\dfrac{1}{2}}"), same_mathematics("x+1", r"\boxed{x}")
    (True, False)
    """
    right = final_answer(solution)
    if symbolic:
        return symbolic_check()(said, right)
    if max(len(said), len(right)) > LONGEST:
        return said == right
    one, other = _plain(final_answer(said)), _plain(right)
    if not one[0] or any(a and b and a != b for a, b in zip(one[1:], other[1:], strict=True)):
        return False
    value = _number(one[0])
    return one[0] == other[0] or (value is not None and value == _number(other[0]))


def _plain(text: str) -> tuple[str, str, str]:
    """Return an answer in plain signs, and what it has of a unit and of a name ("x =")."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\ ", " ").strip().rstrip(".")
    text = IGNORED.sub("", text).strip()
    found, unit = UNIT.search(text), ""
    if found and not WORDS.search(text, 0, found.start()):
        word = (found[1] or found[2] or "").strip()
        if NO_UNITS.isdisjoint(word.split()):
            text, unit = text[: found.start()], word
    text, name = WORDS.sub(r"\1", text).strip(), ""
    if named := NAME.match(text):
        text, name = text[named.end() :], named[1]
    text = PLAIN.sub(lambda m: _fraction(m, *m.groups()), text)
    before = ""
    while text != before:  # from the inside out
        before = text
        text = FRACTION.sub(lambda m: _fraction(m, m[1], m[2] or m[3], m[4] or m[5]), text)
    text = BLANK.sub("", text)
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return text.casefold() if re.fullmatch(r"[a-zA-Z]{3,}", text) else text, unit, name


def _fraction(found: re.Match[str], whole: str | None, over: str, under: str) -> str:
    """Return a fraction with the brackets that it needs; a whole number before it is added."""
    over, under = (s if re.fullmatch(r"\d+|[a-zA-Z]", s) else f"({s})" for s in (over, under))
    text = f"{over}/{under}"
    if whole and (over + under).isdecimal():
        text = f"{whole}+{text}"
    elif whole:
        return f"{whole}({text})"
    return text if found[0] == found.string else f"({text})"


def _number(text: str) -> Fraction | None:
    """Return the exact value of a number that `_plain` wrote, None of anything else."""
    found = VALUE.fullmatch(text)
    if found is None:
        return None
    whole, over, under = found.groups()[1:4] if found[3] else found.groups()[4:7]
    numbers = [exactly(part.strip("()")) for part in (whole or "0", over, under or "1")]
    added, top, bottom = (Fraction(0) if n is None else n for n in numbers)
    if None in numbers or not bottom:
        return None
    return (added + top / bottom) * (-1 if found[1] else 1)


def symbolic_check() -> Callable[[str, str], bool]:
    """Return what compares two LaTeX answers by math-verify; ImportError without it."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["math_verify"]) from error
    return lambda said, right: bool(verify(parse(f"${right}$"), parse(f"${said}$")))


def solves_countdown(said: str, solution: str) -> bool:
    """Return whether an expression makes the target from the numbers, each used at most once.

    `solution` is "target=24, numbers=1,2,3,4"; only + - * / and brackets count.

    >>> solution = "target=24, numbers=2,3,4"
    >>> solves_countdown("(2 * 3) * 4", solution), solves_countdown("4 * 6", solution)
    (True, False)
    """
    target, numbers = TARGET.search(solution), NUMBERS.search(solution)
    if target is None or numbers is None:
        raise ValueError(f"expected 'target=<int>, numbers=<int>,<int>,...', got {solution[:80]!r}")
    given = [int(n) for n in re.findall(r"\d+", numbers[1])]
    return countdown_value(said, given) == int(target[1])


def countdown_value(said: str, numbers: Sequence[int]) -> Fraction | None:
    """Return the exact value of an expression of these numbers, each used at most once, else None.

    >>> countdown_value("(3 - 2) / 4", [2, 3, 4]), countdown_value("3 + 3", [2, 3, 4])
    (Fraction(1, 4), None)
    """
    said, used = said.strip(), Counter[int]()
    if len(said) > LONGEST:
        return None
    try:
        value = _value(ast.parse(said, mode="eval").body, used)
    except UNREADABLE:
        return None
    return None if used - Counter(numbers) else value


def _value(node: ast.AST, used: Counter[int]) -> Fraction:
    """Return the exact value of an expression and count its numbers; ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("expected numbers, + - * / and brackets")
