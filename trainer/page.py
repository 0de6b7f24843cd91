"""The HTML page around charts and texts: one file, no scripts, no network, light and dark.

All text goes through `escape`: a model's replies may hold markup or bytes that are no text.
"""

import html
from collections.abc import Iterable, Mapping, Sequence

from trainer import svg

_STYLE = """
*{box-sizing:border-box}
:root{color-scheme:light dark;--soft:#f5f7f9;--good:#12866a;--bad:#c03a2b;--busy:#2563c9}
@media (prefers-color-scheme:dark){
:root{--soft:#1f262e;--good:#4cc9a4;--bad:#ff8d7d;--busy:#78a9ff}}
body{margin:0 auto;max-width:1200px;padding:28px 20px 60px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
h1{font-size:26px;margin:0 0 2px;line-height:1.25;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px}
h3{font-size:14px;margin:22px 0 8px;color:var(--muted);font-weight:600}
p{margin:6px 0}
a{color:var(--hue0)}
.muted{color:var(--muted)}
.state{font-size:13px;font-weight:600;vertical-align:4px;margin-left:8px;padding:2px 10px;
border-radius:99px;border:1px solid;white-space:nowrap}
.finished{color:var(--good)}.failed{color:var(--bad)}.running,.preempted{color:var(--busy)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--soft);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:18px;line-height:1.4;white-space:nowrap;
font-variant-numeric:tabular-nums}
.tile span{font-size:12.5px;color:var(--muted)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:14px 0;font-size:14px}
dt{color:var(--muted)}dd{margin:0;min-width:0;overflow-wrap:anywhere}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--soft);border-radius:8px;padding:12px 14px;overflow:auto;margin:8px 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));
gap:28px 24px}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin:0 0 18px}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
svg.chart{width:100%;height:auto;display:block}
.pairs{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.card{border:1px solid var(--grid);border-radius:8px;padding:10px 14px;min-width:0}
.prompt{font-weight:600;overflow-wrap:anywhere;white-space:pre-wrap}
.reply{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0 6px;
border-left:3px solid var(--grid);padding-left:10px;max-height:22em;overflow:auto}
.facts{font-size:12.5px;color:var(--muted);font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;width:100%}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);
white-space:nowrap;font-variant-numeric:tabular-nums}
th{color:var(--muted);font-weight:600}
summary{cursor:pointer;color:var(--muted);margin:34px 0 8px}
@media (max-width:520px){body{padding:18px 14px 40px}dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:8px}.tiles{grid-template-columns:1fr 1fr}}
"""


def escape(text: object) -> str:
    """Escape a text for HTML; control characters become the replacement character.

    >>> escape("<b>")
    '&lt;b&gt;'
    """
    shown = "".join(c if c in "\n\t" or ord(c) >= 32 else "\ufffd" for c in str(text))
    return html.escape(shown)


def page(title: str, body: Iterable[str]) -> str:
    """Put the parts of a page together."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{svg.CSS}{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def heading(title: str, state: str) -> str:
    """Draw the title with the state of the run beside it."""
    kind = state if state in ("finished", "failed", "running", "preempted") else "muted"
    return f'<h1>{escape(title)}<span class="state {kind}">{escape(state)}</span></h1>'


def tiles(values: Mapping[str, str]) -> str:
    """Draw the few numbers that matter most, name below value."""
    drawn = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in values.items()
    )
    return f'<div class="tiles">{"".join(drawn)}</div>' if values else ""


def facts(values: Mapping[str, str]) -> str:
    """Draw a list of names and values (the values are HTML)."""
    return (
        "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{v}</dd>" for k, v in values.items()) + "</dl>"
    )


def charts(drawn: Sequence[str], *, title: str = "", key: Sequence[str] = ()) -> str:
    """Lay charts out in as many columns as fit; `key` names the hues that they share."""
    if not drawn:
        return ""
    head = f"<h2>{escape(title)}</h2>" if title else ""
    names = (
        f"<span><i {svg.fill(i, 'background')}></i>{escape(n)}</span>" for i, n in enumerate(key)
    )
    head += f'<div class="key">{"".join(names)}</div>' if key else ""
    return f'{head}<div class="charts">{"".join(drawn)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Draw a table (the cells are HTML, the header is text)."""
    top = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def folded(title: str, text: str) -> str:
    """Draw a block of text that opens on a click."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
