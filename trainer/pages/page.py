"""Render HTML pages from the templates in this folder: one file each, no network.

Templates escape every text that is not marked as safe, as responses may contain markup. A page is
readable without its scripts (script.js, responses.js).
"""

import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from policies.files import write_text
from trainer.pages.chart import CSS, line_style
from trainer.pages.formats import duration, nats, short

RELOAD = 5  # seconds
PATIENCE = 300.0  # seconds until a page is shown as stale
FOLDER = Path(__file__).parent

_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_TEMPLATES.globals |= {
    "style": CSS + (FOLDER / "style.css").read_text(encoding="utf-8"),
    "script": (FOLDER / "script.js").read_text(encoding="utf-8"),
    "responses_script": (FOLDER / "responses.js").read_text(encoding="utf-8"),
}
_TEMPLATES.filters |= {"duration": duration, "line_style": line_style, "nats": nats, "short": short}
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def write_page(path: Path, template: str, *, patience: float | None = None, **values: Any) -> None:
    """Write a page from a template.

    `patience`: seconds after which a page that is rewritten regularly is shown as stale.
    """
    times = {"patience": patience, "written": time.time(), "reload": RELOAD}
    write_text(path, _TEMPLATES.get_template(template).render(**times, **values))
