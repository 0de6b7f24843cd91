"""Published shapes of rows: each becomes the chat written by hand in shapes.yaml."""

import json
import math
import re
from datetime import date
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from runs import ROOT

from envs.chat_rows import load_chats
from envs.shapes import SHAPES
from envs.tasks import Chats, MathWords, Preferences, Prompts
from envs.tasks.task import Response

CASES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
HI, HO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


def write(path, *rows):
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("case", CASES, ids=[case["shape"] for case in CASES])
def test_a_published_shape_is_recognised_and_read(tmp_path, case, suffix):
    path = write(tmp_path / f"d{suffix}", case["row"])
    task = (Preferences if "rejected" in case else Chats)(path, eval_dataset=path)
    (row,) = task.demonstrations()
    assert row["messages"] == case["chat"]
    assert row.get("tools") == case.get("tools")
    assert row.get("rejected") == case.get("rejected")
    assert row.get("unlearnt") == case.get("unlearnt")
    assert row["origin"].shapes == {(case["shape"], *case["columns"]): 1}
    assert list(row["origin"].unused) == case.get("unused", [])
    (asked,) = Prompts(path, eval_dataset=path).rows("train")
    assert asked["messages"] == case["chat"][: len(asked["messages"])]
    assert asked["messages"][-1]["role"] in ("user", "tool")


def test_the_page_names_every_shape_and_its_columns():
    page = (ROOT / "docs" / "environments.md").read_text()
    listed = dict(re.findall(r"^\| ([^|`]+) \| (`[^|]+) \|", page, re.M))
    for shape in SHAPES:
        assert all(f"`{column}`" in listed[shape.name] for column in shape.needs()), shape.name
    assert {case["shape"] for case in CASES} == {shape.name for shape in SHAPES}


IMAGE = HI | {"content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": "x"}]}
ALONE = r"and answer; set env\.columns\.question={0} env\.columns\.answer=.*env=prompts .*={0},"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "Hi"}, ALONE.format("question")),
        ({"prompt": "Hi", "gold": "Ho"}, ALONE.format("prompt")),
        ({"text": "Hi"}, r"env=prompts env\.columns\.question="),
        ({"dialog": [HI, HO]}, r"env\.columns\.messages=dialog"),
        ({"input": "Hi", "output": "Ho"}, r"Alpaca, .*instruction.*; set .*answer=output"),
        ({"chosen": "Ho", "rejected": "No"}, r"chosen; set env\.columns\.question="),
        ({"query": "Hi", "answers": ["Ho"]}, r"xLAM, .*env\.columns\.question=query"),
        (
            {"messages": [IMAGE, HO]},
            r"messages\[0\]\.content: expected text alone, got 'image_url'",
        ),
        ({"messages": [HI, HO, HI]}, "row 0, messages: expected .* the last message"),
        ({"prompt": [HI, HO], "answer": "Ho"}, "row 0, prompt: .*not with a response or its"),
        ({"query": "Hi", "tools": "[]", "answers": "[{"}, r"row 0, answers\[0\]\.tool_calls: "),
        ({"instruction": "Hi", "output": "Ho", "input": 5}, "row 0, input: expected a text"),
        ({"instruction": [HI], "output": "Ho", "input": "a"}, "row 0, instruction: .* a text"),
        ({"instruction": "Hi", "output": "Ho", "history": ["ab"]}, "row 0, history: .*pairs"),
        ({"question": "Hi", "answer": "Ho", "images": ["a.png"]}, "row 0, images: .*text alone"),
        ({"question": "Hi", "answer": math.nan}, "row 0, answer: "),
    ],
)
def test_what_fits_no_shape_is_one_line_with_the_nearest_one(tmp_path, row, says):
    with pytest.raises(ValueError, match=says) as caught:
        load_chats(write(tmp_path / "d.jsonl", row))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "*"])
def test_nulls_of_calls_stay_unless_the_file_added_them(tmp_path, name):
    calls = [{"function": {"name": "f", "arguments": given}} for given in ({"a": 1}, {"b": 2})]
    chats = [{"messages": [HI, {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    if name == "d.jsonl":
        calls[0]["function"]["arguments"]["b"] = None
    write(tmp_path / (name if name != "*" else "d.parquet"), *chats)
    path = str(tmp_path / name)
    (row, _) = load_chats(path, eval_dataset=path)["train"]
    got = row["response"]["tool_calls"][0]["function"]["arguments"]
    assert got == ({"a": 1, "b": None} if name == "d.jsonl" else {"a": 1})


@pytest.mark.parametrize("label", ["label", "kto_tag"])
def test_a_response_to_avoid_is_left_out_and_counted(tmp_path, label):
    rows = [{"prompt": f"{i}?", "completion": "Ho", label: i % 3 > 0} for i in range(6)]
    path = write(tmp_path / "d.jsonl", *rows)
    kept = Chats(path, eval_dataset=path).demonstrations()
    assert [row["messages"][0]["content"] for row in kept] == ["1?", "2?", "4?", "5?"]
    origin = kept[0]["origin"]
    assert (origin.left_out, list(origin.unused)) == (2, [])


def test_times_in_calls_are_texts(tmp_path):
    call = {"function": {"name": "f", "arguments": {"day": date(2026, 1, 2)}}}
    chat = [HI, {"role": "assistant", "tool_calls": [call]}, HI, HO]
    path = write(tmp_path / "d.parquet", {"messages": chat})
    (row,) = Chats(path, eval_dataset=path).demonstrations()
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"day": "2026-01-02"}


def test_an_answer_is_taken_before_a_chat_except_for_sft(tmp_path):
    row = {"messages": [HI, HO], "question": "2 + 3?", "answer": "#### 5"}
    path = write(tmp_path / "d.jsonl", row)
    (problem,) = MathWords(path, eval_dataset=path).rows("train")
    assert (problem["question"], problem["final"]) == ("2 + 3?", "5")
    (demonstration,) = Chats(path, eval_dataset=path).demonstrations()
    assert demonstration["messages"] == [HI, HO]


def test_a_response_to_a_row_whose_response_is_a_call_is_not_judged(tmp_path):
    path = write(
        tmp_path / "d.jsonl", {"query": "Hi", "answers": '[{"name": "f", "arguments": {}}]'}
    )
    task = Chats(path, eval_dataset=path)
    for text in ("", '{"name": "f", "arguments": {}}'):
        reward = task.reward(task.rows("eval")[0], Response(text, True, []))
        assert (reward.success, reward.dropped) == (False, True)


@pytest.mark.parametrize("large", [False, True])
def test_several_data_sets_are_one(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr("envs.data.LARGE", 0)
    first = write(
        tmp_path / "a.jsonl", {"question": "1", "answer": 1}, {"question": "2", "answer": 2.0}
    )
    second = write(tmp_path / "b.parquet", {"prompt": "3", "completion": "c", "n": 0})
    task = Chats([first, second], eval_dataset=[second])
    rows = task.rows("train")
    assert [row["answer"] for row in rows] == ["1", "2.0", "c"]
    shapes = {
        ("questions and answers", "question", "answer"): 2,
        ("prompts and completions", "prompt", "completion"): 1,
    }
    assert (rows[2]["origin"].shapes, [*rows[2]["origin"].unused]) == (shapes, ["n"])
    assert rows[2]["index"] == f"0 of {second}"
    assert [row["answer"] for row in task.rows("eval")] == ["c"]
    torn = write(tmp_path / "c.jsonl", {"question": "1", "answer": None})
    with pytest.raises(ValueError, match=r"c\.jsonl, row 0, answer: "):
        Chats([first, torn])


TEXTS = "\n\nHuman: {}\n\nAssistant: {}"


@pytest.mark.parametrize("form", ["chats", "texts", "HH-RLHF"])
def test_pairs_that_compare_nothing_are_left_out_and_counted(tmp_path, form):
    """Of the pairs (prompt and response, chosen and rejected) the last one compares."""
    pairs = [("Hi", "Ho", "Hi", "Ho"), ("Hi", "Ho", "Hi", ""), ("Hello", "Ho", "Hi", "No")]
    pairs = [*pairs[: 2 if form == "texts" else 3], ("Hi", "Ho", "Hi", "No")]
    rows = []
    for prompt, chosen, other, rejected in pairs:
        if form == "texts":
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        elif form == "HH-RLHF":
            texts = TEXTS.format(prompt, chosen), TEXTS.format(other, rejected)
            rows.append(dict(zip(("chosen", "rejected"), texts, strict=True)))
        else:
            better = [HI | {"content": prompt}, HO | {"content": chosen}]
            worse = [HI | {"content": other}, HO | {"content": rejected}]
            rows.append({"chosen": better, "rejected": worse})
    path = write(tmp_path / "d.jsonl", *rows)
    (pair,) = Preferences(path, eval_dataset=path).preferences()
    assert (pair["chosen"], pair["rejected"]) == ("Ho", "No")
    origin = pair["origin"]
    assert (list(origin.shapes.values()), origin.left_out) == ([1], len(rows) - 1)
    assert f"left out {len(rows) - 1} rows" in origin.describe()
    with pytest.raises(ValueError, match="expected at least one row that is kept"):
        Preferences(write(tmp_path / "d.jsonl", *rows[:-1]))


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_a_thought_in_a_pair_is_refused_by_its_column(tmp_path, column):
    pair = {"chosen": HO, "rejected": HO | {"content": "No"}}
    pair[column] = pair[column] | {"reasoning_content": "hm"}
    with pytest.raises(ValueError, match=f"row 0, {column}: "):
        Preferences(write(tmp_path / "d.jsonl", {"prompt": "Hi", **pair}))


def test_a_split_of_a_file_is_refused(tmp_path):
    path = write(tmp_path / "d.jsonl", {"question": "Hi", "answer": "Ho"})
    with pytest.raises(ValueError, match=r"env\.split=test: .*env\.dataset"):
        load_chats(path, split="test")
