"""Rows that do not fit, in runs that are killed, go on, and share their rows between ranks."""

import json
import os
import signal

import pytest
from runs import launch, metrics, train, wait_for

pytestmark = pytest.mark.reliability
FEW = (
    "experiment=grpo_tiny",
    "env=gsm8k",
    "policy.model=tiny",
    "policy.max_new_tokens=3",
    "policy.max_prompt_tokens=100",
    "trainer.prompts_per_iteration=4",
    "trainer.num_iterations=12",
    "algorithm.group_size=2",
    "eval.num_samples=1",
    "checkpoint.every=1",
)


def test_a_killed_run_and_two_ranks_leave_the_same_rows_out(tmp_path):
    rows = [{"question": f"{i} + 1 is?", "answer": i + 1} for i in range(24)]
    for i in (3, 11, 17):
        rows[i]["question"] = "12 " * 300 + f"{i}?"
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = [*FEW, f"env.dataset={path}"]
    whole = train(*words, f"output_dir={tmp_path / 'whole'}")
    assert whole.code == 0, whole.text
    killed = tmp_path / "killed"
    process = launch(*words, f"output_dir={killed}")
    written = killed / "metrics.jsonl"
    wait_for(lambda: written.exists() and len(written.read_text().splitlines()) > 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = train(f"resume={killed}")
    assert again.code == 0, again.text
    assert again.text.count("rows exceed 100 tokens") == whole.text.count("rows exceed 100 tokens")
    assert metrics(killed) == metrics(tmp_path / "whole")
    two = train(*words, f"output_dir={tmp_path / 'two'}", "launch.num_processes=2")
    assert two.code == 0, two.text
    firsts = [metrics(tmp_path / name)[1]["reward/mean"] for name in ("whole", "two")]
    assert firsts[0] == pytest.approx(firsts[1])
