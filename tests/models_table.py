"""What leash computes for each family of models, against transformers alone.

    PYTHONPATH=. python tests/models_table.py        # writes docs/models.md

Each family of tests/families.yaml gets a tiny checkpoint of random weights. The log-probs of
sampler and scorer, and the gradient, are compared with a plain float32 forward of each row alone.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from policies.load import load_policy, load_reference
from policies.models import find_model, load_tokenizer, quiet
from policies.padding import pad, pad_mask
from policies.sampler import Stop, sample

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
INTRO = """\
# Models

<!-- written by `python tests/models_table.py` from tests/families.yaml -->

Each line is a family of causal language models of transformers, by the `model_type` in its \
`config.json`. `make test-models` writes a tiny checkpoint of each one with random weights, and \
compares sampler, scorer and gradient with a plain float32 forward of each row alone. Log-probs \
differ by less than 1e-5 nats, the gradient by less than 1e-4 of its length, and the exact KL of \
the policy to itself is 0, in updates with gradient checkpointing too. "Exact to" is the largest \
difference of log-probs.

"Shared prompts": a group computes its prompt once. "Packing": `algorithm.packing=true` works; it \
is refused for the others.

Every model is checked at load, so a family that is not listed either trains exactly or ends with \
one line: its scores of a row, and its logits token by token with other rows beside it, must be \
those of its own forward. Weights that a text never reaches (towers of images and sound) are \
frozen. leash's norms, MLPs and attention replace those of a model only if the model computes the \
same with them; `policy.kernels=false` switches them off.

"""
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
        kl = scores.log_probs if scores.full_kl is None else scores.full_kl
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


def write_page() -> None:
    """Measure every family and write the page."""
    lines = ["| family | exact to | shared prompts | packing | notes |", "|---|---|---|---|---|"]
    for family, settings in families().items():
        note = settings.get("note", "")
        with TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(family, Path(folder))
            if "refused" in settings:
                cells = ["refused", "", "", note]
            else:
                measured = measure(checkpoint)
                logs = measured.sample, measured.right, measured.left, measured.grouped
                packs = "" if measured.packed is None else "yes"
                cells = [f"{max(logs):.0e}", "yes" if measured.shares else "", packs, note]
        lines.append(f"| {' | '.join([family, *cells])} |")
        print(lines[-1])
    PAGE.write_text(INTRO + "\n".join(lines) + "\n")


def listed() -> list[str]:
    """Return the families on the page."""
    return re.findall(r"^\| (\w.*?) \|", PAGE.read_text(), re.M)[1:]


if __name__ == "__main__":
    write_page()
