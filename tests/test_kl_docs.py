"""The numbers of docs/kl.md: those of its picture, and those that docs/replies.py prints."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from trainer.losses import kl_term

DOCS = Path(__file__).parents[1] / "docs"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kl", [0.02, 0.5, 1.5])
def test_moments_of_the_picture_are_integrals_over_the_terms_of_leash(kl):
    """N(0, 1) against N(m, 1), on a grid."""
    m = math.sqrt(2 * kl)
    x = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    policy, ref = (torch.distributions.Normal(mean, 1.0).log_prob(x) for mean in (0.0, m))
    chance = policy.exp() * (x[1] - x[0])
    moments = script("kl_estimators").moments(kl)
    for name in ("k1", "k2", "k3"):
        value = kl_term(policy, ref, name)
        mean = (chance * value).sum()
        spread = (chance * (value - mean) ** 2).sum().sqrt()
        assert moments[name] == pytest.approx((mean.item(), spread.item()), rel=1e-6)
    assert moments["full"] == (pytest.approx((chance * (policy - ref)).sum().item()), 0.0)


def test_a_run_of_a_sweep_has_its_rewards_its_kl_and_its_efficiency(tmp_path):
    """One prompt, right half the time: the least KL for 3/4 is that of two coins."""
    run = tmp_path / "a=1"
    run.mkdir()
    (run / "config.yaml").write_text("policy: {}\nalgorithm: {}\n")
    (run / "status.json").write_text(json.dumps({"state": "finished"}))
    rows = [
        {"progress/iteration": 0, "eval/reward": 0.25, "eval/kl_ref_sequence": 0.0},
        {"progress/iteration": 1, "kl/coeff": 0.1, "kl/ref_sequence": 99.0},
        {"progress/iteration": 2, "eval/reward": 0.75, "eval/kl_ref_sequence": 0.5},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run / "transcripts.jsonl").write_text("")
    samples = {"reward": [[0.0, 1.0] * 2048], "success": [[0.0] * 4096]}
    (tmp_path / "limit.json").write_text(json.dumps(samples))
    (point,) = script("replies").read(tmp_path)
    assert (point.coeff, point.reward, point.kl) == (0.1, (0.25, 0.75), 0.5)
    least = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert point.efficiency == pytest.approx(least / 0.5, rel=0.01)
