"""Write, hash and list files: texts replaced atomically, folders with a manifest. Torch-free.

A manifest lists every file of a folder with its size and sha256, so that a damaged folder is found.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "MANIFEST.json"
SMALL = 1 << 20  # bytes; files up to this size are hashed even in a cheap check


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


def read_manifest(
    folder: Path, *, full: bool = False, share: slice = slice(None)
) -> dict[str, Any] | None:
    """Return the manifest of an intact folder; None if it is absent, incomplete or damaged.

    If `full`, a file that it does not list is damage too, except hidden files (.DS_Store).
    `share`: the slice of the tensor files that this process hashes.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        tensors = sorted(name for name in files if name.endswith(".safetensors"))
        mine = {*files} - {*tensors} | {*tensors[share]} if full else set()
        sound = all(_is_sound(folder / n, entry, full=n in mine) for n, entry in files.items())
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


def hash_files(paths: Iterable[Path], folder: Path) -> dict[str, Any]:
    """Flush files to disk; return their entries in the manifest of the folder."""
    files = {}
    for path in sorted(paths):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        flush(path)
    return files


def write_manifest(
    folder: Path, about: dict[str, Any], hashed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """List every file of a finished folder with its sha256, flush all to disk, return the list.

    hashed: entries of the files that other processes wrote.
    """
    make_readable(folder)
    files = dict(hashed or {})
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files |= hash_files((p for p in paths if p.relative_to(folder).as_posix() not in files), folder)
    manifest = {"about": about, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush(folder / MANIFEST)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        flush(path)
    return manifest


def make_readable(place: Path) -> None:
    """Set the umask's mode on a file or a folder's files; safetensors writes private files."""
    mask = os.umask(0o077)  # the only way to read it
    os.umask(mask)
    for path in (place, *place.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
