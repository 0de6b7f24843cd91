"""docs/coming_from_torchrl.md: every import that it names works."""

import re
from importlib import import_module
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/coming_from_torchrl.md").read_text()
IMPORTS = re.findall(r"`from ([\w.]+) import ([\w, ]+)`", PAGE)


def test_every_name_on_the_page_can_be_imported_from_there():
    assert len(IMPORTS) > 20
    for package, names in IMPORTS:
        for name in names.split(", "):
            assert getattr(import_module(package), name).__name__ == name
