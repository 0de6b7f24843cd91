"""Gao's curves: the fit by hand numbers and by another way, best-of-n by enumeration, the runs."""

import itertools
import json
import math
from statistics import fmean

import numpy as np
import pytest
from pages import Page, write_lines, write_status

from benchmarks import overoptimisation
from benchmarks.gao import apart, best_of, fit, kl_of_best_of, reweighted
from benchmarks.overoptimisation import (
    WIDTHS,
    at_one_kl,
    build_body,
    commands,
    fits,
    held_out,
    judged,
    leashes,
)
from benchmarks.overoptimisation_picture import draw
from benchmarks.overoptimisation_runs import Proxy, near_peak, tilted
from conf.build import make_task
from conf.compose import compose_checked
from trainer import limit

KL = np.array([0.04, 0.25, 0.81, 1.0, 2.25, 4.0, 9.0])


def curve(kl, alpha, beta, form):
    d = np.sqrt(kl)
    return d * (alpha - beta * (np.log(d) if form == "rl" else d))


def cramer(kl, gain, form):
    """Return alpha and beta of the normal equations by Cramer's rule, and what they leave."""
    d, gain = np.sqrt(kl), np.asarray(gain)
    u, v = d, -d * (np.log(d) if form == "rl" else d)
    det = (u @ u) * (v @ v) - (u @ v) ** 2
    alpha = ((u @ gain) * (v @ v) - (v @ gain) * (u @ v)) / det
    beta = ((v @ gain) * (u @ u) - (u @ gain) * (u @ v)) / det
    return alpha, beta, gain - alpha * u - beta * v


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

    alpha, beta, off = cramer(KL, gain, form)
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


def test_with_gold_and_proxy_the_same_both_are_what_the_limit_says():
    reward = np.random.default_rng(2).normal(size=(3, 8))

    assert reweighted(reward, reward, 0.7) == pytest.approx(limit.optimum(reward, 0.7))
    for k in (1, 3, 8):
        assert best_of(reward, reward, k) == pytest.approx(limit.best_of(reward, k))


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


def test_the_pairs_that_judge_a_proxy_are_none_that_it_was_trained_on(tmp_path):
    proxy = Proxy(width=8, seed=1, base=tmp_path, coeffs=("0",))
    (run := proxy.model.parent).mkdir(parents=True)
    cfg = compose_checked(["experiment=rm_tiny", "seed=1"])
    (run / "config.yaml").write_text(json.dumps(cfg))  # JSON is YAML

    trained, held = (
        {row["messages"][-1]["content"] for row in rows}
        for rows in (make_task(cfg["env"]).preferences(), held_out(proxy))
    )
    assert (len(trained), len(held), len(trained & held)) == (1080, 120, 0)


def test_a_proxy_is_judged_by_its_pairs_and_its_weights_are_counted(tmp_path, monkeypatch):
    from envs.tasks import Preferences
    from policies import GPT2RewardModel
    from policies.reward_scorer import ChatRewards

    proxy = Proxy(width=8, seed=1, base=tmp_path, coeffs=("0",))
    build_body(tmp_path / "body", 8, 1)
    build_body(proxy.model, 8, 1)  # for the tokenizer
    GPT2RewardModel(tmp_path / "body").save_pretrained(proxy.model)
    rows = Preferences().rows("eval")[:9]
    monkeypatch.setattr(overoptimisation, "held_out", lambda _: rows)

    score, right = ChatRewards(proxy.model), 0
    for row in rows:
        one, other = (
            score([[*row["messages"], {"role": "assistant", "content": row[side]}]])
            for side in ("chosen", "rejected")
        )
        right += one > other
    assert 0 < right < 9
    layer = 4 * 8 * 8 + 3 * 8 * 24 + 2 * 8 + 3 * 8  # q k v o, gated MLP, norms, biases
    body, whole, share = judged(proxy)
    assert body == 2 * layer + 8 + 8  # last norm, head
    assert whole - body == 400 * 8
    assert share == pytest.approx(right / 9)


# Two prompts with 1024 replies of the reference: 512 and 16 of them the proxy likes (reward 1), and
# of those 384 and 0 are right; of the others 128 and 512. So half of all are right.
LIKED, RIGHT, RIGHT_OF_OTHERS = (512, 16), (384, 0), (128, 512)
FREE_KL, FREE_GOLD = (0.0, 0.25, 1.0, 4.0, 6.25), (0.5, 0.6, 0.7, 0.45, 0.55)
LEASHED_KL, LEASHED_GOLD = (0.0, 0.25, 1.0), (0.5, 0.65, 0.8)


def best(odds):
    """Return reward, gold and KL of the best policy for the proxy at the odds of a liked reply."""
    likes = [n / 1024 for n in LIKED]
    shares = [p * odds / (1 - p + p * odds) for p in likes]
    gold, kl = [], []
    for i, (p, a) in enumerate(zip(likes, shares, strict=True)):
        gold.append(a * RIGHT[i] / LIKED[i] + (1 - a) * RIGHT_OF_OTHERS[i] / (1024 - LIKED[i]))
        kl.append(a * math.log(a / p) + (1 - a) * math.log((1 - a) / (1 - p)))
    return fmean(shares), fmean(gold), fmean(kl)


def best_of_k(k):
    """Return KL and gold of the best of k: none is liked, or one that is."""
    gold, kl = [], []
    for liked, good, others in zip(LIKED, RIGHT, RIGHT_OF_OTHERS, strict=True):
        none = math.comb(1024 - liked, k) / math.comb(1024, k)
        gold.append((1 - none) * good / liked + none * others / (1024 - liked))
        p = 1 - liked / 1024
        q = p**k  # with replacement: the KL is of what the reference says, not of the draw
        kl.append(q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))
    return fmean(kl), fmean(gold)


def tilts():
    """Return the odds of a liked reply at 25 coefficients, 30 to 0.2 times the mean deviation."""
    deviation = fmean(math.sqrt(n / 1024 * (1 - n / 1024)) for n in LIKED)
    return [math.exp(1 / (deviation * 30 * (0.2 / 30) ** (i / 24))) for i in range(25)]


def write_way(folder, kl, gold, odds):
    rows = [
        {"eval/kl_ref_sequence": x, "eval/sampled_accuracy": y, "eval/reward": best(z)[0]}
        for x, y, z in zip(kl, gold, odds, strict=True)
    ]
    write_status(write_lines(folder, *rows, begin=0), state="finished")


def proxy_of(base, width, seed, more=None):
    """Write a free run and, with `more` gold than by hand, a penalised one."""
    proxy = Proxy(width, seed, base, ("0",) if more is None else ("0", "1"))
    write_way(proxy.run("0"), FREE_KL, FREE_GOLD, (1, 2, 3, 9, 20))
    if more is not None:
        gold = [LEASHED_GOLD[0], *(y + more for y in LEASHED_GOLD[1:])]
        write_way(proxy.run("1"), LEASHED_KL, gold, (1, 3, 9))
    reward, success = [], []
    for liked, good, others in zip(LIKED, RIGHT, RIGHT_OF_OTHERS, strict=True):
        reward.append([1.0] * liked + [0.0] * (1024 - liked))
        success.append([1] * good + [0] * (1024 - good - others) + [1] * others)
    found = {"asked": 2, "reward": reward, "success": success}
    (proxy.run("0") / "limit.json").write_text(json.dumps(found))
    return proxy


@pytest.fixture
def sizes(tmp_path):
    """Return two seeds of a width, one of another, and a width without a penalty."""
    return {
        8: [proxy_of(tmp_path, 8, 1, 0.0), proxy_of(tmp_path, 8, 2, 0.1)],
        16: [proxy_of(tmp_path, 16, 1, -0.1)],
        32: [proxy_of(tmp_path, 32, 1)],
    }


def cells(table):
    rows = table.splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_what_a_penalty_moves_is_by_hand(sizes):
    """At KL 0.25 and 1 gold is 0.05 and 0.1 higher; at the rewards of these -0.05 and 0.35."""
    proxy = f"{(best(9)[0] - best(2)[0]) / 2:+.3f}"
    spent = pytest.approx([best(9)[2] / 1.0, best(3)[2] / 1.0], abs=0.02)  # at KL 1 both
    eight, sixteen, whole = cells(leashes(sizes))

    assert all(
        [float(share) for share in row.pop().split(", ")] == spent for row in (eight, sixteen)
    )
    end = "1.00, 0.85"
    assert eight == ["1", "8", "+0.125 ± 0.071", f"{proxy} ± 0.000", "+0.200 ± 0.071", end]
    assert sixteen == ["1", "16", "-0.025", proxy, "+0.050", "1.00, 0.70"]
    assert whole[2:5] == ["+0.050 ± 0.106", f"{proxy} ± 0.000", "+0.125 ± 0.106"]


def test_the_highest_gold_by_each_means_is_by_hand(sizes):
    def top(points):
        kl, gold = max(points, key=lambda point: point[1])
        return f"{gold:.3f} at {kl:.2f}"

    picked = top(map(best_of_k, (2, 4, 8, 16, 32, 64, 128)))
    tilt = top((kl, gold) for _, gold, kl in map(best, tilts()))
    assert len({picked, tilt}) == 2
    assert cells(at_one_kl(sizes)) == [
        ["8", "0.500", "0.700 at 1.00", "0.850 at 1.00", picked, tilt],
        ["16", "0.500", "0.700 at 1.00", "0.700 at 1.00", picked, tilt],
        ["32", "0.500", "0.700 at 1.00", "", picked, tilt],
    ]


def test_a_fit_is_of_what_is_not_below_the_start_also_after_a_fall(sizes):
    """Of the free way the point at 4 nats is below; that at 6.25 came later and is not."""
    whole = [(kl, gold - 0.5) for kl, gold in zip(FREE_KL, FREE_GOLD, strict=True)]
    kept = [point for point in whole if point[0] != 4]
    picked = [(kl, gold - 0.5) for kl, gold in map(best_of_k, (2, 4, 8, 16, 32, 64, 128))]
    high = [point for point in picked if point[1] >= 0]
    assert near_peak(whole) == kept
    assert 2 < len(high) < len(picked)

    def expected(kept, whole, form):
        kl, gain = np.array([point for point in kept if point[0] > 0]).T
        alpha, beta, off = cramer(kl, gain, form)
        kls, gains = np.array([point for point in whole if point[0] > 0]).T
        r2 = [
            1 - np.mean(left**2) / np.var(y)
            for left, y in ((off, gain), (cramer(kls, gains, form)[2], gains))
        ]
        grid = np.linspace(0.001, 4, 400_000)
        values = curve(grid, alpha, beta, form)
        peak = f"{grid[values.argmax()]:.2f}, {values.max():.3f}"
        numbers = (alpha, beta, math.sqrt(np.mean(off**2)), abs(off).max())
        return [*(f"{x:.3f}" for x in numbers), *(f"{x:.2f}" for x in r2), peak]

    rl, other, n = cells(fits(sizes))[-3:]
    assert (rl[:2], n[:2]) == (["32", "RL"], ["32", "best-of-n"])
    assert rl[3:] == [*expected(kept, whole, "rl"), "1.00, 0.200"]
    assert other[3:] == [*expected(kept, whole, "best_of"), "1.00, 0.200"]
    assert n[3:-1] == expected(high, picked, "best_of")


def test_the_picture_has_a_panel_for_the_penalty_only_where_there_is_one(sizes):
    race, leash, picks = Page(draw(sizes)).charts().values()
    assert [len(drawn.paths("line")) for drawn in (race, leash, picks)] == [9, 3, 3]
    golds = [0.5, 0.7, 0.85, 0.5, 0.55, 0.7]  # mean of the seeds of width 8; width 16
    assert [leash.value(float(dot.attrib["cy"])) for dot in leash.dots] == pytest.approx(golds)
    assert len(picks.dots) == 3 * 7
    assert race.dots == []

    free = [Proxy(p.width, p.seed, p.base, ("0",)) for p in sizes[8]]
    assert len(Page(draw({8: free})).charts()) == 2


def test_the_reference_is_reweighted_from_hardly_to_nearly_the_best(sizes):
    """A liked reply is worth 1, so exp(proxy / c) raises its odds by e^(1 / c)."""
    for (kl, gold), odds in zip(tilted(sizes[8][0]), tilts(), strict=True):
        _, expected, spent = best(odds)
        assert (kl, gold) == pytest.approx((spent, expected))
