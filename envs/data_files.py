"""Read local data files row by row, without a cache.

.jsonl has one object per line; .json a list, an object with one list of objects, or objects; .csv
and .tsv have a header, and all cells are texts. All of these may be .gz. .parquet is read by
pyarrow. JSON values are read by json.loads, because `datasets` would give each row the keys of all
rows, and dates for texts. A fault names file and line.
"""

import codecs
import csv
import gzip
import json
import os
import pickle
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import glob
from itertools import chain, islice, repeat
from pathlib import Path
from typing import IO, Any

DEEPEST = 100  # largest number of nested lists and objects in a row, as in Parquet
TOO_DEEP = f"expected a row of at most {DEEPEST} levels of lists and objects, got more"
QUIET = 10  # seconds of reading until a line is printed
LONGEST = 2**31 - 1  # largest number of characters of a .csv cell; Python's default is 131072
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
DECODER = json.JSONDecoder()
NOT_BLANK = re.compile(r"\S")
Placed = tuple[str, Any]  # place in the file, value


def find_files(dataset: str) -> list[Path]:
    """Return the path of a file, or all paths that a pattern with * matches."""
    path = Path(dataset).expanduser()
    if "*" not in dataset or path.exists():
        return [path]
    pattern = re.sub(r"[\[?]", r"[\g<0>]", str(path))  # only * is special
    return [Path(name) for name in sorted(glob(pattern, recursive=True))] or [path]


def find_split(folder: Path, split: str) -> list[Path]:
    """Return the files of a split of a folder; raise ValueError if they are of several kinds.

    The split is in the file's name, as in `datasets`: train-00000.parquet, test/a.jsonl; a name
    without a split means train. A README.md is not read, because it may name any file or address.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    skipped = re.compile(r"(^|/)([._]|dataset_infos?\.json$)")
    names = [name for name in sorted(folder.rglob("*")) if kind_of(name) in KINDS]
    names = [name for name in names if not skipped.search(str(name.relative_to(folder)))]
    if not names:
        raise ValueError(f"{folder}: expected files ({', '.join(KINDS)}), got none")
    patterns = get_data_patterns(str(folder))
    groups = DataFilesDict.from_patterns(patterns, base_path=str(folder)).items()
    splits = {os.path.realpath(name): str(key) for key, group in groups for name in group}
    files: dict[str, list[Path]] = {}
    for name in names:
        files.setdefault(splits.get(os.path.realpath(name), ""), []).append(name)
    rest = files.pop("", [])
    if rest and "train" not in files:
        files["train"], rest = rest, []
    if not (wanted := files.get(split)):
        raise ValueError(f"{folder}: expected a split {' or '.join(files)}, got {split!r}")
    kind = kind_of(wanted[0]).removesuffix("l")
    unread = [name for name in wanted if kind_of(name).removesuffix("l") != kind]
    if unread := unread + (rest if split == "train" else []):
        several = ",".join(map(str, [wanted[0], *unread[:3]]))
        raise ValueError(
            f"{folder}: expected files of one kind, each with its split in the name, got "
            f"{wanted[0].name} and {', '.join(name.name for name in unread[:3])}; list what to "
            f"read, with * for many files: [{several}]"
        )
    return wanted


def read_files(files: Iterable[Path]) -> tuple[list[str], list[bytes]]:
    """Return the columns and pickled rows of files.

    Pickled rows are a third as large as dicts, and each access gives a new dict.
    """
    columns, rows = dict[str, None](), list[bytes]()
    shown_at = time.monotonic() + QUIET
    for file in files:
        if kind_of(file) not in KINDS:
            raise ValueError(f"{file}: expected the extension {', '.join(KINDS)}, got {file.name}")
        try:
            for place, row in KINDS[kind_of(file)](file):
                if not isinstance(row, dict):
                    raise _fault(file, place, f"expected an object as row, got {row!r:.80}")
                columns.update(dict.fromkeys(row))
                rows.append(pickle.dumps(row))
                if time.monotonic() > shown_at and os.environ.get("RANK", "0") == "0":
                    print(f"reading {file}: {len(rows)} rows so far", file=sys.stderr, flush=True)
                    shown_at = float("inf")
        except RecursionError:
            raise _fault(file, f"after {len(rows)} rows", TOO_DEEP) from None
    return list(columns), rows


def kind_of(path: Path) -> str:
    """Return the suffix of a file name, without .gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def refuse_deep_rows(files: Iterable[Path]) -> None:
    """Raise ValueError for a row so deep that `datasets` would overflow its stack and crash."""
    for file in files:
        if kind_of(file) not in (".json", ".jsonl"):
            continue
        depth = 0
        with suppress(OSError, EOFError, zlib.error), _open(file) as lines:
            for number, line in enumerate(lines, 1):
                bare = JSON_STRING.sub(b"", line)
                opened = bare.count(b"[") + bare.count(b"{")
                if depth + opened <= DEEPEST:
                    depth += opened - bare.count(b"]") - bare.count(b"}")
                    continue
                for bracket in re.findall(rb"[\[{\]}]", bare):
                    depth += 1 if bracket in b"[{" else -1
                    if depth > DEEPEST:
                        raise _fault(file, f"line {number}", TOO_DEEP)


def _read_jsonl(path: Path) -> Iterator[Placed]:
    for number, line in _lines(path):
        yield from _values(path, number, line.rstrip("\n"))


def _read_json(path: Path) -> Iterator[Placed]:
    values = _values(path, 1, "".join(line for _, line in _lines(path)))
    first = list(islice(values, 2))
    if len(first) == 1:
        document = first[0][1]
        if isinstance(document, dict):
            lists = [name for name, value in document.items() if _are_objects(value)]
            if len(lists) == 1 and not _is_in_a_row(lists[0], document[lists[0]][0]):
                document = document[lists[0]]
        if isinstance(document, list):
            return ((f"row {index}", row) for index, row in enumerate(document))
    return chain(first, values)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, dict) for v in value)


def _is_in_a_row(name: str, first: dict[str, Any]) -> bool:
    """Return whether a list of objects, by its name and first object, has messages or tools."""
    return name == "tools" or "role" in first or {"from", "value"} <= first.keys()


def _values(path: Path, line: int, text: str) -> Iterator[Placed]:
    """Yield the JSON values of a text that begins at a line of the file."""
    end = 0
    start = _skip_blanks(text, 0)
    while start < len(text):
        line += text.count("\n", end, start)
        try:
            value, end = DECODER.raw_decode(text, start)
            if "\\ud" in text[start:end].lower():
                json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
        except ValueError as error:
            at = getattr(error, "pos", start)
            got = f"got {text[at : at + 60]!r} ({getattr(error, 'msg', error)})"
            line += text.count("\n", start, at)
            raise _fault(path, f"line {line}", f"expected JSON, {got}") from None
        yield f"line {line}", value
        line += text.count("\n", start, end)
        start = _skip_blanks(text, end)


def _skip_blanks(text: str, start: int) -> int:
    match = NOT_BLANK.search(text, start)
    return match.start() if match else len(text)


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(LONGEST)
    delimiter = "\t" if kind_of(path) == ".tsv" else ","
    reader = csv.reader((text for _, text in _lines(path)), delimiter=delimiter, strict=True)
    columns, line = list[str](), 1
    try:
        for cells in reader:
            if len(cells) < 2 and not "".join(cells).strip():
                pass  # a blank line
            elif not columns:
                columns = [name or f"Unnamed: {index}" for index, name in enumerate(cells)]
                if len(set(columns)) < len(columns):
                    raise _fault(path, f"line {line}", f"expected different columns, got {columns}")
            elif len(cells) > len(columns):
                counts = f"expected {len(columns)} cells, got {len(cells)}"
                raise _fault(path, f"line {line}", counts)
            else:
                cells += [""] * (len(columns) - len(cells))
                yield f"line {line}", dict(zip(columns, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise _fault(path, f"line {line}", f"expected comma-separated cells ({error})") from None


def _read_parquet(path: Path) -> Iterator[Placed]:
    import datasets  # takes a second
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(10_000):
            table = pyarrow.Table.from_batches([batch])
            maps = [field.name for field in table.schema if "map<" in str(field.type)]  # from Spark
            pairs = table.select(maps).to_pylist() if maps else repeat({})
            rows = datasets.Dataset(table.drop_columns(maps)).to_list()  # decodes JSON cells
            for row, cells in zip(rows, pairs, strict=False):
                yield "", {name: {**row, **cells}[name] for name in table.column_names}
    except pyarrow.ArrowException as error:
        raise OSError(error) from None


KINDS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                is_utf16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                byte = f"the byte {line[error.start]:#x} (latin-1?)"
                raise ValueError(
                    f"{path}, line {number}: expected UTF-8, got {'UTF-16' if is_utf16 else byte}; "
                    "save the file as UTF-8"
                ) from None
            yield number, text


def _open(path: Path) -> IO[bytes]:
    return (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb")


def _fault(path: Path, place: str, text: str) -> ValueError:
    return ValueError(f"{path}, {place}: {text}; correct or remove the row")
