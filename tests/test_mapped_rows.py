"""Large data sets stay on disk and are the same rows, in the same order, as in memory."""

import csv
import json
import os
import pickle
import random
from itertools import pairwise

import pytest
from datasets import Dataset

from envs.chat_rows import split_off
from envs.data import LARGE, load_table
from envs.mapped_rows import ArrowRows
from envs.tasks import Chats, MathWords
from policies.chats.chat_template import Renderer
from policies.models import find_model, load_tokenizer
from trainer.fitting import Fit

COUNT = 600
FILLER = "x" * (LARGE // COUNT + 200)


def content():
    odd = [None, "é\u2028🙂", "", 'a,b\n"c"', "\ud83d"]
    for i in range(COUNT):
        row = {"question": f"{i % 500} + 1?", "answer": f"#### {i % 500 + 1}", "filler": FILLER}
        yield row | ({"level": i, "odd": odd[i % 5], "deep": {"a": [1.5, {}]}} if i % 3 else {})


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
def test_rows_on_disk_are_those_of_the_file(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / f"d{suffix}"
    rows = write(path, suffix)
    table = load_table(str(path))
    assert path.stat().st_size > LARGE
    assert not isinstance(table.rows, list)
    assert len(table.rows) == COUNT
    assert table.columns[:3] == ["question", "answer", "filler"]
    order = random.Random(0).sample(range(COUNT), COUNT)
    assert all(table.rows[i] == rows[i] for i in [*order, -1])
    assert table.rows[5:8] == rows[5:8]
    with pytest.raises(IndexError):
        table.rows[COUNT]
    assert list(table.rows[-1]) == list(rows[-1]), "the cells keep their order"
    if suffix == ".jsonl":
        assert pickle.loads(pickle.dumps(table.rows))[7] == rows[7]
    path.write_bytes(b"")  # who edits the file edits no run
    assert table.rows[11] == rows[11]


def test_a_task_on_disk_has_the_rows_of_one_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
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


def spoil(cache, old, new):
    """Change a row of the copy in the cache, unseen: same size, same time."""
    (path,) = cache.glob("data/*/rows.jsonl")
    stat = path.stat()
    text = path.read_bytes()
    assert text.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(text.replace(old, new))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_rows_on_disk_are_looked_at_once_for_a_content_and_for_what_is_asked(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "d.jsonl"
    write(path, ".jsonl")
    first = MathWords(str(path), seed=3)
    assert capfd.readouterr().err.count("once for this content") == 5
    before = [first.rows(split)[5] for split in ("train", "eval")]
    right, none = b'"499 + 1?", "answer": "#### 500"', b'"499 + 1?", "answer": "####    "'
    spoil(tmp_path / "cache", right, none)
    again = MathWords(str(path), seed=3)
    assert capfd.readouterr().err == ""
    assert [again.rows(split)[5] for split in ("train", "eval")] == before
    for other in (
        lambda: MathWords(str(path), seed=4),
        lambda: MathWords(str(path), seed=3, columns={"question": "answer"}),
        lambda: type("Mine", (MathWords,), {})(str(path), seed=3),
    ):
        with pytest.raises(ValueError, match="row 499, answer: expected a final answer"):
            other()
    Chats(str(path), seed=3)  # which wants no number


def test_rows_on_disk_that_are_too_long_are_found_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "d.jsonl", ".jsonl")
    rows = MathWords(str(tmp_path / "d.jsonl")).rows("train")
    renderer = Renderer(load_tokenizer(find_model("tiny")), "chatml")

    def long(room, rows=rows, before=()):
        return Fit(renderer, room, lambda row: [[*before, *row["messages"]]], True).too_long(rows)

    found, plain = long(14), long(14, list(rows))
    assert found == plain
    assert 0 < len(found) < len(rows)
    (manifest,) = (tmp_path / "cache").glob("overlong/*/MANIFEST.json")
    about = json.loads(manifest.read_text()) | {"about": {"long": [[3, 99]]}}
    manifest.write_text(json.dumps(about))
    assert long(14) == {3: 99}, "it is read, not made again"
    system = {"role": "system", "content": "Be brief."}
    assert len(long(14, before=[system])) == len(rows), "what a run puts before the rows counts"


def test_a_malformed_row_far_down_is_told_when_the_task_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    for bad, says in (
        ('{"question": "a"}', "row 600, answer: expected a text"),
        ('{"question": "a", "answer": "####"}', "row 600, answer: expected a final answer"),
        ('{"question": "a"', "line 601: expected a JSON object"),
        ('["a"]', "row 600: expected an object"),
    ):
        write(tmp_path / "d.jsonl", ".jsonl")
        with open(tmp_path / "d.jsonl", "a") as file:
            file.write(f"\n{bad}")
        with pytest.raises(ValueError, match=says):
            MathWords(str(tmp_path / "d.jsonl"))
    assert not [p for p in (tmp_path / "cache" / "data").iterdir() if "tmp" in p.name]


def test_the_held_out_rows_are_those_of_a_sample_of_the_distinct_prompts():
    prompts = [str(i * 7919 % 700) for i in range(2000)]
    distinct = list(dict.fromkeys(prompts))
    for seed in range(5):
        chosen = set(random.Random(seed).sample(distinct, 70))
        train, held_out = split_off(prompts, seed=seed)
        assert held_out.tolist() == [i for i, p in enumerate(prompts) if p in chosen]
        assert train.tolist() == [i for i, p in enumerate(prompts) if p not in chosen]


def test_batches_of_any_size_are_one_sequence():
    data = Dataset.from_list([{"n": i} for i in range(1000)])
    cut = (0, 0, 1, 64, 65, 200, 1000)
    table = data.data.table.combine_chunks()
    slices = [table.slice(a, b - a) for a, b in pairwise(cut)]
    rows = ArrowRows([batch for part in slices for batch in part.to_batches()])
    assert [rows[i]["n"] for i in range(1000)] == list(range(1000))
    assert [rows[i]["n"] for i in (999, 0, 500, -1, 64)] == [999, 0, 500, 999, 64]
