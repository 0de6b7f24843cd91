"""The numbers of the picture in docs/kl.md."""

import math
import runpy
from pathlib import Path

import pytest
import torch

from trainer.losses import kl_term

SCRIPT = Path(__file__).parents[1] / "docs" / "kl_estimators.py"


@pytest.mark.parametrize("kl", [0.02, 0.5, 1.5])
def test_moments_of_the_picture_are_integrals_over_the_terms_of_leash(kl):
    """N(0, 1) against N(m, 1), on a grid."""
    m = math.sqrt(2 * kl)
    x = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    policy, ref = (torch.distributions.Normal(mean, 1.0).log_prob(x) for mean in (0.0, m))
    chance = policy.exp() * (x[1] - x[0])
    moments = runpy.run_path(str(SCRIPT))["moments"](kl)
    for name in ("k1", "k2", "k3"):
        value = kl_term(policy, ref, name)
        mean = (chance * value).sum()
        spread = (chance * (value - mean) ** 2).sum().sqrt()
        assert moments[name] == pytest.approx((mean.item(), spread.item()), rel=1e-6)
    assert moments["full"] == (pytest.approx((chance * (policy - ref)).sum().item()), 0.0)
