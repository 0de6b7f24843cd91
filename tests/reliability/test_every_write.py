"""A kill, or a full disk, at each write of a run: it goes on as if nothing had happened.

The writes are those that a run makes, counted while it makes them: by file and by what is done to
it. Each has its turn once, in a fork of this process. The page is drawn by another process
(tests/test_live_page.py), config.yaml is the parent's (tests/test_launch.py).
"""

import hashlib
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from faulty import at_call, calls, forked, full, kill
from runs import lines, metrics
from small_faults import TINY

pytestmark = pytest.mark.reliability
PARENTS = {"config.yaml", "report.html"}


@pytest.fixture(scope="module")
def config(cache) -> bytes:
    from conf.compose import compose_checked
    from conf.start import set_up

    set_up()
    words = [*TINY, "trainer.num_iterations=3", "checkpoint.keep_last=1", "policy.device=cpu"]
    saved = compose_checked([word for word in words if word != "trainer.num_iterations=6"])
    return yaml.safe_dump(saved).encode()


def work(config: bytes, folder: Path, *, resume: bool = False) -> int:
    """Be the worker of a run."""
    import train
    from trainer.reports import live

    live.LivePage._start = lambda self: None  # another process's work, and what takes longest
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_bytes(config)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it ends with this process)
    return train.worker(str(folder / "config.yaml"), str(folder), *[str(folder)] * resume)


def left_by(folder: Path) -> dict:
    """Return what counts of a run: what it measured, said and learnt, to the bit."""
    weights = [*folder.rglob("*.safetensors")]
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
    return {
        "metrics": metrics(folder),
        "transcripts": lines(folder / "transcripts.jsonl"),
        "files": sorted(str(path.relative_to(folder)) for path in _kept(folder)),
        **{str(path.relative_to(folder)): sha for path, sha in files.items()},
    }


def _kept(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in PARENTS]


def kinds_of(calls: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], int]:
    """Return the number of the last call of each kind: what is done, and to which file."""
    out = {}
    for number, (name, path) in enumerate(calls, start=1):
        if str(folder) in path and Path(path).name not in PARENTS:
            place = os.path.relpath(path, folder)
            out[name, re.sub(r"\.\d+\.tmp|\d+", "*", place)] = number
    return out


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """Return a run that nothing happened to, and its calls."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    told = folder.with_name("calls")

    def count() -> int:
        with calls() as made:
            code = work(config, folder)
        told.write_text("".join(f"{name}\t{path}\n" for name, path in made))
        return code

    assert forked(count) == 0
    made = [tuple(line.split("\t")) for line in told.read_text().splitlines()]
    return left_by(folder), kinds_of(made, folder)


def test_every_file_of_a_run_has_its_turn(straight):
    """Of those that are left, and nobody has listed them by hand."""
    whole, kinds = straight
    written = {re.sub(r"^\.|\*", "", Path(place).name) for _, place in kinds}
    lost = {re.sub(r"\d+", "", Path(file).name) for file in whole["files"]} - written
    rust = (".safetensors", "tokenizer.json")  # of which only the manifest is written in Python
    assert not {name for name in lost if not name.endswith(rust)}
    assert {"status.json", "metrics.jsonl", "state.json", "MANIFEST.json"} <= written


@pytest.mark.parametrize("fault", [kill, full])
def test_a_run_goes_on_to_the_bit_from_a_fault_at_each_kind_of_write(
    fault, config, straight, tmp_path
):
    whole, kinds = straight
    fell = []
    for turn, ((name, place), number) in enumerate(sorted(kinds.items())):
        folder = tmp_path / str(turn) / "run"
        folder.parent.mkdir()

        def faulty(folder: Path = folder, number: int = number) -> int:
            at_call(number, fault)
            return work(config, folder)

        code = forked(faulty)
        again = forked(lambda folder=folder: work(config, folder, resume=True))
        if again or left_by(folder) != whole:
            different = [key for key, value in left_by(folder).items() if value != whole.get(key)]
            fell.append((name, place, code, again, different))
    assert not fell, "\n".join(map(str, fell))
