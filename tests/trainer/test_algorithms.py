"""Every algorithm of conf/algorithm against its paper: loops over sequences and tokens, float64.

The advantage, the objective and the aggregation are those that its YAML composes; what they are
compared with is written from the paper's equation, with the paper's numbers.
"""

import math
from collections.abc import Callable, Iterator
from statistics import fmean as mean
from statistics import stdev as std

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from support.invariance import planned
from support.peers import MOST, REWARDS, G, batch_of, draw
from support.policies import demonstrations, leash, make_policy, one_process, plain_log_probs
from tensordict import TensorDict
from torch import Tensor

import trainer.losses
from conf.compose import compose_checked, set_up
from policies.scorer import Scores
from trainer.advantage import GroupAdvantage
from trainer.demonstrations import ReferenceLogProbs
from trainer.surrogates import RATIOS, ClipRange, clipped_term, is_clipped

BETA = 0.3  # KL coefficient
# Of GDPO: parts of a reward. The second does not apply to every third row.
SPEED = [i * i % 7 / 7 if i % 3 else math.nan for i in range(len(REWARDS))]
PARTS = {"right": REWARDS, "speed": SPEED, "unweighted": REWARDS[::-1]}
# How far a sampler is off, so that tokens lie on both sides of an algorithm's bounds.
MOVES = {"gspo": 0.02, "cispo": 1.5, "dppo": 1.5, "dppo_kl": 1.5}


class Case:
    """Responses as peers.py draws them; `kept` are the tokens of a row that count."""

    def __init__(self, group_size: int = G, move: float = 0.7) -> None:
        data = draw(move=move)
        self.batch = batch_of(data)
        self.batch["group_id"] = torch.arange(len(data.mask)) // group_size
        for name, values in PARTS.items():
            self.batch["reward_part", name] = torch.tensor(values, dtype=torch.float64)
        self.curr, self.gen, self.ref = map(data.log_probs, (data.curr, data.gen, data.ref))
        self.kept = [row.nonzero().flatten().tolist() for row in data.mask]
        self.rows, self.tokens = range(len(self.kept)), sum(map(len, self.kept))
        self.groups = [self.rows[i : i + group_size] for i in self.rows[::group_size]]


# What the papers say. `curr` has the gradient; each returns what is minimised.


def k3(c: Case, curr: Tensor, i: int, t: int) -> Tensor:
    """arXiv 2402.03300 eq. 4."""
    ahead = c.ref[i, t] - curr[i, t]
    return torch.exp(ahead) - ahead - 1


def k3_ratio(c: Case, curr: Tensor, i: int, t: int) -> Tensor:
    """arXiv 2512.02556 eq. 7: the ratio has a gradient too."""
    return torch.exp(curr[i, t] - c.gen[i, t]) * k3(c, curr, i, t)


def clip(r: Tensor, a: float, low: float, high: float) -> Tensor:
    return min(r * a, min(max(r, r.new_tensor(1 - low)), r.new_tensor(1 + high)) * a)


def by_group(c: Case, score: Callable[[float, list[float]], float]) -> list[float]:
    """Return each row's advantage from its reward and the rewards of its group."""
    return [score(REWARDS[i], [REWARDS[j] for j in group]) for group in c.groups for i in group]


def standard(c: Case) -> list[float]:
    return by_group(c, lambda r, group: (r - mean(group)) / (std(group) + 1e-4))


def centred(c: Case) -> list[float]:
    return by_group(c, lambda r, group: r - mean(group))


def each(c: Case, term: Callable[[int, int], Tensor]) -> Iterator[list[Tensor]]:
    """Yield a row's terms, one for each token that counts."""
    return ([term(i, t) for t in c.kept[i]] for i in c.rows)


def over_tokens(c: Case, term: Callable[[int, int], Tensor]) -> Tensor:
    return sum(map(sum, each(c, term))) / c.tokens


def over_rows(c: Case, term: Callable[[int, int], Tensor]) -> Tensor:
    return sum(sum(row) / len(row) for row in each(c, term)) / len(c.rows)


def over_most(c: Case, term: Callable[[int, int], Tensor]) -> Tensor:
    return sum(map(sum, each(c, term))) / (len(c.rows) * MOST)


def clipped(
    c: Case,
    curr: Tensor,
    a: list[float],
    over: Callable,
    low: float,
    high: float,
    beta: float,
    kl: Callable = k3_ratio,
) -> Tensor:
    """Return the mean `over` tokens of PPO's clipped term less beta kl, to be minimised."""

    def term(i: int, t: int) -> Tensor:
        r = torch.exp(curr[i, t] - c.gen[i, t])
        return clip(r, a[i], low, high) - beta * kl(c, curr, i, t)

    return -over(c, term)


def grpo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2402.03300 eq. 3, all tokens alike (arXiv 2503.14476 eq. 8)."""
    return clipped(c, curr, standard(c), over_tokens, 0.2, 0.2, BETA)


def grpo_k3(c: Case, curr: Tensor) -> Tensor:
    """The same with the paper's own KL, eq. 4."""
    return clipped(c, curr, standard(c), over_tokens, 0.2, 0.2, BETA, k3)


def dapo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2503.14476 eq. 8: eq. 3 of GRPO with another upper bound, and no KL."""
    return clipped(c, curr, standard(c), over_tokens, 0.2, 0.28, 0.0)


def dr_grpo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2503.20783 section 3.2: neither the length nor the std divides."""
    return clipped(c, curr, centred(c), over_most, 0.2, 0.2, BETA)


def rloo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2402.14740 section 2.3: r - beta log(pi / ref) of a response, against the others'."""
    total = [
        REWARDS[i] - BETA * sum(float(c.gen[i, t] - c.ref[i, t]) for t in c.kept[i]) for i in c.rows
    ]
    a = {}
    for group in c.groups:
        for i in group:
            a[i] = total[i] - mean([total[j] for j in group if j != i])
    return -over_most(c, lambda i, t: a[i] * curr[i, t])


def whitened(c: Case, curr: Tensor, a: dict[tuple[int, int], float]) -> Tensor:
    """arXiv 2501.03262v9 eq. 5, 7: advantages over mean and std of all tokens, PPO's clipping."""
    middle, scale = mean(list(a.values())), std(list(a.values())) + 1e-4

    def term(i: int, t: int) -> Tensor:
        return clip(torch.exp(curr[i, t] - c.gen[i, t]), (a[i, t] - middle) / scale, 0.2, 0.2)

    return -over_tokens(c, term)


def reinforce_pp(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2501.03262v9 eq. 4 and 5: A_t = r - beta (sum of KL from t on), whitened."""
    to_go = {
        (i, t): REWARDS[i]
        - BETA * sum(float(c.gen[i, s] - c.ref[i, s]) for s in c.kept[i] if s >= t)
        for i in c.rows
        for t in c.kept[i]
    }
    return whitened(c, curr, to_go)


def reinforce_pp_baseline(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2501.03262v9 eq. 6 to 8: r less the group's mean, whitened; k2 in the loss."""
    a = centred(c)
    kl = over_tokens(c, lambda i, t: (curr[i, t] - c.ref[i, t]) ** 2 / 2)
    return whitened(c, curr, {(i, t): a[i] for i in c.rows for t in c.kept[i]}) + BETA * kl


def beta_of(p: float, a: float, b: float) -> float:
    """Return the density of Beta(a, b) at p."""
    norm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(norm) * p ** (a - 1) * (1 - p) ** (b - 1)


def bnpo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2506.02864 theorem 1: (r - p) / f(p; 1 + a/3, 1 + b/3), a and b from p's moments."""
    chances = [mean([REWARDS[i] for i in group]) for group in c.groups]
    middle, both = mean(chances), mean(chances) * (1 - mean(chances)) / std(chances) ** 2 - 1
    shapes = 1 + both * middle / 3, 1 + both * (1 - middle) / 3
    a = by_group(c, lambda r, group: (r - mean(group)) / beta_of(mean(group), *shapes))
    return clipped(c, curr, a, over_most, 0.2, 0.28, BETA)


def gdpo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2601.05242: per part (r - mean) / std in the group, summed, then over the batch."""
    total = [0.0 for _ in c.rows]
    for weight, part in ((1.0, PARTS["right"]), (0.5, PARTS["speed"])):
        for group in c.groups:
            those = [part[i] for i in group if not math.isnan(part[i])]
            for i in group:
                if not math.isnan(part[i]):
                    total[i] += weight * (part[i] - mean(those)) / (std(those) + 1e-4)
    a = [(x - mean(total)) / (std(total) + 1e-4) for x in total]
    return clipped(c, curr, a, over_tokens, 0.2, 0.2, BETA)


def gspo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2507.18071 eq. 5 to 7, and GRPO's KL."""
    a, total = standard(c), torch.zeros(())
    for i in c.rows:
        log_ratio = sum(curr[i, t] - c.gen[i, t] for t in c.kept[i]) / len(c.kept[i])
        total = total + clip(torch.exp(log_ratio), a[i], 3e-4, 4e-4) / len(c.rows)
    return -total + BETA * over_rows(c, lambda i, t: k3_ratio(c, curr, i, t))


def cispo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2506.13585 eq. 4 and 5, with a weight of at most 5, and GRPO's KL."""
    a = standard(c)

    def term(i: int, t: int) -> Tensor:
        weight = min(math.exp(float(curr[i, t].detach() - c.gen[i, t])), 5.0)
        return weight * a[i] * curr[i, t] - BETA * k3_ratio(c, curr, i, t)

    return -over_tokens(c, term)


def dppo(c: Case, curr: Tensor, divergence: str = "tv", most: float = 0.15) -> Tensor:
    """arXiv 2602.04879 eq. 11 to 14, with the advantage of Dr. GRPO as in its runs, GRPO's KL."""
    a = centred(c)

    def term(i: int, t: int) -> Tensor:
        now, then = math.exp(float(curr[i, t].detach())), math.exp(float(c.gen[i, t]))
        if divergence == "tv":
            distance = abs(then - now)
        else:
            rest = (1 - then) * math.log((1 - then) / (1 - now))
            distance = then * math.log(then / now) + rest
        if distance > most and a[i] * (now - then) > 0:
            return -BETA * k3_ratio(c, curr, i, t)
        return a[i] * torch.exp(curr[i, t] - c.gen[i, t]) - BETA * k3_ratio(c, curr, i, t)

    return -over_most(c, term)


def dppo_kl(c: Case, curr: Tensor) -> Tensor:
    """The same by eq. 14, KL(sampler || policy); from the policy one token is nearer than 0.06."""
    return dppo(c, curr, "kl", 0.06)


def kpop(c: Case, curr: Tensor) -> Tensor:
    """As AReaL, prime-rl and verl write it: both KLs of (this token, any other) are at most 0.1."""
    a = standard(c)

    def term(i: int, t: int) -> Tensor:
        p, g = math.exp(float(curr[i, t].detach())), math.exp(float(c.gen[i, t]))
        ways = [
            x * math.log(x / y) + (1 - x) * math.log((1 - x) / (1 - y)) for x, y in ((p, g), (g, p))
        ]
        kept = max(ways) <= 0.1
        return kept * a[i] * torch.exp(curr[i, t] - c.gen[i, t]) - BETA * k3_ratio(c, curr, i, t)

    return -over_tokens(c, term)


def sequence_masked(c: Case, curr: Tensor, far: Callable[[float, list[float]], bool]) -> Tensor:
    """GRPO without the policy term of the rows that are `far`, by advantage and log-ratios."""
    a = standard(c)
    ratios = [[float(curr[i, t].detach() - c.gen[i, t]) for t in c.kept[i]] for i in c.rows]
    a = [0.0 if far(a[i], ratios[i]) else a[i] for i in c.rows]
    return clipped(c, curr, a, over_tokens, 0.2, 0.2, BETA)


def opsm(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2512.02556 eq. 9."""
    return sequence_masked(c, curr, lambda a, x: a < 0 and -sum(x) / len(x) > 0.05)


def trm_max(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2512.23075, the largest token, k2."""
    return sequence_masked(c, curr, lambda a, x: max(v * v / 2 for v in x) > 0.8)


def trm_mean(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2512.23075, the mean token, k3."""
    return sequence_masked(c, curr, lambda a, x: mean([math.exp(v) - 1 - v for v in x]) > 0.2)


def minor_sft(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2408.10642: the gradient of a row is 2 sigmoid(-beta D) / m that of -log pi."""
    total = torch.zeros(())
    for i in c.rows:
        ahead = sum(curr[i, t] - c.ref[i, t] for t in c.kept[i])
        total = total - 2 / 0.1 * torch.log(torch.sigmoid(0.1 * ahead)) / len(c.kept[i])
    return total / len(c.rows)


EACH = (grpo, gdpo, dapo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, bnpo, gspo, cispo)
PAPERS = {f.__name__: f for f in (*EACH, grpo_k3, dppo, dppo_kl, kpop, minor_sft)}
PAPERS |= {f.__name__: f for f in (opsm, trm_max, trm_mean)}
GRPO = ("experiment=grpo_tiny", "algorithm=grpo")
WORDS = {
    "grpo": GRPO,
    "grpo_k3": (*GRPO, "kl.estimator=k3"),
    "gdpo": ("experiment=gdpo_tiny", "algorithm.part_weights={right: 1, speed: 0.5}"),
    "dppo_kl": ("experiment=dppo_tiny", "algorithm.surrogate=kl_mask", "algorithm.kl_bound=0.06"),
    "kpop": (*GRPO, "algorithm.surrogate=kpop", "algorithm.kl_bound=0.1"),
    "opsm": (*GRPO, "algorithm.opsm=0.05"),
    "trm_max": (*GRPO, "algorithm.trm_max=0.8"),
    "trm_mean": (*GRPO, "algorithm.trm_mean=0.2"),
}


def composed(name: str) -> DictConfig:
    """Return what the experiment of an algorithm composes; groups are as small as the case's."""
    set_up()
    words = WORDS.get(name, (f"experiment={name}_tiny",))
    cfg = OmegaConf.create(compose_checked([*words]))
    size = cfg.algorithm.group_size = min(cfg.algorithm.group_size, G)
    if "group_size" in cfg.algorithm.advantage:
        cfg.algorithm.advantage.group_size = size
    return cfg


def agrees_with_its_paper(name: str) -> Tensor:
    """Raise AssertionError unless loss and gradient are the paper's; return where it clips."""
    cfg, kept = composed(name), torch.get_default_dtype()
    algorithm, c = cfg.algorithm, Case(cfg.algorithm.group_size, MOVES.get(name, 0.7))
    cfg.kl.coeff = 0.0 if name in ("dapo", "minor_sft") else BETA
    parts = planned(cfg)
    batch, curr = c.batch, c.curr.clone().requires_grad_()
    mask = batch["loss_mask"]
    torch.set_default_dtype(torch.float64)
    try:
        if algorithm.source._target_ != "trainer.Demonstrations":
            batch = parts.advantage(leash=parts.leash, runtime=one_process())(batch)
        terms = parts.objective(leash=parts.leash)(Scores(curr), batch)
        totals = {"total_tokens": int(mask.sum()), "total_rows": len(c.kept), "max_tokens": MOST}
        weight = trainer.losses.token_weights(mask, algorithm.aggregation, **totals)
        loss = sum((weight * term).sum() for term in terms.loss.values())
        same = c.curr.clone().requires_grad_()
        want = PAPERS[name](c, same)
    finally:
        torch.set_default_dtype(kept)
    got, paper = (torch.autograd.grad(*pair)[0] for pair in ((loss, curr), (want, same)))
    assert paper.abs().max() > 1e-3
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, paper, rtol=1e-10, atol=1e-12)
    stopped = terms.means.get("policy/sequence_masked", terms.means.get("policy/clip_fraction"))
    return mask if stopped is None else stopped[mask]


@pytest.mark.parametrize("name", PAPERS)
def test_loss_and_gradient_are_those_of_the_paper(name):
    clipped = agrees_with_its_paper(name)
    bounded = name not in ("rloo", "minor_sft")
    assert not bounded or 0 < clipped.double().mean() < 1, "the case needs tokens of both kinds"


def test_a_masked_response_goes_as_a_whole():
    """Its tokens have advantages of both signs, as with credit=return_to_go; padding has none."""
    gen, curr = torch.zeros(2, 4), torch.tensor([[-1.0, -1.0, -1.0, 9.0]] * 2)
    advantage = torch.tensor([[-3.0, 1.0, 1.0, 9.0], [3.0, -1.0, -1.0, -9.0]])
    batch = TensorDict({"advantage": advantage}, [2])
    batch["log_probs", "full"] = gen
    batch["loss_mask"] = torch.tensor([[True, True, True, False]] * 2)
    objective = trainer.GRPOObjective(leash=leash(0.0), surrogate="reinforce", opsm=0.5)
    terms = objective(Scores(curr), batch)
    assert (terms.loss["policy"][:, :3] != 0).tolist() == [[False] * 3, [True] * 3]
    assert terms.means["policy/sequence_masked"].tolist() == [[1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("whiten", [False, True])
def test_a_group_need_not_lie_together_and_an_advantage_has_its_bound(whiten):
    batch, order = Case().batch, torch.arange(24).view(2, 12).T.flatten()
    options = {"group_size": G, "leash": leash(BETA), "whiten": whiten}
    want = GroupAdvantage(**options)(batch.clone())["advantage"]
    assert want.abs().max() > 0.8
    bounded = GroupAdvantage(**options, clip_advantage=0.8)
    assert torch.equal(bounded(batch[order])["advantage"], want[order].clamp(-0.8, 0.8))


def test_a_token_that_is_clipped_with_its_sequence_has_no_gradient():
    c = Case(move=0.02)
    mask, curr = c.batch["loss_mask"], c.curr.clone().requires_grad_()
    bounds = ClipRange(3e-4, 4e-4)
    a = torch.ones_like(curr)
    r = RATIOS["sequence"](curr, c.gen, mask)
    (clipped_term(curr, c.gen, r, a, bounds) * mask).sum().backward()
    stopped = is_clipped(curr, c.gen, r.detach(), a, bounds) & mask
    assert torch.equal(curr.grad == 0, stopped | ~mask)
    assert 0 < stopped.sum() < mask.sum()


def test_two_sided_clipping_by_hand():
    """Dual clip (arXiv 1912.09729 eq. 5), c = 3: it acts where the advantage is negative."""
    r = torch.tensor([2.0, 4.0, 4.0, 0.5], dtype=torch.float64)
    a = torch.tensor([-1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    curr, gen, bounds = r.log().requires_grad_(), torch.zeros_like(r), ClipRange(0.2, 0.2, most=3.0)
    term = clipped_term(curr, gen, curr.exp(), a, bounds)
    assert term.tolist() == pytest.approx([2.0, 3.0, -1.2, 0.8])
    (gradient,) = torch.autograd.grad(term.sum(), curr)
    assert gradient.tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert is_clipped(curr, gen, r, a, bounds).tolist() == [False, True, True, True]


@torch.no_grad()
def test_the_reference_of_minor_sft_is_the_policy_as_it_started():
    policy = make_policy.__wrapped__()
    batch = demonstrations(policy, "response")
    reference = ReferenceLogProbs(policy=policy, micro_batch_tokens=40)
    ids, attended = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    want = torch.zeros(ids.shape)
    for row, keep, out in zip(ids, attended, want, strict=True):
        out[keep] = plain_log_probs(policy, row[keep], 1.0).float()
    for p in policy.model.parameters():
        p.mul_(1.1)
    got = reference(batch)["ref_log_probs", "full"]
    torch.testing.assert_close(got, want * batch["loss_mask"], atol=1e-5, rtol=1e-5)
