"""The roles of policies/roles.py and who plays them."""

import pytest
from contracts import make_policy

from policies.roles import Engine, Generator, Policy
from policies.wrappers.vllm_wrapper import vLLMWrapper


@pytest.mark.parametrize("role", [Generator, Engine, Policy])
def test_a_role_has_nothing_that_nobody_plays(role):
    kinds = [kind for kind in role.__mro__ if kind is not object]
    members = {name for kind in kinds for name in (*vars(kind), *kind.__annotations__)}
    known = {*dir(make_policy()), *(dir(vLLMWrapper) if role is Engine else ())}
    assert {name for name in members if not name.startswith("_")} <= known
