"""The saved configuration of a run that goes on or that a mode is for, with what may change."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from conf import names, schema
from conf.compose import compose_raw, settle
from conf.interpolations import bounded, secrets_named_in
from trainer.runs.find import find_jobs, has_weights, is_running
from trainer.runs.nodes import sent_keys, walk_texts
from trainer.runs.run_files import bomb_in, dig, is_sweep
from trainer.runs.saved_configs import as_today

KINDS: dict[str, Any] = {"int": int, "float": int | float, "bool": bool, "str": str, "dict": dict}
BESIDE = {"experiment", "kept_in", "trains_first"}  # of a warm-up, of a preflight
RESUMABLE = ("trainer.num_iterations", "trainer.stop_at", "trainer.patience", "trainer.overlap")
RESUMABLE += ("tracker", "launch", "checkpoint", "eval", "policy.vllm")

HERE = re.compile(  # addresses of this machine, and no others by any reading
    r"(\w+://)?((?ai:localhost)|127\.0\.0\.1|\[?::1\]?)(:\d+)?(/[^\s\\@,]*)?"
    r"|(sqlite:///|((file://)?|\.{1,2})/(?!/))[^\s\\]*|"
)
FOLDER = re.compile(r"(?!databricks)[\w-]+")  # of a tracking_uri; of others it is a machine's name
ADDRESS = re.compile(  # by the key's name: host, base_url, servers, servers.a
    r"(?i)(^|[._])(url|uri|server|host|addresse?|endpoint|proxy|proxie)(s(\.[^.]*)?)?$"
)
LOOK = re.compile(r"(?i)(http|ws|grpc)s?:")


@bounded()
def load_for_resume(
    folder: str, words: Sequence[str], *, mode: str = "train", may=RESUMABLE, **instead: Any
) -> dict[str, Any]:
    """Return a run's saved configuration, `instead` in it, with overrides that `may` change.

    allow_targets is not taken from it: it counts on the command line alone, as do servers on other
    machines and the keys that they are sent: they are repeated there.
    """
    path, typed = Path(folder) / "config.yaml", words
    if "${" in str(folder):
        raise ValueError(f"resume={folder}: expected a folder without ${{ in its name; rename it")
    if not path.is_file():
        raise ValueError(f"resume={folder}: {no_run(Path(folder))}")
    may, saved = (*may, "allow_targets"), read_saved(path)
    said = {word: _pair(word) for word in words}
    told = {*told_again(saved)}
    told |= {pair for pair in said.values() if "${" in pair[1] and _holds(saved, *pair)}
    again = {pair for pair in said.values() if pair in told}  # as it is
    words = [word for word in words if said[word] not in again]
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
    known = again, tuple(f"{key}." for key in changed)
    plain: Any = OmegaConf.to_container(saved)
    if fault := next(_unrepeated(plain, *known, mode=mode), None):
        raise ValueError(f"{path} {fault}")
    with secrets_named_in(typed):
        made = settle(saved)
    if fault := next(_unrepeated(made, *known, mode=mode), None):  # what stood behind a ${...}
        raise ValueError(f"{path} {fault}")
    return made


def _unrepeated(
    tree: dict[str, Any], again: set[tuple[str, str]], changed: tuple[str, ...], *, mode: str
) -> Iterator[str]:
    """Yield what a run folder says and the command line neither repeats nor changes."""
    for place, text in [] if tree["allow_targets"] else told_again(tree):
        what = "which key is sent to a server"
        if _is_server(place, text):
            what = "which server gets the prompts and replies"
            if mode in ("chat", "export"):  # the policy speaks there, and to nobody else
                continue
        written = [there for name, there in again if name == place]
        if not (text in written or "${" in "".join(written) or f"{place}.".startswith(changed)):
            what = f"says {what}; if the run is yours, repeat it: '{place}={text}'"
            yield f"{what} (give nothing to somebody else's)"


def told_again(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield place and text of what a run folder says and whoever goes on with it has to repeat.

    Keys that are sent to servers, and servers, which get prompts and replies: of a judge, a
    sandbox, an environment, a tracker, or the one that samples, unless it is on this machine.

    >>> dict(told_again({"policy": {"vllm": {"url": "http://h:8000"}}}))
    {'policy.vllm.url': 'http://h:8000'}
    """
    yield from sent_keys(tree)
    yield from (found for found in walk_texts(tree) if _is_server(*found))


def _is_server(place: str, text: str) -> bool:
    """Return whether a text is the address of another machine, by its key or by its look."""
    bare = re.sub(r"[\s\x00-\x1f]+", "", text)  # libraries leave blanks out
    here = HERE.fullmatch(text) or (place.endswith("uri") and FOLDER.fullmatch(text))
    return bool(ADDRESS.search(place) or LOOK.match(bare)) and ("${" in text or not here)


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lstrip("+"), value.strip("'\"")


def _holds(tree: Any, place: str, text: str) -> bool:
    return dig(tree, *place.split(".")) == text


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
