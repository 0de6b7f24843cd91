"""Write docs/configuration.md: every key, from conf/keys.yaml, and what the files of conf/ choose.

python docs/make_configuration.py
"""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from conf.compose import compose
from conf.schema import FOLDER, Key, declared, leaves, sections

PAGE = Path(__file__).with_name("configuration.md")
INTRO = """\
# Configuration

<!-- written by `python docs/make_configuration.py` from conf/: change conf/keys.yaml -->

Every key of `python train.py`: its allowed values, its value in the default experiment \
`grpo_smollm`, and its meaning. Set a key by `key=value`, choose a file of `conf/` by \
`folder=file`. `python train.py experiment=grpo_tiny --cfg job` prints the keys of another \
experiment. A wrong key ends with an error that names the nearest one.

The arguments of a class that a `_target_` names are keys beside it: `env.task.min_digits=2`. The \
docstring of the class explains them. A second table of a section lists the arguments that the \
files of `conf/` set. You must set what is `???`.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """Return the page."""
    out = [INTRO, "## Anywhere\n", *_table("root", [], {})]
    for group in sections():
        out.append(f"\n## {group}\n")
        seen: dict[str, str] = {}
        parts = [part for part in declared() if part.partition("=")[0] == group]
        for part in parts[group == "algorithm" :]:  # the first file has all that algorithms share
            words = [part] if seen else []
            rows = _table(part, words, seen)
            if words:
                out.append(f"\n`{part}`, where it differs:\n")
            out += rows
        out += ["", *_arguments(group), "", *_choices(group)]
    out += ["\n## experiment\n", *_choices("experiment")]
    return re.sub("\n\n\n+", "\n\n", "\n".join(out) + "\n")


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


def _table(part: str, words: list[str], seen: dict[str, str]) -> list[str]:
    """Return the rows of the keys of a part, less those of `seen`, to which they are added."""
    out, cfg = [], _composed(tuple(words))
    for name, key in leaves(part):
        default = _shown(OmegaConf.select(cfg, name))
        row = f"| `{name}` | {_values(key)} | {default} | {_plain(key.about)} |"
        if seen.get(name) != row:
            out.append(row)
        seen[name] = row
    return ["| key | values | `grpo_smollm` | |", "|---|---|---|---|", *out]


@cache
def _composed(words: tuple[str, ...]) -> DictConfig:
    return compose(words)


def first_lines(group: str) -> dict[str, str]:
    """Return what the files of a folder of conf/ say of themselves, less commands."""
    out = {}
    for path in sorted((FOLDER / group).glob("*.yaml")):
        head = itertools.takewhile(lambda line: line[:1] == "#", path.read_text().splitlines())
        about = [line[2:] for line in head if not re.match("# ( |@|python train)", line)]
        out[path.stem] = " ".join(about).rstrip(":")
    return out


def _values(key: Key) -> str:
    """Return the values that a key may have: the choices, else the type with its range."""
    if isinstance(key.limit, list):
        return ", ".join(f"`{'null' if c is None else c}`" for c in key.limit)
    kind = key.type.replace("|", "or")
    return _plain(f"{kind}, {key.limit.removeprefix('to be ')}" if key.limit else kind)


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


def _arguments(group: str) -> list[str]:
    """Return a table of what the files of a folder give to the classes that they name."""
    out = []
    for path in sorted((FOLDER / group).rglob("*.yaml")):
        said, inner = comments(path), path.parent.name if path.parent.name != group else ""
        word = f"{group}/{inner}={path.stem}" if inner else f"{group}={path.stem}"
        inside = f"{inner}." if inner else ""  # of policy/engine=vllm
        for key, target, value in _given(yaml.safe_load(path.read_text()), inside):
            about = f"{_shown(value)} | {_plain(said.get(key.removeprefix(inside), ''))}"
            out.append(f"| `{group}.{key}` | `{word}` | `{target}` | {about} |")
    head = ["| argument | given by | to | value | |", "|---|---|---|---|---|"]
    return [*head, *out] if out else []


def _given(node: dict[str, Any], inside: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each argument of a class below `node`, with the class and its value; no other key's."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _given(value, f"{inside}{key}.")
        elif inside and "_target_" in node and key != "_target_" and "${" not in str(value):
            yield f"{inside}{key}", node["_target_"], value


def _choices(group: str) -> list[str]:
    """Return a line for each file of a folder, if there are several."""
    out = [f"- `{group}={name}`: {_plain(said)}" for name, said in first_lines(group).items()]
    return out if len(out) > 1 else []


if __name__ == "__main__":
    main()
