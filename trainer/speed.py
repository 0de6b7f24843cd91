"""How fast an iteration was: seconds of its phases, tokens per second, and the update's MFU."""

import re
import time

import torch
from tensordict import TensorDictBase

from trainer.update import Update

PEAKS = {  # words of a GPU's name -> dense bfloat16 FLOPs per second
    "A10": 125e12, "A100": 312e12, "B200": 2250e12, "H100 PCIe": 756e12, "H100": 989e12,
    "H200": 989e12, "L40S": 362e12, "RTX 4090": 165e12,
}  # fmt: skip


class Clock:
    """Measure the seconds of each phase of an iteration."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def seconds(self) -> dict[str, float]:
        """Return time/<phase>_s and time/iteration_s."""
        out = {f"time/{name}_s": value for name, value in self.laps.items()}
        return out | {"time/iteration_s": time.perf_counter() - self.start}


def count_tokens(batch: TensorDictBase, *, share_prompts: bool) -> dict[str, float]:
    """Return the rows of a batch and its tokens: all, sampled, and those that forwards compute.

    With `share_prompts` the rows of a group compute their prompt once.
    """
    tokens = float(batch.get(("masks", "all_attention_mask")).sum())
    response = batch.get(("masks", "all_response_mask"), None)
    sampled = 0.0 if response is None else float(response.sum())
    ids = batch.get("group_id", None) if share_prompts else None
    computed_prompts = 1.0 if ids is None else len(ids.unique()) / len(ids)  # share of the rows
    return {
        "tokens": tokens,
        "samples": float(batch.batch_size[0]),
        "sampled": sampled,
        "computed": sampled + computed_prompts * (tokens - sampled),
    }


def speeds(
    total: dict[str, float],
    seconds: dict[str, float],
    *,
    update: Update,
    skipped: float,
    scored: bool,
    device: torch.device,
    ranks: int,
) -> dict[str, float]:
    """Return the tokens per second of an iteration and its phases, and the MFU of the update.

    `total`: `count_tokens` over all ranks; `seconds`: the time/ metrics; `skipped`: the fraction of
    the update that target_kl skipped; `scored`: whether a reference scored the batch.
    """
    update_s = seconds["time/update_s"]
    learnt = total["tokens"] * update.epochs * (1 - skipped)
    out = {
        "perf/tokens_per_s": total["tokens"] / max(seconds["time/iteration_s"], 1e-9),
        "perf/update_tokens_per_s": learnt / update_s,
    }
    if total["sampled"]:
        sample_s = seconds.get("time/sample_s", seconds["time/collect_s"])
        out["perf/collect_tokens_per_s"] = total["sampled"] / sample_s
    if scored:
        out["perf/score_tokens_per_s"] = total["tokens"] / seconds["time/score_s"]
    if peak := peak_flops(device):
        # Per weight and token: 2 in the forward, 2 for the input's gradient, 2 for the weight's.
        flops = sum(p.numel() * (6 if p.requires_grad else 4) for p in update.scorer.parameters())
        computed = learnt * total["computed"] / total["tokens"]
        out["perf/mfu"] = flops * computed / update_s / (peak * ranks)
    return out


def peak_flops(device: torch.device) -> float | None:
    """Return the bfloat16 FLOPs per second of a GPU of PEAKS, else None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for gpu, peak in PEAKS.items() if re.search(rf"\b{gpu}\b", name)), None)
