"""Published shapes of rows: each becomes the chat written by hand in shapes.yaml."""

import json
import math
import re
from datetime import date
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from support.runs import ROOT

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
    (row,) = judged = task.rows("train")
    if case["chat"][-1]["role"] == "assistant":
        (row,) = task.demonstrations()
    else:
        with pytest.raises(ValueError, match=r"row 0: .*env\.columns\.answer"):
            task.demonstrations()
    assert row["messages"] == case["chat"]
    right = case.get("right", [case["chat"][-1]["content"]])
    assert judged[0].get("answers", [judged[0]["answer"]]) == right
    assert row.get("tools") == case.get("tools")
    assert row.get("rejected") == case.get("rejected")
    assert row.get("unlearnt") == case.get("unlearnt")
    assert row["origin"].shapes == {(case["shape"], *case["columns"]): 1}
    assert list(row["origin"].unused) == case.get("unused", [])
    (asked,) = Prompts(path, eval_dataset=path).rows("train")
    assert asked["messages"] == case["chat"][: len(asked["messages"])]
    assert asked["messages"][-1]["role"] in ("user", "tool")


def test_the_page_names_every_shape_and_its_columns():
    page = (ROOT / "docs" / "data.md").read_text()
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
        ({"Question": "Hi", "Response": "Ho"}, r"question=Question env.columns.answer=Response"),
        (
            {"input": [HI], "label": "Ho"},
            r"set env.columns.question=input env.columns.answer=label",
        ),
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
        ({"question": "Hi", "answer": "Ho", "context": [5]}, "row 0, context: expected a text"),
        (
            {"question": "Hi", "answer": {"target": 24, "numbers": [2, 12]}},
            "row 0, answer: .*right",
        ),
        ({"question": "Hi", "answer": 2, "choices": ["Ho", "No"]}, "row 0, answer: .*options"),
        ({"question": "Hi", "answer": 0, "choices": "Ho"}, "row 0, choices: expected options"),
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


CHAT = {"messages": [HI, HO]}
ASKED = {"prompt": "Hi", "completion": "Ho"}
ANSWERED = {"question": "Hi", "answer": "Ho"}
NAMED = {"question": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("row", "columns", "column", "part"),
    [
        (CHAT | {"documents": ["Ann came."]}, {}, "documents", None),
        (ANSWERED | {"A": "Lima.", "B": "Oslo."}, {}, "A", None),
        (ANSWERED | {"table": "x | y"}, {}, "table", "context"),
        (CHAT | {"system": "No.", "system_prompt": "So."}, {}, "system_prompt", None),
        (CHAT | {"choices": ["a", "b"]}, {}, "choices", None),
        (CHAT | {"history": [["a", "b"]]}, {}, "history", None),
        (CHAT | {"reasoning": "Hm, hm."}, {}, "reasoning", None),
        (CHAT | {"system_message": "Be brief."}, {}, "system_message", "system"),
        (CHAT | {"metadata": '{"tools": [{"name": "w"}]}'}, {}, "metadata", "tools"),
        (ASKED | {"functions": [{"name": "w"}]}, {}, "functions", "tools"),
        (ASKED | {"cot": "Hm.", "Complex_CoT": "Hmm."}, {}, "Complex_CoT", "thoughts"),
        (ANSWERED | {"rationale": "Hm."}, {}, "rationale", "solution"),
        ({"p": "Hi", "a": "Ho", "passage": "b"}, NAMED | {"context": "c"}, "passage", "context"),
    ],
)
def test_a_column_of_prompt_or_response_is_read_refused_or_left_out(
    tmp_path, row, columns, column, part
):
    path = write(tmp_path / "d.jsonl", row | {"c": "cc", "id": 1, "date": "2026"})
    with pytest.raises(ValueError, match=rf"env\.columns\.{column}=null") as caught:
        load_chats(path, eval_dataset=path, columns=columns)
    remedy = re.search(rf"env\.columns\.(\w+)=({column}\S*) to read it", str(caught.value))
    assert (remedy and remedy[1]) == part
    (kept,) = load_chats(path, eval_dataset=path, columns=columns | {column: None})["train"]
    assert "cc" in str(kept["messages"]) or "context" not in columns
    assert list(kept["origin"].unused)[-2:] == ["id", "date"]
    if remedy and not columns:
        named = {part: remedy[2]} | {name: None for name in row if name == "cot"}
        (read,) = load_chats(path, eval_dataset=path, columns=named)["train"]
        changed = [
            key for key in ("messages", "response", "tools") if read.get(key) != kept.get(key)
        ]
        assert len(changed) == 1


@pytest.mark.parametrize(
    "row",
    [
        CHAT | {"prompt": "Hi", "reasoning": "on", "documents": [], "context": "Hi"},
        CHAT | {"problem": "1", "solution": "2", "answer": "3", "explanation": "4"},
        ASKED | {"solution": "2", "metadata": {"tools": None, "n": 1}, "thinking": False},
        ANSWERED | {"level": 1, "type": "a", "source": "b", "context": None, "score_answer": 1.5},
    ],
)
def test_columns_that_add_nothing_end_no_run(tmp_path, row):
    path = write(tmp_path / "d.jsonl", row)
    (done,) = Chats(path, eval_dataset=path).demonstrations()
    assert done["messages"] == [HI, HO]


@pytest.mark.parametrize(
    "columns",
    [{"contxt": "question"}, {"context": "id", "messages": "chat"}, {"contxt": None}],
)
def test_a_part_that_no_row_has_is_refused(tmp_path, columns):
    path = write(tmp_path / "d.jsonl", ANSWERED | {"chat": [HI, HO], "id": "a"})
    with pytest.raises(ValueError, match=rf"env\.columns\.{next(iter(columns))}="):
        load_chats(path, eval_dataset=path, columns=columns)


@pytest.mark.parametrize("scores", [range(5), [0.5, 1, 1, 0, 1]])
def test_scores_are_no_labels_and_are_refused_in_sft(tmp_path, scores):
    rows = [{"prompt": "Hi", "response": "Ho", "helpfulness": score} for score in scores]
    path = write(tmp_path / "d.jsonl", *rows)
    with pytest.raises(ValueError, match=r"env\.columns\.helpfulness=null"):
        Chats(path, eval_dataset=path)
    kept = Chats(path, eval_dataset=path, columns={"helpfulness": None})
    assert len(kept.rows("train")) == len(rows)
    assert len(Prompts(path, eval_dataset=path).rows("train")) == len(rows)


def test_bad_rows_are_left_out_and_counted_if_wanted(tmp_path):
    rows = [{"question": f"{i}?", "answer": a} for i, a in enumerate(["1", None, "####", "2"])]
    path = write(tmp_path / "d.jsonl", *rows)
    for bad in (rows[1], rows[2]):
        with pytest.raises(ValueError, match=r"row 1, answer.*env\.skip_bad_rows=true"):
            MathWords(write(tmp_path / "e.jsonl", rows[0], bad))
    kept = MathWords(path, eval_dataset=path, skip_bad_rows=True).rows("train")
    assert [row["question"] for row in kept] == ["0?", "3?"]
    assert "bad rows left out: 2, the first: " in kept[0]["origin"].describe()
    path = write(tmp_path / "d.jsonl", *rows[1:3])
    with pytest.raises(ValueError, match="row 0, answer"):
        MathWords(path, eval_dataset=path, skip_bad_rows=True)


YES_NO, SIGN = ["no", "yes"].__getitem__, [-1, 1].__getitem__


@pytest.mark.parametrize("label", ["label", "kto_tag", "is_correct", "desirable"])
@pytest.mark.parametrize("form", [bool, int, str, float, YES_NO, SIGN])
def test_a_response_to_avoid_is_left_out_and_counted(tmp_path, label, form):
    rows = [{"prompt": f"{i}?", "completion": "Ho", label: form(i % 3 > 0)} for i in range(6)]
    rows[1][label] = None
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
    assert (problem["question"], problem["finals"]) == ("2 + 3?", ["5"])
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
    with pytest.raises(ValueError, match="at least one row"):
        Preferences(write(tmp_path / "d.jsonl", *rows[:-1]))


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_a_thought_in_a_pair_is_refused_by_its_column(tmp_path, column):
    pair = {"chosen": HO, "rejected": HO | {"content": "No"}}
    pair[column] = pair[column] | {"reasoning_content": "hm"}
    with pytest.raises(ValueError, match=f"row 0, {column}: "):
        Preferences(write(tmp_path / "d.jsonl", {"prompt": "Hi", **pair}))


def test_a_split_of_a_file_is_refused(tmp_path):
    path = write(tmp_path / "d.jsonl", {"question": "Hi", "answer": "Ho"})
    with pytest.raises(ValueError, match=r"env\.split=test"):
        load_chats(path, split="test")
