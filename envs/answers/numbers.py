"""Read the number in a text, and compare answers by it.

Numbers are exact fractions; $ % , and units do not count. Answers that are no numbers must be the
same text.
"""

import re
from fractions import Fraction

# A minus after a letter or digit is a dash ("5-3" ends in 3). At most 40 digits, to bound the cost
# of endless digits.
EXPONENT = r"(?:[eE][+-]?\d+)?"
NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?!\d)"
    rf"{EXPONENT}(?:/0{{0,9}}[1-9]\d{{0,20}})?|(?<![\w.])-?\.\d{{1,40}}(?!\d){EXPONENT}"
)
LARGEST = 999  # exponent: 1e999999999 would fill the memory


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None without one, or beyond 1e999.

    >>> last_number("about -$1,234.50, or 25% of it"), last_number("none")
    (Fraction(25, 1), None)
    """
    matches = NUMBER.findall(_bare(text))
    return exactly(matches[-1].replace(",", "")) if matches else None


def exactly(number: str) -> Fraction | None:
    """Return the value of "-1.5", "1e5" or "1/2"; None beyond 1e999."""
    over, _, under = number.partition("/")
    exponent = over.lower().partition("e")[2].lstrip("+-").lstrip("0")
    if len(exponent) > len(str(LARGEST)):
        return None
    return Fraction(over) / Fraction(under or 1)


def same_answer(answer: str, right: str) -> bool:
    """Return whether a final answer is the right one: the same number, else the same text.

    >>> same_answer("so 18 dollars", "$18.0"), same_answer("Blue.", "blue")
    (True, True)
    """
    number = last_number(right)
    rest = NUMBER.sub("", _bare(right))
    if number is not None and not re.sub(r"[\s%.]|[a-zA-Z]{3,}", "", rest):
        return last_number(answer) == number
    return bool(_words(right)) and _words(answer) == _words(right)


def _bare(text: str) -> str:
    return text.replace("\u2212", "-").replace("\\", "").replace("$", "")


def _words(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
