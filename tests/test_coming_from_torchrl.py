"""docs/coming_from_torchrl.md: imports, tests and faults of the original that it names exist."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/coming_from_torchrl.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]
IMPORTS = {
    (package, name)
    for package, names in re.findall(r"`from ([\w.]+) import ([\w, ]+)`", PAGE)
    for name in names.split(", ")
}
PUBLIC = {
    "policies": """History ChatHistory Text Tokens Masks LogProbs LLMWrapperBase TransformersWrapper
        vLLMWrapper LLMMaskedCategorical MaskedCategorical MaskedOneHotCategorical
        OneHotCategorical ReparamGradientStrategy LogProbDistribution GPT2RewardModel""",
    "envs": """ChatEnv DatasetChatEnv GSM8KEnv Transform Compose TransformedEnv EnvBase Composite
        Unbounded NonTensor""",
    "envs.transforms": """RetrieveLogProb KLComputation RetrieveKL KLRewardTransform RayTransform
        RayRetrieveKL RayKLRewardTransform PolicyVersion ToolRegistry ToolCall XMLBlockParser
        JSONCallParser ExecuteToolsInOrder SimpleToolTransform PythonInterpreter""",
    "trainer": """GRPOLoss CISPOLoss PPOLoss SFTLoss MCAdvantage GAE RolloutFromModel
        KLControllerBase ConstantKLController AdaptiveKLController LLMCollector PromptData
        get_dataloader""",
}


@cache
def names_in(path: str) -> set[str]:
    """Return the names of the tests of a file, as pytest writes them."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {before + p.name for p in parts if isinstance(p, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_its_place_on_the_page(package):
    assert {(package, name) for name in PUBLIC[package].split()} <= IMPORTS


def test_every_name_on_the_page_can_be_imported_from_there():
    for package, name in sorted(IMPORTS):
        assert getattr(import_module(package), name).__name__ == name


def test_every_fault_has_a_line_and_tests_that_exist():
    faults = {int(row[0]): row for row in ROWS if row[0].isdigit()}
    assert len(faults) > 40
    for number, (*_, cell) in faults.items():
        named = re.findall(r"`(tests/\w+\.py)::([\w:]+)`", cell)
        assert named, f"fault {number} has no test"
        for path, test in named:
            assert test in names_in(path), f"{path}::{test} is not there"
