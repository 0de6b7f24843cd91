"""Predict memory, time and disk of a run from the iterations of a preflight."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from policies.models.find import has_adapter
from policies.models.weights import local
from trainer.modes.preflight.profile import Findings, Iteration, Phase
from trainer.pages.formats import duration
from trainer.runs.failures import LESS_MEMORY
from trainer.trainer import Trainer

FULL = 0.95  # usable share of the device's memory


def at_limits(phase: Phase, *, scale: float, gradients: int = 0) -> int:
    """Return the bytes of a phase if its memory beyond the gradients grows by `scale`."""
    fixed = min(phase.before + gradients, phase.peak)
    return int(fixed + (phase.peak - fixed) * max(scale, 1.0))


def largest_micro_batch(phase: Phase, *, tokens: int, room: float, gradients: int) -> int:
    """Return the tokens that fit in `room` bytes if an update with `tokens` had this phase."""
    fixed = min(phase.before + gradients, phase.peak)
    return int(tokens * max(room - fixed, 0) / max(phase.peak - fixed, 1))


def note_casts(policy: dict[str, Any], findings: Findings) -> None:
    """Suggest policy.dtype=bfloat16 if each forward would cast LoRA's frozen weights again."""
    # Autocast caches cast weights only if they are trained.
    if policy["lora"]["r"] and policy["dtype"] == "float32" and policy["autocast"]:
        findings.say("frozen float32 weights are cast in each product; set policy.dtype=bfloat16")


def check_memory(
    loop: Trainer,
    settings: dict[str, Any],
    findings: Findings,
    *,
    played: Iteration,
    rest: dict[str, Phase],
    longest: int,
) -> None:
    """Print the measured peak of each phase, and the peak for sequences of `longest` tokens.

    A micro-batch of an update has trainer.micro_batch_tokens, or one sequence if that is longer.
    """
    limit, device = settings["trainer"]["micro_batch_tokens"], loop.runtime.device
    lengths = played.batch.get(("masks", "all_attention_mask")).sum(-1)  # [B]
    tokens = min(max(limit, int(lengths.max())), int(lengths.sum()))  # tokens of a micro-batch
    longer, forward = longest / int(lengths.max()), max(limit, longest) / tokens
    scale = {"generate": longer, "evaluation": longer, "score": forward, "update": forward}
    weights = loop.policy.scorer.parameters()
    gradients = sum(local(p).nbytes for p in weights if p.requires_grad)
    sharing = loop.runtime.ranks if device.type == "cpu" else 1  # ranks share a CPU's memory
    room, needs = memory_of(device), {}
    findings.section(
        "Memory of a rank",
        f"the longest of {len(lengths)} sequences has {int(lengths.max())} tokens of {longest}",
        f"{'phase':<22}{'measured':>12}{'at the limits':>16}",
    )
    others = {"sync"} if "reward_raw" in played.batch else {"sync", "generate", "score"}
    for name, phase in (played.phases | rest).items():
        if name not in others:
            fixed = gradients if name == "update" else 0
            needs[name] = at_limits(phase, scale=scale.get(name, 1.0), gradients=fixed)
            findings.say(f"{name:<22}{gib(phase.peak):>12}{gib(needs[name]):>16}")
    worst = max(needs, key=needs.__getitem__)
    most = needs[worst] * sharing
    findings.say(f"the run can use {gib(room)}")
    fits = largest_micro_batch(
        played.phases["update"], tokens=tokens, room=FULL * room / sharing, gradients=gradients
    )
    findings.say(f"the largest trainer.micro_batch_tokens that fits: {fits}")
    if device.type == "cuda":
        note_casts(settings["policy"], findings)
    if most > FULL * room:
        findings.problem(
            f"{worst} needs up to {gib(most)} of {gib(room)}; {LESS_MEMORY}, policy.lora.r=16, or "
            "policy.gradient_checkpointing=true"
        )


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU that torch has or can take, else of the machine or container."""
    if device.type == "cuda":  # excludes CUDA's context, NCCL and other processes
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def check_time(
    loop: Trainer,
    settings: dict[str, Any],
    findings: Findings,
    *,
    played: tuple[Iteration, ...],
    rest: dict[str, Phase],
) -> None:
    """Predict the run time without checkpoints, from the second iteration."""
    total, (first, second) = settings["trainer"]["num_iterations"], played
    findings.section("Time on this machine now, by two iterations and a batch of the evaluation")
    for name, phase in second.phases.items():
        before = first.phases[name].seconds
        findings.say(f"{name:<9} {phase.seconds:.2f} s (the first {before:.2f} s)")
    seconds = findings.start + first.seconds + (total - 1) * second.seconds
    if "evaluation" in rest:
        evaluate = loop.evaluate
        times = 1 + sum(evaluate.due(i, total) for i in range(1, total + 1))
        count = len(evaluate.rows) + sum(len(e.rows) for e in evaluate.beside.values() if e.plans)
        few = min(evaluate.prompts_per_batch * loop.runtime.ranks, len(evaluate.rows))  # played
        seconds += times * rest["evaluation"].seconds * count / max(few, 1)
    length = float(second.batch.get("loss_mask").sum(-1).float().mean())
    findings.say(
        f"the run with its start, {total} iterations and evaluations: about {duration(seconds)}, "
        f"while rows learn {length:.0f} tokens on average"
    )


def check_disk(loop: Trainer, settings: dict[str, Any], findings: Findings) -> None:
    """Compare the bytes that the run writes with the free disk space.

    A checkpoint has the weights and AdamW's moments; one more exists while it is written.
    """
    folder = Path(settings["output_dir"] or "outputs").expanduser().absolute()
    place = next(p for p in (folder, *folder.parents) if p.is_dir())
    saving, total = settings["checkpoint"], settings["trainer"]["num_iterations"]
    weights = list(loop.policy.scorer.parameters())
    model = sum(p.numel() * p.element_size() for p in weights)
    trained = sum(p.numel() * p.element_size() for p in weights if p.requires_grad)
    one = 2 * trained + (trained if has_adapter(loop.policy.model) else model)
    count = -(-total // saving["every"]) if saving["every"] else int(saving["on_stop"])
    most = min(count, saving["keep_last"] + int(saving["keep_best"]) + 1)
    need, free = most * one + model, shutil.disk_usage(place).free
    findings.section(
        "Disk",
        f"{most} checkpoints of {gib(one)} at a time, the final model {gib(model)}; "
        f"{gib(free)} are free at {place}",
    )
    if need > free:
        findings.problem(
            f"the run writes {gib(need)} and {place} has {gib(free)}; write elsewhere with "
            "output_dir=, or lower checkpoint.keep_last"
        )


def gib(size: float) -> str:
    """Format bytes: "3.0 GiB", "5 MiB"."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
