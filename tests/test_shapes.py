"""Published shapes of rows: each becomes the chat written by hand in shapes.yaml."""

import json
import re
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from runs import ROOT

from envs.chat_rows import load_chats
from envs.shapes import SHAPES
from envs.tasks import Chats, Preferences

CASES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
HI, HO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


def write(path, *rows):
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("case", CASES, ids=[case["line"] for case in CASES])
def test_a_published_shape_is_recognised_and_read(tmp_path, case, suffix):
    path = write(tmp_path / f"d{suffix}", case["row"])
    task = (Preferences if "rejected" in case else Chats)(path, eval_dataset=path)
    (row,) = task.demonstrations()
    assert row["messages"] == case["chat"]
    assert row.get("tools") == case.get("tools")
    assert row.get("rejected") == case.get("rejected")
    assert row["origin"].describe() == f"data: 1 rows of {case['line']}"


def test_the_page_names_every_shape_and_its_columns():
    page = (ROOT / "docs" / "environments.md").read_text()
    listed = dict(re.findall(r"^\| ([^|`]+) \| (`[^|]+) \|", page, re.M))
    for shape in SHAPES:
        assert all(f"`{column}`" in listed[shape.name] for column in shape.needs()), shape.name
    assert {case["line"].partition(" (")[0] for case in CASES} == {shape.name for shape in SHAPES}
