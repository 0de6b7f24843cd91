"""Build folders once and keep them in the user's cache: converted models, warmed-up policies.

A folder is built under a temporary name, listed in a manifest (size and sha256 of every file),
flushed to disk and renamed, under a lock: an interrupted build leaves no valid folder, and a
second process waits for the first. Torch-free.

Left out on purpose: eviction. A folder's name encodes its source; old folders may be deleted.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

MANIFEST = "MANIFEST.json"
SMALL = 1 << 20  # bytes; files up to this size are hashed even in a cheap check


def cache_dir() -> Path:
    """Return $LEASH_CACHE, else $XDG_CACHE_HOME/leash, else ~/.cache/leash; it need not exist."""
    folder, home = os.environ.get("LEASH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(folder or f"{home or '~/.cache'}/leash").expanduser().absolute()


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode("utf-8", "replace"))  # lone surrogates of a model's output
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # after a failed write


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_path(path: Path, suffixes: Sequence[str] | None = None) -> str:
    """Return the sha256 of a file, or over the names and files of a folder."""
    if path.is_file():
        return sha256_file(path)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    files = [p for p in files if suffixes is None or p.suffix in suffixes]
    return sha256_of_texts([f"{p.relative_to(path)} {sha256_file(p)}" for p in files])


def sha256_of_texts(texts: Sequence[str]) -> str:
    """Return the sha256 of lines."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


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


def read_manifest(folder: Path, *, full: bool = False) -> dict[str, Any] | None:
    """Return the manifest of an intact folder; None if it is absent, incomplete or damaged.

    With `full`, a file that it does not list is damage too, except hidden ones (.DS_Store).
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        sound = all(_is_sound(folder / name, entry, full=full) for name, entry in files.items())
        if full:
            paths = (path for path in folder.rglob("[!.]*") if not path.is_dir())
            present = {path.relative_to(folder).as_posix() for path in paths}
            sound = sound and present <= {MANIFEST, *files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if sound and "about" in manifest else None


def _is_sound(path: Path, entry: dict[str, Any], *, full: bool) -> bool:
    size = path.stat().st_size
    hashed = full or size <= SMALL
    return size == entry["bytes"] and (not hashed or sha256_file(path) == entry["sha256"])


def make_readable(place: Path) -> None:
    """Set the umask's mode on a file or a folder's files; safetensors writes private files."""
    mask = os.umask(0o077)  # the only way to read it
    os.umask(mask)
    for path in (place, *place.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def write_manifest(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """List every file of a finished folder with its sha256, flush all to disk, return the list."""
    make_readable(folder)
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        flush(path)
    manifest = {"about": about, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush(folder / MANIFEST)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        flush(path)
    return manifest


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
