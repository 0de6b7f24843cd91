"""Read the last number of a text as an exact fraction; $ € £ % , and units are ignored."""

import re
from fractions import Fraction

# A minus after a letter or digit is a dash ("5-3" ends in 3). At most 40 digits, to bound the cost.
EXPONENT = r"(?:[eE][+-]?\d+)?"
NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?!\d)"
    rf"{EXPONENT}(?:/0{{0,9}}[1-9]\d{{0,20}})?|(?<![\w.])-?\.\d{{1,40}}(?!\d){EXPONENT}"
)
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:[\u00a0\u2009\u202f]\d{3})+(?!\d)")  # 12 345 678
BARE = str.maketrans("\u2212", "-", "\\$\u20ac\u00a3\u00a5\u20b9")
LARGEST = 999  # largest exponent, because 1e999999999 would fill the memory


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None without one, or beyond 1e999.

    >>> last_number("about -$1,234.50, or 25% of it"), last_number("none")
    (Fraction(25, 1), None)
    """
    matches = NUMBER.findall(bare(text))
    return exactly(matches[-1].replace(",", "")) if matches else None


def exactly(number: str) -> Fraction | None:
    """Return the value of "-1.5", "1e5" or "1/2"; None beyond 1e999."""
    over, _, under = number.partition("/")
    exponent = over.lower().partition("e")[2].lstrip("+-").lstrip("0")
    if len(exponent) > len(str(LARGEST)):
        return None
    return Fraction(over) / Fraction(under or 1)


def ungroup(text: str) -> str:
    """Return a text without the fixed and thin spaces inside numbers."""
    return GROUPED.sub(lambda match: "".join(match[0].split()), text)


def bare(text: str) -> str:
    """Return a text without currency signs and backslashes, and with an ASCII minus."""
    text = re.sub(r"(?<=[A-Za-z])\$(?=\d)", " ", ungroup(text).replace("\\", ""))  # US$5
    return text.translate(BARE)
