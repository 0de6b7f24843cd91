"""Rows that do not fit, in a run that is killed and goes on, and in one of two ranks."""

import json
import os
import signal

import pytest
from faulty import TINY
from runs import launch, metrics, train, wait_for

pytestmark = pytest.mark.reliability


def test_a_killed_run_and_two_ranks_leave_the_same_rows_out(tmp_path):
    rows = [{"question": f"{i} + 1 is?", "answer": i + 1} for i in range(24)]
    for i in (3, 11, 17):
        rows[i]["question"] = "12 " * 300 + f"{i}?"
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = [word.replace("num_iterations=4", "num_iterations=12") for word in TINY]
    words += ["env=gsm8k", f"env.dataset={path}", "policy.max_prompt_tokens=100"]
    whole = train(*words, f"output_dir={tmp_path / 'whole'}")
    assert "3 rows" in whole.text
    killed = tmp_path / "killed"
    process = launch(*words, f"output_dir={killed}")
    wait_for(lambda: any(killed.glob("checkpoints/iteration_000004")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = train(f"resume={killed}")
    assert again.code == 0, again.text
    assert metrics(killed) == metrics(tmp_path / "whole")
    two = train(*words, f"output_dir={tmp_path / 'two'}", "launch.num_processes=2")
    assert two.code == 0, two.text
    firsts = [metrics(tmp_path / name)[1]["reward/mean"] for name in ("whole", "two")]
    assert firsts[0] == pytest.approx(firsts[1])
