"""The HTML page around charts and texts: one file, no network, light and dark, wide and narrow.

All text goes through `escape`: a model's replies may hold markup or bytes that are no text. The
page says everything without its script (script.js), which only reloads the page of a run or
sweep that goes on, sorts tables and shows tooltips where there is no mouse.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from trainer.reports import svg
from trainer.reports.svg import escape

RELOAD = 5  # seconds
SMOOTHED = "Thin: the values. Thick: their mean over a tenth of the curve around each."
STATES = ("finished", "failed", "running", "preempted", "killed")


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def page(title: str, body: Iterable[str], *, patience: float | None = None) -> str:
    """Put the parts of a page together.

    `patience`: seconds after which a page that is written again and again may be called stale.
    """
    attributes, reload = "", ""
    if patience is not None:
        times = f'data-written="{time.time():.0f}" data-patience="{patience:.0f}"'
        attributes = f' {times} data-reload="{RELOAD}"'
        reload = f'<noscript><meta http-equiv="refresh" content="{RELOAD}"></noscript>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{reload}<title>{escape(title)}</title>"
        f"<style>{svg.CSS}{_asset('style.css')}</style></head>\n<body{attributes}>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{_asset('script.js')}</script></body></html>\n"
    )


def heading(title: str, state: str) -> str:
    """Draw the title with the state of the run beside it, if it is known."""
    return f"<h1>{escape(title)}{badge(state) if state else ''}</h1>"


def stale(again: str) -> str:
    """Draw what the script shows when nobody has written the page for long; `again` tells more."""
    return f'<p id="stale" class="failed" hidden>No news for long; is it dead? {again} tells.</p>'


def badge(state: str) -> str:
    """Draw the state of a run."""
    return f'<span class="state {look(state)}">{escape(state)}</span>'


def look(state: str) -> str:
    """Return the CSS class of a state; status.json may hold anything."""
    return state if state in STATES else "muted"


def tiles(values: Mapping[str, str]) -> str:
    """Draw the few numbers that matter most, name below value."""
    drawn = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in values.items()
    )
    return f'<div class="tiles">{"".join(drawn)}</div>' if values else ""


def facts(values: Mapping[str, str]) -> str:
    """Draw a list of names and values (the values are HTML)."""
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{v}</dd>" for k, v in values.items())
    return f"<dl>{rows}</dl>" if values else ""


def command(text: str) -> str:
    """Draw a command; one click selects all of it."""
    return f'<code class="command">{escape(text)}</code>'


def copyable(text: str) -> str:
    """Draw a command with a button that copies it; the script shows the button."""
    return f'{command(text)} <button type="button" class="copy" hidden>copy</button>'


def charts(drawn: Sequence[str], *, title: str = "", key: Sequence[str] = ()) -> str:
    """Lay charts out in as many columns as fit; `key` names the curves that they share."""
    if not drawn:
        return ""
    head = f"<h2>{escape(title)}</h2>" if title else ""
    names = (
        f'<span><svg width="22" height="10" aria-hidden="true"><path d="M1 5h20" '
        f'style="{svg.line_style(i)};stroke-width:3"/></svg>{escape(n)}</span>'
        for i, n in enumerate(key)
    )
    head += f'<div class="key">{"".join(names)}</div>' if key else ""
    if title and any('class="raw"' in chart for chart in drawn):
        head += f'<p class="muted smooth">{SMOOTHED}</p>'
    return f'{head}<div class="charts">{"".join(drawn)}</div>'


def figure(chart: str, healthy: str, metrics: str) -> str:
    """Draw a chart with what is healthy below it; a tooltip names the metrics."""
    if not healthy:
        return chart
    name = f"{metrics} (docs/metrics.md)"
    note = f'<figcaption title="{escape(name)}">healthy: {escape(healthy)}</figcaption>'
    return f"<figure>{chart}{note}</figure>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, sortable: bool = False) -> str:
    """Draw a table (the cells are HTML, the header is text); its columns scroll where too wide."""
    breaks = (escape(name).replace("/", "/<wbr>").replace("_", "_<wbr>") for name in header)
    top = "".join(f"<th>{name}</th>" for name in breaks)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    head = f"<thead><tr>{top}</tr></thead>"
    return f'<div class="scroll"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


def folded(title: str, body: str) -> str:
    """Draw a part (HTML) that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def block(text: str) -> str:
    """Draw a block of text as it stands."""
    return f"<pre>{escape(text)}</pre>" if text else ""
