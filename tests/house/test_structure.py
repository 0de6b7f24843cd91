"""The shape of the repository: which way imports point, what loads torch, what is declared."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from itertools import chain

import pytest
from support.runs import ROOT

LAYERS = ("policies", "envs", "trainer")  # each may import those before it
PACKAGES = ("policies", "envs", "envs.rewards", "envs.tasks", "envs.tools", "envs.transforms")
PACKAGES += ("trainer",)
FILES = sorted(
    [ROOT / "train.py", *(p for name in (*LAYERS, "conf") for p in (ROOT / name).rglob("*.py"))]
)
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
MODULES = {n.removesuffix(".py").removesuffix("/__init__").replace("/", "."): n for n in TREES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imports(name: str) -> set[str]:
    """Return the modules that a file imports anywhere, also inside functions and for types."""
    names = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in MODULES else str(node.module) for name in whole}
        elif isinstance(node, ast.Call):
            names |= imports_by_string(node)
    return names


def imports_by_string(call: ast.Call) -> set[str]:
    """Return the modules of import_module("a.b"), runpy and the strings of a lazy face."""
    function = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if function == "run_path":
        return {"train"}  # the one script
    if function not in ("import_module", "lazy"):
        return set()
    names = set()
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        text = value.values[0] if isinstance(value, ast.JoinedStr) else value
        start = getattr(text, "value", None)
        if isinstance(start, str) and value is not text:  # f"trainer.modes.{name}"
            names |= {name for name in MODULES if name.startswith(start)}
        elif start in MODULES:
            names.add(start)
    return names


def packages(name: str) -> set[str]:
    return {module.partition(".")[0] for module in imports(name)}


@pytest.mark.parametrize("name", TREES)
def test_imports_point_one_way(name):
    used, layer = packages(name), name.partition("/")[0]
    if layer in LAYERS:
        above = {*LAYERS[LAYERS.index(layer) + 1 :], "conf", "train", "tests"}
        assert not used & {*above, "hydra", "omegaconf"}
        assert "cfg." not in (ROOT / name).read_text(), "classes take plain arguments"
    if layer != "trainer":
        assert not used & {"accelerate", "wandb"}
    assert not used & {"torchrl", "trl"}


def test_imports_have_no_circle():
    graph = {module: imports(name) & MODULES.keys() for module, name in MODULES.items()}
    while leaves := {module for module in graph if not graph[module]}:
        graph = {module: needs - leaves for module, needs in graph.items() if module not in leaves}
    assert not graph


def test_the_loop_imports_no_other_room():
    """Processes, pages, modes and TorchRL's names know the loop; it knows none of them."""
    rooms = {p.name for p in (ROOT / "trainer").iterdir() if (p / "__init__.py").exists()} - {"kl"}
    assert rooms == {"modes", "pages", "runs", "scale", "torchrl"}
    loop = [name for name in TREES if re.fullmatch(r"trainer/(kl/)?(?!__init__)\w+\.py", name)]
    for name in loop:
        assert not [m for m in imports(name) if m.startswith(tuple(f"trainer.{r}" for r in rooms))]


# Methods of TorchRL's API on classes of the road, which import on call.
ON_CALL = {
    "policies/chats/containers.py": {"policies.torchrl.specs", "policies.torchrl.conversions"},
    "policies/chats/history.py": {
        f"policies.torchrl.{name}" for name in ("specs", "parsing", "histories")
    },
    "envs/tools/calling.py": {"policies.torchrl.specs"},
}


@pytest.mark.parametrize("name", [n for n in TREES if not re.search("/torchrl/|__init__", n)])
def test_nothing_outside_torchrls_rooms_stands_on_them(name):
    assert {m for m in imports(name) if ".torchrl" in m} == ON_CALL.get(name, set())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_has_a_docstring(package):
    module = import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def test_the_parent_and_lazy_packages_load_nothing_heavy():
    light = [*PACKAGES, "conf.api", "conf.check", "conf.cli", "envs.tools.sandbox", "train"]
    light += ["trainer.pages.report", "trainer.pages.sweep_page"]
    for room in ("tasks", "adapters", "answers"):
        light += [f"envs.{room}.{p.stem}" for p in (ROOT / "envs" / room).glob("[a-z]*.py")]
    heavy = "{'torch', 'transformers', 'accelerate', 'tensordict', 'wandb', 'datasets'}"
    code = f"import sys, {', '.join(light)}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


DISTRIBUTIONS = {"hydra": "hydra_core", "yaml": "pyyaml"}  # where the names differ
NOT_OURS = {"conf", "envs", "policies", "trainer", "train", *sys.stdlib_module_names}
PRIVATE = {"transformers", "peft", "vllm"}  # of which more than the public API is used


def test_what_is_imported_is_declared_and_bounded_where_private_names_are_used():
    every = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    ranges = dict(re.fullmatch(r"([\w.-]+)(.*)", text).groups() for text in every)
    ranges = {name.lower().replace("-", "_"): bounds for name, bounds in ranges.items()}
    used = set().union(*map(packages, TREES)) - NOT_OURS
    assert {DISTRIBUTIONS.get(name, name).lower() for name in used} <= ranges.keys()
    assert all("<" in ranges[name] for name in PRIVATE)
