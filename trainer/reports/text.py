"""Numbers and replies as text for a terminal, safe for whatever a model writes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from trainer.runs.failures import silence

_BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))


class Output(Console):
    """A console that outlives its reader."""

    def on_broken_pipe(self) -> None:
        """Fall silent: the run goes on."""
        self.quiet = True
        silence()


def sparkline(values: Sequence[float], *, most: int = 24, unicode: bool = True) -> str:
    """Draw values as a row of bars from their lowest to their highest.

    More than `most` values are averaged to as many, so that the row is always the whole of them.

    >>> sparkline([0, 1, 2], unicode=False), sparkline([0, 0, 1, 3, 4, 4], most=3, unicode=False)
    ('.=#', '.=#')
    """
    levels = _BLOCKS if unicode else ".:-=+*#"
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    count = len(finite)
    cells = min(count, most)
    edges = [i * count // cells for i in range(cells + 1)]
    finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    lo, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(levels[round((v - lo) / span * (len(levels) - 1))] for v in finite)


def duration(seconds: float) -> str:
    """Format a time for people.

    >>> [duration(s) for s in (8.4, 200, 8000)]
    ['8 s', '3 min 20 s', '2 h 13 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def named(metrics: Mapping[str, float], shown: Sequence[tuple[str, str]]) -> list[str]:
    """Format those metrics of `shown` (name, form) that are there.

    >>> named({"kl/coeff": 0.5}, [("kl/coeff", "coeff {:.2f}"), ("kl/ref", "kl {}")])
    ['coeff 0.50']
    """
    return [form.format(metrics[name]) for name, form in shown if name in metrics]


def split_of_time(metrics: Mapping[str, float]) -> str:
    """Return which share of an iteration each phase of at least 1 % took.

    >>> split_of_time({"time/iteration_s": 4.0, "time/collect_s": 3.0, "time/update_s": 1.0})
    'collect 75% update 25%'
    """
    whole = metrics.get("time/iteration_s", 0.0)
    phases = {
        name.removeprefix("time/").removesuffix("_s"): value / whole
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/iteration_s" and value >= whole / 100 > 0
    }
    return " ".join(f"{name} {share:.0%}" for name, share in phases.items())


def lay_out(parts: Iterable[str], width: int) -> list[str]:
    """Lay parts out on as few lines of at most `width` as their order allows.

    >>> lay_out(["reward 0.5", "kl 1.0", "entropy 2.0"], 20)
    ['reward 0.5  kl 1.0', 'entropy 2.0']
    """
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def shown(value: str | Path) -> Text:
    """Return a text, or a path that a click opens where the terminal can (OSC 8)."""
    link = value.absolute().as_uri() if isinstance(value, Path) else None
    return Text(str(value), style=Style(link=link) if link else "")


def one_line(text: Any, width: int) -> str:
    """Make model output safe for a terminal: one line, no control characters, at most `width`."""
    plain = " ".join(_printable(text).split())
    return plain if len(plain) <= width else plain[: width - 3] + "..."


def reply(row: Mapping[str, Any], width: int) -> Text:
    """Return a reply (row of transcripts.jsonl) on one line, what the policy sampled in colour."""
    pieces = row.get("pieces") or {}
    texts = pieces.get("text") or [row.get("response", "")]
    own = [value is not None for value in pieces.get("log_prob") or [0.0] * len(texts)]
    out = Text()
    for text, mine in zip(texts, own, strict=True):
        out.append(_printable(text), style="cyan" if mine else "dim")
    if len(out) > width:
        out = out[: width - 3].append("...")
    return out


def _printable(text: Any) -> str:
    return "".join(c if c.isprintable() else " " for c in str(text))
