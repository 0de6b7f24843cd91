"""What the cache does with interrupted, damaged and shared folders."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

from policies.cache import build_once
from policies.files import read_manifest


def two_files(folder: Path) -> None:
    (folder / "small.txt").write_text("small")
    (folder / "sub").mkdir()
    (folder / "sub" / "large.bin").write_bytes(b"x" * (2 << 20))


def flip(path: Path) -> None:
    """Change a byte and keep size and time."""
    data, time = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    data[0] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(time, time))


@pytest.mark.parametrize(
    ("damage", "full"),
    [
        (lambda folder: flip(folder / "small.txt"), False),
        (lambda folder: flip(folder / "sub" / "large.bin"), True),
        (lambda folder: (folder / "sub" / "large.bin").write_bytes(b"x"), False),
        (lambda folder: (folder / "MANIFEST.json").write_text("{"), False),
    ],
    ids=["flip", "flip-large", "cut", "torn-manifest"],
)
def test_a_sound_folder_is_reused_and_a_damaged_one_built_anew(tmp_path, damage, full):
    folder = tmp_path / "a"
    manifest = build_once(folder, two_files)
    assert manifest["files"]["small.txt"]["sha256"] == hashlib.sha256(b"small").hexdigest()
    inode = folder.stat().st_ino
    assert build_once(folder, two_files) == manifest
    assert folder.stat().st_ino == inode
    damage(folder)
    assert read_manifest(folder, full=full) is None
    build_once(folder, two_files, full=full)
    assert read_manifest(folder, full=True) is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.lock", "a"]


BUILDER = """
import os, sys, time
from pathlib import Path
from policies.cache import build_once
place, how = Path(sys.argv[1]), sys.argv[2]
def build(folder):
    with open(place.parent / "builds.txt", "a") as log:
        log.write("x")
    (folder / "a.txt").write_text("a")
    if how == "die":
        os._exit(9)
    time.sleep(0.3)
build_once(place, build)
"""


def start(place: Path, how: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(place), how], cwd=ROOT)


def test_a_killed_build_counts_for_nothing_and_of_concurrent_builders_one_builds(tmp_path):
    assert start(tmp_path / "a", "die").wait(60) == 9
    assert not (tmp_path / "a").exists()
    jobs = [start(tmp_path / "a", "live") for _ in range(3)]
    assert [job.wait(60) for job in jobs] == [0] * 3
    assert (tmp_path / "builds.txt").read_text() == "xx"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.lock", "a", "builds.txt"]
