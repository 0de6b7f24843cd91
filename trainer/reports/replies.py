"""The transcripts of a report: a browser of all of them, and before and after training.

Of the best, the median and the worst reply of an iteration every token is shown with its KL
(background) and its advantage (underline); texts that were not sampled stay uncoloured. Without its
script (replies.js) a page shows the latest iteration.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.reports.browser import Reply, draw, has_tokens, load_replies
from trainer.reports.chart import escape
from trainer.reports.formats import nats, short
from trainer.runs.run_files import number

PAIRS = 6
SIDE = 3  # so many of the best and of the worst
STRONGEST = 0.5  # opacity of the background: text on it keeps a contrast of 4.5


def sections(folder: Path) -> list[str]:
    """Return the sections (HTML) of a run's transcripts.jsonl."""
    found = load_replies(folder / "transcripts.jsonl")
    latest = found.train.get(found.latest, [])
    full = [row for row in latest if has_tokens(row)]
    legend = _legend(_full_colour(full, "kl")) if full else ""
    drawn = draw(found, "".join(_latest(latest, found.latest)), legend)
    return ['<h2 id="replies">Replies</h2>', drawn, *_held_out(found.held)] if drawn else []


def _latest(rows: Sequence[Reply], iteration: float) -> Iterator[str]:
    """Draw the replies of an iteration, the best first: three token by token, others as cards."""
    once: dict[tuple[Any, Any], Reply] = {}  # each prompt and reply, with its tokens if it has any
    for row in sorted(rows, key=has_tokens, reverse=True):
        once.setdefault((row.get("prompt"), row.get("response")), row)
    ranked = sorted(once.values(), key=lambda r: -(number(r.get("reward")) or 0.0))
    full = [r for r in ranked if has_tokens(r)]
    rest = [r for r in ranked if not has_tokens(r)]
    if full:
        most = {key: _full_colour(full, key) for key in ("kl", "advantage")}
        cards = [_card(r, [(str(r.get("rank") or ""), r)], most) for r in full]
        short_ones = all(len(str(r.get("response"))) < 300 for r in full)
        yield f"<h3>Token by token: iteration {iteration:g}</h3>"
        yield _grid(cards) if short_ones else "".join(cards)
    if rest:
        which = "Others of this iteration" if full else f"Latest replies: iteration {iteration:g}"
        shown = rest if len(rest) <= 2 * SIDE else [*rest[:SIDE], *rest[-SIDE:]]
        yield f"<h3>{which}, the best first</h3>" + _grid([_card(r, [("", r)]) for r in shown])


def _held_out(rows: Sequence[Reply]) -> Iterator[str]:
    """Draw what was said to held-out prompts before and after training."""
    said = {
        kind: {r.get("prompt"): r for r in rows if r.get("kind") == kind}
        for kind in ("before", "after")
    }
    there = [kind for kind, held in said.items() if held]
    if there:
        both = [p for p in said[there[0]] if p in said[there[-1]]] or list(said[there[0]])
        pairs = [[(kind, said[kind][p]) for kind in there if p in said[kind]] for p in both[:PAIRS]]
        title = f"{' and '.join(there).capitalize()} training, on held-out prompts"
        yield f"<h3>{title}</h3>" + _grid([_card(pair[0][1], pair) for pair in pairs])


def _grid(cards: Sequence[str]) -> str:
    return f'<div class="pairs">{"".join(cards)}</div>'


def _card(
    row: Reply, replies: Sequence[tuple[str, Reply]], most: dict[str, float] | None = None
) -> str:
    """Draw a prompt and what was replied; with `most` (the scale of the colours) its tokens."""
    parts = [f'<div class="prompt">{escape(row.get("prompt"))}</div>']
    for name, said in replies:
        text = "".join(_tokens(said["pieces"], most)) if most else escape(said.get("response"))
        parts.append(f'<div class="reply{" heat" if most else ""}">{text}</div>')
        parts.append(f'<div class="facts">{escape(numbers(said, name))}</div>')
    return f'<div class="card">{"".join(parts)}</div>'


def numbers(row: Reply, name: str) -> str:
    """Return the line below a reply."""
    told = {"reward": short, "kl": nats, "advantage": short}
    values = {key: number(row.get(key)) for key in told}
    texts = [
        {"kl": "log-ratio {} nats"}.get(key, f"{key} {{}}").format(told[key](value))
        for key, value in values.items()
        if value is not None
    ]
    return " \u00b7 ".join([*[name] * bool(name), *texts, *["cut"] * bool(row.get("truncated"))])


def _legend(full: float) -> str:
    """Explain the colours; `full` is the KL of the strongest."""
    entries = (
        f'<u class="m" style="--k:{STRONGEST}">likelier</u>than under the reference '
        f'(full colour: <b class="full">{short(full)}</b> nats per token)',
        f'<u class="l" style="--k:{STRONGEST}">less likely</u>than under the reference',
        '<u class="u" style="--a:1">advantage above 0</u>made likelier',
        '<u class="d" style="--a:1">advantage below 0</u>made less likely',
    )
    return f'<p class="legend heat">{"".join(f"<span>{e}</span>" for e in entries)}</p>'


def _tokens(pieces: Reply, most: dict[str, float]) -> Iterable[str]:
    """Draw each token in the colour of its KL, underlined by its advantage."""
    columns = [pieces.get(key) or [] for key in ("kl", "advantage", "log_prob")]
    for i, text in enumerate(pieces["text"]):
        kl, advantage, log_prob = (number(c[i]) if i < len(c) else None for c in columns)
        drawn = escape(text).replace("\n", "\u21b5\n")
        if log_prob is None:  # not sampled
            yield f"<i>{drawn}</i>"
            continue
        named = (("log-prob", log_prob), ("log-ratio", kl), ("advantage", advantage))
        tip = ", ".join(f"{name} {short(v)}" for name, v in named if v is not None)
        styles, classes = [], []
        for value, key, signs, name, full in (
            (kl or 0.0, "kl", "ml", "k", STRONGEST),
            (advantage or 0.0, "advantage", "ud", "a", 1.0),
        ):
            strength = min(abs(value) / most[key], 1.0) * full
            if strength >= 0.01:
                classes.append(signs[value < 0])
                styles.append(f"--{name}:{strength:.2f}")
        look = f' class="{" ".join(classes)}" style="{";".join(styles)}"' if classes else ""
        yield f'<u{look} title="{tip}">{drawn}</u>'
    if cut := number(pieces.get("left_out")):
        yield f"<i> ... {cut:g} more tokens</i>"


def _full_colour(rows: Sequence[Reply], key: str) -> float:
    """Return what all but the largest twentieth lie below: one outlier must not pale the rest."""
    columns = [row["pieces"].get(key) for row in rows]
    values = [number(v) for column in columns if isinstance(column, list) for v in column]
    sizes = sorted(abs(v) for v in values if v is not None)
    return max(sizes[int(0.95 * (len(sizes) - 1))] if sizes else 0.0, 1e-3)
