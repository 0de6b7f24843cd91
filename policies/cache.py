"""Build folders once and keep them in the user's cache: converted models, warmed-up policies.

A folder is built under a temporary name, listed in a manifest (size and sha256 of every file),
flushed to disk and renamed, under a lock: an interrupted build leaves no valid folder, and a
second process waits for the first. Nothing is removed; users may delete old folders. Torch-free.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from policies.files import flush, read_manifest, write_manifest


def cache_dir() -> Path:
    """Return $LEASH_CACHE, else $XDG_CACHE_HOME/leash, else ~/.cache/leash; it need not exist."""
    folder, home = os.environ.get("LEASH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(folder or f"{home or '~/.cache'}/leash").expanduser().absolute()


def build_once(
    folder: Path, build: Callable[[Path], dict[str, Any] | None], *, full: bool = False
) -> dict[str, Any]:
    """Build `folder` by `build(empty folder)` unless an intact one exists; return its manifest.

    The manifest stores the result of `build` under "about". A damaged folder is built again.
    The check compares sizes and hashes small files; `full` hashes all files.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "words"
    >>> def build(folder):
    ...     (folder / "a.txt").write_text("hello")
    ...     return {"language": "en"}
    >>> build_once(place, build)["about"], sorted(p.name for p in place.iterdir())
    ({'language': 'en'}, ['MANIFEST.json', 'a.txt'])
    """
    manifest = read_manifest(folder, full=full)
    if manifest is not None:
        return manifest
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o666)
        lock.acquire()
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache {folder.parent} ({error.strerror}); set LEASH_CACHE"
        ) from error
    work = folder.with_name(f".{folder.name}.tmp")
    try:
        manifest = read_manifest(folder, full=full)  # another process may have built it meanwhile
        if manifest is None:
            for stale in (work, folder):
                shutil.rmtree(stale, ignore_errors=True)
            work.mkdir()
            manifest = write_manifest(work, build(work) or {})
            work.rename(folder)
            flush(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.release()
    return manifest


def save_on_any_rank(model: Any, folder: Path) -> None:
    """Write a model on any rank; transformers alone would write on rank 0 only."""
    vars(model)["should_save_on_this_rank"] = lambda is_main_process: True
    model.save_pretrained(folder)
