"""What a GPU waits for in an iteration, counted on a device of glass (tests/support/glass.py)."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from support.runs import PATH, ROOT, environment

# Waits, and all crossings: 6 tokens of 32 rows; 3 micro-batches in score and update.
BARS = {"rollout": (30, 42), "score": (5, 24), "update": (5, 35), "metrics": (1, 23)}


@pytest.mark.runs
def test_no_phase_of_an_iteration_waits_more_often_than_it_did(tmp_path):
    command = [sys.executable, "-m", "support.glass", str(tmp_path / "run")]
    env = environment(PYTHONPATH=PATH)
    out = subprocess.check_output(command, cwd=ROOT, env=env, text=True)
    waits, crossings, lines = Counter(), Counter(), json.loads(out.splitlines()[-1])
    for phase, what, _, count in lines:
        crossings[phase] += count
        waits[phase] += count * what.startswith("wait")
    found = {phase: (waits[phase], crossings[phase]) for phase in BARS}
    more = [p for p, bar in BARS.items() if any(n > b for n, b in zip(found[p], bar, strict=True))]
    assert not more, "\n".join(f"{found[line[0]]} {line}" for line in lines if line[0] in more)
    assert all(crossings[phase] for phase in BARS), f"a phase was not entered: {found}"
