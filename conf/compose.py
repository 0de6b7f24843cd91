"""Compose and check a configuration; a fault is a one-line ValueError."""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from conf.check import check
from conf.schema import FOLDER, TYPES, all_keys, sections
from policies.files import write_text
from trainer.runs.folders import TEMPORARY, is_main_rank, quoted, unique_folder
from trainer.runs.redact import is_secret, redact

GROUPS = sections()
FAULTS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def compose(words: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose the words with the files of conf/ and, in a job, of its other search folders."""
    set_up()
    running = GlobalHydra.instance()
    outer, running.hydra = running.hydra, None  # set by the user's Hydra app or by conf/cli.py
    options: Any = {"overrides": [*_searchpath(), *words], "return_hydra_config": with_hydra}
    try:
        with hydra.initialize_config_dir(str(FOLDER), version_base="1.3"):
            return hydra.compose("config", **options)
    except FAULTS as error:
        raise ValueError(explain(error)) from error
    finally:
        running.hydra = outer


def _searchpath() -> list[str]:
    """Return the override that names this job's configuration folders other than conf/."""
    job: Any = HydraConfig.instance().cfg
    sources = job.hydra.runtime.config_sources if job else ()
    named = [source for source in sources if source.provider not in ("hydra", "schema")]
    folders = ",".join(quoted(f"{source.schema}://{source.path}") for source in named)
    return [f"hydra.searchpath=[{folders}]"] if folders else []


def compose_checked(words: Sequence[str]) -> dict[str, Any]:
    """Return the checked configuration of one run."""
    return checked(compose(words))


def compose_experiment(name: str, *, allow_targets: bool = False) -> dict[str, Any]:
    """Return the checked configuration of an experiment without overrides."""
    allowed = ["allow_targets=true"] if allow_targets else []
    return compose_checked([f"experiment={name}", *allowed])


def checked(cfg: DictConfig) -> dict[str, Any]:
    """Check a composed configuration and return it resolved.

    Texts with ${oc.env:NAME} stay unresolved, since they may be secrets; readers of the saved file
    resolve them. A plain-text secret becomes such a text.
    """
    try:
        resolved: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error
    check(resolved)
    return _as_saved(OmegaConf.to_container(cfg), resolved)


def _as_saved(raw: Any, resolved: Any, path: str = "") -> Any:
    if isinstance(raw, dict):
        return {key: _as_saved(raw[key], resolved[key], f"{path}.{key}") for key in raw}
    if isinstance(raw, list):
        return [_as_saved(*pair, path) for pair in zip(raw, resolved, strict=True)]
    if isinstance(raw, str) and "${oc.env:" in raw:
        return raw
    if isinstance(resolved, str) and is_secret(path, resolved):
        os.environ[_variable(path)] = resolved  # for the processes of the run
        return f"${{oc.env:{_variable(path)}}}"
    return resolved.replace("${", "\\${") if isinstance(resolved, str) else resolved


def _variable(path: str) -> str:
    """Return the environment variable of a secret that was typed for a key, `.policy.api_key`."""
    return re.sub(r"\W", "_", f"leash{path}").upper()


def write_defaults(folder: Path, hydra_config: DictConfig) -> None:
    """Write the defaults of the experiment and of leash, for the report, into a run folder."""
    choices, words = hydra_config.runtime.choices, hydra_config.overrides.task
    experiment = [f"experiment={quoted(choices.experiment)}"] if "experiment" in choices else []
    files = [word for word in words if word.partition("=")[0] in GROUPS]
    named = ((group, choices[group]) for group in GROUPS if group in choices)
    chosen = ["~experiment", *(f"{group}={quoted(str(name))}" for group, name in named)]
    defaults = {
        "experiment": compose([*experiment, *files] if experiment else chosen),
        "leash": compose(chosen),
    }
    defaults_of = {name: OmegaConf.to_container(cfg) for name, cfg in defaults.items()}
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    write_text(folder / ".hydra" / "defaults.yaml", yaml.safe_dump(defaults_of, sort_keys=False))
    hide_secrets(folder / ".hydra")


def hide_secrets(folder: Path) -> None:
    """Replace the secrets in Hydra's YAML files in a folder."""
    for path in folder.glob("*.yaml"):
        saved = yaml.safe_load(path.read_text())
        if (hidden := redact(saved)) != saved:
            write_text(path, yaml.safe_dump(hidden, sort_keys=False))


def explain(error: Exception) -> str:
    """Return a one-line message for an error of Hydra or OmegaConf."""
    from conf.unknown_names import missing_file, nearest  # only errors need it

    text = str(error)
    if isinstance(error, yaml.YAMLError):
        return " ".join(text.split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return missing_file(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:  # spaces around it are another word each
            return f"expected <key>=<value> without spaces, got {error.override!r}"
        return f"cannot read {error.override!r}; quote what it holds, as in 'name=\"a {{b}}, c\"'"
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", text):
        return f"{ambiguous[1]} is several values; add -m to sweep them"
    of_hydra = isinstance(error, HydraException)
    cause = error.__cause__ or error.__context__ if of_hydra else error
    if not isinstance(cause, OmegaConfBaseException):
        return _line(text) if of_hydra else text
    file = re.search(r"In '([^']+)'", text)
    where = f" ({file[1]}.yaml)" if file else ""
    override = re.search(r"(?:use \+|override )([\w.@/]+)=(.*)", text)
    name, value = override.groups() if override else ("", None)
    key = cause.full_key or ""
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        unknown = max(key, name, key=len)  # for a.b.c, a.b may be the unknown key
        if unknown == "experiment" and file:
            return f"{file[1]}.yaml: write # @package _global_ as its first line, it has none"
        return f"there is no key {unknown}{where}{nearest(unknown, value)}"
    if f"'{(variable := _variable(f'.{key}'))}' not found" in text:
        return f"{key} was typed at the start and is not saved; set {variable} to its value"
    unresolved = re.match(r"Interpolation key|\w+ raised while resolving", text)
    if not unresolved and (declared := all_keys().get(key, ("", None))[1]):
        got = "null" if cause.value is None else repr(cause.value)
        return f"expected {key} to be {TYPES[declared.type][1]}, got {got}{where}"
    return f"{key}: {_line(str(cause))}{where}" if key else _line(text)


def _line(text: str) -> str:
    """Return the first line of a message, without the prefix that OmegaConf adds to resolvers."""
    raised = r"^\w+ raised while resolving interpolation: "
    return re.sub(raised, "", text.splitlines()[0]).strip('"')


@cache
def set_up() -> None:
    """Register the resolvers of conf/config.yaml for folders."""
    for function in (run_dir, sweep_dir, output_subdir):
        OmegaConf.register_new_resolver(function.__name__, function, replace=True)


def run_dir(*, _root_: DictConfig) -> str:
    """Return the run folder; a temporary one for other modes and other ranks."""
    resume = None if _root_.resume == "auto" else _root_.resume
    folder = os.path.expanduser(resume or _root_.output_dir or "")
    if is_temporary(_root_):  # an engine on another machine reads weights from output_dir
        shared = _root_.output_dir or "outputs"
        served = OmegaConf.select(_root_, "policy.engine.url")
        return temporary_folder(Path(shared if served else tempfile.gettempdir()))
    return folder or unique_folder(f"outputs/{_title(_root_)}")


def sweep_dir(*, _root_: DictConfig) -> str:
    """Return a new folder for a sweep."""
    return unique_folder(f"multirun/{_title(_root_)}")


def _title(cfg: DictConfig) -> str:
    """Return the name of the experiment, or of a primary configuration that has none."""
    return cfg.hydra.runtime.choices.get("experiment") or cfg.hydra.job.config_name


def output_subdir(*, _root_: DictConfig) -> str | None:
    """Return the folder of Hydra's files; None for a run named by resume, which has them."""
    return None if _root_.resume not in (None, "auto") or is_temporary(_root_) else ".hydra"


def is_temporary(cfg: Any) -> bool:
    """Return whether a configuration needs only a temporary run folder."""
    return cfg["preflight"] or cfg["mode"] != "train" or not is_main_rank()


@cache
def temporary_folder(home: Path) -> str:
    """Create the folder for preflight and modes; it is removed when this process ends."""
    home = home.expanduser().absolute()
    home.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=TEMPORARY, dir=home)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
