"""The roles of policies/roles.py and what the loop really asks of who plays them."""

import ast
from pathlib import Path

import pytest
from contracts import make_policy

from policies.roles import Engine, Generator, Policy
from policies.wrappers.vllm_wrapper import vLLMWrapper
from policies.wrappers.wrapper import LLMWrapperBase

LOOP = sorted((Path(__file__).parents[1] / "trainer").glob("*.py"))
ROLES = {"Generator": Generator, "Engine": Engine, "Policy": Policy}


def members(role: type) -> set[str]:
    """Return what a protocol has, that of its bases included."""
    found = {
        name
        for kind in role.__mro__
        for name in (*vars(kind), *vars(kind).get("__annotations__", ()))
    }
    return {name for name in found if not name.startswith("_")}


def asked(tree: ast.AST) -> dict[str, set[str]]:
    """Return by role which attributes a file reads of parameters and fields of that type.

    Also the settings that `collect` needs: it compares them with the policy's own.
    """
    types: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            types.setdefault(name, set()).update(
                n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)
            )
    found: dict[str, set[str]] = {role: set() for role in ROLES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("self.")
            for role in types.get(owner, set()) & {*ROLES}:
                found[role].add(node.attr)
            if owner in ("policy", "generator") and not types.get(owner, set()) & {*ROLES}:
                found["Policy" if owner == "policy" else "Generator"].add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ready":
            found["Generator"] |= {w.arg for w in node.keywords if w.arg not in (None, "learn")}
    return found


def test_the_loop_asks_of_a_role_only_what_it_has():
    seen: dict[str, set[str]] = {role: set() for role in ROLES}
    for path in LOOP:
        for role, names in asked(ast.parse(path.read_text())).items():
            seen[role] |= names
            if path.stem not in (
                "weight_sync",
                "hand_over",
            ):  # its generator is an Engine unless it is the policy
                assert names <= members(ROLES[role]), (path.name, role, names)
    assert seen["Generator"] >= {"limits", "num_samples", "pad_output", "text_key", "renderer"}
    assert seen["Generator"] <= members(Engine)
    assert {"scorer", "model", "found"} <= seen["Policy"]


@pytest.mark.parametrize("role", ROLES.values())
def test_a_role_has_nothing_that_nobody_plays(role):
    policy = make_policy()
    known = {*dir(policy), *dir(vLLMWrapper)} if role is Engine else {*dir(policy)}
    assert members(role) <= known
    settings = {name for name in members(Generator) if name in policy._settings}
    assert settings <= {*(LLMWrapperBase.__init__.__kwdefaults__ or ())}
