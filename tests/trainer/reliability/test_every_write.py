"""A kill, or a full disk, at each kind of write of a run, an export and an evaluation.

The writes are those that happen, counted while they happen; of each kind the first and the last
have their turn, in a fork of this process. A run goes on as if nothing had happened; what a mode
writes is there whole or not at all. Another process draws the page;
config.yaml is the parent's (tests/trainer/runs/test_launch.py).
"""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.faults import TINY, at_call, be_worker, forked, full, kill, list_writes, preload
from support.runs import asked, lines, metrics

pytestmark = pytest.mark.reliability
OF_THE_PARENT = {"config.yaml", "report.html"}


def config_of(*words: str) -> bytes:
    """Return what the parent hands to a worker."""
    return yaml.safe_dump(asked(words), sort_keys=False).encode()


def go_on(config: bytes, folder: Path) -> int:
    """Be the parent and then the worker of a run that goes on."""
    from trainer.runs.launch import prepare

    prepare(yaml.safe_load(config), folder, compose=lambda _: {}, worker=lambda *_: 0)
    return be_worker(config, folder, str(folder))


def turns(work: Callable[[], int], below: Path) -> list[tuple]:
    """Return kind and number of the first and last write of each kind that work makes."""
    path = below.with_name("writes")

    def count() -> int:
        kinds = list_writes(below)
        code = work()
        path.write_text("".join(f"{name}\t{place}\n" for name, place in [*kinds]))
        return code

    assert forked(count) == 0
    found = Counter(tuple(line.split("\t")) for line in path.read_text().splitlines())
    kept = {kind: n for kind, n in found.items() if Path(kind[1]).name not in OF_THE_PARENT}
    return sorted(
        {(kind, n) for kind, last in kept.items() for n in (1, 1 if "status" in kind[1] else last)}
    )


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def left_by(folder: Path) -> list:
    """Return what counts of a run: what it measured, said and learnt, to the bit.

    Of checkpoints the newest: a run that ends between a save and its pruning leaves one more.
    """
    newest = max((folder / "checkpoints").glob("iteration_*"))
    kept = [files_of(at) for at in (newest, folder / "model")]
    weights = [{k: v for k, v in files.items() if k.endswith("safetensors")} for files in kept]
    names = {path.name for path in folder.iterdir()} - OF_THE_PARENT
    rows = [metrics(folder), lines(folder / "transcripts.jsonl")]
    return [newest.name, rows, names, *map(sorted, kept), weights]


@pytest.fixture(scope="module")
def config(cache) -> bytes:
    words = ("checkpoint.keep_last=1", "policy.device=cpu", "+env.task.num_rows=40")
    return config_of(*TINY, *words, "eval.every=2")


@pytest.fixture(scope="module")
def run(config, tmp_path_factory) -> Path:
    """Return the folder of a run that nothing happened to; what it needs is loaded."""
    folder = tmp_path_factory.mktemp("run")
    preload(lambda: be_worker(config, folder / "run"), folder / "modules")
    return folder / "run"


@pytest.mark.parametrize("fault", [kill, full])
def test_a_run_goes_on_to_the_bit_from_a_fault_at_each_kind_of_write(fault, config, run, tmp_path):
    folder, wrong = tmp_path / "run", []
    for kind, number in turns(lambda: be_worker(config, folder), folder):
        shutil.rmtree(folder, ignore_errors=True)

        def faulty(kind=kind, number: int = number) -> int:
            at_call(number, fault, folder, kind)
            return be_worker(config, folder)

        code = forked(faulty)
        again = forked(lambda: go_on(config, folder))
        if again or left_by(folder) != left_by(run) or (fault is kill and code != -9):
            wrong.append((kind, number, code, again))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("fault", [kill, full])
@pytest.mark.parametrize(("mode", "files"), [("export", 7), ("evaluate", 1)])
def test_what_a_mode_writes_is_there_whole_or_not_at_all(mode, files, fault, run, tmp_path):
    target, aside = tmp_path / "out" / "model", tmp_path / "aside"
    config, wrong = config_of(f"mode={mode}", f"resume={run}", f"output_dir={target}"), []
    every = turns(lambda: be_worker(config, aside), target.parent)
    whole = files_of(target.parent)
    assert len(whole) >= files
    for kind, number in every:
        shutil.rmtree(target.parent, ignore_errors=True)

        def faulty(kind=kind, number: int = number) -> int:
            at_call(number, fault, target.parent, kind)
            return be_worker(config, aside)

        code, left = forked(faulty), files_of(target)
        visible = {f"model/{name}": data for name, data in left.items() if name[0] != "."}
        remains = fault is full and [*target.parent.glob(".part*")]
        if (visible and visible != whole) or remains or (fault is kill and code != -9):
            wrong.append((kind, number, code, sorted(left)))
    assert not wrong, "\n".join(map(str, wrong))
    shutil.rmtree(target, ignore_errors=True)
    assert forked(lambda: be_worker(config, aside)) == 0, "it can be asked again"
    assert files_of(target.parent) == whole, "of the kills nothing stays"
