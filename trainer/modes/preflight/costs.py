"""What a run costs in memory, time and disk, by what the iterations of a preflight took."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.models import has_adapter
from policies.packing import pack_rows
from policies.sharding import held_bytes
from trainer.modes.preflight.footprint import memory_of
from trainer.modes.preflight.play import Findings, Iteration, Phase
from trainer.reports.formats import duration
from trainer.runs.failures import LESS_MEMORY
from trainer.trainer import Trainer

FULL = 0.95  # of the device's memory
PROBE = 2**26  # bytes written to time a disk


def held(loop: Trainer, *, whole: bool = False) -> dict[str, int]:
    """Return the bytes of what a rank holds between iterations, and of the gradients.

    `whole`: of what all ranks hold together, where each has a part.
    """
    own = {id(p): p for p in loop.policy.scorer.parameters()}
    theirs = loop.retrieve_kl.scorer
    others = () if theirs is None else [p for p in theirs.parameters() if id(p) not in own]
    moments = [value for state in loop.checkpoints.optimizer.state.values()
               for value in state.values() if isinstance(value, Tensor)]  # fmt: skip
    return held_by(own.values(), others, moments, whole=whole)


def held_by(
    own: Iterable[Tensor],
    others: Iterable[Tensor],
    moments: Iterable[Tensor],
    *,
    whole: bool = False,
) -> dict[str, int]:
    """Return the bytes of a policy's tensors, a reference's, an optimizer's, and of gradients."""
    size = _whole_bytes if whole else held_bytes
    own = list(own)
    return {
        "weights": sum(map(size, own)),
        "reference": sum(map(size, others)),
        "optimizer": sum(map(size, moments)),
        "gradients": sum(size(p) for p in own if p.requires_grad),
    }


def _whole_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def check_memory(
    loop: Trainer, settings: dict[str, Any], findings: Findings, *, played: Iteration, longest: int
) -> None:
    """Scale what each phase took up to sequences of `longest` tokens; compare with the device."""
    batch, limit = played.batch, settings["trainer"]["micro_batch_tokens"]
    attention = batch.get(("masks", "all_attention_mask"))  # [B, T]
    lengths = attention.sum(-1)
    parts = pack_rows(attention, limit, group_id=batch.get("group_id", None))
    seen = max(len(part) * int(lengths[part].max()) for part in parts)
    forward = min(max(limit, longest), len(batch) * longest) / seen
    scale = {"generate": longest / int(lengths.max()), "score": forward, "update": forward}
    sizes, room = held(loop), memory_of(loop.runtime.device)
    findings.section(
        "Memory of a rank",
        ", ".join(f"{name} {gib(size)}" for name, size in sizes.items()),
        f"{len(batch)} rows in {len(parts)} micro-batches of at most {limit} tokens",
        f"{'phase':<10}{'at the limits':>14}{'measured':>12}",
    )
    needed = {}
    for name in scale if "reward_raw" in batch else ("update",):
        phase, gradients = played.phases[name], sizes["gradients"] * (name == "update")
        needed[name] = at_limits(phase, scale=scale[name], gradients=gradients)
        findings.say(f"{name:<10}{gib(needed[name]):>14}{gib(phase.peak):>12}")
    worst, cpu = max(needed, key=needed.__getitem__), loop.runtime.device.type == "cpu"
    more = 0
    if ahead := settings["trainer"]["overlap"]:  # what samples does so while another phase goes on
        second, copies = needed["generate"], (ahead + 1) * sizes["gradients"]
        second -= 0 if cpu else played.phases["generate"].before - sizes["weights"]
        if settings["policy"]["engine"] != "transformers":
            second = 0
            alone = getattr(loop.generator, "takes_trained", False)
            if has_adapter(loop.policy.model) and not alone:  # beside it the merged model
                copies += (ahead + 1) * (sizes["weights"] - sizes["gradients"])
        more = second + (copies if cpu else 0)
        findings.say(
            f"trainer.overlap={ahead}: beside each of them {gib(second)} of the process that "
            f"samples, and copies of the weights, {gib(copies)} on the CPU"
        )
    ranks = loop.runtime.ranks if cpu else 1
    most, shared = ranks * (needed[worst] + more), f" for {ranks} ranks" if ranks > 1 else ""
    findings.say(f"the device has {gib(room)}{shared}")
    if most > FULL * room:
        findings.problem(
            f"{worst} needs up to {gib(most)} of {gib(room)}; {LESS_MEMORY}, policy.lora.r=16, or "
            "policy.gradient_checkpointing=true"
        )


def at_limits(phase: Phase, *, scale: float, gradients: int = 0) -> int:
    """Return the bytes of a phase if what it took beyond the gradients grows by `scale`."""
    fixed = min(phase.before + gradients, phase.peak)
    return int(fixed + (phase.peak - fixed) * max(scale, 1.0))


def check_time(
    loop: Trainer, settings: dict[str, Any], findings: Findings, *, played: list[Iteration]
) -> None:
    """Predict how long the run takes: its start, iterations, evaluations and checkpoints.

    All iterations but the first count as the second.
    """
    total, every = settings["trainer"]["num_iterations"], settings["checkpoint"]["every"]
    findings.section("Time on this machine now, by two iterations and a batch of the evaluation")
    times, one = 0, 0.0
    if loop.evaluate.plans:  # one before the run, too
        times = 1 + sum(loop.evaluate.due(i, total) for i in range(1, total + 1))
        one = evaluation_seconds(loop)
    need, place = disk_need(loop, settings), place_of(settings)
    count, a_byte = saves(total, every), write_seconds(place, need["checkpoint"])
    first, second = played
    parts = {
        "start": findings.start,
        f"{total} iterations": first.seconds + (total - 1) * second.seconds,
        f"{times} evaluations of {one:.2f} s": times * one,
    }
    written = count * need["checkpoint"] + need["model"]
    parts[f"{count} checkpoints and the final model"] = a_byte * written
    for name, phase in second.phases.items():
        findings.say(
            f"{name:<9} {phase.seconds:.2f} s (the first {first.phases[name].seconds:.2f} s)"
        )
    for name, seconds in parts.items():
        findings.say(f"{name}: {duration(seconds)}")
    basis = ""
    if "reward_raw" in second.batch:
        replied = second.batch.get(("masks", "all_response_mask")).sum(-1).float().mean()
        basis = f", while replies stay at {float(replied):.0f} tokens on average"
    findings.say(f"the run: about {duration(sum(parts.values()))}{basis}")


def saves(total: int, every: int) -> int:
    """Return how many checkpoints a run writes: every so many iterations and at its end; 0 = none.

    >>> saves(10, 4), saves(8, 4), saves(8, 0)
    (3, 2, 0)
    """
    return -(-total // every) if every else 0


def evaluation_seconds(loop: Trainer) -> float:
    """Time one batch of the evaluation; return what a whole one takes."""
    few = copy(loop.evaluate)
    few.rows = few.rows[: few.chunk * loop.runtime.ranks]
    start = time.perf_counter()
    few(0)
    return (time.perf_counter() - start) * len(loop.evaluate.rows) / max(len(few.rows), 1)


def write_seconds(folder: Path, size: int) -> float:
    """Return how long a byte takes to write and to hash in a folder, by at most `size` bytes."""
    part = os.urandom(max(min(size, PROBE), 1))
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:  # it has no name: nothing can be left over
        file.write(part)
        file.flush()
        os.fsync(file.fileno())
    hashlib.sha256(part).digest()
    return (time.perf_counter() - start) / len(part)


def disk_need(loop: Trainer, settings: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of a checkpoint, of those there at a time, and of the final model.

    With LoRA a checkpoint has the adapter alone. One more than is kept is there while it is
    written.
    """
    kept, sizes = settings["checkpoint"], held(loop, whole=True)
    adapter = sizes["gradients"] if has_adapter(loop.policy.model) else 0
    one = (adapter or sizes["weights"]) + sizes["optimizer"]
    one += sizes["gradients"] if settings["kl"]["refresh_every"] else 0  # a reference of its own
    one += settings["trainer"]["overlap"] * sizes["gradients"]  # older weights
    count = saves(settings["trainer"]["num_iterations"], kept["every"])
    most = min(count, kept["keep_last"] + int(kept["keep_best"]) + 1)
    return {"checkpoint": one, "checkpoints": most * one, "model": sizes["weights"] + adapter}


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
        f"a checkpoint {gib(need['checkpoint'])}, those there at a time "
        f"{gib(need['checkpoints'])}, the final model {gib(need['model'])}",
        f"{gib(asked)} of {gib(free)} that are free at {place}",
    )
    if asked > free:
        findings.problem(
            f"the run writes {gib(asked)} and {place} has {gib(free)}; write elsewhere with "
            "output_dir=, or lower checkpoint.keep_last"
        )


def gib(size: float) -> str:
    """Return bytes for people.

    >>> gib(3 * 2**30), gib(5 * 2**20), gib(2000)
    ('3.0 GiB', '5 MiB', '0 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
