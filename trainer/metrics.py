"""Metrics of a batch, reduced over ranks. Names and formulas: docs/metrics.md.

A mean is a sum over rows or tokens divided by their number on all ranks. Rewards and KLs exclude
dropped rows; a reward part excludes rows to which it does not apply. The KL is over all sampled
tokens, also tokens that filters remove from the loss mask.
"""

import math

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from policies.layout import groups
from policies.precision import in_float64
from trainer.batch import LEASHES
from trainer.kl.estimators import k3
from trainer.runtime import Runtime

PER_TOKEN = ("kl/ref", "kl/ref_k3", "kl/teacher", "kl/teacher_k3")
PER_JUDGED_ROW = ("reward/mean", "reward/raw_mean", "square", "kl/ref_sequence")
PER_JUDGED_ROW += ("kl/teacher_sequence",)


def on_host(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch on the CPU, for code that reads single values, without ref_states."""
    texts = [key for key, value in batch.items() if is_non_tensor(value)]
    out = batch.exclude(*texts, "ref_states").to("cpu").clear_device_()
    return out.update(batch.select(*texts))


def summarize(
    batch: TensorDictBase, runtime: Runtime, *, rewarded: bool = True
) -> dict[str, float]:
    """Return the metrics of an iteration's batch (before the update).

    `rewarded`: whether the task has a reward; without one there are no reward metrics.
    """
    mask, out = batch.get("loss_mask"), dict[str, float]()  # [B, T]
    response = batch.get(("masks", "all_response_mask"), mask)
    sampled = response & judged_rows(batch).unsqueeze(-1)
    sums = {"rows": float(mask.shape[0]), "tokens": float(sampled.sum())}
    sums["judged"] = float(judged_rows(batch).sum())
    if "reward_raw" in batch and rewarded:
        _rewards(batch, sums)
    if "truncated" in batch:
        sums["response/truncated_fraction"] = float(batch.get("truncated").sum())
    for name in LEASHES:
        _kl(batch, name, sampled, sums)
    logged, per_token = batch.get("logged", {}), [*PER_TOKEN]
    for name, value in logged.items():  # [B, T] or [B]
        per_token += [name] if value.ndim == 2 else []
        sums[name] = float((value * sampled if value.ndim == 2 else value).sum())
    if "returns" in batch:
        fit = return_sums(batch.get("returns"), batch.get("value"), mask)
        out["value/explained_variance"] = explained_variance(runtime.all_reduce_sum(fit))
    length = response.sum(-1).float()  # [B]
    sums["response/length_mean"] = float(length.sum())
    out |= _means(runtime.all_reduce_sum(sums), per_token)
    if "square" in out:
        variance = max(out.pop("square") - out["reward/raw_mean"] ** 2, 0.0)
        out["reward/std"] = variance**0.5
    if "groups" in out:
        flat, compared = out.pop("flat"), out.pop("groups")
        if compared:
            out["group/zero_variance_fraction"] = flat / compared
    return out | runtime.all_reduce_max({"response/length_max": float(length.max())})


def judged_rows(batch: TensorDictBase) -> Tensor:
    """Return the mask of rows that the task did not drop, [B]."""
    dropped = batch.get("dropped", None)
    every = torch.ones_like(batch.get("loss_mask")[:, 0], dtype=torch.bool)
    return every if dropped is None else ~dropped


def _means(total: dict[str, float], per_token: list[str]) -> dict[str, float]:
    """Return sums divided by their counts; a sum with count 0 is left out."""
    rows, judged, tokens = (total.pop(name) for name in ("rows", "judged", "tokens"))
    over = dict.fromkeys(total, rows) | dict.fromkeys(per_token, tokens)
    over |= dict.fromkeys(PER_JUDGED_ROW, judged) | {"reward/errors": 1.0}
    for name in [name for name in total if name.startswith("fits ")]:
        over[name.removeprefix("fits ")] = total.pop(name)
    return {name: value / over[name] for name, value in total.items() if over[name]}


def _rewards(batch: TensorDictBase, sums: dict[str, float]) -> None:
    judged = judged_rows(batch)
    raw = in_float64(batch.get("reward_raw").sum(-1)[judged])  # [K]
    sums["reward/raw_mean"] = float(raw.sum())
    sums["square"] = float((raw**2).sum())
    sums["reward/mean"] = float(batch.get("reward").sum(-1)[judged].sum())
    parts = batch.get("reward_part", None)
    for name, value in () if parts is None else parts.items():
        fits = judged & ~value.isnan()
        sums[f"reward_part/{name}"] = float(value[fits].sum())
        sums[f"fits reward_part/{name}"] = float(fits.sum())
    if "reward_errors" in batch:
        sums["reward/errors"] = float(batch.get("reward_errors").sum())
        sums["reward/dropped_fraction"] = float((~judged).sum())
    rows, idle = groups(batch.get("group_id")), idle_groups(batch).tolist()
    flat = [i for g, i in zip(rows, idle, strict=True) if len(g) > 1 and bool(judged[g].all())]
    sums["groups"], sums["flat"] = float(len(flat)), float(sum(flat))


def _kl(batch: TensorDictBase, name: str, mask: Tensor, sums: dict[str, float]) -> None:
    names = LEASHES[name]
    if names.penalty not in batch:
        return
    k1 = batch.get(names.penalty) * mask  # [B, T]
    gen, ref = batch.get(("log_probs", "full")), batch.get(names.log_probs)  # [B, T]
    sums[f"kl/{name}"] = sums[f"kl/{name}_sequence"] = float(k1.sum())
    sums[f"kl/{name}_k3"] = float((k3(gen - ref) * mask).sum())
    for each, rows in batch.get("teachers", {}).items() if name == "teacher" else ():
        of_rows = mask & rows.unsqueeze(-1)  # [B, T]
        sums[f"kl/teacher/{each}"] = float((k1 * of_rows).sum())
        sums[f"fits kl/teacher/{each}"] = float(of_rows.sum())


def idle_groups(batch: TensorDictBase) -> Tensor:
    """Return the mask of idle groups, [P] bool: rows with loss tokens have equal task rewards.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"group_id": torch.tensor([5, 5, 2, 2])}, [4])
    >>> td["reward_raw"] = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    >>> idle_groups(td.set("loss_mask", torch.ones(4, 2, dtype=torch.bool))).tolist()
    [True, False]
    """
    reward = batch.get("reward_raw").sum(-1).tolist()  # [B]
    learnt = batch.get("loss_mask").any(-1).tolist()  # [B]
    rows = groups(batch.get("group_id"))
    idle = [len({reward[i] for i in row if learnt[i]}) < 2 for row in rows]
    return torch.tensor(idle, dtype=torch.bool)


def return_sums(returns: Tensor, value: Tensor, mask: Tensor) -> dict[str, float]:
    """Return sums over masked tokens for `explained_variance`; add them over ranks before."""
    y, error = in_float64(returns[mask]), in_float64((returns - value)[mask])
    numbers = torch.stack([y.sum(), (y**2).sum(), error.sum(), (error**2).sum()]).tolist()
    return {"count": float(len(y)), **dict(zip(("y", "yy", "e", "ee"), numbers, strict=True))}


def explained_variance(sums: dict[str, float]) -> float:
    """Return 1 - Var(returns - value) / Var(returns); NaN if the returns are constant.

    >>> y, v = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 1.5]])
    >>> explained_variance(return_sums(y, v, y >= 0))
    0.75
    """
    count = max(sums["count"], 1.0)
    total = sums["yy"] / count - (sums["y"] / count) ** 2
    left = sums["ee"] / count - (sums["e"] / count) ** 2
    floor = 1e-12 * sums["yy"] / count  # rounding error of equal returns
    return 1 - left / total if total > floor else math.nan


def name_beside(name: str, rows: str) -> str:
    """Return the name of an evaluation's metric for other rows, train or retain.

    >>> name_beside("eval/reward", "train"), name_beside("kl/efficiency", "train")
    ('eval_train/reward', 'kl/efficiency_train')
    """
    family, _, rest = name.partition("/")
    return f"eval_{rows}/{rest}" if family == "eval" else f"kl/{rest}_{rows}"


def scores_by_row(batch: TensorDictBase, rows: list[int]) -> dict[int, dict[str, list]]:
    """Return {row: reward, success and KL, if measured, of its responses}.

    Dropped rows are left out.
    """
    values = {"reward": in_float64(batch.get("reward_raw")).sum(-1)}  # each [B]
    values["success"] = batch.get("success").int()
    if (kl := batch.get("kl_penalty", None)) is not None:
        values["kl"] = (in_float64(kl) * batch.get(("masks", "all_response_mask"))).sum(-1)
    table = {name: value.view(len(rows), -1).tolist() for name, value in values.items()}
    dropped = batch.get("dropped").view(len(rows), -1)[:, 0].tolist()  # by full groups
    return {
        row: {name: column[i] for name, column in table.items()}
        for i, row in enumerate(rows)
        if not dropped[i]
    }
