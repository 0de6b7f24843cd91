"""Gao's curves: the fit by hand numbers and by another way, best-of-n by enumeration, the runs."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.gao import apart, best_of, fit, kl_of_best_of, reweighted
from benchmarks.overoptimisation import WIDTHS, build_body, commands
from benchmarks.overoptimisation_runs import Proxy
from conf.compose import compose_checked

KL = np.array([0.04, 0.25, 0.81, 1.0, 2.25, 4.0, 9.0])


def curve(kl, alpha, beta, form):
    d = np.sqrt(kl)
    return d * (alpha - beta * (np.log(d) if form == "rl" else d))


@pytest.mark.parametrize("form", ["rl", "best_of"])
def test_exact_points_give_back_what_they_were_made_of(form):
    gain = curve(KL, 0.31, 0.17, form)
    found = fit([0.0, -0.01, *KL], [0.4, 0.3, *gain], form)  # what has not moved is left out

    assert (found.alpha, found.beta) == pytest.approx((0.31, 0.17))
    assert found.rmse == pytest.approx(0, abs=1e-12)
    assert found.r2 == pytest.approx(1)
    assert [found(kl) for kl in KL] == pytest.approx(list(gain))
    assert found(0.0) == 0


@pytest.mark.parametrize("form", ["rl", "best_of"])
def test_the_peak_is_where_no_other_kl_has_more(form):
    found = fit(KL, curve(KL, 0.31, 0.17, form), form)
    kls = np.linspace(0.01, 12, 200_000)

    assert found.peak == pytest.approx(kls[np.argmax(curve(kls, 0.31, 0.17, form))], rel=1e-3)


def test_a_curve_that_never_falls_has_no_peak():
    assert fit(KL, np.sqrt(KL) * (0.1 + np.log(np.sqrt(KL)))).peak is None


@pytest.mark.parametrize("form", ["rl", "best_of"])
def test_a_noisy_fit_solves_the_normal_equations(form):
    noise = np.random.default_rng(0).normal(scale=0.03, size=len(KL))
    gain = curve(KL, 0.31, 0.17, form) + noise
    found = fit(KL, gain, form)

    d = np.sqrt(KL)
    u, v = d, -d * (np.log(d) if form == "rl" else d)
    det = (u @ u) * (v @ v) - (u @ v) ** 2  # Cramer's rule, by hand
    alpha = ((u @ gain) * (v @ v) - (v @ gain) * (u @ v)) / det
    beta = ((v @ gain) * (u @ u) - (u @ gain) * (u @ v)) / det
    off = gain - alpha * u - beta * v
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta))
    assert found.rmse == pytest.approx(math.sqrt(np.mean(off**2)))
    assert found.largest == pytest.approx(max(abs(off)))
    assert found.r2 == pytest.approx(1 - np.sum(off**2) / np.sum((gain - gain.mean()) ** 2))


def test_one_point_is_refused():
    with pytest.raises(ValueError, match="at least two points with a KL > 0, got 1"):
        fit([0.0, 1.0], [0.0, 0.1])


def test_best_of_n_by_the_proxy_is_the_mean_over_all_subsets_and_ties():
    proxy = np.array([[1.0, 1.0, 2.0, 3.0, 3.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    gold = np.array([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
    for k in range(1, 7):
        means = []
        for values, worth in zip(proxy, gold, strict=True):
            for chosen in itertools.combinations(range(6), k):
                most = max(values[i] for i in chosen)
                means.append(np.mean([worth[i] for i in chosen if values[i] == most]))
        assert best_of(proxy, gold, k) == pytest.approx(np.mean(means)), k


def test_the_kl_of_best_of_n_is_that_of_all_draws():
    """Enumerate n draws with replacement from replies of which one comes twice."""
    said = [0.0, 1.0, 1.0, 2.0]  # replies by their proxy
    for k in (1, 2, 3, 4):
        draws = [max(draw) for draw in itertools.product(said, repeat=k)]
        kl = 0.0
        for reply in (0.0, 1.0, 2.0):
            p, q = draws.count(reply) / len(draws), said.count(reply) / len(said)
            kl += p * math.log(p / q)
        assert kl_of_best_of(np.array([said]), k) == pytest.approx(kl, abs=1e-12)


def test_the_reweighted_reference_beats_its_neighbours():
    proxy = np.random.default_rng(1).normal(size=(1, 5))
    gold, coeff = np.array([[0.0, 1.0, 0.0, 1.0, 1.0]]), 0.7
    chances = np.exp(proxy[0] / coeff) / np.exp(proxy[0] / coeff).sum()

    def worth(p):
        return p @ proxy[0] - coeff * np.sum(p * np.log(5 * p))

    kl, reached = reweighted(proxy, gold, coeff)
    assert kl == pytest.approx(np.sum(chances * np.log(5 * chances)))
    assert reached == pytest.approx(chances @ gold[0])
    for i, j in itertools.permutations(range(5), 2):
        moved = chances.copy()
        moved[i], moved[j] = moved[i] + 1e-3, moved[j] - 1e-3
        assert worth(moved) < worth(chances)


def test_paths_are_compared_at_one_kl_and_only_where_both_are():
    path = [(0.0, 0.2), (0.5, 0.4), (2.0, 0.7), (5.0, 0.9)]
    other = [(0.0, 0.2), (4.0, 0.6), (1.0, 0.3)]

    assert apart(path, other) == pytest.approx([0.4 - 0.25, 0.7 - 0.4])


def test_each_run_of_the_study_composes_and_evaluates_often(tmp_path):
    proxy = Proxy(width=16, seed=3, base=tmp_path, coeffs=("0", "1"))
    build_body(tmp_path / "bodies" / "16_3", 16, 3)
    proxy.model.mkdir(parents=True)
    (proxy.model / "reward_model.safetensors").touch()
    first, free, held = (compose_checked(told) for told in commands(proxy).values())

    assert first["policy"]["model"] == str(tmp_path / "bodies" / "16_3")
    assert (free["kl"]["coeff"], held["kl"]["coeff"]) == (0, 1)
    assert {c["seed"] for c in (first, free, held)} == {3}
    for policy in (free, held):
        assert policy["env"]["task"]["reward_model"] == str(proxy.model)
        assert policy["trainer"]["num_iterations"] >= 10 * policy["eval"]["every"]


def test_a_size_has_four_times_the_weights_of_the_one_before(tmp_path):
    from policies.models import find_model, load_model

    counts = []
    for width in WIDTHS:
        build_body(tmp_path / str(width), width, 1)
        model = load_model(find_model(str(tmp_path / str(width))))
        counts.append(sum(p.numel() for p in model.base_model.layers.parameters()))
    ratios = [b / a for a, b in itertools.pairwise(counts)]
    assert ratios == pytest.approx([4, 4, 4], rel=0.05)
    assert counts[-1] == pytest.approx(107_136, rel=0.01)  # of the model `tiny` itself
