"""Format numbers, times and responses for pages and the terminal."""

from typing import Any


def short(value: float) -> str:
    """Format a value with three significant digits.

    >>> [short(v) for v in (0, 0.12345, 1234.5, 45678, 2e-05)]
    ['0', '0.123', '1,234', '45.7k', '2e-5']
    """
    size = abs(value)
    if size >= 999_500:
        return f"{value / 1e6:.3g}M"
    if size >= 9_999.5:
        return f"{value / 1e3:.3g}k"
    if size >= 99.95:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.3g}"


def nats(value: float) -> str:
    """Format a KL; a rounding error is 0."""
    return short(value) if abs(value) >= 1e-5 else "0"


def duration(seconds: float) -> str:
    """Format a time.

    >>> [duration(s) for s in (8.4, 59.6, 200, 8000)]
    ['8 s', '1 min 0 s', '3 min 20 s', '2 h 13 min']
    """
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def printable(text: Any) -> str:
    """Replace unprintable characters, which could control a terminal, by spaces."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def one_line(text: Any, width: int) -> str:
    """Make model output safe for a terminal: one line of at most `width` characters."""
    plain = " ".join(printable(text).split())
    return plain if len(plain) <= width else plain[: width - 3] + "..."
