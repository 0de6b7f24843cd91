"""What a run costs: the part of a preflight that is about memory, time and disk.

Formulas are in trainer/modes/preflight/sums.py; what a few iterations took stands beside them.
"""

import hashlib
import os
import shutil
import tempfile
import time
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any

from policies import lora
from policies.packing import pack_rows
from trainer.memory import memory_of
from trainer.modes.preflight import sums
from trainer.modes.preflight.findings import Findings
from trainer.modes.preflight.play import Iteration
from trainer.reports.formats import duration
from trainer.runs.failures import LESS_MEMORY
from trainer.trainer import Trainer

FULL = 0.95  # of the device's memory
PROBE = 2**26  # bytes written to time a disk


def model_sizes(loop: Trainer, settings: dict[str, Any]) -> sums.Sizes:
    """Return what the parts at hand hold."""
    own = {id(p): p for p in loop.policy.scorer.parameters()}
    theirs = loop.retrieve_kl.scorer
    others = {id(p): p for p in theirs.parameters()} if theirs is not None else {}
    trained = [p for p in own.values() if p.requires_grad]
    shape = loop.policy.model.config.get_text_config()
    heads = shape.num_attention_heads
    half = settings["policy"]["autocast"] or next(iter(own.values())).element_size() == 2
    return sums.Sizes(
        weights=sum(p.numel() * p.element_size() for p in own.values()),
        reference=sum(p.numel() * p.element_size() for i, p in others.items() if i not in own),
        trained=sum(p.numel() for p in trained),
        gradient=sum(p.numel() * p.element_size() for p in trained),
        half=any(p.element_size() < 4 for p in trained),
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        heads=heads,
        kv_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        intermediate=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
        vocabulary=loop.policy.model.get_input_embeddings().num_embeddings,
        width=2 if half else 4,
        checkpointing=settings["policy"]["gradient_checkpointing"],
    )


def check_memory(
    loop: Trainer,
    settings: dict[str, Any],
    findings: Findings,
    *,
    played: list[Iteration],
    rows: sums.Rows,
) -> None:
    """Compare what each phase needs by the formulas, at the limits, with what it took here."""
    batch = played[-1].batch
    peaks = played[1].peaks | {"loaded": played[0].peaks["loaded"]}
    sizes, limit = model_sizes(loop, settings), settings["trainer"]["micro_batch_tokens"]
    needed = sums.memory(sizes, rows, limit=limit)
    rest = max(peaks["loaded"] - needed["loaded"], 0)  # the process: libraries, data
    if "reward_raw" not in batch:  # nothing is generated, and nothing scored
        needed = {name: needed[name] for name in ("loaded", "update")}
    room = memory_of(loop.runtime.device)
    findings.section(
        "Memory of a rank",
        f"weights {sums.gib(sizes.weights)}, reference {sums.gib(sizes.reference)}, optimizer "
        f"{sums.gib(sizes.moments)} (AdamW, {sizes.trained:,} weights), gradients "
        f"{sums.gib(sizes.gradient)}, the process itself {sums.gib(rest)}",
        f"{'phase':<10}{'at the limits':>14}{'measured':>12}",
    )
    for name, size in needed.items():
        findings.say(f"{name:<10}{sums.gib(size + rest):>14}{sums.gib(peaks[name]):>12}")
    ranks = loop.runtime.ranks if loop.runtime.device.type == "cpu" else 1
    most = ranks * max(max(needed.values()) + rest, *(max(done.peaks.values()) for done in played))
    shared = f" for {ranks} ranks" if ranks > 1 else ""
    findings.say(f"the device has {sums.gib(room)}{shared}")
    if most > FULL * room:
        worst = max(needed, key=needed.__getitem__)
        findings.problem(
            f"{worst} needs up to {sums.gib(most)} of {sums.gib(room)}; {LESS_MEMORY}, "
            "policy.lora.r=16, or policy.gradient_checkpointing=true"
        )
    attention = batch.get(("masks", "all_attention_mask"))
    parts = pack_rows(attention, limit, group_id=batch.get("group_id", None))
    findings.say(f"an iteration's rows of the rank fill {len(parts)} micro-batches")


def check_time(
    loop: Trainer, settings: dict[str, Any], findings: Findings, *, played: list[Iteration]
) -> None:
    """Predict how long the run takes: its start, iterations, evaluations and checkpoints.

    All iterations but the first count as the median of those played after it.
    """
    total, every = settings["trainer"]["num_iterations"], settings["checkpoint"]["every"]
    took = [done.total for done in played]
    times = sums.evaluations(total, settings["eval"]["every"]) if loop.evaluate.plans else 0
    findings.wait("timing a batch of the evaluation and a write to the disk")
    one, share = evaluation_seconds(loop) if times else (0.0, 1.0)
    saved = sums.saves(total, every)
    need = disk_need(loop, settings)
    save = write_seconds(place_of(settings), need["checkpoint"])
    parts = {
        "start": findings.start,
        f"{total} iterations of {_shown(median(took[1:]))}": sums.whole(took, total),
        f"{times} evaluations of {_shown(one)} ({share:.0%} of one played)": times * one,
        f"{saved} checkpoints of {_shown(save)}": saved * save,
        "the final model": save * need["model"] / need["checkpoint"],
    }
    findings.section(
        f"Time, by a first iteration and {len(played) - 1} after it on this machine now"
    )
    for name in played[0].seconds:
        laps = [done.seconds[name] for done in played]
        findings.say(
            f"{name:<9} {_shown(median(laps[1:])):>8} (the first "
            f"{_shown(laps[0])}), of the run {duration(sums.whole(laps, total))}"
        )
    for name, seconds in parts.items():
        findings.say(f"{name}: {duration(seconds)}")
    findings.say(f"the run: about {duration(sum(parts.values()))}{_basis(settings, played[-1])}")


def _basis(settings: dict[str, Any], done: Iteration) -> str:
    """Return how long the replies were that a prediction rests on."""
    if "reward_raw" not in done.batch:
        return ""
    sampled = done.batch.get(("masks", "all_response_mask")).sum(-1).float().mean()
    most = settings["env"]["max_turns"] * settings["policy"]["max_new_tokens"]
    return f", while replies stay at {float(sampled):.0f} tokens on average (the limit is {most})"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def evaluation_seconds(loop: Trainer) -> tuple[float, float]:
    """Time one batch of the evaluation; return what a whole one takes, and which share it was."""
    few = copy(loop.evaluate)
    few.rows = few.rows[: few.chunk * loop.runtime.ranks]
    start = time.perf_counter()
    few(0)
    share = len(few.rows) / max(len(loop.evaluate.rows), 1)
    return (time.perf_counter() - start) / max(share, 1e-9), share


def write_seconds(folder: Path, size: int) -> float:
    """Return how long `size` bytes take to write and to hash in a folder, by a part of them."""
    part = os.urandom(min(size, PROBE))
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:  # it has no name: nothing can be left over
        file.write(part)
        file.flush()
        os.fsync(file.fileno())
    hashlib.sha256(part).digest()
    return (time.perf_counter() - start) * size / max(len(part), 1)


def disk_need(loop: Trainer, settings: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that the run's checkpoints and its final model take."""
    kept, total = settings["checkpoint"], settings["trainer"]["num_iterations"]
    return sums.disk(
        model_sizes(loop, settings),
        adapter=lora.has_adapter(loop.policy.model),
        moves=settings["kl"]["refresh_every"] > 0,
        saved=sums.saves(total, kept["every"]),
        keep_last=kept["keep_last"],
        keep_best=kept["keep_best"],
    )


def place_of(settings: dict[str, Any]) -> Path:
    """Return the folder that the run writes to, or the first above it that is there."""
    place = Path(settings["output_dir"] or "outputs").expanduser().absolute()
    return next(p for p in (place, *place.parents) if p.is_dir())


def check_disk(loop: Trainer, settings: dict[str, Any], findings: Findings) -> None:
    """Compare what the run writes with what is free where it writes."""
    need, place = disk_need(loop, settings), place_of(settings)
    free, asked = shutil.disk_usage(place).free, need["checkpoints"] + need["model"]
    findings.section(
        "Disk",
        f"a checkpoint {sums.gib(need['checkpoint'])}, those there at a time "
        f"{sums.gib(need['checkpoints'])}, the final model {sums.gib(need['model'])}",
        f"{sums.gib(asked)} of {sums.gib(free)} that are free at {place}",
    )
    if asked > free:
        findings.problem(
            f"the run writes {sums.gib(asked)} and {place} has {sums.gib(free)}; write elsewhere "
            "with output_dir=, or lower checkpoint.keep_last"
        )
