"""What leash computes for each family of models, against transformers alone.

    python tests/support/models_table.py    # writes docs/models.md; asks .venv-vllm

Without .venv-vllm the column of vLLM stays as it is.

Each family of tests/support/families.yaml gets a tiny checkpoint of random weights. The log-probs
of sampler and scorer, and the gradient, are compared with a plain float32 forward of each row
alone.
"""

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # the root and tests/ in place of this folder
    sys.path[:1] = map(str, Path(__file__).parents[2:0:-1])

import torch
import yaml
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from policies.load import load_policy, load_reference
from policies.models import lora
from policies.models.find import find_model, load_tokenizer, quiet
from policies.padding import pad, pad_mask
from policies.sampler import Stop, sample
from support.families import KINDS
from support.policies import move_adapter
from trainer.checkpoint import save_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
INTRO = """\
# Models

<!-- written by `python tests/support/models_table.py` from tests/support/families.yaml -->

Each line is a family of causal language models of transformers, named by the `model_type` in \
its `config.json`. `make test-models` writes a tiny checkpoint of each with random weights and \
compares leash with transformers:

- **exact to**: largest difference of log-probs, in nats, between sampler or scorer and a plain \
float32 forward of each row alone. It is below 1e-5, except where a note says so. The gradient \
differs by less than 1e-4 of its norm.
- **shared prompts**: a group computes its prompt once.
- **packing**: `algorithm.packing=true` works. The other families refuse it.
- **LoRA**: the adapter is on every matrix except embeddings, output head and the names in the \
cell; "experts" means also on the matrices of the experts.
- **in vLLM**: vLLM {version} lists the architecture. This says nothing about its log-probs; \
leash compares them at the start of a run.

A run of every family that is not refused is stopped after one iteration and resumed, with all \
weights and with LoRA. It ends with the weights and moments of an unbroken run, equal to the \
bit, and transformers loads the exported model. One family of each kind, {kinds}, also trained \
on two ranks, by DDP and by FSDP2, and ended with the weights of one rank (2e827189).

At load leash compares every model, also of a family that is not listed, with the model's own \
forward. If they differ by more than 1e-3 in float32, the run ends. In half precision the check \
is coarse. Weights that a text never reaches (towers of images and sound) are frozen.

leash's norms, MLPs and attention replace the model's only if the model computes the same with \
them; `policy.kernels=false` switches them off. `policy.compile=true` instead fuses the layers \
of updates by `torch.compile`; it refuses recurrences that are computed in a loop (Mamba, and \
Qwen3-Next and Qwen3.5 without their kernels).

"""
COLUMNS = ("shared prompts", "packing", "LoRA", "in vLLM")
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
TEMPERATURE = 0.8
PROMPTS = (5, 9, 3)  # lengths; each prompt has four responses


@dataclass(frozen=True)
class Measured:
    """Largest distances to transformers: of log-probs in nats, of the gradient relative to it."""

    sample: float
    right: float
    left: float
    grouped: float
    packed: float | None  # None: refused
    train: float
    kl: float  # of the policy to a copy of itself, in train mode
    gradient: float
    shares: bool  # whether a group computes its prompt once
    trains: set[str]  # names of the weights
    reached: set[str]  # names of the weights that have a gradient


@dataclass(frozen=True)
class Adapted:
    """What LoRA does to a model."""

    merged: float  # largest distance of log-probs to the merged model in transformers, in nats
    moved: float  # the same to the model without adapter
    unreached: list[str]  # weights of the adapter without a gradient
    bare: set[str]  # last names of the matrices without an adapter
    experts: bool  # whether experts have one
    # Linear layers with one although other code than their forward reads the weight, or vice versa.
    misplaced: list[str]


@cache
def families() -> dict[str, dict[str, Any]]:
    """Return the configuration of each family."""
    table = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
    return {
        name: config if "text_config" in config else table["ALL"] | config
        for name, config in table["families"].items()
    }


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a checkpoint of random weights, with the tiny model's tokenizer, into a folder."""
    own = ("type", "note", "refused", "sample_within")
    settings = families()[family]
    keys = {k: v for k, v in settings.items() if k not in own and v is not None}
    config = AutoConfig.for_model(settings.get("type", family), **keys)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.12)
            else:
                p.add_(torch.randn_like(p), alpha=0.1)
        model.save_pretrained(folder)
        load_tokenizer(find_model("tiny")).save_pretrained(folder)
    return folder


def measure(folder: Path) -> Measured:
    """Return the distances of a checkpoint."""
    policy = load_policy(str(folder), max_new_tokens=10, gradient_checkpointing=True)
    rows, sampled = draw(policy.model)
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = [score_alone(plain, row) for row in rows]
    group = torch.arange(len(PROMPTS)).repeat_interleave(4)
    scorer, reference = policy.scorer, load_reference(policy).scorer

    def score(side: str = "right", **options: Any) -> list[Tensor]:
        mask = pad_mask([len(row) for row in rows], side=side)
        options |= {"temperature": TEMPERATURE}
        scores = scorer(pad(rows, side=side), mask, **options)
        kl = scores.log_probs if scores.divergence is None else scores.divergence
        return [x[m] for x, m in zip(kl, mask, strict=True)]

    def distance(got: list[Tensor], want: list[Tensor] = want) -> float:
        return max(float((a[1:] - b[1:]).abs().max()) for a, b in zip(got, want, strict=True))

    scorer.eval()
    with torch.no_grad():
        found = {side: distance(score(side)) for side in ("right", "left")}
        found["grouped"] = distance(score(group_id=group))
        try:
            found["packed"] = distance(score(pack=True))
        except ValueError:
            found["packed"] = None
        pairs = zip(sampled, want, strict=True)
        found["sample"] = max(float((a - b[-len(a) :]).abs().max()) for a, b in pairs)
        scorer.train()
        found["train"] = distance(score(group_id=group))
        found["kl"] = max(float(kl.abs().max()) for kl in score(reference=reference))
    mine = gradient(policy.model, score(group_id=group))
    theirs = gradient(plain, want)
    norm = torch.cat([g.flatten() for g in theirs.values()]).norm()
    gaps = [(mine[name] - theirs[name]).flatten() for name in theirs]
    found["gradient"] = float(torch.cat(gaps).norm() / norm)
    trains = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    return Measured(**found, shares=scorer.share_prompts, trains=trains, reached=set(theirs))


def adapt(folder: Path, trained: Path) -> Adapted:
    """Move an adapter on a checkpoint, save it into a folder, and load that by transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the adapter
        policy = load_policy(str(folder), lora={"r": 2}, max_new_tokens=10)
    plain = load_policy(str(folder), max_new_tokens=10)
    matrices, adapted = lora.matrices(plain.model), lora.adapted_weights(policy.model)
    move_adapter(policy, scale=0.1)
    row = torch.arange(5, 20)
    log_probs = score_alone(policy.model, row)
    log_probs.sum().backward()
    log_probs = log_probs.detach()
    weights = lora.trained_weights(policy.model)
    save_model(policy, trained)
    with quiet(), torch.no_grad():
        merged = score_alone(AutoModelForCausalLM.from_pretrained(trained).eval(), row)
        before = score_alone(plain.model, row)
    return Adapted(
        merged=float((merged - log_probs).abs().max()),
        moved=float((before - log_probs).abs().max()),
        unreached=[name for name, p in weights.items() if p.grad is None],
        bare={n.removesuffix(".weight").rpartition(".")[2] for n in matrices.keys() - adapted},
        experts=any(plain.model.get_parameter(name).ndim == 3 for name in adapted),
        misplaced=[
            name
            for name, layer in plain.model.named_modules()
            if type(layer) in lora.LINEAR and f"{name}.weight" in matrices
            if (f"{name}.weight" in adapted) == is_read_in_source(plain.model, name)
        ],
    )


def is_read_in_source(model: nn.Module, name: str) -> bool:
    """Return whether the file of a layer's module reads the layer's weight, by its text."""
    above, _, last = name.rpartition(".")
    source = inspect.getsource(sys.modules[type(model.get_submodule(above)).__module__])
    return bool(re.search(rf"self\.{last}\.weight(?!\.dtype|\.shape|\[)", source))


def draw(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return rows of prompt and response, and the sampler's log-probs of the responses."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 390, (size,), generator=generator) for size in PROMPTS]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    mask = pad_mask([len(prompt) for prompt in prompts], side="left")
    sampled = sample(
        model,
        pad(prompts, side="left"),
        mask,
        streams=torch.arange(len(prompts)),
        stop=Stop(frozenset(range(0, 400, 7))),
        max_new_tokens=10,
        temperature=TEMPERATURE,
    )
    ids = [row[:n] for row, n in zip(sampled.ids, sampled.lengths, strict=True)]
    log_probs = [row[:n] for row, n in zip(sampled.log_probs, sampled.lengths, strict=True)]
    return [torch.cat(pair) for pair in zip(prompts, ids, strict=True)], log_probs


def score_alone(model: nn.Module, row: Tensor) -> Tensor:
    """Return the log-prob of each token by a forward of one row; entry 0 is 0."""
    table = (model(input_ids=row[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    values = table[:-1].gather(-1, row[1:, None]).squeeze(-1)
    return torch.cat([values.new_zeros(1), values])


def gradient(model: nn.Module, log_probs: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a weighted sum of log-probs, by the names of the weights."""
    model.zero_grad(set_to_none=True)
    weights = (torch.linspace(-1, 1, len(row)) for row in log_probs)
    sum((row * w).sum() for row, w in zip(log_probs, weights, strict=True)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_vllm() -> tuple[str, ...]:
    """Return vLLM's version and the architectures that it lists; `make test-vllm` installs it."""
    code = (
        "import vllm; from vllm.model_executor.models import ModelRegistry as registry; "
        "print(vllm.__version__, *registry.get_supported_archs())"
    )
    said = subprocess.run([VLLM, "-c", code], capture_output=True, text=True, check=True).stdout
    return tuple(said.splitlines()[-1].split())


def differ(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not the same in both."""
    return [
        name
        for name in got.keys() | want.keys()
        if name not in got or name not in want or not torch.equal(got[name], want[name])
    ]


def cells(checkpoint: Path) -> list[str]:
    """Return the line of a family, from "exact to" to the last before that of vLLM."""
    measured, adapted = measure(checkpoint), adapt(checkpoint, checkpoint.with_name("trained"))
    logs = measured.sample, measured.right, measured.left, measured.grouped
    bare = f", not {', '.join(sorted(adapted.bare))}" if adapted.bare else ""
    return [
        f"{max(logs):.0e}",
        "yes" if measured.shares else "",
        "" if measured.packed is None else "yes",
        ("experts" if adapted.experts else "yes") + bare,
    ]


def write_page() -> None:
    """Measure every family and write the page."""
    if VLLM.exists():
        version, *architectures = in_vllm()
    else:
        version, architectures = re.findall(r"vLLM ([\d.]+) lists", PAGE.read_text())[0], None
    kept = dict(re.findall(r"^\| (\w.*?) \|.*\| *(\w*) \|[^|]*\|$", PAGE.read_text(), re.M))
    names = "family", "exact to", *COLUMNS, "notes"
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for family, settings in families().items():
        note = settings.get("note", "")
        with TemporaryDirectory() as folder, quiet():
            checkpoint = write_checkpoint(family, Path(folder) / "start")
            if "refused" in settings:
                line = ["refused", *[""] * len(COLUMNS)]
            else:
                line = cells(checkpoint)
                kind = AutoConfig.from_pretrained(checkpoint).architectures[0]
                known = kept.get(family) if architectures is None else kind in architectures
                line.append("yes" if known else "")
        lines.append(f"| {' | '.join([family, *line, note])} |")
        print(lines[-1])
    kinds = ", ".join(f"{kind} ({family})" for kind, family in KINDS.items())
    intro = INTRO.replace("{version}", version).replace("{kinds}", kinds)
    PAGE.write_text(intro + "\n".join(lines) + "\n")


def listed() -> list[str]:
    """Return the families on the page."""
    return re.findall(r"^\| (\w.*?) \|", PAGE.read_text(), re.M)[1:]


if __name__ == "__main__":
    write_page()
