"""What `make docs` adds to mkdocs: links out of docs/, public names, doctests, a check of figures.

A link that works on GitHub works on the site: a file of the repository that a page links to gets a
page there, a text file as a block of code. The build fails on a table of measured numbers without a
commit and a command.
"""

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"[-+±]?\d[\d.,]*( ?±.*| ?%|,.*)?")  # a cell that begins with a number
COMMIT = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{7,8}\b")
COMMAND = re.compile(r"(`|^)([A-Z]+=\S+ )?(python|make) |script `", re.M)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def at_home(uri: str) -> str:
    """Return the path in the repository of a page: code/ is the root, the others lie in docs/."""
    return uri.removeprefix("code/") if uri.startswith("code/") else f"docs/{uri}"


def resolved(link: str, uri: str) -> tuple[str, str]:
    """Return where a link of a page leads in the repository, and the page of the site for it."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(at_home(uri)), link))
    code = f"code/{path}" if path.endswith(".md") else f"code/{path}.md"
    inside = path.startswith("docs/") and not path.endswith((".py", ".sh", ".yaml"))
    return path, path.removeprefix("docs/") if inside else code


def text_of(path: Path) -> str:
    """Return the text of a page for a file: Markdown, or a block of code."""
    if path.suffix == ".md":
        return path.read_text()
    language = path.suffix.removeprefix(".")
    return f"# {path.relative_to(ROOT)}\n\n````{language}\n{path.read_text()}\n````\n"


def on_files(files, config):
    """Add a page for each file outside of docs/ that a page links to."""
    todo = [file for file in files if file.is_documentation_page()]
    for page in todo:  # grows: a page that is added may link to others
        for link in LINK.findall(page.content_string):
            path, uri = resolved(link, page.src_uri)
            if uri.startswith("code/") and uri not in files.src_uris and (ROOT / path).is_file():
                file = File.generated(config, uri, content=text_of(ROOT / path))
                file.inclusion = file.inclusion.NOT_IN_NAV
                files.append(file)
                todo.append(file)
    return files


def measured(section: str) -> bool:
    """Return whether a section has a table with two rows or more of mostly numbers."""
    rows = [line.strip("|").split("|")[1:] for line in section.splitlines() if line[:1] == "|"]
    numbers = [[NUMBER.fullmatch(cell.strip()) for cell in cells] for cells in rows]
    return sum(2 * sum(map(bool, cells)) > len(cells) for cells in numbers) > 1


def check_figures(markdown: str, uri: str) -> None:
    """Fail on measured numbers without a source in their section or the page's introduction."""
    introduction, *sections = re.split(r"^(?=## )", markdown, flags=re.M)
    for section in [introduction, *sections]:
        text = introduction + section
        if measured(section) and not (COMMIT.search(text) and COMMAND.search(text)):
            raise PluginError(
                f"{at_home(uri)}, {section.splitlines()[0]!r}: expected the commit and the command"
                " of the table's numbers; add both (`python ...` at 1a2b3c4d)"
            )


def on_page_markdown(markdown, page, **_):
    """Let links lead to these pages; check the figures of a page of ours."""
    uri = page.file.src_uri
    check_figures(markdown, uri)
    if "." in uri.removesuffix(".md"):  # a file of code
        page.meta["search"] = {"exclude": True}
    elif uri in ("kl.md", "configuration.md"):
        page.meta["search"] = {"boost": 2}
    folder = posixpath.dirname(uri)
    return LINK.sub(
        lambda match: posixpath.relpath(resolved(match[1], uri)[1], folder or "."),
        markdown,
    )


class Names(griffe.Extension):
    """Take as public what a lazy package (policies/lazy.py) imports; fence doctests."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            fenced = r"```pycon\n\g<0>\n```"
            obj.docstring.value = re.sub(r"^>>> .+(\n.+)*", fenced, obj.docstring.value, flags=re.M)

    def on_module_members(self, *, mod, **_):
        if "lazy" in mod.members:
            names = [name for name, member in mod.members.items() if member.is_alias]
            mod.exports = [n for n in names if n[0] != "_" and n not in ("lazy", "TYPE_CHECKING")]
