"""What a batch of trajectories says, reduced over ranks. Names and formulas: docs/metrics.md.

Every mean is a sum over rows or kept tokens divided by their number on all ranks. Rewards and
kl/ref_sequence leave out the rows that the task dropped, a reward part those that it does not fit.
The KL is over all sampled tokens: filters of the loss mask do not shorten the leash.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.packing import groups
from trainer.gae import explained_variance, return_sums
from trainer.losses import kl_term
from trainer.pieces import pieces
from trainer.runtime import Runtime
from trainer.shaping import idle_groups

PER_TOKEN = ("kl/ref", "kl/ref_k3", "policy/mismatch_limited")
PER_KEPT_ROW = ("reward/mean", "reward/raw_mean", "square", "kl/ref_sequence")


def summarize(batch: TensorDictBase, runtime: Runtime) -> dict[str, float]:
    """Return the metrics of an iteration's batch (before the update)."""
    mask, out = batch.get("loss_mask"), dict[str, float]()  # [B, T]
    response = batch.get(("masks", "all_response_mask"), mask)
    sampled = response & _kept_rows(batch).unsqueeze(-1)
    sums = {"rows": float(mask.shape[0]), "tokens": float(sampled.sum())}
    sums["kept"] = float(_kept_rows(batch).sum())
    if "reward_raw" in batch:
        _rewards(batch, sums)
    if "kl_penalty" in batch:
        _kl(batch, sampled, sums)
    if "mismatch" in batch:
        limited = batch.get(("mismatch", "limited")) & sampled
        sums["policy/mismatch_limited"] = float(limited.sum())
    if "draws" in batch:
        sums["group/resampled"] = float((batch.get("draws") - 1).sum())
    if "returns" in batch:
        fit = return_sums(batch.get("returns"), batch.get("value"), mask)
        out["value/explained_variance"] = explained_variance(runtime.sums(fit))
    length = response.sum(-1).float()  # [B]
    sums["response/length_mean"] = float(length.sum())
    out |= _means(runtime.sums(sums))
    if "square" in out:
        variance = max(out.pop("square") - out["reward/raw_mean"] ** 2, 0.0)
        out["reward/std"] = variance**0.5
    if "groups" in out:
        flat, compared = out.pop("flat"), out.pop("groups")
        if compared:
            out["group/zero_variance_fraction"] = flat / compared
    return out | runtime.maxima({"response/length_max": float(length.max())})


def _kept_rows(batch: TensorDictBase) -> Tensor:
    """Return which rows the task did not drop, [B]."""
    dropped = batch.get("dropped", None)
    every = torch.ones_like(batch.get("loss_mask")[:, 0], dtype=torch.bool)
    return every if dropped is None else ~dropped


def _means(total: dict[str, float]) -> dict[str, float]:
    """Return sums divided by what they are over; what is over nothing has no mean."""
    rows, kept, tokens = (total.pop(name) for name in ("rows", "kept", "tokens"))
    over = dict.fromkeys(total, rows) | dict.fromkeys(PER_TOKEN, tokens)
    over |= dict.fromkeys(PER_KEPT_ROW, kept) | {"reward/errors": 1.0}
    for name in [name for name in total if name.startswith("fits ")]:
        over[name.removeprefix("fits ")] = total.pop(name)
    return {name: value / over[name] for name, value in total.items() if over[name]}


def _rewards(batch: TensorDictBase, sums: dict[str, float]) -> None:
    kept = _kept_rows(batch)
    raw = batch.get("reward_raw").sum(-1).double()  # [B]
    sums["reward/raw_mean"] = float(raw[kept].sum())
    sums["square"] = float((raw[kept] ** 2).sum())
    sums["reward/mean"] = float(batch.get("reward").sum(-1)[kept].sum())
    parts = batch.get("reward_part", None)
    for name, value in () if parts is None else parts.items():
        fits = kept & ~value.isnan()
        sums[f"reward_part/{name}"] = float(value[fits].sum())
        sums[f"fits reward_part/{name}"] = float(fits.sum())
    if "reward_errors" in batch:
        sums["reward/errors"] = float(batch.get("reward_errors").sum())
        sums["reward/dropped_fraction"] = float((~kept).sum())
    sums["response/truncated_fraction"] = float(batch.get("truncated").sum())
    rows, idle = groups(batch.get("group_id")), idle_groups(batch).tolist()
    flat = [i for g, i in zip(rows, idle, strict=True) if len(g) > 1 and bool(kept[g].all())]
    sums["groups"], sums["flat"] = float(len(flat)), float(sum(flat))


def _kl(batch: TensorDictBase, mask: Tensor, sums: dict[str, float]) -> None:
    k1 = batch.get("kl_penalty") * mask
    gen, ref = batch.get(("log_probs", "full")), batch.get(("ref_log_probs", "full"))
    sums["kl/ref"] = sums["kl/ref_sequence"] = float(k1.sum())
    sums["kl/ref_k3"] = float((kl_term(gen, ref, "k3") * mask).sum())


def transcripts(
    batch: TensorDictBase, iteration: int, *, count: int, kind: str, tokenizer: Any = None
) -> list[dict]:
    """Return the best and worst replies of a batch as plain records for transcripts.jsonl.

    A prompt stands once among the best and once among the worst; dropped replies do not. With a
    tokenizer the median one stands between them, and it, the best and the worst say so in `rank`
    and hold their tokens in `pieces`.
    """
    reward, prompts = batch.get("reward_raw").sum(-1).tolist(), batch.get("prompt").tolist()
    kept = _kept_rows(batch).nonzero().squeeze(-1).tolist()
    order = sorted(kept, key=reward.__getitem__, reverse=True)

    def once(rows: Iterable[int]) -> list[int]:
        first: dict[str, int] = {}
        for i in rows:
            first.setdefault(prompts[i], i)
        return list(first.values())

    best = once(order)[: count // 2]
    worst = once(i for i in reversed(order) if i not in best)[: count - count // 2]
    wanted = order[len(order) // 2 :][:1] if tokenizer is not None else []
    median = [i for i in wanted if i not in (*best, *worst)]
    chosen = [*best, *median, *reversed(worst)]
    rows = {i: transcript(batch, i, iteration, kind=kind) for i in chosen}
    for rank, held in (("best", best), ("median", median), ("worst", worst)):
        for i in held[:1] if tokenizer is not None else ():
            rows[i] |= {"rank": rank, "pieces": pieces(batch, i, tokenizer)}
    return list(rows.values())


def transcript(batch: TensorDictBase, i: int, iteration: int, *, kind: str) -> dict:
    """Return row i of a batch as a plain record."""
    mask = batch.get("loss_mask")[i]
    sampled = batch.get(("masks", "all_response_mask"), batch.get("loss_mask"))[i]
    parts = batch.get("reward_part", None)
    advantage = batch.get("advantage", None)
    penalty = batch.get("kl_penalty", None)
    return {
        "iteration": iteration,
        "kind": kind,
        "prompt": batch.get("prompt")[i].data,
        "response": batch.get("response")[i].data,
        "reward": _short(batch.get("reward_raw")[i].sum()),
        "parts": _parts(() if parts is None else parts.items(), i),
        "advantage": _mean(advantage, i, mask),
        "kl": None if penalty is None else _short((penalty[i] * sampled).sum()),
        "truncated": bool(batch.get("truncated")[i]),
    }


def _parts(parts: Iterable[tuple[str, Tensor]], i: int) -> dict[str, float]:
    """Return those parts that fit row i."""
    return {name: _short(value[i]) for name, value in parts if not bool(value[i].isnan())}


def _mean(values, i: int, mask) -> float | None:
    if values is None or not bool(mask.any()):
        return None
    return _short(values[i][mask].mean())


def _short(value: Tensor) -> float:
    """Return a float32 as a person wrote it: 0.1, not 0.10000000149."""
    return float(f"{value:.7g}")
