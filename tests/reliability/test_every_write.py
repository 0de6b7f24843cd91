"""A kill, or a full disk, at each write of a run: it goes on as if nothing had happened.

The writes are those that a run makes, counted while it makes them: by file and by what is done to
it. Of each class the first and the last have their turn, in a fork of this process. The page is
drawn by another process (tests/test_live_page.py), config.yaml is the parent's
(tests/test_launch.py).
"""

import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from faulty import at_write, be_worker, forked, full, kill, listed, load_what
from runs import lines, metrics
from small_faults import TINY

pytestmark = pytest.mark.reliability
PARENTS = {"config.yaml", "report.html"}


@pytest.fixture(scope="module")
def config(cache) -> bytes:
    from conf.compose import compose_checked, set_up

    set_up()
    words = [*TINY, "trainer.num_iterations=3", "checkpoint.keep_last=1", "policy.device=cpu"]
    words += ["+env.task.num_rows=40", "eval.every=2"]
    saved = compose_checked([word for word in words if word != "trainer.num_iterations=6"])
    return yaml.safe_dump(saved, sort_keys=False).encode()


def go_on(config: bytes, folder: Path) -> int:
    """Be the parent and then the worker of a run that goes on."""
    from trainer.runs.launch import prepare

    prepare(yaml.safe_load(config), folder, compose=lambda _: {})
    return be_worker(config, folder, str(folder))


def left_by(folder: Path) -> dict:
    """Return what counts of a run: what it measured, said and learnt, to the bit.

    Of checkpoints the newest: a run that ends between a save and its pruning leaves one more.
    """
    weights = [path for path in _kept(folder) if path.suffix == ".safetensors"]
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
    return {
        "metrics": metrics(folder),
        "transcripts": lines(folder / "transcripts.jsonl"),
        "files": sorted(str(path.relative_to(folder)) for path in _kept(folder)),
        **{str(path.relative_to(folder)): sha for path, sha in files.items()},
    }


def _kept(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in PARENTS]
    older = sorted((folder / "checkpoints").glob("iteration_*"))[:-1]
    return [path for path in files if not any(there in path.parents for there in older)]


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """Return a run that nothing happened to, and how often it wrote what."""
    folder = tmp_path_factory.mktemp("straight")

    def count() -> int:
        made = listed(folder / "run")
        code = be_worker(config, folder / "run")
        (folder / "made").write_text("".join(f"{name}\t{place}\n" for name, place in [*made]))
        return code

    load_what(lambda: be_worker(config, folder / "first"), folder / "modules")
    assert forked(count) == 0
    made = [tuple(line.split("\t")) for line in (folder / "made").read_text().splitlines()]
    return left_by(folder / "run"), Counter(made)


def turns(made: Counter) -> list[tuple]:
    """List kind and number of the writes that have a turn: of each class the first and the last.

    The small files of a model are a class, what is removed of an old checkpoint is one, and so is a
    status that says the same of another iteration. How often a status is written depends on the
    time, but not what is new in it: of what it says between its first and last, its renaming is
    enough.
    """
    classes: dict[tuple[str, str], list[tuple]] = {}
    for (name, place), count in sorted(made.items()):
        if Path(place).name not in PARENTS:
            first, status = 1 if name != "fsync" else count, "status.json" in place
            numbers = (1, 1) if status else (first, count)
            if not status or name == "rename" or " None" in place:
                turns = [((name, place), number) for number in numbers]
                classes.setdefault((name, _class_of(place)), []).extend(turns)
    return [turn for found in classes.values() for turn in sorted({found[0], found[-1]})]


def _class_of(place: str) -> str:
    place = re.sub(r"(\.trash-[^/]+)/.+", r"\1/*", place)
    place = re.sub(r"model/[\w.]+\.(json|jinja)$", "model/*", place)
    return re.sub(r" \d+ (?!None)", " ", place)


def test_every_file_of_a_run_has_its_turn(straight):
    """Of those that are left, and nobody has listed them by hand."""
    whole, made = straight
    written = {re.sub(r"^\.|\*| .*", "", Path(place).name) for _, place in made}
    lost = {re.sub(r"\d+", "", Path(file).name) for file in whole["files"]} - written
    rust = (".safetensors", "tokenizer.json")  # of which only the manifest is written in Python
    assert not {name for name in lost if not name.endswith(rust)}
    assert {"status.json", "metrics.jsonl", "state.json", "MANIFEST.json"} <= written
    said = {place.split()[-1] for _, place in made if "status.json" in place}
    assert {"evaluate", "collect", "score", "update", "save", "end"} <= said


@pytest.mark.parametrize("fault", [kill, full])
def test_a_run_goes_on_to_the_bit_from_a_fault_at_each_kind_of_write(
    fault, config, straight, tmp_path
):
    whole, made = straight
    fell = []
    for turn, (kind, number) in enumerate(turns(made)):
        folder = tmp_path / str(turn) / "run"
        folder.parent.mkdir()

        def faulty(folder: Path = folder, kind=kind, number: int = number) -> int:
            at_write(folder, kind, number, fault)
            return be_worker(config, folder)

        code = forked(faulty)
        again = forked(lambda folder=folder: go_on(config, folder))
        if again or left_by(folder) != whole:
            different = [key for key, value in left_by(folder).items() if value != whole.get(key)]
            fell.append((kind, number, code, again, different))
        if fault is kill and code != -9:
            fell.append((kind, number, code, "the kill had no turn"))
    assert not fell, "\n".join(map(str, fell))
