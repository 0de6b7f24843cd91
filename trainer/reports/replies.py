"""The transcripts of a report: before and after training, and what the latest iteration sampled.

Of the best, the median and the worst reply of the latest iteration every token is shown with its
KL (background) and its advantage (underline); texts that were not sampled stay uncoloured.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.reports import page, svg
from trainer.runs.run_files import number, read_lines

PAIRS = 6
SIDE = 3  # so many of the best and of the worst
STRONGEST = 0.5  # opacity of the background: text on it keeps a contrast of 4.5


def replies(folder: Path) -> list[str]:
    """Return the sections (HTML) of a run's transcripts.jsonl."""
    rows = read_lines(folder / "transcripts.jsonl", most=2**21)
    train = [r for r in rows if r.get("kind") == "train"]
    latest = max((number(r.get("iteration")) or 0 for r in train), default=0)
    parts = _latest([r for r in train if r.get("iteration") == latest], latest)
    parts += _before_and_after(rows)
    return ["<h2>Replies</h2>", *parts] if parts else []


def _latest(rows: Sequence[dict[str, Any]], iteration: float) -> list[str]:
    """Draw the replies of one iteration: three token by token, the rest as cards."""
    ranked = _ranked(rows)
    full = [r for r in ranked if _pieces(r)]
    parts = [_heat(full, iteration)] if full else []
    rest = [r for r in ranked if not _pieces(r)]
    shown = rest if len(rest) <= 2 * SIDE else [*rest[:SIDE], *rest[-SIDE:]]
    cards = [_card(r.get("prompt"), [("", r)]) for r in shown]
    which = "Others of this iteration" if full else f"Latest replies: iteration {iteration:g}"
    return parts + ([f"<h3>{which}, the best first</h3>{_cards(cards)}"] if cards else [])


def _before_and_after(rows: Sequence[dict[str, Any]]) -> list[str]:
    before = {r.get("prompt"): r for r in rows if r.get("kind") == "before"}
    after = {r.get("prompt"): r for r in rows if r.get("kind") == "after"}
    prompts = [p for p in before if p in after] or list(before) or list(after)
    pairs = [
        _card(p, [("before", before.get(p)), ("after", after.get(p))]) for p in prompts[:PAIRS]
    ]
    when = [name for name, held in (("Before", before), ("after", after)) if held]
    title = f"{' and '.join(when).capitalize()} training, on held-out prompts"
    return [f"<h3>{title}</h3>{_cards(pairs)}"] if pairs else []


def _ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort by reward, the best first, each prompt and reply once, with its tokens if it has any."""
    once: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in sorted(rows, key=_pieces, reverse=True):  # a stable sort
        once.setdefault((row.get("prompt"), row.get("response")), row)
    return sorted(once.values(), key=lambda r: -(number(r.get("reward")) or 0.0))


def _heat(rows: Sequence[dict[str, Any]], iteration: float) -> str:
    """Draw replies token by token, on one scale."""
    most = {
        key: max(_high(abs(v) for row in rows for v in _values(row, key)), 1e-3)
        for key in ("kl", "advantage")
    }
    cards = []
    for row in rows:
        about = page.escape(_about(row, str(row.get("rank") or "")))
        text = "".join(_tokens(row["pieces"], most))
        cut = row["pieces"].get("left_out")
        text += f"<i> ... {cut:g} more tokens</i>" if number(cut) else ""
        cards.append(
            f'<div class="card"><div class="prompt">{page.escape(row.get("prompt"))}</div>'
            f'<div class="reply heat">{text}</div><div class="facts">{about}</div></div>'
        )
    title = f"<h3>Token by token: iteration {iteration:g}</h3>"
    short = all(len(str(row.get("response"))) < 300 for row in rows)
    return title + _legend(most, rows) + (_cards(cards) if short else "".join(cards))


def _legend(most: dict[str, float], rows: Sequence[dict[str, Any]]) -> str:
    """Explain the colours that occur."""
    entries = []
    if any(_values(row, "kl") for row in rows):
        strong = f"full colour: {svg.short(most['kl'])} nats per token"
        entries += [
            f'<u class="m" style="--k:{STRONGEST}">likelier</u>than under the reference ({strong})',
            f'<u class="l" style="--k:{STRONGEST}">less likely</u>than under the reference',
        ]
    advantages = [v for row in rows for v in _values(row, "advantage")]
    if any(v > 0 for v in advantages):
        entries.append('<u class="u" style="--a:1">advantage above 0</u>made likelier')
    if any(v < 0 for v in advantages):
        entries.append('<u class="d" style="--a:1">advantage below 0</u>made less likely')
    return f'<p class="legend heat">{"".join(f"<span>{e}</span>" for e in entries)}</p>'


def _tokens(pieces: dict[str, Any], most: dict[str, float]) -> Iterable[str]:
    columns = [pieces.get(key) or [] for key in ("kl", "advantage", "log_prob")]
    for i, text in enumerate(pieces["text"]):
        kl, advantage, log_prob = (number(c[i]) if i < len(c) else None for c in columns)
        shown = page.escape(text).replace("\n", "\u21b5\n")
        if log_prob is None:  # not sampled
            yield f"<i>{shown}</i>"
            continue
        named = (("log-prob", log_prob), ("KL", kl), ("advantage", advantage))
        tip = ", ".join(f"{name} {svg.short(v)}" for name, v in named if v is not None)
        styles, classes = [], []
        for value, key, signs, name, full in (
            (kl, "kl", "ml", "k", STRONGEST),
            (advantage, "advantage", "ud", "a", 1.0),
        ):
            strength = min(abs(value or 0.0) / most[key], 1.0) * full
            if strength >= 0.01:
                classes.append(signs[(value or 0.0) < 0])
                styles.append(f"--{name}:{strength:.2f}")
        look = f' class="{" ".join(classes)}" style="{";".join(styles)}"' if classes else ""
        yield f'<u{look} title="{tip}">{shown}</u>'


def _pieces(row: dict[str, Any]) -> bool:
    pieces = row.get("pieces")
    return isinstance(pieces, dict) and isinstance(pieces.get("text"), list)


def _values(row: dict[str, Any], key: str) -> list[float]:
    found = row["pieces"].get(key)
    values = found if isinstance(found, list) else []
    return [v for v in map(number, values) if v is not None]


def _high(values: Iterable[float]) -> float:
    """Return what all but the largest twentieth lie below: one outlier must not pale the rest."""
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0


def _cards(cards: Sequence[str]) -> str:
    return f'<div class="pairs">{"".join(cards)}</div>'


def _card(prompt: object, shown: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    parts = [f'<div class="prompt">{page.escape(prompt)}</div>']
    for name, row in shown:
        if row is not None:
            parts.append(f'<div class="reply">{page.escape(row.get("response"))}</div>')
            parts.append(f'<div class="facts">{page.escape(_about(row, name))}</div>')
    return f'<div class="card">{"".join(parts)}</div>'


def _about(row: dict[str, Any], name: str) -> str:
    """Return the line below a reply."""
    named = [("reward", "reward", ""), ("kl", "KL", " nats"), ("advantage", "advantage", "")]
    values = [(title, number(row.get(key)), unit) for key, title, unit in named]
    texts = [
        f"{title} {svg.short(value)}{unit}" for title, value, unit in values if value is not None
    ]
    texts += ["cut"] * bool(row.get("truncated"))
    return " \u00b7 ".join([name] * bool(name) + texts)
