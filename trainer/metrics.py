"""What a batch of trajectories says, reduced over ranks. Names and formulas: docs/metrics.md.

Every mean is a sum over rows or kept tokens divided by their number on all ranks.
"""

from collections.abc import Iterable

from tensordict import TensorDictBase
from torch import Tensor

from policies.packing import groups
from trainer.gae import explained_variance, return_sums
from trainer.losses import kl_term
from trainer.runtime import Runtime


def summarize(batch: TensorDictBase, runtime: Runtime) -> dict[str, float]:
    """Return the metrics of an iteration's batch (before the update)."""
    mask, out = batch.get("loss_mask"), dict[str, float]()  # [B, T]
    sums = {"rows": float(mask.shape[0]), "tokens": float(mask.sum())}
    if "reward_raw" in batch:
        _rewards(batch, sums)
    if "kl_penalty" in batch:
        _kl(batch, sums)
    if "returns" in batch:
        fit = return_sums(batch.get("returns"), batch.get("value"), mask)
        out["value/explained_variance"] = explained_variance(runtime.sums(fit))
    response = batch.get(("masks", "all_response_mask"), None)
    length = (mask if response is None else response).sum(-1).float()  # [B]
    sums["response/length_mean"] = float(length.sum())
    total = runtime.sums(sums)
    rows, tokens = max(total.pop("rows"), 1.0), max(total.pop("tokens"), 1.0)
    per_token = {"kl/ref", "kl/ref_k3"}
    out |= {k: v / (tokens if k in per_token else rows) for k, v in total.items()}
    if "square" in out:
        variance = max(out.pop("square") - out["reward/raw_mean"] ** 2, 0.0)
        out["reward/std"] = variance**0.5
    if "groups" in out:
        flat, groups = out.pop("flat"), out.pop("groups")
        if groups:
            out["group/zero_variance_fraction"] = flat / groups
    return out | runtime.maxima({"response/length_max": float(length.max())})


def _rewards(batch: TensorDictBase, sums: dict[str, float]) -> None:
    raw = batch.get("reward_raw").sum(-1).double()  # [B]
    sums["reward/raw_mean"] = float(raw.sum())
    sums["square"] = float((raw**2).sum())
    sums["reward/mean"] = float(batch.get("reward").sum())
    parts = batch.get("reward_part", None)
    for name, value in () if parts is None else parts.items():
        sums[f"reward_part/{name}"] = float(value.sum())
    sums["response/truncated_fraction"] = float(batch.get("truncated").sum())
    rows = [group for group in groups(batch.get("group_id")) if len(group) > 1]
    values = raw.tolist()
    sums["groups"] = float(len(rows))
    sums["flat"] = float(sum(len({values[i] for i in group}) == 1 for group in rows))


def _kl(batch: TensorDictBase, sums: dict[str, float]) -> None:
    mask = batch.get("loss_mask")
    k1 = batch.get("kl_penalty") * mask
    gen, ref = batch.get(("log_probs", "full")), batch.get(("ref_log_probs", "full"))
    sums["kl/ref"] = sums["kl/ref_sequence"] = float(k1.sum())
    sums["kl/ref_k3"] = float((kl_term(gen, ref, "k3") * mask).sum())


def transcripts(batch: TensorDictBase, iteration: int, *, count: int, kind: str) -> list[dict]:
    """Return the best and worst replies of a batch as plain records for transcripts.jsonl.

    A prompt stands once among the best and once among the worst.
    """
    reward, prompts = batch.get("reward_raw").sum(-1).tolist(), batch.get("prompt").tolist()
    order = sorted(range(len(reward)), key=reward.__getitem__, reverse=True)

    def once(rows: Iterable[int]) -> list[int]:
        first: dict[str, int] = {}
        for i in rows:
            first.setdefault(prompts[i], i)
        return list(first.values())

    best = once(order)[: count // 2]
    worst = once(i for i in reversed(order) if i not in best)[: count - count // 2]
    return [transcript(batch, i, iteration, kind=kind) for i in [*best, *reversed(worst)]]


def transcript(batch: TensorDictBase, i: int, iteration: int, *, kind: str) -> dict:
    """Return row i of a batch as a plain record."""
    mask = batch.get("loss_mask")[i]
    parts = batch.get("reward_part", None)
    advantage = batch.get("advantage", None)
    penalty = batch.get("kl_penalty", None)
    return {
        "iteration": iteration,
        "kind": kind,
        "prompt": batch.get("prompt")[i].data,
        "response": batch.get("response")[i].data,
        "reward": _short(batch.get("reward_raw")[i].sum()),
        "parts": {} if parts is None else {k: _short(v[i]) for k, v in parts.items()},
        "advantage": _mean(advantage, i, mask),
        "kl": None if penalty is None else _short((penalty[i] * mask).sum()),
        "truncated": bool(batch.get("truncated")[i]),
    }


def _mean(values, i: int, mask) -> float | None:
    if values is None or not bool(mask.any()):
        return None
    return _short(values[i][mask].mean())


def _short(value: Tensor) -> float:
    """Return a float32 as a person wrote it: 0.1, not 0.10000000149."""
    return float(f"{value:.7g}")
