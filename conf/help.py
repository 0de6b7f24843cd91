"""What the files of conf/ say of themselves, for --help and docs/configuration.md. Torch-free."""

import itertools
import re
import shutil
import textwrap

from conf import explain


def about(group: str) -> dict[str, str]:
    """Return what the files of a folder of conf/ say of themselves: first lines, less commands."""
    out = {}
    for path in sorted((explain.FOLDER / group).glob("*.yaml")):
        head = itertools.takewhile(lambda line: line[:1] == "#", path.read_text().splitlines())
        said = [line[2:] for line in head if not re.match("# ( |@|python train)", line)]
        out[path.stem] = " ".join(said).rstrip(":")
    return out


def list_experiments() -> str:
    """Return a paragraph per experiment as wide as the terminal, for --help."""
    said, width = about("experiment"), shutil.get_terminal_size((100, 0)).columns
    edge = max(map(len, said)) + 4
    fill = textwrap.TextWrapper(max(width, 2 * edge), subsequent_indent=" " * edge).fill
    return "\n".join(fill(f"  {name:{edge - 2}}{text}") for name, text in said.items())
