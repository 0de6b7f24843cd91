"""A kill, or a full disk, at each write of a mode: what has its final name is whole."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml
from faulty import at_write, be_worker, forked, full, kill, listed, load_what
from small_faults import TINY

pytestmark = pytest.mark.reliability


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory) -> Path:
    """Return the folder of a finished run."""
    from conf.compose import compose_checked, set_up

    set_up()
    folder = tmp_path_factory.mktemp("trained")
    words = ["+env.task.num_rows=40", "policy.device=cpu"]
    config = yaml.safe_dump(compose_checked([*TINY, *words])).encode()
    load_what(lambda: be_worker(config, folder / "run"), folder / "modules")
    return folder / "run"


def settings(*words: str) -> bytes:
    """Return what the parent gives to the worker of a mode."""
    from runs import asked

    return yaml.safe_dump(asked(words)).encode()


def writes(config: bytes, aside: Path, below: Path) -> Counter:
    """Return how often a mode writes what below a folder, nothing happening to it."""
    told = aside.with_name("told")

    def count() -> int:
        made = listed(below)
        code = be_worker(config, aside)
        told.write_text(json.dumps([*made]))
        return code

    assert forked(count) == 0, [path.read_text() for path in aside.glob("errors/*")]
    return Counter(map(tuple, json.loads(told.read_text())))


def held_by(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("fault", [kill, full])
@pytest.mark.parametrize("mode", ["export", "evaluate"])
def test_what_a_mode_writes_is_there_whole_or_not_at_all(mode, fault, run, tmp_path):
    target = tmp_path / "out" / "model"
    config = settings(f"mode={mode}", f"resume={run}", f"output_dir={target}")
    made = writes(config, tmp_path / "aside", target.parent)
    whole, names = held_by(target), [path.name for path in target.parent.iterdir()]
    assert len(whole) >= (1 if mode == "evaluate" else 7)
    fell = []
    for kind, number in sorted(made.items()):
        shutil.rmtree(target.parent, ignore_errors=True)

        def faulty(kind=kind, number: int = number) -> int:
            at_write(target.parent, kind, number, fault)
            return be_worker(config, tmp_path / "aside")

        code, left = forked(faulty), held_by(target)
        visible = {name: data for name, data in left.items() if name[0] != "."}
        if visible and visible != whole:
            fell.append((kind, number, code, sorted(left)))
        if fault is kill and code != -9:
            fell.append((kind, number, code, "the kill had no turn"))
        if fault is full and [*target.parent.glob(".part*")]:
            fell.append((kind, number, code, "what it had written is still there"))
    assert not fell, "\n".join(map(str, fell))
    shutil.rmtree(target, ignore_errors=True)
    assert forked(lambda: be_worker(config, tmp_path / "aside")) == 0, "it can be asked again"
    assert held_by(target) == whole
    assert [path.name for path in target.parent.iterdir()] == names, "of the kills nothing stays"


def test_a_preflight_writes_nothing_where_the_run_would(run, tmp_path):
    """So a kill at any point of it leaves nothing there."""
    there = tmp_path / "there"
    words = [word for word in TINY if "num_iterations" not in word]
    config = settings(*words, "preflight=true", "policy.device=cpu", f"output_dir={there}/run")
    made = writes(config, tmp_path / "aside" / "it", tmp_path)
    outside = {place for _, place in made if not place.startswith(("aside", "told"))}
    assert not outside
    assert not there.exists()
