"""Four ranks that hold two copies of the weights, and what one rank learns."""

import pytest
from support.runs import metrics, train

pytestmark = pytest.mark.scale


def test_copies_of_shards_learn_what_full_models_learn(tmp_path):
    words = ["experiment=grpo_tiny", "optimizer.warmup=0", "trainer.num_iterations=3"]
    words += ["trainer.prompts_per_iteration=8", "algorithm.group_size=4", "optimizer.eps=1e-2"]
    words += ["eval.num_samples=1", "eval.max_rows=3", "eval.greedy=false", "checkpoint.every=3"]
    launches = (["launch=fsdp2", "launch.shards=2"], ["launch.num_processes=1"])
    for name, launch in zip(("copies", "one"), launches, strict=True):
        folder = f"output_dir={tmp_path / name}"
        done = train(*words, folder, "launch.num_processes=4", "launch.threads=1", *launch)
        assert done.code == 0, done.text
    for got, want in zip(metrics(tmp_path / "copies"), metrics(tmp_path / "one"), strict=True):
        for name in ("loss/policy", "optim/grad_norm", "kl/ref", "eval/reward", "eval/kl_ref"):
            assert got.get(name) == pytest.approx(want.get(name), abs=1e-4)
