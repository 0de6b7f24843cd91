"""Pages and pictures taken apart, and run folders to make them of."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support.runs import ROOT
from trainer.pages.trackers.jsonl import JsonlTracker

VOID = {"meta", "br", "img", "link", "input", "hr", "wbr"}


class Page(HTMLParser):
    """The tags and texts of a page; every end tag must have its start tag."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.source = page if isinstance(page, str) else page.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def attributes(self, name: str, tag: str = "") -> list[str]:
        return [str(a[name]) for t, a in self.tags if name in a and tag in ("", t)]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def goes_on(self) -> bool:
        """Whether the page reloads itself, with and without a script."""
        assert ("noscript" in dict(self.tags)) == ("data-reload" in dict(self.tags)["body"])
        return "data-reload" in dict(self.tags)["body"]

    def in_order(self, *texts: str) -> bool:
        places = [self.texts.index(text) for text in texts]
        return places == sorted(places)

    def charts(self) -> dict[str, "Picture"]:
        found = re.findall(r'<svg class="chart".*?</svg>', self.source)
        return {made.root.get("aria-label", ""): made for made in map(Picture, found)}


class Picture:
    """An SVG drawing: its texts, curves, values and tooltips, and its y axis in both directions."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)

    def all(self, **attributes: str) -> list[ElementTree.Element]:
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [e for e in self.root.iter() if all(e.get(n) == v for n, v in wanted.items())]

    def texts(self, **attributes: str) -> list[str]:
        return ["".join(e.itertext()) for e in self.all(**attributes) if e.tag.endswith("text")]

    @property
    def dots(self) -> list[ElementTree.Element]:
        return [e for e in self.root.iter() if e.tag.endswith("circle")]

    @property
    def tips(self) -> list[str]:
        return [e.text or "" for e in self.root.iter() if e.tag.endswith("title")]

    @property
    def ticks(self) -> list[float]:
        return sorted(float(text) for text in self.texts(text_anchor="end") if text)

    def paths(self, kind: str) -> list[list[tuple[float, float]]]:
        drawn = [e.attrib["d"][1:].split("L") for e in self.all(**{"class": kind})]
        return [[(float(p.split()[0]), float(p.split()[1])) for p in path] for path in drawn]

    def value(self, y: float) -> float:
        """Return the value that is drawn at a height."""
        labels = [e for e in self.all(text_anchor="end") if e.text]
        marks = {float(e.text or 0): float(e.attrib["y"]) - 4 for e in labels}
        lo, hi = min(marks), max(marks)
        return lo + (hi - lo) * (marks[lo] - y) / (marks[lo] - marks[hi])


def write_lines(folder: Path, *lines: dict[str, float], begin: int = 1) -> Path:
    """Write the metrics of iterations, from `begin` on."""
    tracker = JsonlTracker(folder, resume=True)
    for iteration, line in enumerate(lines, begin):
        tracker.log(line, iteration)
    return folder


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the lines of a real run from a file here, which has a column for each metric."""
    columns = json.loads((Path(__file__).parent / name).read_text())
    begin = int("eval/reward" not in columns)  # with evaluations from the one before training on
    rows = zip(*columns.values(), strict=True)
    lines = [dict(zip(columns, row, strict=True)) for row in rows]
    return [{**line, "progress/iteration": i} for i, line in enumerate(lines, begin)]


def documented_metrics() -> list[str]:
    """Return the names on docs/metrics.md; <name> stands for any."""
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)


def write_status(folder: Path, **status: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def write_words(folder: Path, *words: str) -> Path:
    """Write the overrides of the command line, as Hydra does."""
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    return folder


def write_run(folder: Path, *, iterations: int = 12, state: str = "failed") -> Path:
    """Write a run with an evaluation before, a metric of its own, responses and a secret."""
    tracker = JsonlTracker(folder)
    tracker.log({"eval/sampled_accuracy": 0.25}, 0)
    before = {"kind": "before", "prompt": "<b>Q</b>", "response": "x </pre><script>1</script>"}
    tracker.responses([before], 0, kind="before")
    for i in range(1, iterations + 1):
        metrics = {"reward/mean": i / 16, "kl/ref_sequence": i / 4, "my/own": 1.0}
        tracker.log({**metrics, "reward_part/format": 0.5, "optim/grad_norm": math.nan}, i)
        rows = [{"prompt": "p", "response": f"response {k}", "reward": k / 8} for k in range(8)]
        tracker.responses([{"kind": "train", **row} for row in rows], i, kind="train")
    late = {**before, "kind": "after", "response": "\ud800\x00 late"}
    tracker.responses([late], iterations, kind="after")
    model = {"name": "m", "origin": "folder", "sha256": "c0ffee"}
    write_status(folder, state=state, reason="<i>why</i>", model=model, seconds=75.0)
    (folder / "config.yaml").write_text("experiment: demo\nenv:\n  api_key: planted-2\n")
    return folder
