"""The HTML page around charts and texts: one file, no network, light and dark, wide and narrow.

All text goes through `escape`: a model's replies may hold markup or bytes that are no text. The
page says what matters without its script (script.js), which reloads the page of a run or sweep that
goes on, sorts tables, browses replies (replies.js) and shows tooltips where there is no mouse.
"""

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer.reports.chart import CSS, escape, line_style
from trainer.runs.redact import redact_word
from trainer.runs.run_files import PLACES, Run, dig

RELOAD = 5  # seconds
CHANGEABLE = ("trainer", "checkpoint", "eval", "launch")  # groups that a resume may change
STATES = ("finished", "failed", "running", "preempted", "killed")  # style.css has their colours
_STYLE, _SCRIPT, _REPLIES = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("style.css", "script.js", "replies.js")
)


def page(title: str, body: Iterable[str], *, patience: float | None = None) -> str:
    """Put the parts of a page together.

    `patience`: seconds after which a page that is written again and again may be called stale.
    """
    parts, attributes, reload = [part for part in body if part], "", ""
    script = _REPLIES * any('id="browser"' in part for part in parts) + _SCRIPT
    if patience is not None:
        times = f'data-written="{time.time():.0f}" data-patience="{patience:.0f}"'
        attributes = f' {times} data-reload="{RELOAD}"'
        reload = f'<noscript><meta http-equiv="refresh" content="{RELOAD}"></noscript>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{reload}<title>{escape(title)} - leash</title>"
        f"<style>{CSS}{_STYLE}</style></head>\n<body{attributes}>\n"
        + "\n".join(parts)
        + f"\n<script>{script}</script></body></html>\n"
    )


def badge(state: str) -> str:
    """Draw the state of a run, "" if it is not known."""
    return f'<span class="state {look(state)}">{escape(state)}</span>' if state else ""


def look(state: str) -> str:
    """Return the CSS class of a state; status.json may hold anything."""
    return state if state in STATES else "muted"


def rewrite(folder: Path) -> str:
    """Draw the command that writes a page again."""
    return command(f"python -m trainer.reports {shlex.quote(str(folder.resolve()))}")


def stale(folder: Path) -> str:
    """Draw what the script shows when nobody has written the page for long."""
    text = f"No news for long; is it dead? {rewrite(folder)} tells."
    return f'<p id="stale" class="failed" hidden>{text}</p>'


def tiles(values: Mapping[str, str], *, alarms: Mapping[str, str] | None = None) -> str:
    """Draw the few numbers that matter most, name below value; before them what is wrong."""
    red = (
        f'<div class="tile bad"><b>{escape(title)}</b><span>{escape(text)}</span></div>'
        for title, text in (alarms or {}).items()
    )
    drawn = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in values.items()
    )
    return f'<div class="tiles">{"".join([*red, *drawn])}</div>' if values or alarms else ""


def jumps(names: Sequence[str]) -> str:
    """Draw links to the headings of a page."""
    links = (f'<a href="#{name.lower()}">{name}</a>' for name in names)
    return f"<nav>{''.join(links)}</nav>" if names else ""


def facts(values: Mapping[str, str]) -> str:
    """Draw a list of names and values (the values are HTML)."""
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{v}</dd>" for k, v in values.items())
    return f"<dl>{rows}</dl>" if values else ""


def repeat_command(run: Run) -> str:
    """Return the command that repeats a run, without its place; "" if Hydra did not start it."""
    left_out = (*(f"{key}=" for key in PLACES), "hydra.")
    words = [redact_word(word) for word in _words(run) if not word.startswith(left_out)]
    named = [word for word in words if word.startswith("experiment=")]
    first = named or [f"experiment={run.experiment}"]
    rest = [word for word in words if word not in named]
    return shlex.join(["python", "train.py", *first, *rest]) if run.words else ""


def of_python(run: Run) -> bool:
    """Tell whether a reward is a function that Python gave, which no command line can name."""
    rewards = dig(run.config, "env", "rewards")
    nodes = rewards.values() if isinstance(rewards, dict) else ()
    return any(dig(node, "_target_") == "envs.rewards.Given" for node in nodes)


def _words(run: Run) -> list[str]:
    """Return the overrides of a run, those of a resumed one as it became."""
    if "resumed" not in run.status:
        return run.words
    words = {word.partition("=")[0]: word for word in run.words}
    for group in CHANGEABLE:
        node, theirs = dig(run.config, group), dig(run.defaults, "experiment", group)
        for name, value in node.items() if isinstance(node, dict) else ():
            same = value == dig(theirs, name) or str(dig(theirs, name)).startswith("${")
            key, known = f"{group}.{name}", isinstance(theirs, dict) and name in theirs
            plain = value is None or isinstance(value, bool | int | float | str)
            if plain and (key in words or (known and not same)):
                words[key] = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
    return list(words.values())


def command(text: str, *, copy: bool = False) -> str:
    """Draw a command; one click selects it, and a button, which the script shows, copies it."""
    button = ' <button type="button" class="copy" hidden>copy</button>' if copy else ""
    return f'<code class="command">{escape(text)}</code>{button}'


def tabs(drawn: Mapping[str, str]) -> str:
    """Draw several parts (HTML) in one place; a click on a name shows its own, without a script."""
    if len(drawn) < 2:
        return "".join(drawn.values())
    picks = (
        f'<input type="radio" name="tab" id="tab{i}"{" checked" * (i == 0)}>'
        f'<label for="tab{i}">{escape(name)}</label>'
        for i, name in enumerate(drawn)
    )
    parts = (f'<div class="tab">{part}</div>' for part in drawn.values())
    return f'<div class="tabs">{"".join(picks)}{"".join(parts)}</div>'


def charts(drawn: Sequence[str], *, title: str = "", names: Sequence[str] = ()) -> str:
    """Lay charts out in as many columns as fit; `names` are those of the curves that they share."""
    if not drawn:
        return ""
    head = f'<h2 id="{escape(title.lower())}">{escape(title)}</h2>' if title else ""
    key = (
        f'<span><svg width="22" height="10" aria-hidden="true"><path d="M1 5h20" '
        f'style="{line_style(i)};stroke-width:3"/></svg>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    head += f'<div class="key">{"".join(key)}</div>' if names else ""
    if title and any('class="raw"' in chart for chart in drawn):
        text = "Thin: the values. Thick: their mean over a tenth of the curve around each."
        text += "" if names else " A number beside a name: the last value."
        head += f'<p class="muted smooth">{text}</p>'
    return f'{head}<div class="charts">{"".join(drawn)}</div>'


def table(header: Iterable[str], rows: Iterable[Sequence[str]], *, sortable: bool = False) -> str:
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
