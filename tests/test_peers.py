"""Rows of docs/coming_from_*.md that are marked = or ≠, each run against the peer's own function.

A row and its case are one: a case names its row by the first cell, and a marked row without a case
fails, as does a case without a row.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from peers import LENGTHS, MOST, ActorConfig, Data, G, draw, leash_gradient, peer_gradient
from torch import Tensor

# Warnings of the peers, on the transformers that leash takes, are theirs.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[1]
SAME = 1e-9  # of the largest gradient


@pytest.fixture(autouse=True)
def float64():
    """Compare in float64: token weights have torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Case:
    """Their loss, the words that the row gives for leash, and other words that must not be equal.

    `times`: their gradient is that many times leash's; `within`: as far as their epsilons go.
    The row says both.
    """

    page: str
    row: str
    words: str
    loss: Callable[[Data], Tensor]
    other: str
    differs: bool = False
    values: bool = False
    times: float = 1.0
    within: float = SAME
    data: Callable[[], Data] = draw


# TRL


def trl(row: str, words: str, other: str, **settings: Any) -> Case:
    """Return a case of GRPOTrainer or RLOOTrainer; `settings` of Case go there."""
    own = {k: settings.pop(k) for k in ("differs", "times", "data") if k in settings}
    return Case("trl", row, words, partial(trl_loss, settings=settings), other, **own)


def trl_loss(d: Data, settings: dict[str, Any]) -> Tensor:
    settings = {"beta": 0.0, "loss_type": "dapo", **settings}
    if "importance" in settings:
        settings["weights"] = peers.trl_weights(d, *settings.pop("importance"))
    if settings.pop("mask_truncated", False):
        settings["kept"] = d.mask & ~d.truncated[:, None]
    if "rloo" in settings:
        from trl import RLOOTrainer

        own = {k: settings.pop(k) for k in ("normalize_advantages", "penalty") if k in settings}
        own["beta"] = own.pop("penalty", 0.0)
        settings["advantage"] = peers.trl_advantages(RLOOTrainer, d, **own)
    return peers.trl_loss(d, **settings)


NEAR = partial(draw, move=0.02)  # ratios within GSPO's bounds and without them
FRESH = partial(draw, on_policy=True)
IMPORTANCE = (
    "algorithm.after_rollout={{importance: {{_target_: trainer.ImportanceSampling, {}}}}}"
).format


def two_engines() -> Data:
    """Replies of another engine: what the trainer scores is not what sampled."""
    d = draw(move=0.5)
    return replace(d, old=2 * d.curr - d.gen)


TRL = [
    trl(
        "`use_bias_correction_kl` (True)",
        "kl.coeff=0.1 kl.estimator=k3_ratio",
        "kl.estimator=k3",
        beta=0.1,
    ),
    trl("`beta` (0.0)", "kl.coeff=0.1", "kl.coeff=0.2", beta=0.1, use_bias_correction_kl=False),
    trl(
        "`epsilon` (0.2), `epsilon_high`",
        "algorithm.clip_low=0.1 algorithm.clip_high=0.3",
        "algorithm.clip_high=0.1",
        epsilon=0.1,
        epsilon_high=0.3,
    ),
    trl("`delta`", "algorithm.dual_clip=2", "algorithm.dual_clip=3", delta=2.0),
    trl(
        "`importance_sampling_level`",
        "algorithm.ratio=sequence",
        "algorithm.ratio=token",
        importance_sampling_level="sequence",
        data=NEAR,
    ),
    trl('`loss_type="dapo"` (default)', "", "algorithm.aggregation=sequence_mean"),
    trl(
        '`loss_type="grpo"`',
        "algorithm.aggregation=sequence_mean",
        "algorithm.aggregation=token_mean",
        loss_type="grpo",
    ),
    trl(
        '`loss_type="dr_grpo"`',
        "algorithm.aggregation=constant",
        "algorithm.aggregation=token_mean",
        loss_type="dr_grpo",
    ),
    trl('`loss_type="bnpo"`', "", "algorithm=bnpo", loss_type="bnpo"),
    trl(
        '`loss_type="cispo"`',
        "algorithm=cispo algorithm.clip_high=4",
        "algorithm.clip_high=5",
        loss_type="cispo",
        epsilon_high=5.0,
        data=partial(draw, move=1.5),
    ),
    trl(
        '`scale_rewards="group"` (default)',
        "algorithm.scale_by_std=true",
        "algorithm.scale_by_std=false",
    ),
    trl(
        '`scale_rewards="batch"`',
        "algorithm.scale_by_std=false algorithm.whiten=true",
        "algorithm.scale_by_std=false",
        scale_rewards="batch",
        differs=True,
    ),
    trl(
        '`scale_rewards="none"`',
        "algorithm.scale_by_std=false",
        "algorithm.scale_by_std=true",
        scale_rewards="none",
    ),
    trl(
        "`mask_truncated_completions`",
        "algorithm.after_rollout={drop: {_target_: trainer.DropTruncated}}",
        "algorithm.after_rollout={}",
        mask_truncated=True,
        differs=True,
    ),
    trl(
        "`entropy_coef` (0.0)",
        "algorithm.entropy_coeff=0.1",
        "algorithm.entropy_coeff=0.2",
        entropy_coef=0.1,
    ),
    trl(
        "`vllm_importance_sampling_correction`, `_mode`, `_clip_max` (3.0)",
        IMPORTANCE("level: sequence, mode: mask, limit: 3, floor: 0"),
        IMPORTANCE("level: sequence, mode: mask, limit: 3"),
        importance=("sequence_mask", None, 3.0),
        data=two_engines,
    ),
    trl(
        "`_mode`=`token_truncate`, `_clip_min`",
        IMPORTANCE("level: token, mode: truncate, limit: 3, floor: 0.5"),
        IMPORTANCE("level: token, mode: truncate, limit: 3"),
        importance=("token_truncate", 0.5, 3.0),
        data=two_engines,
    ),
    trl(
        "`RLOOTrainer`",
        "algorithm=rloo",
        "algorithm.baseline=group_mean",
        rloo=True,
        times=float(MOST),
        data=FRESH,
    ),
    trl(
        "`beta` (0.05)",
        "algorithm=rloo kl.coeff=0.1",
        "kl.coeff=0.2",
        rloo=True,
        penalty=0.1,
        times=float(MOST),
        data=FRESH,
    ),
    trl(
        "`normalize_advantages` (False)",
        "algorithm=rloo algorithm.whiten=true",
        "algorithm.whiten=false",
        rloo=True,
        normalize_advantages=True,
        times=float(MOST),
        data=FRESH,
        differs=True,
    ),
]

# verl


@cache
def imported() -> tuple[Any, ...]:
    return peers.import_peers()


def verl(row: str, words: str, other: str, **settings: Any) -> Case:
    """Return a case of verl: advantages of GRPO without the std, whose floor is another."""
    own = {k: settings.pop(k) for k in ("differs", "values", "data", "within") if k in settings}
    words = words if "algorithm=" in words else f"algorithm.scale_by_std=false {words}"
    loss = partial(verl_loss, settings=settings)
    return Case("verl", row, words, loss, other, **own)


def verl_loss(d: Data, settings: dict[str, Any]) -> Tensor:
    """Return the loss as verl's workers put it together from core_algos."""
    settings = {"loss_mode": "vanilla", "loss_agg_mode": "token-mean", **settings}
    core, corrections = imported()[:2]
    mode, aggregation = settings.pop("loss_mode"), settings.pop("loss_agg_mode")
    curr, old, mask = d.log_probs(d.curr), d.log_probs(d.old), d.mask.double()
    advantage = settings.pop("advantage", verl_grpo)(d, core)
    weights = None
    if "rollout_is" in settings:
        log_ratio = (old - d.log_probs(d.gen)).detach()
        chosen = {k: settings.pop(k) for k in ("rollout_is", "rollout_is_threshold")}
        weights, _ = corrections.compute_rollout_correction_weights(log_ratio, mask, **chosen)
    entropy, kl = settings.pop("entropy_coeff", 0.0), settings.pop("kl_loss", ("k3", 0.0))
    clip = settings.pop("cliprange_value", None)
    settings.setdefault("clip_ratio_c", 1e9)
    config = ActorConfig(**settings)
    if aggregation == "seq-mean-token-sum-norm":
        config.global_batch_info = {"loss_scale_factor": MOST}
    loss, _ = core.get_policy_loss_fn(mode)(
        old, curr, advantage, mask, aggregation, config, rollout_is_weights=weights
    )
    add = partial(core.agg_loss, loss_mask=mask, loss_agg_mode=aggregation)
    if entropy:
        table = d.curr.log_softmax(-1)
        loss = loss - entropy * add(loss_mat=-(table.exp() * table).sum(-1))
    loss = loss + kl[1] * add(loss_mat=core.kl_penalty(curr, d.log_probs(d.ref), kl[0]))
    if clip is not None:
        returns = verl_gae(d, core, returns=True)
        loss = loss + 0.5 * core.compute_value_loss(d.values, returns, d.old_values, mask, clip)[0]
    return loss


def rewards(d: Data) -> Tensor:
    """Return the task rewards at the last tokens, [B, T]."""
    return d.rewards[:, None] * (torch.arange(peers.T) == torch.tensor(LENGTHS)[:, None])


def groups() -> list[int]:
    return [row // G for row in range(len(LENGTHS))]


def verl_grpo(d: Data, core: Any, std: bool = False) -> Tensor:
    mask = d.mask.double()
    chosen = {"index": groups(), "norm_adv_by_std_in_grpo": std}
    return core.compute_grpo_outcome_advantage(rewards(d), mask, **chosen)[0]


def verl_rloo(d: Data, core: Any) -> Tensor:
    return core.compute_rloo_outcome_advantage(rewards(d), d.mask.double(), groups())[0]


def verl_gae(d: Data, core: Any, returns: bool = False) -> Tensor:
    found = core.compute_gae_advantage_return(
        rewards(d), d.old_values, d.mask.double(), gamma=1.0, lam=0.95
    )
    return found[1 if returns else 0]


def verl_plus_plus(d: Data, core: Any) -> Tensor:
    config = ActorConfig(gamma=1.0)
    return core.compute_reinforce_plus_plus_outcome_advantage(rewards(d), d.mask.double(), config)[
        0
    ]


def verl_plus_plus_baseline(d: Data, core: Any) -> Tensor:
    name = "compute_reinforce_plus_plus_baseline_outcome_advantage"
    return getattr(core, name)(rewards(d), d.mask.double(), groups())[0]


VERL = [
    verl(
        "`adv_estimator` (`gae`)",
        "algorithm=ppo algorithm.epochs=1 kl.coeff=0",
        "algorithm.lmbda=0.5",
        advantage=verl_gae,
        cliprange_value=0.2,
        values=True,
        differs=True,
    ),
    verl(
        "`adv_estimator=grpo`", "algorithm.scale_by_std=false", "algorithm.baseline=leave_one_out"
    ),
    verl(
        "`adv_estimator=rloo`",
        "algorithm.baseline=leave_one_out algorithm.scale_by_std=false",
        "algorithm.baseline=group_mean",
        advantage=verl_rloo,
    ),
    verl(
        "`adv_estimator=reinforce_plus_plus`",
        "algorithm=reinforce_pp kl.coeff=0",
        "algorithm.whiten=false",
        advantage=verl_plus_plus,
        differs=True,
    ),
    verl(
        "`adv_estimator=reinforce_plus_plus_baseline`",
        "algorithm=reinforce_pp_baseline kl.coeff=0",
        "algorithm.whiten=false",
        advantage=verl_plus_plus_baseline,
        differs=True,
    ),
    verl(
        "`norm_adv_by_std_in_grpo` (True)",
        "algorithm.scale_by_std=true",
        "algorithm.scale_by_std=false",
        advantage=partial(verl_grpo, std=True),
        differs=True,
    ),
    verl(
        "`rollout_correction.rollout_is`, `rollout_is_threshold` (2.0)",
        IMPORTANCE("level: token, limit: 2"),
        IMPORTANCE("level: token, limit: 3"),
        rollout_is="token",
        rollout_is_threshold=2.0,
        data=two_engines,
    ),
    verl(
        '`rollout_is_threshold="0.5_2.0"`',
        IMPORTANCE("level: token, mode: mask, limit: 2"),
        IMPORTANCE("level: token, limit: 2"),
        rollout_is="token",
        rollout_is_threshold="0.5_2.0",
        data=two_engines,
    ),
    verl(
        "`actor.clip_ratio_low` (0.2), `clip_ratio_high` (0.2)",
        "algorithm.clip_low=0.1 algorithm.clip_high=0.3",
        "algorithm.clip_high=0.1",
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
    ),
    verl(
        "`actor.clip_ratio` (0.2)",
        "algorithm.clip_low=0.05 algorithm.clip_high=0.05",
        "",
        clip_ratio=0.05,
        differs=True,
    ),
    verl(
        "`actor.clip_ratio_c` (3.0)",
        "algorithm.dual_clip=3",
        "algorithm.dual_clip=2",
        clip_ratio_c=3.0,
    ),
    verl("`actor.loss_agg_mode` (`token-mean`)", "", "algorithm.aggregation=sequence_mean"),
    verl(
        "`seq-mean-token-mean`",
        "algorithm.aggregation=sequence_mean",
        "algorithm.aggregation=token_mean",
        loss_agg_mode="seq-mean-token-mean",
        within=1e-7,
    ),
    verl(
        "`seq-mean-token-sum-norm`",
        "algorithm.aggregation=constant",
        "algorithm.aggregation=token_mean",
        loss_agg_mode="seq-mean-token-sum-norm",
    ),
    verl(
        "`actor.policy_loss.loss_mode=gspo`",
        "algorithm=gspo algorithm.scale_by_std=false kl.coeff=0",
        "algorithm.ratio=token",
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        data=NEAR,
        within=1e-7,
    ),
    verl(
        "`actor.policy_loss.loss_mode=cispo`",
        "algorithm=cispo algorithm.scale_by_std=false algorithm.clip_high=4 kl.coeff=0",
        "algorithm.clip_high=1",
        loss_mode="cispo",
        clip_ratio_low=1.0,
        clip_ratio_high=4.0,
        data=partial(draw, move=1.5),
    ),
    verl(
        "`actor.policy_loss.loss_mode=dppo_tv`",
        "algorithm=dppo algorithm.aggregation=token_mean kl.coeff=0",
        "algorithm.tv_bound=0.05",
        loss_mode="dppo_tv",
        clip_ratio_low=0.15,
        clip_ratio_high=0.15,
    ),
    verl(
        "`actor.entropy_coeff` (0)",
        "algorithm.entropy_coeff=0.1",
        "algorithm.entropy_coeff=0.2",
        entropy_coeff=0.1,
    ),
    verl(
        "`actor.kl_loss_type` (`low_var_kl`)",
        "kl.coeff=0.1 kl.estimator=k3",
        "kl.estimator=k2",
        kl_loss=("low_var_kl", 0.1),
    ),
    verl(
        "`kl_loss_type=low_var_kl` beyond 2.61 nats",
        "kl.coeff=0.1 kl.estimator=k3",
        "kl.estimator=k2",
        kl_loss=("low_var_kl", 0.1),
        data=partial(draw, far_ref=2.0),
        differs=True,
    ),
    *[
        verl(
            "`kl_loss_type=mse`, `k2`, `k1+`, `k3+`",
            "kl.coeff=0.1 kl.estimator=k2",
            "kl.estimator=k3",
            kl_loss=(kind, 0.1),
        )
        for kind in ("mse", "k2", "k1+", "k3+")
    ],
    verl(
        "`critic.cliprange_value` (0.5)",
        "algorithm=ppo algorithm.epochs=1 algorithm.whiten=false algorithm.value_clip=0.2",
        "algorithm.value_clip=0.4",
        advantage=lambda d, core: verl_gae(d, core, returns=True) - d.old_values,
        cliprange_value=0.2,
        values=True,
    ),
]

# OpenRLHF


def openrlhf_loss(d: Data, *, kl: tuple[str, float] = ("k3", 0.0), **settings: Any) -> Tensor:
    core, _, losses, utils = imported()
    policy = losses.PolicyLoss(**settings)
    advantage, mask = verl_grpo(d, core), d.mask.double()
    curr = d.log_probs(d.curr)
    loss = policy(curr, d.log_probs(d.old), advantage, mask)[0]
    utils.torch.Tensor.float, keep = torch.Tensor.double, torch.Tensor.float  # compared in float64
    try:
        term = utils.compute_approx_kl(curr, d.log_probs(d.ref), kl_estimator=kl[0])
    finally:
        torch.Tensor.float = keep
    return loss + kl[1] * losses.aggregate_loss(term, mask)


def openrlhf(row: str, words: str, other: str, data: Any = draw, **settings: Any) -> Case:
    words = f"algorithm.scale_by_std=false {words}"
    return Case("verl", row, words, partial(openrlhf_loss, **settings), other, data=data)


OPENRLHF = [
    openrlhf(
        "`actor.eps_clip` (0.2), `eps_clip_low_high`, `actor.dual_clip`",
        "algorithm.clip_low=0.1 algorithm.clip_high=0.3 algorithm.dual_clip=2",
        "algorithm.dual_clip=3",
        clip_eps_low=0.1,
        clip_eps_high=0.3,
        dual_clip=2.0,
    ),
    *[
        openrlhf(
            "`algo.kl.init_coef` (0.01), `init_kl_coef`",
            f"kl.coeff=0.1 kl.estimator={kind}",
            "kl.coeff=0.2",
            kl=(kind, 0.1),
        )
        for kind in ("k2", "k3")
    ],
]

CASES = [*TRL, *VERL, *OPENRLHF]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.page}: {case.row}")
def test_the_gradient_is_the_peers_or_differs_as_the_row_has_it(case):
    d = case.data()
    theirs = peer_gradient(case.loss, d, values=case.values) / case.times
    ours = leash_gradient(d, *split(case.words))
    bound = case.within * float(theirs.abs().max())
    gap = float((ours - theirs).abs().max())
    assert bound > 0
    assert (gap > bound) if case.differs else (gap <= bound), gap
    if case.other and not case.differs:
        changed = leash_gradient(d, *split(f"{case.words} {case.other}"))
        assert float((changed - theirs).abs().max()) > 1e3 * bound


def split(words: str) -> list[str]:
    """Return the words of a command line; a list in braces is one."""
    return re.findall(r"\S+=\{.*?\}\}|\S+=\{.*?\}|\S+", words)


MARKED = re.compile(r"^\| (.+?) \| .+? \| ([=≠]) ?", re.MULTILINE)


@pytest.mark.parametrize("page", ["trl", "verl"])
def test_every_marked_row_has_a_case_and_every_case_a_row(page):
    text = (ROOT / "docs" / f"coming_from_{page}.md").read_text()
    rows = {(row, mark == "≠") for row, mark in MARKED.findall(text)}
    assert rows == {(case.row, case.differs) for case in CASES if case.page == page}
