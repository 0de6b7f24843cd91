"""The pictures of docs/kl.md: their scripts run, and their numbers are those of leash."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

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
    made = script("kl_estimators").moments(kl)
    for name in ("k1", "k2", "k3"):
        value = kl_term(policy, ref, name)
        mean = (chance * value).sum()
        spread = (chance * (value - mean) ** 2).sum().sqrt()
        assert made[name] == pytest.approx((mean.item(), spread.item()), rel=1e-6)
    assert made["full"] == (pytest.approx((chance * (policy - ref)).sum().item()), 0.0)


def test_picture_on_the_page_is_what_the_script_draws():
    drawn = script("kl_estimators").picture()
    assert (DOCS / "kl_estimators.svg").read_text() == drawn, "run python docs/kl_estimators.py"


def write_run(folder: Path, coeff: float, *, reward: float, kl: float) -> None:
    """Write the files of a finished run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"policy": {}, "algorithm": {}}))
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    rows = [
        {"progress/iteration": 0, "eval/reward": 0.25, "eval/kl_ref_sequence": 0.0},
        {"progress/iteration": 1, "kl/coeff": coeff, "kl/ref_sequence": 99.0},
        {"progress/iteration": 2, "eval/reward": reward, "eval/kl_ref_sequence": kl},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = "Write a one-sentence review of a {}."
    said = [
        {"kind": kind, "prompt": asked.format(thing), "response": f"Good | {thing}", "reward": 0.5}
        for kind, thing in (("train", "lamp"), *(("after", x) for x in ("gym", "coat", "tea")))
    ]
    (folder / "transcripts.jsonl").write_text("\n".join(map(json.dumps, said)))


def test_replies_of_a_sweep_have_numbers_and_texts_for_each_coefficient(tmp_path):
    write_run(tmp_path / "b=1", 0.3, reward=0.5, kl=0.25)
    write_run(tmp_path / "a=1", 0.0, reward=0.75, kl=4.0)
    made = script("replies")
    told = made.markdown(made.read(tmp_path, count=2)).splitlines()
    assert told[2:4] == ["| 0 | 0.25 -> 0.75 | 4.0 | - |", "| 0.3 | 0.25 -> 0.50 | 0.2 | - |"]
    assert "| 0 | a coat | Good / coat | 0.50 |" in told
    assert not any("lamp" in line for line in told)  # trained on, not held out
    assert not any("tea" in line for line in told)  # more than asked for
    with pytest.raises(ValueError, match="finished runs"):
        made.read(tmp_path / "b=1" / "none")


def test_a_sampled_reference_tells_the_efficiency_of_each(tmp_path):
    """One prompt, right half the time: the least KL for 3/4 is that of two coins."""
    write_run(tmp_path / "a=1", 0.1, reward=0.75, kl=0.5)
    samples = {"reward": [[0.0, 1.0] * 2048], "success": [[0.0] * 4096]}
    (tmp_path / "limit.json").write_text(json.dumps(samples))
    least = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    (point,) = script("replies").read(tmp_path)
    assert point.efficiency == pytest.approx(least / 0.5, rel=0.01)
