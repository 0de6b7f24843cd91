"""Sweeps side by side, with real runs: equal to those in turn, stopped and continued."""

import os
import signal

import pytest
from runs import launch, metrics, train, wait_for

from trainer.runs.run_files import load_run, read_status

pytestmark = pytest.mark.scale
TINY = ("experiment=sft_tiny", "policy.model=tiny", "trainer.prompts_per_iteration=4")
TINY += ("eval.max_rows=4", "checkpoint.every=2", "seed=1,2,3")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


@pytest.mark.parametrize("launcher", [JOBLIB, ("hydra/launcher=submitit_local",)])
def test_jobs_side_by_side_are_those_in_turn_to_the_bit(launcher, tmp_path):
    words = ["-m", *TINY, "trainer.num_iterations=4"]
    for place, more in ("in turn", ()), ("together", launcher):
        done = train(*words, *more, f"hydra.sweep.dir='{tmp_path / place}'")
        assert done.code == 0, done.text
    for seed in (1, 2, 3):
        one, two = (tmp_path / place / f"seed={seed}" for place in ("in turn", "together"))
        assert metrics(one) == metrics(two)
        for name in ("model/model.safetensors", "config.yaml"):
            assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", [JOBLIB, ("hydra/launcher=submitit_local",)])
def test_a_sweep_that_ends_early_takes_its_jobs_along_and_goes_on(launcher, kind, tmp_path):
    words = ["-m", *TINY, *launcher, f"hydra.sweep.dir={tmp_path}"]
    process = launch(*words, "trainer.num_iterations=99999")
    saved = "checkpoints/iteration_*"
    wait_for(lambda: sum(any(job.glob(saved)) for job in tmp_path.glob("seed=*")) > 1, process)
    (os.killpg if kind == signal.SIGINT else os.kill)(process.pid, kind)  # as Ctrl-C and kill do
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + kind, text
    begun = [job for job in sorted(tmp_path.glob("seed=*")) if (job / "status.json").exists()]
    assert {load_run(job).state for job in begun} == {"preempted"}
    done = max(read_status(job).get("iteration", 0) for job in begun)
    for path in tmp_path.glob("seed=*/config.yaml"):
        text = path.read_text().replace("num_iterations: 99999", f"num_iterations: {done + 2}")
        path.write_text(text)
    again = train(*words, f"trainer.num_iterations={done + 2}")
    assert again.code == 0, again.text
    for seed in (1, 2, 3):
        job = tmp_path / f"seed={seed}"
        assert read_status(job)["state"] == "finished"
        assert [line["progress/iteration"] for line in metrics(job)] == [*range(done + 3)]
