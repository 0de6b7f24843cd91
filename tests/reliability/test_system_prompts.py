"""Whichever experiment an env is chosen for, no other env's system prompt is left in."""

from pathlib import Path

import pytest

from conf.compose import compose

CONF = Path(__file__).parents[2] / "conf"
pytestmark = pytest.mark.reliability

PROMPTED = {"gsm8k", "python_tool"}
EACH = 4  # envs without a prompt for each experiment, in turn: a composition takes 0.3 s


def test_of_every_experiment_and_every_env():
    envs, experiments = (
        sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        for group in ("env", "experiment")
    )
    plain = [env for env in envs if env not in PROMPTED]
    assert len(experiments) * EACH > len(plain)  # each env is met
    brought = {env: set() for env in envs}
    for number, experiment in enumerate(experiments):
        turn = {plain[(number * EACH + i) % len(plain)] for i in range(EACH)}
        for env in turn | PROMPTED:
            cfg = compose([f"experiment={experiment}", f"env={env}"])
            brought[env].add(cfg.policy.system_prompt)
    assert all(len(prompts) == 1 for prompts in brought.values())
    assert {env for env, prompts in brought.items() if prompts != {None}} == PROMPTED
