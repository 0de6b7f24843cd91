"""Write docs/configuration.md: every key, from conf/schema.py and the comments of conf/**/*.yaml.

python docs/make_configuration.py
"""

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from conf.bounds import NUMBERS, RELATED, choices
from conf.explain import FOLDER, compose_raw
from conf.help import about
from conf.schema import Config, register

PAGE = Path(__file__).with_name("configuration.md")
INTRO = """\
# Configuration

<!-- written by `python docs/make_configuration.py` from conf/: change the comments there -->

Every key of leash that `python train.py` takes: its type, its value in the default experiment \
(`python train.py` is `experiment=grpo_smollm`), the values that it may have, and what it is. A \
key is given as `key=value`, a file of a folder of `conf/` as `folder=file`; `python train.py \
experiment=grpo_tiny --cfg job` prints all keys of another experiment. A key that does not exist \
is an error that names the nearest one, and so is what does not go together, before any model is \
loaded.

What a `_target_` names takes the arguments of its constructor, whose docstring explains them, as \
keys beside it: `env.task.min_digits=2`. Those that a file of `conf/` gives stand at the end of \
their section; `???` is for you to give.
"""
NAMES = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "any"}


def main() -> None:
    """Write the page; say so if a key has no comment."""
    text, silent = page()
    if silent:
        sys.exit(f"expected a comment in conf/ for {', '.join(silent)}, got none")
    PAGE.write_text(text)


def page() -> tuple[str, list[str]]:
    """Return the page, and the keys that no YAML file explains."""
    register()
    out = [INTRO, "## Anywhere\n", *_table(Config, "", FOLDER / "config.yaml", [], {})]
    for group in (field.name for field in dataclasses.fields(Config) if _is_node(field.type)):
        out.append(f"\n## {group}\n")
        seen: dict[str, str] = {}
        for node, path in _bases(group):
            words = [f"{group}={path.stem}"] if seen else []
            rows = _table(node, group, path, words, seen)
            if words:
                out.append(f"\n`{words[0]}`, without what is the same as above:\n")
            out += rows
        out += ["", *_arguments(group), "", *_choices(group)]
    out += ["\n## experiment\n", *_choices("experiment")]
    text = "\n".join(out) + "\n"
    silent = re.findall(r"^\| `(\S+)` .* \|  \|$", text, re.M)
    return text.replace("\n\n\n", "\n\n"), silent


def comments(path: Path) -> dict[str, str]:
    """Return what a YAML file says of each key: beside it, else in the lines right above."""
    said, above, parents = {}, [], []
    for line in path.read_text().splitlines():
        if found := re.match(r"( *)# ?(.*)", line):
            above.append(found[2])
            continue
        found = re.match(r"( *)(\w+):(?:[^#]|(?<=\S)#)*(?:# ?(.*))?$", line)
        if found:
            depth = len(found[1]) // 2
            parents[depth:] = [found[2]]
            said[".".join(parents)] = found[3] or " ".join(above)
        above = []
    return said


def _bases(group: str) -> Iterator[tuple[type, Path]]:
    """Yield each schema of a group with the file that explains its keys."""
    store = ConfigStore.instance().repo[group]
    files = {path: yaml.safe_load(path.read_text()).get("defaults", []) for path in _files(group)}
    for name, entry in store.items():
        path = next(p for p, defaults in files.items() if name.removesuffix(".yaml") in defaults)
        yield OmegaConf.get_type(entry.node), path


def _files(group: str) -> list[Path]:
    return sorted((FOLDER / group).glob("*.yaml"))


def _table(node: type, group: str, path: Path, words: list[str], seen: dict[str, str]) -> list[str]:
    """Return the rows of a schema's keys, less those of `seen`, to which they are added."""
    said, out = comments(path), []
    for key, hint in _keys(node, ""):
        full = f"{group}.{key}".lstrip(".")
        if full in seen and key not in said:  # of algorithms that this one is not
            continue
        cfg = _composed(tuple(words))
        default = _shown(OmegaConf.select(cfg, full))
        about = _plain(said.get(key, ""))
        row = f"| `{full}` | {_type(hint)} | {default} | {_allowed(full, cfg)} | {about} |"
        if seen.get(full) != row:
            out.append(row)
        seen[full] = row
    return ["| key | type | default | allowed | |", "|---|---|---|---|---|", *out]


@cache
def _composed(words: tuple[str, ...]) -> DictConfig:
    return compose_raw(words)


def _keys(node: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(node).items():
        if not dataclasses.is_dataclass(hint):
            yield f"{prefix}{name}", hint
        elif prefix or node is not Config:  # those of the root are sections of their own
            yield from _keys(hint, f"{prefix}{name}.")


def _is_node(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _type(hint: Any) -> str:
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part) for part in parts)
    if typing.get_origin(hint) is list:
        return f"list of {_type(parts[0])}s"
    return "names with values" if typing.get_origin(hint) is dict else NAMES[hint]


def _plain(text: str) -> str:
    """Return a comment such that Markdown shows it as it is."""
    return re.sub(r"[*<|]|\b_|_\b", r"\\\g<0>", text)


def _shown(value: Any) -> str:
    """Return a default as it is written on the command line; of a part its class."""
    if isinstance(value, DictConfig) and "_target_" in value:
        return f"`{value._target_}`"
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).split("\n")[0]
    return f"`{text}`"


def _allowed(key: str, cfg: DictConfig) -> str:
    if known := choices(cfg).get(key):
        return ", ".join(f"`{'null' if c is None else c}`" for c in known)
    return _plain(NUMBERS.get(key) or RELATED.get(key, "").removeprefix("to be "))


def _arguments(group: str) -> list[str]:
    """Return a table of what the files of a folder give to the classes that they name."""
    out = []
    for path in _files(group):
        said = comments(path)
        for key, target, value in _given(yaml.safe_load(path.read_text()), ""):
            about = f"{_shown(value)} | {_plain(said.get(key, ''))}"
            out.append(f"| `{group}.{key}` | `{group}={path.stem}` | `{target}` | {about} |")
    head = ["| argument | given by | to | value | |", "|---|---|---|---|---|"]
    return [*head, *out] if out else []


def _given(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each argument of a class below `node`, with the class and its value; no other key's."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _given(value, f"{prefix}{key}.")
        elif prefix and "_target_" in node and key != "_target_" and "${" not in str(value):
            yield f"{prefix}{key}", node["_target_"], value


def _choices(group: str) -> list[str]:
    """Return a line for each file of a folder, if there are several."""
    out = [f"- `{group}={name}`: {_plain(said)}" for name, said in about(group).items()]
    return out if len(out) > 1 else []


if __name__ == "__main__":
    main()
