"""Data files of each kind, renamed columns, split-offs, and what malformed rows say."""

import csv
import gzip
import json
import random
from pathlib import Path

import pytest
from datasets import Dataset

from envs.chat_rows import load_chats, split_off
from envs.data import LARGE, load_table
from envs.tasks import MathWords
from tests.checkpoints import write_gsm8k_jsonl

ROWS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(30)]


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_json(path, rows):
    path.write_text(json.dumps(rows))
    return str(path)


def write_parquet(path, rows):
    Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


WRITERS = {".jsonl": write_jsonl, ".csv": write_csv, ".json": write_json, ".parquet": write_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_file_kind_gives_the_same_rows(tmp_path, suffix):
    path = WRITERS[suffix](tmp_path / f"data{suffix}", ROWS)
    table = load_table(path)
    assert table.rows == ROWS
    assert table.columns == ["question", "answer"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json"])
def test_packed_texts_are_the_same_rows(tmp_path, suffix):
    path = Path(WRITERS[suffix](tmp_path / f"d{suffix}", ROWS))
    packed = tmp_path / f"d{suffix}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_table(str(packed)).rows == ROWS
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cannot be read"):
        load_table(str(packed))


def test_shards_of_a_folder_or_a_pattern_are_one_table(tmp_path):
    for number in range(3):
        name = f"train-{number:05d}-of-00003.parquet"
        write_parquet(tmp_path / name, ROWS[10 * number : 10 * number + 10])
    assert load_table(str(tmp_path)).rows == ROWS
    assert load_table(f"{tmp_path}/*.parquet").rows == ROWS


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "doesn't contain any data files"),
        ({"a.jsonl": [{"question": "a"}], "b.jsonl": "{"}, "JSON parse error"),
        ({"a.parquet": [{"question": "a"}], "b.parquet": [{"prompt": "b"}]}, "column names don't"),
        ({"a.parquet": [{"answer": "a"}], "b.parquet": [{"answer": {"x": 1}}]}, "to string"),
        ({"test.jsonl": [{"question": "a"}]}, 'Unknown split "train"'),
    ],
)
def test_a_folder_that_is_no_table_is_one_line(tmp_path, capfd, files, says):
    for name, rows in files.items():
        path = tmp_path / name
        path.write_text(rows) if isinstance(rows, str) else WRITERS[path.suffix](path, rows)
    capfd.readouterr()
    with pytest.raises(ValueError, match="cannot be read: ") as caught:
        load_table(str(tmp_path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_mark_at_the_start_of_a_file_is_no_part_of_the_first_column(tmp_path):
    path = tmp_path / "excel.csv"
    path.write_bytes("\ufeffquestion,answer\r\n1+1?,2\r\n".encode())
    assert load_table(str(path)).rows == [{"question": "1+1?", "answer": "2"}]


def test_line_separators_inside_a_text_do_not_split_a_row(tmp_path):
    row = {"question": "a\u2028b", "answer": "c\x85d"}
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert load_table(str(path)).rows == [row]


def test_columns_are_renamed(tmp_path):
    rows = [{"problem": r["question"], "solution": r["answer"], "level": 1} for r in ROWS]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    found = load_chats(path, columns={"question": "problem", "answer": "solution"})
    for row in found["train"]:
        assert row["messages"] == [{"role": "user", "content": rows[row["index"]]["problem"]}]
        assert row["answer"] == rows[row["index"]]["solution"]


def test_messages_column_wins_unless_question_is_named(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{**row, "messages": chat} for row in ROWS]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    assert load_chats(path, eval_dataset=path)["train"][0]["messages"] == chat[:-1]
    asked = load_chats(path, eval_dataset=path, columns={"question": "question"})
    assert asked["train"][0]["messages"][0]["content"] == "0 + 1?"
    renamed = write_jsonl(tmp_path / "e.jsonl", [{"chat": chat}])
    found = load_chats(renamed, eval_dataset=renamed, columns={"messages": "chat"})
    assert found["train"][0]["answer"] == "Ho"


def test_prompts_and_replies_may_be_texts_or_messages(tmp_path):
    system, user, said = ({"role": r, "content": r[0]} for r in ("system", "user", "assistant"))
    tool = {"role": "tool", "content": "t"}
    names = {"question": "prompt", "answer": "completion"}
    for prompt, completion, messages, answer in (
        ("Hi", "Ho", [{"role": "user", "content": "Hi"}], "Ho"),
        ([user], "Ho", [user], "Ho"),
        ([system, user, said, user], [said], [system, user, said, user], "a"),
        ([user], [said, tool, LAST], [user, said, tool], "Ho"),
    ):
        rows = [{"prompt": prompt, "completion": completion, "level": 3}] * 2
        path = write_jsonl(tmp_path / "d.jsonl", rows)
        row = load_chats(path, eval_dataset=path, columns=names)["train"][1]
        assert (row["messages"], row["answer"]) == (messages, answer)
        assert (row["question"], row["columns"]) == (prompt, rows[1])
        bare = load_chats(path, eval_dataset=path, columns={"question": "prompt"}, answers=False)
        assert "answer" not in bare["eval"][0]


def test_columns_are_those_of_the_data_set_in_every_row(tmp_path):
    chat = {"messages": [GOOD, LAST]}
    for first, second in ((ROWS[0], ROWS[1]), (chat, chat)):
        path = write_jsonl(tmp_path / "d.jsonl", [first, second | {"level": 3}])
        rows = load_chats(path, eval_dataset=path)["train"]
        assert [row["columns"] for row in rows] == [
            {**first, "level": None}, {**second, "level": 3}
        ]  # fmt: skip


def test_split_off_is_seeded_disjoint_and_complete(tmp_path):
    path = write_gsm8k_jsonl(tmp_path / "g.jsonl", 100)
    splits = [load_chats(str(path), seed=seed) for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]
    for split in splits:
        indices = [row["index"] for name in ("train", "eval") for row in split[name]]
        assert sorted(indices) == list(range(100))
        assert len(split["eval"]) == 10


def test_equal_prompts_stay_on_one_side():
    prompts = [str(i % 7) for i in range(70)]
    for seed in range(5):
        train, held_out = split_off(prompts, seed=seed)
        assert not {prompts[i] for i in train} & {prompts[i] for i in held_out}
        assert len(train) + len(held_out) == 70
    with pytest.raises(ValueError, match="at least 2 different prompts"):
        split_off(["a", "a"])


def test_split_off_takes_at_most_200():
    assert len(split_off([str(i) for i in range(5000)])[1]) == 200


def test_file_has_no_splits_so_eval_split_is_split_off(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert load_chats(path, eval_split="test") == load_chats(path)


def test_named_splits_of_a_data_set_folder(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for name, rows in (("train", ROWS), ("test", ROWS[:4])):
        write_jsonl(folder / f"{name}.jsonl", rows)
    found = load_chats(str(folder), eval_split="test")
    assert (len(found["train"]), len(found["eval"])) == (30, 4)
    assert found["eval"][3]["answer"] == "#### 4"


GOOD = {"role": "user", "content": "Hi"}
LAST = {"role": "assistant", "content": "Ho"}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"question": None, "answer": "1"}, "question: expected a text or a list of messages, got"),
        (
            {"question": "q", "answer": {"a": 5}},
            "answer: expected a text or a list of messages, got {'a': 5} (dict)",
        ),
        ({"question": ["q"], "answer": "1"}, "question[0]: expected a dict with role and content"),
        (
            {"question": [{"role": "assistant", "content": "q"}], "answer": "1"},
            "question: expected a text of the user as the last message, got ['assistant'] (list)",
        ),
        (
            {"question": "q", "answer": [{"role": "user", "content": "1"}]},
            "answer: expected a text of the assistant as the last message, got ['user'] (list)",
        ),
    ],
)
def test_malformed_cell_names_row_column_expected_and_got(tmp_path, bad, words):
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS[:2], bad])
    with pytest.raises(ValueError, match="row 2") as caught:
        load_chats(path)
    assert words in str(caught.value)
    assert str(caught.value).endswith("; correct or remove the row")
    assert "\n" not in str(caught.value)


def test_rows_that_are_all_malformed_name_the_key_of_the_column(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": [GOOD], "n": i} for i in range(9)])
    for columns, says in (
        ({"messages": "prompt"}, "give env.columns.question=prompt in its place"),
        (
            {"question": "n", "answer": "prompt"},
            "prompts: env.columns.question=<column>, of prompt, n",
        ),
    ):
        with pytest.raises(ValueError, match=r"row 0, .* and none of the 9 rows fits; ") as caught:
            load_chats(path, columns=columns)
        assert str(caught.value).endswith(says)
        assert "remove" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "row 1, messages: expected a list of messages, got 'hello' (str)"),
        ([GOOD, "Ho"], "row 1, messages[1]: expected a dict with role and content, got 'Ho'"),
        (
            [{"role": "bot", "content": "x"}, LAST],
            "row 1, messages[0].role: expected system | user | assistant | tool, got 'bot'",
        ),
        ([{"role": "user"}, LAST], "row 1, messages[0].content: expected a text, got None"),
        ([GOOD], "a reply of the assistant as the last message, got ['user']"),
        ([GOOD, LAST | {"content": " "}], "a reply of the assistant as the last message"),
    ],
)
def test_malformed_chat_names_the_place(tmp_path, messages, words):
    rows = [{"messages": [GOOD, LAST]}, {"messages": messages}]
    with pytest.raises(ValueError, match="row 1") as caught:
        load_chats(write_jsonl(tmp_path / "d.jsonl", rows))
    assert words in str(caught.value)


def test_missing_column_lists_the_columns_there_are(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "label": "b"}])
    with pytest.raises(
        ValueError, match=r"'question', got text, label.*columns.question="
    ) as caught:
        load_chats(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="'chat', got text, label"):
        load_chats(path, columns={"messages": "chat"})
    with pytest.raises(ValueError, match=r"keys among .* got \['reply'\]"):
        load_chats(path, columns={"reply": "label"})


def test_columns_that_trl_calls_otherwise_are_known_and_named_ones_go_first(tmp_path):
    rows = [{"prompt": f"{i}?", "completion": f"{i}!", "chosen": "c"} for i in range(4)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)

    def said(**more):
        row = load_chats(path, eval_dataset=path, **more)["train"][0]
        return row["messages"][0]["content"], row.get("answer")

    assert said() == ("0?", "0!")
    assert said(columns={"answer": "chosen"}) == ("0?", "c")
    assert said(columns={"question": "completion"}) == ("0!", "0!")
    assert said(answers=False) == ("0?", None)
    turns = {"prompt": [{"role": "user", "content": "a"}]}
    turns["chosen"] = [{"role": "assistant", "content": "b"}]
    path = write_jsonl(tmp_path / "e.jsonl", [turns])
    assert said() == ("a", "b")
    path = write_jsonl(tmp_path / "f.jsonl", [{**rows[0], "question": "q", "answer": "a"}])
    assert said() == ("q", "a")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"question": "a"}\n{oops', "a.jsonl, line 2: cannot be read"),
        ("a.jsonl", "", "it is empty"),
        ("a.json", "{", "JSON parse error"),
        ("a.csv", "question,answer\n", "cannot be read"),
        ("a.csv", "question,answer\na,1\nb,2,3", "Expected 2 fields in line 3, saw 3"),
        ("a.parquet", "not parquet", "cannot be read"),
        ("a.txt", "a", "expected a file named .jsonl, .json, .csv, .parquet, got a.txt"),
    ],
)
def test_unreadable_file_says_where(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match="cannot be read") as caught:
        load_chats(str(path))
    assert words in str(caught.value)


def test_absent_data_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name, words in (
        (None, "env.dataset"),
        (str(tmp_path / "no.jsonl"), "Unable to find"),
        ("no-one/no-data:main", "give a file"),
    ):
        with pytest.raises(ValueError, match=r"expected|cannot be read") as caught:
            load_chats(name)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_data_sets_are_read_quietly(tmp_path, capfd):
    folder = tmp_path / "hub"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS)
    load_table(str(folder))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", WRITERS)
def test_answers_that_are_numbers_are_read_as_from_a_csv(tmp_path, suffix):
    for given, said in ((5, "5"), (0, "0"), (2.5, "2.5")):
        path = WRITERS[suffix](tmp_path / f"n{suffix}", [{"question": "q", "answer": given}] * 2)
        assert load_chats(path, eval_dataset=path)["train"][1]["answer"] == said
    path = write_jsonl(tmp_path / "b.jsonl", [{"question": "q", "answer": True}])
    assert load_chats(path, eval_dataset=path)["train"][0]["answer"] == "true"


def test_cells_of_a_csv_stay_texts(tmp_path):
    (tmp_path / "d.csv").write_text("question,answer,,\na,007,,\n\nb,NA,,\nc\n")
    rows = load_table(str(tmp_path / "d.csv")).rows
    cells = [(row["question"], row["answer"]) for row in rows]
    assert cells == [("a", "007"), ("b", "NA"), ("c", "")]


COUNT = 600
FILLER = "x" * (LARGE // COUNT + 200)


def content():
    odd = [None, "é\u2028🙂", "", 'a,b\n"c"']
    for i in range(COUNT):
        row = {"question": f"{i % 500} + 1?", "answer": f"#### {i % 500 + 1}", "filler": FILLER}
        row |= {"level": None, "odd": None, "deep": None}
        yield row | ({"level": i, "odd": odd[i % 4], "deep": {"a": [1.5, 2]}} if i % 3 else {})


def write(path, suffix):
    rows = list(content())
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
        return rows
    names = ["question", "answer", "filler", "level"]
    rows = [{name: row.get(name) for name in names} for row in rows]
    if suffix == ".parquet":
        data = Dataset.from_list(rows)
        data = data.add_column("noise", [random.Random(i).randbytes(60_000) for i in range(COUNT)])
        data.to_parquet(str(path))
        return data.to_list()
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return [{n: "" if v is None else str(v) for n, v in row.items()} for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_rows_on_disk_are_those_of_the_file(tmp_path, suffix):
    path = tmp_path / f"d{suffix}"
    rows = write(path, suffix)
    table = load_table(str(path))
    assert path.stat().st_size > LARGE
    assert not isinstance(table.rows, list)
    assert len(table.rows) == COUNT
    assert table.columns[:3] == ["question", "answer", "filler"]
    order = random.Random(0).sample(range(COUNT), COUNT)
    assert all(table.rows[i] == rows[i] for i in [*order, -1])
    assert list(table.rows[5:8]) == rows[5:8]
    with pytest.raises(IndexError):
        table.rows[COUNT]
    assert list(table.rows[-1]) == list(rows[-1]), "the cells keep their order"


def test_a_task_on_disk_has_the_rows_of_one_in_memory(tmp_path):
    path = tmp_path / "d.jsonl"
    rows = write(path, ".jsonl")
    (tmp_path / "small.jsonl").write_text(
        "\n".join(json.dumps(row | {"filler": None}) for row in rows)
    )
    large, small = MathWords(str(path), seed=3), MathWords(str(tmp_path / "small.jsonl"), seed=3)
    for split in ("train", "eval"):
        assert isinstance(small.rows(split), list)
        assert not isinstance(large.rows(split), list)
        for one, other in zip(large.rows(split), small.rows(split), strict=True):
            one["columns"]["filler"] = None
            assert one == other
            assert type(one["index"]) is int
    pairs = zip(large.demonstrations(), small.demonstrations(), strict=True)
    assert all(one["messages"] == other["messages"] for one, other in pairs)


def test_a_malformed_row_far_down_is_told_when_the_task_is_made(tmp_path):
    for bad, says in (
        ('{"question": "a"}', "row 600, answer: expected a text"),
        ('{"question": "a", "answer": "####"}', "row 600, answer: expected a final answer"),
        ('{"question": "a"', "line 601: cannot be read"),
    ):
        write(tmp_path / "d.jsonl", ".jsonl")
        with open(tmp_path / "d.jsonl", "a") as file:
            file.write(f"\n{bad}")
        with pytest.raises(ValueError, match=says):
            MathWords(str(tmp_path / "d.jsonl"))


def test_the_held_out_rows_are_those_of_a_sample_of_the_distinct_prompts():
    prompts = [str(i * 7919 % 700) for i in range(2000)]
    distinct = list(dict.fromkeys(prompts))
    for seed in range(5):
        chosen = set(random.Random(seed).sample(distinct, 70))
        train, held_out = split_off(prompts, seed=seed)
        assert held_out == [i for i, p in enumerate(prompts) if p in chosen]
        assert train == [i for i, p in enumerate(prompts) if p not in chosen]
