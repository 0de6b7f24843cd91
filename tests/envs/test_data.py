"""Data files of each kind, renamed columns, split-offs, and what malformed rows say."""

import gzip
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from envs.chat_rows import load_chats, split_off
from envs.data import load_table
from envs.tasks import MathWords
from envs.tasks.dataset import prompts_to_retain

ROWS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(30)]
KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
ROLES = ("system", "user", "assistant", "tool")
SYSTEM, USER, SAID, TOOL = ({"role": role, "content": role[0]} for role in ROLES)


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix in (".csv", ".tsv"):
        Dataset.from_list(rows).to_csv(str(path), sep="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
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
    text = "\ufeff\n" + json.dumps(row, ensure_ascii=False) + "\r\n \n"
    (tmp_path / "d.jsonl").write_bytes(text.encode())
    assert load_table(str(tmp_path / "d.jsonl")).rows == [row]


@pytest.mark.parametrize("form", ["lines", "list", "printed list", "object", "printed objects"])
def test_values_are_those_of_json(tmp_path, form):
    """Numbers stay ints or floats, dates stay texts, and no object gets another one's keys."""
    call = {"name": "f", "arguments": {"x": [1, 2.5, None, "a", {}], "big": 10**30}}
    rows = [
        {"a": 1, "b": "2020-01-01", "c": [{"role": "user"}, {"role": "tool", "calls": [call]}]},
        {"a": 2.0, "b": "2020-01-01T00:00:00Z", "c": {"k": None}},
        {"a": "3", "b": None, "c": [[1], "x", True], "d": "\U0001f600"},
    ]
    text = {
        "lines": "\n".join(map(json.dumps, rows)),
        "list": json.dumps(rows),
        "printed list": json.dumps(rows, indent=1),
        "object": json.dumps({"version": 1.0, "data": rows}),
        "printed objects": "\n".join(json.dumps(row, indent=1) for row in rows),
    }
    paths = [tmp_path / "d.json"]
    if form == "lines":
        paths.append(tmp_path / "d.jsonl")
    for path in paths:
        path.write_text(text[form])
        expected = [{"a": None, "b": None, "c": None, "d": None, **row} for row in rows]
        assert repr(load_table(str(path)).rows) == repr(expected)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, SAID]},
        {"id": 1, "conversations": [{"from": "human", "value": "a"}]},
        {"query": "a", "tools": [{"name": "f"}], "answers": "[]"},
    ],
)
def test_a_json_file_of_one_row_is_that_row(tmp_path, row):
    (tmp_path / "d.json").write_text(json.dumps(row))
    assert load_table(str(tmp_path / "d.json")).rows == [row]


def test_cells_that_datasets_wrote_into_a_parquet_as_json_are_values(tmp_path):
    rows = [{"m": [{"a": 1}, {"b": "2"}], "x": 1}, {"m": [{"c": {"d": [1, "z"]}}], "x": "s"}]
    source = write(tmp_path / "d.jsonl", rows)
    saved = Dataset.from_json(source, cache_dir=str(tmp_path / "cache"))
    saved.to_parquet(str(tmp_path / "d.parquet"))
    assert load_table(str(tmp_path / "d.parquet")).rows == rows


@pytest.mark.parametrize("name", ["d[1].jsonl", "d.json", "d.csv", "d.tsv", "d.parquet", "."])
def test_rows_are_those_of_the_path_now(tmp_path, monkeypatch, name):
    """Neither a cache nor a file whose name fits the brackets gives other rows."""
    path = tmp_path / ("rows.jsonl" if name == "." else name)
    if name == "d[1].jsonl":
        write(tmp_path / "d1.jsonl", ROWS[:2])
    for rows in (ROWS[:3], ROWS[3:6]):
        write(path, rows)
        os.utime(path, (10**9, 10**9))
        assert load_table(str(tmp_path / name)).rows == rows
    if name != ".":
        (tmp_path / "file").touch()
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file")
        assert load_table(str(path)).rows == ROWS[3:6], "the cache cannot be written"


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


README = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"


@pytest.mark.parametrize(
    ("files", "split", "read"),
    [
        (
            ["a.jsonl", "b.csv"],
            "train",
            r"a\.jsonl and b\.csv.*: \[.*a\.jsonl,.*b\.csv\]",
        ),
        (["train.jsonl", "extra.jsonl", "test.jsonl"], "train", r"extra\.jsonl.*: \["),
        (["data.jsonl", "test_cases.jsonl"], "train", ["data.jsonl"]),
        (["data.jsonl", "test_cases.jsonl"], "test", ["test_cases.jsonl"]),
        (["train.jsonl", "test.jsonl"], "dev", "expected a split t.* or t.*, got 'dev'"),
        (["a.jsonl", "b.json", "_c.csv", "dataset_infos.json"], "train", ["a.jsonl", "b.json"]),
        (["a.json", "README.md: ../x.jsonl"], "train", ["a.json"]),
        (["a.jsonl", "README.md: https://example.org/x.jsonl"], "train", ["a.jsonl"]),
        (["notes.txt"], "train", "expected files .*, got none"),
    ],
)
def test_a_folder_reads_its_own_files_or_names_what_it_does_not_read(tmp_path, files, split, read):
    folder = tmp_path / "rows"
    folder.mkdir()
    write(tmp_path / "x.jsonl", ROWS)
    for i, (name, _, content) in enumerate(name.partition(": ") for name in files):
        if name.endswith((".md", ".txt")):
            (folder / name).write_text(README.format(content))
        else:
            write(folder / name, ROWS[i : i + 1])
    if isinstance(read, list):
        rows = [ROWS[i] for i, name in enumerate(files) if name in read]
        assert load_table(str(folder), split=split).rows == rows
    else:
        with pytest.raises(ValueError, match=read):
            load_table(str(folder), split=split)


def test_a_map_column_of_a_parquet_file_is_read(tmp_path):
    """Spark writes such columns; `datasets` has no type for them."""
    meta = pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64()))
    columns = {name: [row[name] for row in ROWS[:2]] for name in ROWS[0]}
    pq.write_table(pa.table({"meta": meta, **columns}), tmp_path / "d.parquet")
    table = load_table(str(tmp_path / "d.parquet"))
    assert table.rows == [{"meta": [("k", 1)], **ROWS[0]}, {"meta": None, **ROWS[1]}]
    assert table.columns == ["meta", *ROWS[0]]


def test_a_folder_of_save_to_disk_is_loaded(tmp_path):
    data = Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "rows"))
    DatasetDict(train=data, test=data.select(range(4))).save_to_disk(str(tmp_path / "splits"))
    assert load_table(str(tmp_path / "rows")).rows == ROWS
    assert load_table(str(tmp_path / "splits"), split="test").rows == ROWS[:4]
    with pytest.raises(ValueError, match="'test'"):
        load_table(str(tmp_path / "rows"), split="test")


def test_a_long_read_is_one_line_of_rank_0(tmp_path, monkeypatch, capfd):
    path = write(tmp_path / "d.jsonl", ROWS)
    monkeypatch.setattr("envs.data_files.QUIET", -1)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        load_table(path)
        assert capfd.readouterr().err.count("\n") == lines


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none", b"", "none: expected the extension .jsonl"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "a.jsonl.gz: cannot be read"),
        ("a.parquet", b"PAR1", "a.parquet: cannot be read"),
        ("a.jsonl", b'{"question": "a"}\n{oops\n', "a.jsonl, line 2: expected JSON"),
        ("a.jsonl", b'\n{"question": "a"}\n{"question":\n', "a.jsonl, line 3: expected JSON"),
        ("a.jsonl", b'{"question": "\\ud83d"}', "a.jsonl, line 1: expected JSON"),
        ("a.jsonl", b'{"question": "a"}\n[1]', r"line 2: expected an object as row, got \[1\]"),
        ("a.json", b'[{"question": "a"},\n{oops}]', "a.json, line 2: expected JSON"),
        ("a.json", b'[{"question": "a"}, 3]', "a.json, row 1: expected an object as row, got 3"),
        (
            "a.jsonl",
            '{}\n{"question": "\xe9"}'.encode("latin-1"),
            "line 2: expected UTF-8, got .*e9",
        ),
        ("a.jsonl", '{"question": "a"}'.encode("utf-16"), "line 1: expected UTF-8, got UTF-16"),
        ("a.csv", "question\n\xe9".encode("latin-1"), "a.csv, line 2: expected UTF-8"),
        (
            "a.csv",
            b"question,answer\n\n'a\n',1\nb,2,3".replace(b"'", b'"'),
            "line 5: expected 2 cells",
        ),
        ("a.csv", b'question,answer\na,"1\nb,2', "line 2: .*end of data"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=says) as caught:
        load_chats(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "join", "place"),
    [
        ("d.jsonl", "", "after 2 rows"),
        ("d.json", "\n", "after 2 rows"),
        ("*.jsonl", "", "after 2 rows"),
        (".", "", "line 3"),
        (".", "\n", "line 102"),  # 3 + 99: the row itself is a level
    ],
)
def test_a_row_nested_too_deeply_is_refused(tmp_path, dataset, join, place):
    """A parser that calls itself for each level exhausts its stack; in `datasets` it dies."""
    brackets = join.join(['{"a":'] * 100_000 + ["1"] + ["}"] * 100_000)
    fine = json.dumps({"question": "[" * 101, "answer": [{"a": 1}] * 101}) + "\n"
    name = dataset if dataset.startswith("d") else "d.jsonl"
    (tmp_path / name).write_text(f'{fine}{fine}{{"question": "q", "answer": {brackets}}}')
    with pytest.raises(ValueError, match=f"{name}, {place}"):
        load_table(str(tmp_path / dataset))


def test_data_that_are_not_there_name_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name in (None, str(tmp_path / "no.jsonl"), "no-one/no-data:main"):
        with pytest.raises(ValueError, match=r"env\.dataset="):
            load_chats(name)
    missing, rows = str(tmp_path / "no.jsonl"), write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"set env\.eval_dataset="):
        load_chats(rows, eval_dataset=missing)
    with pytest.raises(ValueError, match=r"set eval\.retain="):
        prompts_to_retain(missing)


TRL = {"prompt": "1?", "completion": "1!", "chosen": "c"}
CHAT = {"messages": [SYSTEM, USER, SAID], "question": "q", "answer": "b"}


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
        ({"messages": "text", "question": "label"}, r"env\.columns\.messages alone"),
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
    with pytest.raises(ValueError, match=rf"row 2, {place}: .*env\.columns"):
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
