"""The saved configuration of a run that goes on or that a mode is for, with what may change."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from omegaconf import OmegaConf

from conf import names, schema
from conf.compose import compose_raw, settle
from conf.interpolations import bounded, secrets_named_in
from trainer.runs.find import find_jobs, has_weights, is_running
from trainer.runs.nodes import sent_keys
from trainer.runs.run_files import bomb_in, dig, is_sweep
from trainer.runs.saved_configs import as_today

KINDS: dict[str, Any] = {"int": int, "float": int | float, "bool": bool, "str": str, "dict": dict}
BESIDE = {"experiment", "kept_in", "trains_first"}  # of a warm-up, of a preflight
RESUMABLE = ("trainer.num_iterations", "trainer.stop_at", "trainer.patience", "trainer.overlap")
RESUMABLE += ("tracker", "launch", "checkpoint", "eval", "policy.vllm")

SERVER, HERE = "policy.vllm.url", ("localhost", "127.0.0.1", "::1")


@bounded()
def load_for_resume(
    folder: str, words: Sequence[str], *, mode: str = "train", may=RESUMABLE, **instead: Any
) -> dict[str, Any]:
    """Return a run's saved configuration, `instead` in it, with overrides that `may` change.

    allow_targets is not taken from it: it counts on the command line alone, as do the keys that are
    sent to servers, and the server that samples: they are repeated there.
    """
    path, typed = Path(folder) / "config.yaml", words
    if "${" in str(folder):
        raise ValueError(f"resume={folder}: expected a folder without ${{ in its name; rename it")
    if not path.is_file():
        raise ValueError(f"resume={folder}: {no_run(Path(folder))}")
    may, saved = (*may, "allow_targets"), read_saved(path)
    sent = dict(told_again(saved))
    said = {key: value.strip("'\"") for key, _, value in (word.partition("=") for word in words)}
    names_of = {key: key.lstrip("+") for key in said}
    looked_up = {n: dig(saved, *n.split(".")) for k, n in names_of.items() if "${" in said[k]}
    again = [k for k, n in names_of.items() if (looked_up | sent).get(n) == said[k]]  # as it is
    words = [word for word in words if word.partition("=")[0] not in again]
    changed = [word.partition("=")[0].lstrip("+~") for word in words]
    for key in changed:
        if not any(key == name or key.startswith(f"{name}.") for name in may):
            when, allowed = "on resume" if mode == "train" else f"in mode={mode}", ", ".join(may)
            raise ValueError(f"{key} cannot change {when}, only {allowed}; start a new run for it")
    saved = OmegaConf.create(saved)
    if "tracker" not in changed:  # its keys are those of the saved one
        kind = saved.tracker._target_.rpartition(".")[2].removesuffix("Tracker").lower()
        known = (names.FOLDER / "tracker" / f"{kind}.yaml").is_file()
        words = [f"tracker={kind if known else 'jsonl'}", *words]
    fresh = compose_raw(words)
    saved.allow_targets = False  # the folder may be anybody's
    for key in changed:
        OmegaConf.update(saved, key, OmegaConf.select(fresh, key), merge=False)
    saved.update({"resume": str(folder), "mode": mode, "preflight": False, **instead})
    known = tuple(f"{key.lstrip('+')}." for key in (*again, *changed))
    for place, text in [] if saved.allow_targets else told_again(OmegaConf.to_container(saved)):
        itself = place == SERVER and mode in ("chat", "export")  # the policy speaks, no server
        if f"{place}.".startswith(known) or itself:
            continue
        told = "server gets the prompts" if place == SERVER else "key is sent to a server"
        what = f"{path} says which {told}; if the run is yours, repeat it"
        raise ValueError(f"{what}: '{place}={text}' (give nothing to somebody else's)")
    with secrets_named_in(typed):
        return settle(saved)


def told_again(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield place and text of what a run folder says and whoever goes on with it has to repeat.

    Secrets, and the server that gets the prompts, unless it is on this machine.

    >>> dict(told_again({"policy": {"vllm": {"url": "http://h:8000"}}}))
    {'policy.vllm.url': 'http://h:8000'}
    """
    yield from sent_keys(tree)
    url = ((tree.get("policy") or {}).get("vllm") or {}).get("url")
    if isinstance(url, str) and ("${" in url or urlsplit(url).hostname not in HERE):
        yield SERVER, url


def no_run(folder: Path) -> str:
    """Return why a folder without a config.yaml cannot be gone on with."""
    if folder.is_file():
        return f"expected the folder of a run, got a file; give resume={folder.parent}"
    jobs = find_jobs(folder) if is_sweep(folder) else []
    if jobs:
        return f"expected one run, got a sweep; give one of its jobs, resume='{jobs[0]}'"
    if newest := newest_run(folder):
        return f"expected one run, got a folder of runs; the newest is resume='{newest}'"
    return "expected a run folder with a config.yaml, got none"


def newest_run(folder: Path) -> Path | None:
    """Return the run below a folder that started last, None if there is none."""
    return next(iter(_newest_first(folder)), None)


def last_run(folder: Path, *, trained: bool = False) -> tuple[Path | None, list[Path]]:
    """Return the run that resume=last means, and those that started later but cannot be meant.

    It is the newest; while that is running, or left nothing of what is to be `trained`, the newest
    that has ended and left weights, if any.
    """
    jobs = _newest_first(folder)
    running = [job for job in jobs if is_running(job)]
    ended = next((job for job in jobs if job not in running and has_weights(job)), None)
    if ended is None or not (jobs[0] in running or trained):
        return (jobs[0] if jobs else None), []
    later = jobs[: jobs.index(ended)]
    return ended, later if trained else [job for job in later if job in running]


def _newest_first(folder: Path) -> list[Path]:
    jobs = [job for job in find_jobs(folder) if (job / "config.yaml").is_file()]
    return sorted(jobs, key=_started, reverse=True)


def _started(job: Path) -> tuple[float, int]:
    """Return when a run started: as its folder is dated, else as old as what is written once."""
    for part in reversed(job.parts):
        if dated := re.fullmatch(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:_(\d+))?", part):
            with suppress(ValueError):  # digits, but no date
                at = datetime.strptime(dated[1], "%Y-%m-%d_%H-%M-%S")
                return at.timestamp(), int(dated[2] or 1)
    once = job / ".hydra" / "overrides.yaml"  # the others are written again on resume
    return (once if once.is_file() else job / "config.yaml").stat().st_mtime, 1


def read_saved(path: Path) -> dict[str, Any]:
    """Read the config.yaml of a run; a damaged one is a ValueError of one line."""
    try:
        if not (fault := bomb_in(path.read_bytes())):
            saved = OmegaConf.to_container(OmegaConf.load(path))
            fault = next(_damage(saved), None)
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "it" if mark is None else f"line {mark.line + 1}"
        fault = getattr(error, "strerror", None) or f"{where} is no YAML of keys with values"
    if fault is None:
        return as_today(saved)
    raise ValueError(f"{path} is damaged: {fault}; put a copy of it back, or start a new run")


def _damage(saved: Any) -> Iterator[str]:
    """Yield what a saved configuration lacks, has too much or of a wrong type."""
    if not isinstance(saved, dict) or not saved:
        yield f"expected keys with values, got {repr(saved)[:40] if saved else 'nothing'}"
    groups = [part for part in schema.declared() if "=" not in part and part != "root"]
    for group in groups:
        if not isinstance(saved.get(group), dict):
            yield f"expected keys in {group}, got {repr(saved.get(group))[:40]}"
    today = as_today(saved)
    for group in ("root", *groups):
        node = today if group == "root" else today[group]
        parts = [part for part in schema.declared() if part.partition("=")[0] == group]
        part = min(parts, key=lambda part: len(schema.declared()[part].keys() ^ node.keys()))
        prefix, more = schema.prefix(part), {*groups, *BESIDE} if group == "root" else set()
        yield from _differences(schema.declared()[part], node, prefix, more)


def _differences(tree: dict[str, Any], node: Any, prefix: str, more: set[str]) -> Iterator[str]:
    if not isinstance(node, dict):
        yield f"expected keys in {prefix.rstrip('.')}, got {repr(node)[:40]}"
    for name in {str(name) for name in node} - tree.keys() - more:
        yield f"there is no key {prefix}{name}"
    for name, key in tree.items():
        if name not in node:
            yield f"it has no {prefix}{name}"
        elif isinstance(key, dict):
            yield from _differences(key, node[name], f"{prefix}{name}.", set())
        elif not _fits(key.type, node[name]):
            yield f"expected {prefix}{name} to be {key.kind}, got {repr(node[name])[:40]}"


def _fits(kind: str, value: Any) -> bool:
    plain = kind.removesuffix(" | null")
    if value is None:
        return plain != kind or plain == "any"
    if isinstance(value, str) and "${" in value:  # looked up when it is resolved
        return True
    if isinstance(value, bool):
        return plain in ("bool", "any")
    return isinstance(value, list if plain.startswith("list") else KINDS.get(plain, object))
