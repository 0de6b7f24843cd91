"""A damaged run folder and the real command: one line, or passed over and resumed to the bit.

Each case begins with a run that was killed between iterations 4 and 6 of 6.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from runs import lines, metrics, train
from small_faults import TINY, one_error

from policies.cache import write_manifest

pytestmark = pytest.mark.reliability
NAME = "iteration_{:06d}".format


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory) -> Path:
    """Return the folder of a run that nothing happened to, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = ["eval.every=2", "checkpoint.keep_last=9", f"output_dir={folder}"]
    done = train(*TINY, *words)
    assert done.code == 0, done.text
    return folder


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """Return a copy of it as a kill before its end has left it."""
    folder = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / NAME(6))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "iteration": 5}))
    return folder


def left_by(folder: Path) -> dict:
    weights = sorted((folder / "model").glob("*.safetensors"))
    said = (folder / "transcripts.jsonl",)
    shas = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]
    return {"metrics": metrics(folder), "said": [*map(lines, said)], "weights": shas}


def copied(folder: Path, number: int, **state: object) -> Path:
    """Copy iteration 4 as another one, with other things in its state; its hashes are right."""
    there = shutil.copytree(folder / NAME(4), folder / NAME(number))
    about = json.loads((there / "MANIFEST.json").read_text())["about"]
    (there / "MANIFEST.json").unlink()
    said = json.loads((there / "state.json").read_text()) | {"iteration": number, **state}
    (there / "state.json").write_text(json.dumps(said))
    write_manifest(there, about)
    return there


def test_what_only_looks_like_a_checkpoint_is_passed_over(killed, whole, tmp_path):
    """All at once: each is newer than the sound one, so each is looked at first."""
    folder = killed / "checkpoints"
    (folder / NAME(90)).write_text("a file")
    (folder / NAME(91)).symlink_to(tmp_path / "gone")
    (folder / NAME(92)).mkdir()
    (folder / NAME(93)).mkdir()
    (folder / NAME(93) / "MANIFEST.json").write_text('{"about": {}, "files": {}}')
    more = copied(folder, 94) / "model" / "zzz.safetensors"
    shutil.copy(whole / "model" / "model.safetensors", more)
    (copied(folder, 95) / "state.json").write_text("{'torn")
    (copied(folder, 96) / "optimizer.safetensors").write_bytes(b"\0" * 99)
    (copied(folder, 97) / "MANIFEST.json").write_text("[]")
    copied(folder, 98, iteration=1)
    shutil.copytree(folder / NAME(4), folder / NAME(10**6))
    (folder / f".trash-{NAME(2)}").mkdir()
    (folder / f".part-{NAME(6)}" / "model").mkdir(parents=True)
    done = train(f"resume={killed}")
    assert done.code == 0, done.text
    (line,) = [line for line in done.text.splitlines() if "resumed" in line]
    skipped = [NAME(n) for n in (10**6, 98, 97, 96, 95, 94, 93, 92, 91, 90)]
    assert f"from iteration 4, skipped damaged {', '.join(skipped)}" in line
    assert left_by(killed) == left_by(whole)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [NAME(n) for n in (2, 4, 6)], "the others have made room"


def test_a_checkpoint_of_a_later_leash_is_one_line_and_stays(killed):
    copied(killed / "checkpoints", 5, format=2)
    done = train(f"resume={killed}")
    assert done.code in (1, 2)
    assert f"{NAME(5)} is of format 2, this leash reads 1; go on with" in one_error(done.text)
    assert (killed / "checkpoints" / NAME(5)).is_dir()


def test_a_torn_status_and_noise_among_the_metrics_are_passed_over(killed, whole):
    (killed / "status.json").write_text('{"state": "runn')
    path = killed / "metrics.jsonl"
    noise = b'\0\0\n\xff\xfe\n[1]\n{\nNaN\n{"progress/iteration": "2"}\n{"a": 1}\n'
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*kept[:2], noise, *kept[2:], b'{"progress/iter']))
    done = train(f"resume={killed}")
    assert done.code == 0, done.text
    assert left_by(killed) == left_by(whole)


def test_checkpoints_that_lie_elsewhere_by_a_link_are_gone_on_from(killed, whole, tmp_path):
    """And pruned: what a link leads to is not this run's to remove."""
    folder = killed / "checkpoints"
    for number in (2, 4):
        (folder / NAME(number)).rename(tmp_path / NAME(number))
        (folder / NAME(number)).symlink_to(tmp_path / NAME(number))
    done = train(f"resume={killed}", "checkpoint.keep_last=1")
    assert done.code == 0, done.text
    assert left_by(killed) == left_by(whole)
    assert [path.name for path in folder.iterdir()] == [NAME(6)]
    assert (tmp_path / NAME(2) / "state.json").is_file()


@pytest.mark.parametrize("text", ["{'torn", "{}"])
def test_a_damaged_one_is_never_kept_as_the_best(killed, whole, text):
    (killed / "checkpoints" / NAME(2) / "state.json").write_text(text)
    done = train(f"resume={killed}", "checkpoint.keep_last=1", "checkpoint.keep_best=true")
    assert done.code == 0, done.text
    assert left_by(killed) == left_by(whole)
    left = {path.name for path in (killed / "checkpoints").iterdir()}
    assert NAME(6) in left
    assert NAME(2) not in left
