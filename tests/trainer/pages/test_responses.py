"""Which responses a page holds: whole groups of whole iterations, few enough, and no markup."""

import json
import re
from itertools import pairwise, product
from pathlib import Path

from support.pages import Page, write_lines

from trainer.pages import responses
from trainer.pages.report import write_report
from trainer.pages.trackers.jsonl import JsonlTracker

HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


def data_of(folder: Path, iterations: int, size: int) -> dict:
    """Write three groups of two responses an iteration and three evaluations; return the page's."""
    tracker = JsonlTracker(folder)
    write_lines(folder, {"reward/mean": 0.5})
    row = {"kind": "train", "answer": HOSTILE, "system": "Be brief."}
    for i in range(1, iterations + 1):
        for k, g in product((1, 0), range(3)):
            text = f"{i}-{g}-{k} {HOSTILE} " + "x" * size
            said = {**row, "group": g, "prompt": f"prompt {g}", "response": text}
            tracker.responses([{**said, "parts": {"exact": k / 2}}], i, kind="train")
    for i, kind in ((0, "before"), (iterations // 2, "eval"), (iterations, "after")):
        tried = [{"kind": kind, "prompt": f"held {k}", "response": f"{k} at {i}"} for k in range(4)]
        tracker.responses(tried, i, kind=kind)
    with (folder / "transcripts.jsonl").open("a") as file:
        file.write('{"iteration": 6, "kind": "train", "pro')  # a torn line is left out
    source = write_report(folder).read_text(encoding="utf-8")
    (found,) = re.findall(r'<script [^>]* id="responses-data">(.*?)</script>', source)
    assert "<" not in found
    return json.loads(found)


def test_the_page_holds_whole_groups_with_answer_parts_and_system_prompt_as_text(tmp_path):
    data = data_of(tmp_path, iterations=6, size=1)
    assert [found["iteration"] for found in data["train"]] == [1, 2, 3, 4, 5, 6]
    assert [len(found["groups"]) for found in data["train"]] == [3] * 6
    first = data["train"][0]["groups"][0]
    assert (first["prompt"], first["answer"]) == ("prompt 0", HOSTILE)
    assert first["messages"] == [["system", "Be brief."]]
    assert [row["response"] for row in first["responses"]] == [
        f"1-0-{k} {HOSTILE} x" for k in (1, 0)
    ]
    assert [row["parts"] for row in first["responses"]] == [{"exact": 0.5}, {"exact": 0.0}]
    assert [found["prompt"] for found in data["held"]] == [f"held {k}" for k in range(4)]
    names = [row["name"] for row in data["held"][0]["responses"]]
    assert names == ["before training", "iteration 3", "after training"]
    page = Page(tmp_path / "report.html")
    assert page.tags.count(("script", {})) == 1, "no text of a model is a script"


def test_a_long_run_is_held_by_its_newest_and_evenly_spaced_iterations(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "MOST", 40_000)
    data = data_of(tmp_path, iterations=40, size=500)
    shown = [found["iteration"] for found in data["train"]]
    assert shown[-1] == 40
    assert len({b - a for a, b in pairwise(shown)}) == 1
    assert 5 <= len(shown) < 14
    assert len((tmp_path / "report.html").read_text()) < 40_000 + 60_000
