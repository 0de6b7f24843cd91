"""Data files of each kind, renamed columns, split-offs, and what malformed rows say."""

import gzip
import json
import random
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from envs.chat_rows import load_chats, split_off
from envs.data import load_table
from envs.tasks import MathWords

ROWS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(30)]
KINDS = (".jsonl", ".json", ".csv", ".parquet")
ROLES = ("system", "user", "assistant", "tool")
SYSTEM, USER, SAID, TOOL = ({"role": role, "content": role[0]} for role in ROLES)


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix in (".csv", ".parquet"):
        getattr(Dataset.from_list(rows), f"to_{path.suffix[1:]}")(str(path))
    else:
        lines = "\n".join(map(json.dumps, rows))
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    return str(path)


@pytest.mark.parametrize("suffix", KINDS)
def test_every_kind_of_file_gives_the_same_rows_packed_or_not(tmp_path, suffix):
    path = tmp_path / f"d{suffix}"
    table = load_table(write(path, ROWS))
    assert (table.rows, table.columns) == (ROWS, ["question", "answer"])
    if suffix != ".parquet":
        packed = tmp_path / f"d{suffix}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert load_table(str(packed)).rows == ROWS


def test_texts_stay_as_they_are_in_the_file(tmp_path):
    """Excel's mark at the start, separators of lines, numbers and NA in a .csv."""
    path = tmp_path / "d.csv"
    path.write_bytes("\ufeffquestion,answer,,\r\na,007,,\r\n\r\nb,NA,,\r\nc\r\n".encode())
    cells = [(row["question"], row["answer"]) for row in load_table(str(path)).rows]
    assert cells == [("a", "007"), ("b", "NA"), ("c", "")]
    row = {"question": "a\u2028b", "answer": "c\x85d"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n")
    assert load_table(str(tmp_path / "d.jsonl")).rows == [row]


def test_shards_and_splits_of_a_folder(tmp_path, capfd):
    for number in range(3):
        shard = ROWS[10 * number : 10 * number + 10]
        write(tmp_path / f"train-{number:05d}-of-00003.parquet", shard)
    write(tmp_path / "test-00000-of-00001.parquet", ROWS[:4])
    capfd.readouterr()
    assert load_table(str(tmp_path)).rows == ROWS
    assert load_table(f"{tmp_path}/train*.parquet").rows == ROWS
    found = load_chats(str(tmp_path), eval_split="test")
    assert (len(found["train"]), len(found["eval"])) == (30, 4)
    assert capfd.readouterr() == ("", ""), "no progress bars"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none", "", "cannot be read"),
        ("a.jsonl", '{"question": "a"}\n{oops', "line 2: cannot be read"),
        ("a.csv", "question,answer\na,1\nb,2,3", "line 3"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        load_chats(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("join", ["", "\n"])
@pytest.mark.parametrize("dataset", ["d.jsonl", "d.json", "*.jsonl", "."])
def test_a_row_nested_too_deeply_is_refused_before_it_is_parsed(tmp_path, dataset, join):
    """A parser that calls itself for each level would exhaust its stack: the process dies."""
    brackets = join.join(['{"a":'] * 100_000 + ["1"] + ["}"] * 100_000)
    fine = json.dumps({"question": "[" * 101, "answer": [{"a": 1}] * 101}) + "\n"
    name = dataset if dataset.startswith("d") else "d.jsonl"
    (tmp_path / name).write_text(f'{fine}{fine}{{"question": "q", "answer": {brackets}}}')
    with pytest.raises(
        ValueError, match=rf"{name}, line \d+: expected at most 100 levels"
    ) as caught:
        load_table(str(tmp_path / dataset))
    line = 3 if join == "" else 3 + 99  # the row itself is a level
    assert f"line {line}:" in str(caught.value)


def test_data_that_are_not_there_name_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name in (None, str(tmp_path / "no.jsonl"), "no-one/no-data:main"):
        with pytest.raises(ValueError, match=r"env\.dataset="):
            load_chats(name)


TRL = {"prompt": "1?", "completion": "1!", "chosen": "c"}
CHAT = {"messages": [SYSTEM, USER, SAID], "question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("cells", "columns", "messages", "answer"),
    [
        ({"problem": "p", "answer": "a"}, {"question": "problem"}, "p", "a"),
        (CHAT, {}, [SYSTEM, USER], "a"),
        (TRL, {}, "1?", "1!"),
        ({"prompt": [USER], "chosen": [SAID]}, {}, [USER], "a"),
        ({"prompt": [SYSTEM, USER, SAID, USER], "completion": "Ho"}, {},
         [SYSTEM, USER, SAID, USER], "Ho"),
        ({"prompt": [USER], "completion": [SAID, TOOL, SAID]}, {}, [USER, SAID, TOOL], "a"),
    ],
)  # fmt: skip
def test_prompt_and_answer_are_found_in_the_columns(tmp_path, cells, columns, messages, answer):
    path = write(tmp_path / "d.jsonl", [cells, cells | {"level": 3}])
    first, row = load_chats(path, eval_dataset=path, columns=columns)["train"]
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    assert (row["messages"], row["answer"], row["index"]) == (asked, answer, 1)
    assert first["columns"] == cells | {"level": None}, "every row has the columns of the data"
    assert row["columns"] == cells | {"level": 3}


def test_missing_columns_are_named_with_their_key(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"text": "a", "label": "b"}])
    for columns, says in (
        ({}, r"env\.columns\.question="),
        ({"messages": "chat"}, r"env\.columns\.messages="),
        ({"question": "text"}, r"env\.columns\.answer="),
    ):
        with pytest.raises(ValueError, match=says):
            load_chats(path, columns=columns)


@pytest.mark.parametrize(
    ("cells", "place"),
    [
        ({"question": None, "answer": "1"}, "question"),
        ({"question": "q", "answer": [USER]}, "answer"),
        ({"messages": [{"role": "bot", "content": "x"}, SAID]}, r"messages\[0\]\.role"),
        ({"messages": [{"role": "user"}, SAID]}, r"messages\[0\]\.content"),
        ({"messages": [USER]}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi", SAID]}, r"messages\[0\]"),
    ],
)
def test_a_malformed_cell_is_named_by_row_and_column(tmp_path, cells, place):
    good = {"messages": [USER, SAID]} if "messages" in cells else ROWS[0]
    path = write(tmp_path / "d.jsonl", [good, good, cells])
    with pytest.raises(ValueError, match=rf"row 2, {place}: expected .*env\.columns"):
        load_chats(path)


@given(st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), max_size=99), st.integers(0, 9))
def test_a_tenth_of_the_distinct_prompts_is_held_out_with_all_their_rows(prompts, seed):
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        with pytest.raises(ValueError, match=r"env\.eval_dataset"):
            split_off(prompts, seed=seed)
        return
    chosen = random.Random(seed).sample(distinct, max(1, len(distinct) // 10))
    train, held_out = split_off(prompts, seed=seed)
    assert held_out == [i for i, prompt in enumerate(prompts) if prompt in chosen]
    assert train == [i for i, prompt in enumerate(prompts) if prompt not in chosen]


def test_rows_on_disk_are_those_in_memory_and_are_checked_as_early(tmp_path, monkeypatch):
    odd = [None, "\u00e9\u2028", "", 'a,b\n"c"']
    rows = [
        {**row, "odd": odd[i % 4], "deep": {"a": [1.5, i]} if i % 3 else None}
        for i, row in enumerate(ROWS)
    ]
    path = write(tmp_path / "d.jsonl", rows)
    small = MathWords(path, seed=3)
    monkeypatch.setattr("envs.data.LARGE", 0)
    table, large = load_table(path), MathWords(path, seed=3)
    assert not isinstance(table.rows, list)
    assert [table.rows[i] for i in (7, 3, -1)] == [rows[i] for i in (7, 3, -1)]
    assert list(table.rows[5:8]) == rows[5:8]
    for split in ("train", "eval"):
        assert not isinstance(large.rows(split), list)
        assert list(large.rows(split)) == small.rows(split)
    assert list(large.demonstrations()) == small.demonstrations()
    bad = [{"question": "a", "answer": "####"}, {"question": "a", "answer": None}]
    for row in bad:
        with pytest.raises(ValueError, match="row 30, answer"):
            MathWords(write(tmp_path / "bad.jsonl", [*ROWS, row]))
