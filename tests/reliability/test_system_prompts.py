"""Whichever experiment an env is chosen for, no other env's system prompt is left in."""

from itertools import product
from pathlib import Path

import pytest

from conf.compose import compose_raw

CONF = Path(__file__).parents[2] / "conf"
pytestmark = pytest.mark.reliability


def test_of_every_experiment_with_every_env():
    names = {
        group: sorted(p.stem for p in (CONF / group).glob("*.yaml"))
        for group in ("env", "experiment")
    }
    brought = {}
    for experiment, env in product(names["experiment"], names["env"]):
        cfg = compose_raw([f"experiment={experiment}", f"env={env}"], files_only=True)
        brought.setdefault(env, set()).add(cfg.policy.system_prompt)
    assert all(len(prompts) == 1 for prompts in brought.values())
    assert {env for env, prompts in brought.items() if prompts != {None}} == {
        "gsm8k",
        "python_tool",
    }
