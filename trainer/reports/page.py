"""HTML pages from the templates beside this file: one file each, no network, light and dark.

Templates escape every text that is not marked as safe: a model's replies may hold markup or bytes
that are no text. A page says what matters without its scripts (script.js, replies.js).
"""

import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from policies.cache import write_text
from trainer.reports.chart import CSS, line_style, printable_xml
from trainer.reports.formats import nats, short

RELOAD = 5  # seconds
PATIENCE = 300.0  # seconds; a page that is older may be called stale
STATES = ("finished", "failed", "running", "preempted", "killed")  # style.css has their colours
HERE = Path(__file__).parent


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else printable_xml(value),
    )
    files = ("style.css", "script.js", "replies.js")
    style, script, replies = ((HERE / name).read_text(encoding="utf-8") for name in files)
    made.globals |= {"style": CSS + style, "script": script, "replies_script": replies}
    made.filters |= {"short": short, "nats": nats, "line_style": line_style, "look": look}
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def look(state: str) -> str:
    """Return the CSS class of a state; status.json may hold anything."""
    return state if state in STATES else "muted"


_TEMPLATES = _environment()


def write_page(path: Path, template: str, *, patience: float | None = None, **values: Any) -> None:
    """Write a page from a template.

    `patience`: seconds after which a page that is written again and again may be called stale.
    """
    times = {"patience": patience, "written": time.time(), "reload": RELOAD}
    write_text(path, _TEMPLATES.get_template(template).render(**times, **values))
