"""The papers in loops over sequences and tokens, in float64, and a case to compare them with."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from contracts import one_process
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

import trainer.losses
from conf.build import build, make_leash
from conf.compose import compose_checked, set_up
from policies.scorer import Scores

G, MOST, BETA = 4, 7, 0.3  # replies a prompt, tokens a row may have, KL coefficient
LENGTHS = (6, 3, 1, 4, 5, 2, 6, 4)
REWARDS = (1.0, 0.1, 0.0, 1.0, 0.0, 0.9, 0.1, 0.1)
# How far each row has moved, in nats a token: within GSPO's bounds, past PPO's, past CISPO's.
MOVED = (1e-4, 0.3, 2.0, 0.3, 1e-4, 0.3, 1e-4, 2.0)


@dataclass(frozen=True)
class Case:
    """Two prompts with G replies each; `kept` are the tokens of a row that count."""

    curr: Tensor
    gen: Tensor
    ref: Tensor
    kept: list[list[int]]
    groups: list[list[int]]

    @property
    def rows(self) -> range:
        return range(len(self.kept))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.kept))


def case(group_size: int = G) -> Case:
    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(len(LENGTHS), MOST, generator=generator, dtype=torch.float64)

    curr = -draw(0).abs()
    gen = -(curr - draw(1) * torch.tensor(MOVED, dtype=torch.float64)[:, None]).abs()
    kept = [list(range(1, 1 + n)) for n in LENGTHS]
    rows = list(range(len(LENGTHS)))
    groups = [rows[i : i + group_size] for i in range(0, len(rows), group_size)]
    return Case(curr, gen, curr - 0.5 * draw(2), kept, groups)


def batch_of(c: Case) -> TensorDict:
    mask = torch.tensor([[t in kept for t in range(MOST)] for kept in c.kept])
    reward = torch.zeros(mask.shape, dtype=torch.float64)
    for i, kept in enumerate(c.kept):
        reward[i, kept[-1]] = REWARDS[i]
    ids = torch.tensor([g for g, rows in enumerate(c.groups) for _ in rows])
    td = TensorDict({"loss_mask": mask, "reward_raw": reward, "group_id": ids}, [len(c.kept)])
    td["kl_penalty"] = (c.gen - c.ref) * mask
    td["log_probs", "full"] = c.gen * mask
    td["ref_log_probs", "full"] = c.ref * mask
    return td


# What the papers say. `curr` has the gradient; each returns what is minimised.


def k3(curr: Tensor, ref: Tensor) -> Tensor:
    return torch.exp(ref - curr) - (ref - curr) - 1


def clip(r: Tensor, a: float, low: float, high: float) -> Tensor:
    return min(r * a, min(max(r, r.new_tensor(1 - low)), r.new_tensor(1 + high)) * a)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


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
    c: Case, curr: Tensor, a: list[float], over: Callable, low: float, high: float, beta: float
) -> Tensor:
    """Return the mean `over` tokens of PPO's clipped term less beta k3, to be minimised."""

    def term(i: int, t: int) -> Tensor:
        r = torch.exp(curr[i, t] - c.gen[i, t])
        return clip(r, a[i], low, high) - beta * k3(curr[i, t], c.ref[i, t])

    return -over(c, term)


def grpo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2402.03300 eq. 3 and 4, all tokens alike (arXiv 2503.14476 eq. 8)."""
    return clipped(c, curr, standard(c), over_tokens, 0.2, 0.2, BETA)


def dapo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2503.14476 eq. 8: eq. 3 of GRPO with another upper bound, and no KL."""
    return clipped(c, curr, standard(c), over_tokens, 0.2, 0.28, 0.0)


def dr_grpo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2503.20783 section 3.2: neither the length nor the std divides."""
    return clipped(c, curr, centred(c), over_most, 0.2, 0.2, BETA)


def rloo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2402.14740 section 2.3: r - beta log(pi / ref) of a reply, against the others'."""
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


def gspo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2507.18071 eq. 5 to 7, and GRPO's KL."""
    a, total = standard(c), torch.zeros(())
    for i in c.rows:
        log_ratio = sum(curr[i, t] - c.gen[i, t] for t in c.kept[i]) / len(c.kept[i])
        total = total + clip(torch.exp(log_ratio), a[i], 3e-4, 4e-4) / len(c.rows)
    return -total + BETA * over_rows(c, lambda i, t: k3(curr[i, t], c.ref[i, t]))


def cispo(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2506.13585 eq. 4 and 5, with a weight of at most 5, and GRPO's KL."""
    a = standard(c)

    def term(i: int, t: int) -> Tensor:
        weight = min(math.exp(float(curr[i, t].detach() - c.gen[i, t])), 5.0)
        return weight * a[i] * curr[i, t] - BETA * k3(curr[i, t], c.ref[i, t])

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
            return -BETA * k3(curr[i, t], c.ref[i, t])
        return a[i] * torch.exp(curr[i, t] - c.gen[i, t]) - BETA * k3(curr[i, t], c.ref[i, t])

    return -over_most(c, term)


def dppo_kl(c: Case, curr: Tensor) -> Tensor:
    """The same by eq. 14, KL(sampler || policy); from the policy one token is nearer than 0.06."""
    return dppo(c, curr, "kl", 0.06)


def minor_sft(c: Case, curr: Tensor) -> Tensor:
    """arXiv 2408.10642: the gradient of a row is 2 sigmoid(-beta D) / m that of -log pi."""
    total = torch.zeros(())
    for i in c.rows:
        ahead = sum(curr[i, t] - c.ref[i, t] for t in c.kept[i])
        total = total - 2 / 0.1 * torch.log(torch.sigmoid(0.1 * ahead)) / len(c.kept[i])
    return total / len(c.rows)


EACH = (grpo, dapo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, bnpo, gspo, cispo)
PAPERS = {f.__name__: f for f in (*EACH, dppo, dppo_kl, minor_sft)}
WORDS = {
    "grpo": ("experiment=grpo_tiny", "algorithm=grpo"),
    "dppo_kl": ("experiment=dppo_tiny", "algorithm.surrogate=kl_mask", "algorithm.kl_bound=0.06"),
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
    algorithm, c = cfg.algorithm, case(cfg.algorithm.group_size)
    cfg.kl.coeff = 0.0 if name == "dapo" else BETA
    own = make_leash(cfg)
    batch, curr = batch_of(c), c.curr.clone().requires_grad_()
    mask = batch["loss_mask"]
    torch.set_default_dtype(torch.float64)
    try:
        if algorithm.source._target_ != "trainer.Demonstrations":
            batch = build(algorithm.advantage, algorithm, leash=own, runtime=one_process())(batch)
        terms = build(algorithm.objective, algorithm, leash=own)(Scores(curr), batch)
        totals = {"total_tokens": int(mask.sum()), "total_rows": len(c.kept), "max_tokens": MOST}
        weight = trainer.losses.token_weights(mask, algorithm.aggregation, **totals)
        loss = sum((weight * term).sum() for term in terms.loss.values())
        same = c.curr.clone().requires_grad_()
        want = PAPERS[name](c, same)
    finally:
        torch.set_default_dtype(kept)
    got, paper = (torch.autograd.grad(*pair)[0] for pair in ((loss, curr), (want, same)))
    assert paper.abs().max() > 1e-2
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, paper, rtol=1e-10, atol=1e-12)
    return terms.means["policy/clip_fraction"][mask] if "kl/behaviour" in terms.means else mask
