"""The shape of the repository: which way imports point, what loads torch, sizes, metric names."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("policies", "envs", "trainer")  # each may import those before it
PACKAGES = ("policies", "envs", "envs.rewards", "envs.tasks", "envs.transforms", "trainer")
FILES = sorted(
    [ROOT / "train.py", *(p for name in (*LAYERS, "conf") for p in (ROOT / name).rglob("*.py"))]
)
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}


def imports(tree: ast.AST) -> set[str]:
    """Return the top-level packages that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            found.add((node.module or "").split(".")[0])
    return found


def test_imports_point_one_way():
    for name, tree in TREES.items():
        found, layer = imports(tree), name.split("/")[0]
        if layer in LAYERS:
            above = {*LAYERS[LAYERS.index(layer) + 1 :], "conf", "train", "tests"}
            assert not found & {*above, "hydra", "omegaconf"}, name
            assert "cfg." not in (ROOT / name).read_text(), f"{name}: classes take plain arguments"
        if layer != "trainer":
            assert not found & {"accelerate", "wandb"}, name
        assert not found & {"torchrl", "trl"}, name


def test_imports_have_no_circle():
    """Imports inside functions and for types count too."""
    modules = {n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in TREES}
    graph = {module: set() for module in modules}
    for name, tree in TREES.items():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{a.name}" for a in node.names]
                names = [n if n in modules else node.module for n in whole]
            graph[module] |= {n for n in names if n in modules}
    while leaves := {module for module in graph if not graph[module]}:
        graph = {module: needs - leaves for module, needs in graph.items() if module not in leaves}
    assert not graph


def test_the_loop_imports_no_other_room():
    """Processes, pages, modes and TorchRL's names know the loop; it knows none of them."""
    rooms = [p.name for p in (ROOT / "trainer").iterdir() if (p / "__init__.py").exists()]
    assert {"modes", "reports", "runs", "torchrl"} <= set(rooms)
    for name in (name for name in TREES if re.fullmatch(r"trainer/(?!__init__)\w+\.py", name)):
        for node in ast.walk(TREES[name]):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(m.startswith(f"trainer.{r}") for m in modules for r in rooms), name


def test_no_test_module_imports_another():
    """What tests share is in modules of its own."""
    for path in (ROOT / "tests").glob("*.py"):
        found = re.findall(r"^\s*(?:from|import) (?:tests\.)?(test_\w+)", path.read_text(), re.M)
        assert not found, f"{path.name} imports {found}"


def test_one_module_pads():
    pads = re.compile(r"\b(?:functional|F)\.pad\(|\bpad_sequence\(")
    assert [name for name in TREES if pads.search((ROOT / name).read_text())] == [
        "policies/padding.py"
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_says_what_it_is(package):
    module = import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def test_lazy_packages_load_nothing_heavy():
    light = ["policies", "envs", "envs.tasks", "envs.transforms", "trainer", "trainer.runs.launch"]
    light += ["envs.rewards", "envs.rewards.answers", "envs.sandbox", "trainer.reports.report"]
    light += ["trainer.reports.sweep_page", "conf.schema", "conf.check", "train"]
    light += [f"envs.tasks.{p.stem}" for p in (ROOT / "envs" / "tasks").glob("[a-z]*.py")]
    heavy = "{'torch', 'transformers', 'accelerate', 'tensordict', 'wandb', 'datasets'}"
    code = f"import sys, {', '.join(light)}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


METRIC = re.compile(r"[a-z]+/[a-z0-9_]+")
# trainer/reports/report.py and its like read names; what is written is collected from the others.
READERS = ("report", "sweep", "diagnosis", "dashboard", "run_files")
READERS += ("redact", "redacted_text", "launch")


def documented() -> set[str]:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return set(rows)


def logged() -> set[str]:
    """Collect the metric names among the string constants of the files that make metrics."""
    groups = {name.split("/")[0] for name in documented()}
    found = set()
    for name, tree in TREES.items():
        reads = name.startswith("trainer/reports/") or Path(name).stem in READERS
        if not name.startswith("trainer/") or reads:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):  # f"reward_part/{name}" -> reward_part/<name>
                text = "".join(
                    str(part.value)
                    if isinstance(part, ast.Constant)
                    else f"<{ast.unparse(part.value)}>"
                    for part in node.values
                )
                if text.split("/")[0] in groups and re.fullmatch(r"[a-z_]+/\S+", text):
                    found.add(text)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if METRIC.fullmatch(text) and text.split("/")[0] in groups:
                    found.add(text)
    return found


def test_metrics_page_lists_what_is_logged_and_nothing_else():
    page, code = documented(), logged()
    assert len(page) > 30
    patterns = [re.escape(name) for name in code if "<" in name]
    made = re.compile("|".join(re.sub(r"<[^>]*>", r"(?:[a-z0-9_]+|<name>)", p) for p in patterns))
    assert {name for name in page - code if not made.fullmatch(name)} == set(), "nothing logs it"
    assert {name for name in code - page if "<" not in name} == set(), "not on docs/metrics.md"


DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml"}  # where the names differ
NOT_OURS = {"conf", "envs", "policies", "trainer", "train", *sys.stdlib_module_names}
PRIVATE = {"transformers", "peft", "vllm"}  # of which more than the public API is used


def declared() -> dict[str, str]:
    """Return the range of each declared package, extras included, by its plain name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    split = (re.fullmatch(r"([\w.-]+)(.*)", text) for text in every)
    return {match[1].lower().replace("-", "_"): match[2] for match in split}


def test_what_is_imported_is_declared_and_bounded_where_private_names_are_used():
    used = set().union(*(imports(tree) for tree in TREES.values())) - NOT_OURS
    names = {DISTRIBUTIONS.get(name, name).lower().replace("-", "_") for name in used}
    assert names <= declared().keys(), "imported, not in pyproject.toml"
    assert {name for name in PRIVATE if "<" not in declared()[name]} == set()


def test_the_floors_are_the_lowest_versions_declared():
    lines = (ROOT / "constraints-floors.txt").read_text().splitlines()
    pins = dict(line.lower().replace("-", "_").split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        name, floor = re.match(r"([\w.-]+)>=([\d.]+)", text).groups()
        pin = pins[name.lower().replace("-", "_")]
        if name != "torch":
            assert re.fullmatch(rf"{re.escape(floor)}(\.0)*", pin), text
