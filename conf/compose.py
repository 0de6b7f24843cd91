"""From the words of a command line to one checked configuration, without running anything.

Hydra composes the files that the words choose, once for all jobs of a sweep; the other words are
put in here, so that a fault is known by its word. Every fault is a ValueError of one line.
"""

import os
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from conf import names
from conf.check import check, is_silent
from conf.command_line import ALLOW, check_overrides, read_override, spell_out
from conf.interpolations import bounded, looked_up, secrets_named_in
from conf.names import all_keys
from conf.schema import keys, register
from trainer.runs.nodes import sent_keys, typed_secrets
from trainer.runs.redact import secrets_of
from trainer.runs.run_files import PREFIX, bomb_in, dig

UNKNOWN = (ConfigAttributeError, ConfigKeyError)
BASIC = "hydra._internal.core_plugins.basic_"
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
HYDRA = {  # what runs code, or changes the process, and what it is where no file says otherwise
    "callbacks": {},
    "launcher": {"_target_": f"{BASIC}launcher.BasicLauncher"},
    "sweeper._target_": f"{BASIC}sweeper.BasicSweeper",
    "job_logging": NO_LOGGING,
    "hydra_logging": NO_LOGGING,
    "searchpath": [],
    "job.env_copy": [],
    "job.env_set": {},
    "job.chdir": False,
}


def compose_checked(words: Sequence[str]) -> dict[str, Any]:
    """Return the checked configuration of one job, to be saved; see `settle`."""
    check_overrides(words)
    with secrets_named_in(words):
        config = settle(compose_raw(words))
    _check_leash(words, config)
    for name in _trained_first(config):
        _check_chain((name,), names.FOLDER)
    return config


def _check_leash(words: Sequence[str], config: dict[str, Any]) -> None:
    """Raise ValueError if an experiment without replies leaves an algorithm with some no KL."""
    said = dict(word.partition("=")[::2] for word in words)
    if "algorithm" in said and not config["kl"]["measure"] and "kl.measure" not in said:
        from conf.hints import no_leash

        if not is_silent(config):
            raise ValueError(no_leash(said.get("experiment", ""), said["algorithm"]))


def compose_experiment(name: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the checked configuration of an experiment as its file has it.

    Of `words`, a command line, only allow_targets=... counts.
    """
    _check_chain((name,), names.FOLDER)
    check_overrides(words := _file_of(name, words))
    with secrets_named_in(words):
        return settle(compose_raw(words)) | {"allow_targets": False}


def _file_of(name: str, words: Sequence[str] = ()) -> list[str]:
    return [f"experiment={name}", *(word for word in words if word.startswith("allow_targets="))]


@cache
def _check_chain(chain: tuple[str, ...], folder: Path) -> None:
    """Raise ValueError if the last of these experiments, each needing the next, needs itself."""
    if chain[-1] in chain[:-1]:
        what = f"{PREFIX}{chain[-1]} is trained first by itself ({' -> '.join(chain)})"
        raise ValueError(f"{what}; name another model there")
    for name in _trained_first(_resolved(compose_raw(_file_of(chain[-1])))):
        _check_chain((*chain, name), folder)


def _trained_first(node: Any) -> Iterator[str]:
    """Yield <name> of each experiment:<name> in a configuration."""
    if isinstance(node, str):
        yield from [node.removeprefix(PREFIX)] if node.startswith(PREFIX) else []
    elif isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _trained_first(value)


@bounded()
def compose_raw(
    words: Sequence[str], *, with_hydra: bool = False, files_only: bool = False
) -> DictConfig:
    """Return what the words make of the files of conf/; with Hydra's own settings or without.

    `files_only`: of the words only those count that choose a file.
    """
    items = [read_override(word) for word in spell_out(words)]
    chosen = tuple(str(item.input_line) for item in items if _is_choice(item))
    cfg = deepcopy(_compose_files(chosen, names.FOLDER))
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.overrides.task = [item.input_line for item in items]
        if not with_hydra:
            del cfg["hydra"]
    faults = []
    for item in [] if files_only else items:
        if not _is_choice(item) and (with_hydra or not item.key_or_group.startswith("hydra.")):
            try:
                _put_in(cfg, item)
            except ValueError as error:
                faults.append(error)
    if faults:
        from conf.hints import Several

        raise faults[0] if len(faults) == 1 else Several(faults)
    ours = {key: cfg._get_node(key) for key in cfg if key != "hydra"}
    for place in typed_secrets(OmegaConf.to_container(OmegaConf.create(ours))):
        told = "a secret would lie in the files of the run; put it into the environment, and give"
        raise ValueError(f"{place}: {told} '${{oc.env:NAME}}' in its place")
    return cfg


@cache
def _compose_files(chosen: tuple[str, ...], folder: Path) -> DictConfig:
    register()
    GlobalHydra.instance().clear()
    try:
        for path in folder.glob("*/**/*.yaml"):
            if fault := bomb_in(path.read_bytes()):
                raise ValueError(f"{path}: {fault}; write out what is meant")
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            cfg = hydra.compose("config", overrides=list(chosen), return_hydra_config=True)
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).partition("/")
        from conf.hints import no_file

        raise ValueError(no_file(group, name)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_fault_of_file(error, chosen)) from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a file of conf/"
        what = getattr(error, "problem", None) or "nested too deep"
        raise ValueError(f"{where}: cannot be read as YAML: {what}") from None
    for fault in _forbidden(OmegaConf.to_container(cfg)):
        raise ValueError(fault)
    return cfg


def _forbidden(cfg: Any) -> Iterator[str]:
    """Yield what files of conf/ may not say, for they may be anybody's; `cfg` is not resolved."""
    if cfg["allow_targets"] is not False:
        yield ALLOW
    for name, usual in HYDRA.items():
        given = dig(cfg, "hydra", *name.split("."))
        if given != usual:
            yield (
                f"a file of conf/ sets hydra.{name}, got {given!r:.80}; leave it out: of hydra it "
                "may set run.dir, sweep.dir, sweep.subdir, sweeper.params and job.name"
            )
    for place, text in sent_keys({key: cfg[key] for key in cfg if key != "hydra"}):
        what = f"a file of conf/ says which key is sent to a server, {place}={text}"
        yield f"{what}; leave it out there, and give it on the command line"
    folders = [cfg["hydra"][name] for name in ("run", "sweep")]
    for variable in re.findall(r"oc\.env:\s*[\"']?(\w+)", str([*folders, cfg["output_dir"]])):
        if secrets_of({variable: "a value"}):
            what = f"a file of conf/ names a folder by ${variable}, which is a secret"
            yield f"{what}; leave it out of output_dir and hydra.*.dir"


def _is_choice(item: Override) -> bool:
    """Return whether an override chooses a file of conf/ (or of Hydra), as algorithm=grpo does."""
    name = item.key_or_group
    if "/" in name or item.package is not None:
        return True
    if not name.isidentifier() or not (names.FOLDER / name).is_dir():
        return False
    if item.is_sweep_override():
        raise ValueError(_several(name, item.input_line))
    if not item.is_delete() and not isinstance(item.value(), str | None):
        from conf.hints import no_file

        raise ValueError(no_file(name, item.value()))
    return True


def _several(name: str, word: str) -> str:
    """Return the line on several values of a run: for a sweep, or one value that has commas."""
    value, one = word.partition("=")[2], ""
    for key in keys().get(name, {}).values():
        if "list" in key.type:
            one = f"; for one list: '{name}=[{value}]'"
        elif key.type.startswith("str") and not key.among and "(" not in value:
            one = f"; for one text: '{name}=\"{value}\"'"
    return f"{word} is several values; add -m to sweep them: -m {word}{one}"


def _put_in(cfg: DictConfig, item: Override) -> None:
    """Do what an override says."""
    name, word = item.key_or_group, item.input_line
    if item.is_sweep_override():
        raise ValueError(_several(name, str(word)))
    parent, _, leaf = name.rpartition(".")
    around = OmegaConf.select(cfg, parent) if parent else cfg
    there = isinstance(around, DictConfig) and leaf in around.keys()  # noqa: SIM118
    if item.is_add() and there:
        raise ValueError(f"there is a key {name}; leave the + out: {name}=...")
    if item.is_delete():
        if not there:
            raise ValueError(f"there is no key {name}; leave ~{name} out")
        with open_dict(around):
            del around[leaf]
        return
    value = item.value()
    try:
        try:
            OmegaConf.update(cfg, name, value, merge=True)
        except UNKNOWN as error:
            if not item.is_add() or is_dataclass(error.object_type):
                raise
            OmegaConf.update(cfg, name, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise ValueError(_fault(error, name, value, cfg=cfg)) from error


def _fault(
    error: OmegaConfBaseException, name: str, value: Any, place: str = "", cfg: Any = None
) -> str:
    """Return the line on a key that is not there, or that takes no such value."""
    key = error.full_key or name
    if isinstance(error, UNKNOWN):
        key = max(key, name, key=len)  # of a.b.c, a.b may be what there is not
        from conf.hints import nearest  # here: most starts have no fault

        look_up = partial(OmegaConf.select, cfg or OmegaConf.create())
        return f"there is no key {key}{place}{nearest(key, value, look_up=look_up)}"
    declared = list(keys().get(key, {}).values())
    if not declared:
        inside = ", ".join(name for name in all_keys() if name.startswith(f"{key}."))
        return f"expected keys in {key} ({inside}), got {value!r}{place}"
    if name.startswith(f"{key}."):
        return f"there is no key {name}; {key} is {declared[0].kind}"
    got = value if name == key else error.value
    got = "null" if got is None else repr(got)
    return f"expected {key} to be {declared[0].kind}, got {got}{place}"


def _fault_of_file(error: Exception, chosen: Sequence[str]) -> str:
    """Return the line on what a file of conf/ sets; Hydra names the file in its text."""
    cause = error.__cause__ or error.__context__
    where = re.search(r"In '([^']+)'", str(error))
    if not isinstance(cause, OmegaConfBaseException) or where is None:
        return " ".join(str(error).split())
    key, file = cause.full_key or "", f"conf/{where[1]}.yaml"
    others = " ".join(word for word in chosen if not word.startswith("experiment="))
    if isinstance(cause, UNKNOWN) and key in all_keys() and others:
        what = f"{file} sets {key}, which goes with another part than {others}"
        return f"{what}; take another experiment, or leave {others} out"
    return _fault(cause, key, cause.value, f" ({file})")


def settle(cfg: DictConfig) -> dict[str, Any]:
    """Check a composed configuration and return it resolved; any fault is a ValueError.

    Texts that come from the environment (`${oc.env:NAME}`) stay as they are written: they may be
    secrets, and whoever reads the saved file looks them up again.
    """
    with looked_up() as found:
        plain = _resolved(cfg)
    check(plain)
    raw = OmegaConf.to_container(cfg)
    secrets = [os.environ.get(name, "") for name in found]
    return _as_written(raw, plain, [*filter(None, secrets)])


@bounded()
def _resolved(cfg: DictConfig) -> dict[str, Any]:
    try:
        missing = OmegaConf.missing_keys(cfg)
        plain = {} if missing else OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        if name := re.fullmatch(r"Interpolation key '(\S+)' not found", text):
            text = f"there is no key {name[1]}; what the environment has is ${{oc.env:{name[1]}}}"
        text = text.removeprefix("ValueError raised while resolving interpolation: ")
        raise ValueError(f"{error.full_key}: {text}") from error
    if missing:
        raise ValueError(f"expected a value for {(key := min(missing))}, got none; give {key}=...")
    return plain


def _as_written(raw: Any, plain: Any, secrets: Sequence[str]) -> Any:
    """Return a resolved configuration, but texts that hold what the environment has as in `raw`."""
    if isinstance(raw, dict):
        return {key: _as_written(raw[key], plain[key], secrets) for key in raw}
    if isinstance(raw, list):
        return [_as_written(*pair, secrets) for pair in zip(raw, plain, strict=True)]
    if not isinstance(plain, str):
        return plain
    looked_up = "oc.env:" in str(raw) or any(secret in plain for secret in secrets)
    return raw if looked_up and "${" in str(raw) else plain.replace("${", "\\${")
