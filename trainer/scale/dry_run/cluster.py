"""preflight_gpu=<GiB>: a dry run of launch.num_processes GPUs, only from shapes, on one CPU.

One process plays rank 0 with the run's own scorer, shards, optimizer and checkpoint on fake tensors
and books their bytes. The model needs no weights: a folder with a config.json or a name of
shapes.yaml. A sequence has policy.max_prompt_tokens and the tokens of all turns; all are learnt.

Not counted, because shapes do not show them: the allocator's fragments, NCCL, workspaces of
kernels, vLLM's memory. Layers keep for the backward what they keep on a CPU.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from policies.decoding import FREE_SHARE, row_bytes
from policies.layout import Layout
from policies.load import cast_layers, compute_again, frozen_copy
from policies.models import lora
from policies.models.fast.layers import replace_layers
from policies.models.find import EMBEDDED, TINY, find_model, has_adapter, quiet, readable
from policies.models.shard_files import COPIES, FILE
from policies.models.sharding import ShardedScorer
from policies.models.weights import full, local
from policies.scorer import Placement, Scorer
from policies.token_distribution import score_columns
from trainer.modes.preflight.costs import FULL, gib, note_casts
from trainer.modes.preflight.profile import Findings
from trainer.runtime import Runtime
from trainer.scale.dry_run.ledger import Ledger, by_shapes, rank_of
from trainer.scale.shards import make_mesh, shard_all, tensors_of

NODE = 8  # largest number of GPUs per node
CARD = 3 * 2**30  # bytes that torch does not get: CUDA's context, NCCL's buffers, the card's own
FAR = 16  # times the micro-batch: the peak is a maximum of lines, so nearer sizes may miss one
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")


@dataclass(frozen=True)
class Figures:
    """Bytes of rank 0, on its GPU unless stated otherwise."""

    weights: int  # number of weights
    tokens: int  # tokens per sequence
    rows: int  # sequences per micro-batch
    resident: int  # shards of weights, moments and reference, between iterations
    update: int  # peak of a forward and backward
    a_row: int  # what one more sequence adds to `update`
    step: int  # peak of an optimiser step
    calls: dict[str, int]  # collectives of a micro-batch (DDP: of a step)
    sent: dict[str, int]  # bytes of the full tensors in them
    gathered: int | None  # while the whole policy is gathered to sample; None: it does not sample
    cache: int  # keys, values and logits of a sampled row
    evaluation: int  # peak while the reference scores
    model: int  # peak while rank 0 gathers the final model
    hosts: dict[str, int]  # purpose -> host memory of a node


def run(parts: Any, settings: dict[str, Any], folder: Path) -> float:
    """Print the figures of the settings' run; return the number of problems."""
    with Runtime(folder, device="cpu") as runtime:
        findings = Findings()
        figures = measure(parts, settings)
        report(figures, settings, findings)
        out = float(findings.finish())
        runtime.write_status(objective=out)
    return out


def read_config(model: str) -> Any:
    """Return the config of a folder, a name of shapes.yaml or a model in the hub's cache."""
    shapes = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
    if values := shapes.get(model.removesuffix("-Instruct")):
        return Qwen2Config(**dict(zip(NAMES, values, strict=True)), dtype="bfloat16")
    place = find_model(model).folder if model in (TINY, EMBEDDED) else Path(model).expanduser()
    with readable(place, f"config of a model; give such a folder or one of {', '.join(shapes)}"):
        return AutoConfig.from_pretrained(place, local_files_only=True)


def make_scorer(policy: dict[str, Any], model: str) -> Scorer:
    """Return the scorer of a model as `policies.load_policy` makes it, without values."""
    how = {"dtype": getattr(torch, policy["dtype"])}
    how["attn_implementation"] = policy["attn_implementation"] or "sdpa"
    with quiet():
        network: Any = AutoModelForCausalLM.from_config(read_config(model), **how).eval()
    if policy["kernels"] and not policy["compile"]:
        replace_layers(network, compare=False)
    if policy["lora"]["r"]:
        lora.add_adapter(network, **policy["lora"])
    if policy["gradient_checkpointing"]:
        compute_again(network)
    return Scorer(network, autocast=torch.bfloat16 if policy["autocast"] else None)


class Cloned(Placement):
    """Copies by clone: a deep copy reads the memory of a tensor, and fake ones have none."""

    def copy(self, module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
        """Return a copy of a module, which shares the weights in `shared` (id -> weight)."""
        memo: dict[int, Any] = {id(b): b.clone() for b in module.buffers()}
        for p in module.parameters():
            memo[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        return copy.deepcopy(module, memo | (shared or {}))


class Rank:
    """Rank 0 of a run whose tensors have no values: its parts, and the ledger of their bytes."""

    def __init__(
        self, parts: Any, settings: dict[str, Any], ledger: Ledger, mesh: DeviceMesh | None
    ) -> None:
        launch, policy, kl = (settings[name] for name in ("launch", "policy", "kl"))
        self.ledger, self.leash = ledger, parts.leash
        self.scorer, self.references = make_scorer(policy, policy["model"]), dict[str, Any]()
        self.loaded = ledger.now
        self.scorer.placement = Cloned()
        sharded = {"sharded": mesh is not None}
        if kl["measure"]:
            self.references["ref"] = make_reference(self.scorer, policy, kl, **sharded)
        if self.leash.teacher is not None:
            teacher = settings["teacher"] | {"refresh_every": 0}
            named = teacher["reference"]
            models = dict.fromkeys(named.values()) if isinstance(named, dict) else [named]
            for i, model in enumerate(models):
                teacher["reference"] = model
                each = make_reference(self.scorer, policy, teacher, **sharded)
                self.references[f"teacher {i}" if i else "teacher"] = each
        if parts.critic:
            self.scorer.critic = parts.critic(scorer=self.scorer)
        if mesh is not None:
            shard_all(self.scorer, [*self.references.values()], mesh)
        self.optimizer = parts.make_optimizer(self.scorer)
        trained = [p for p in self.scorer.parameters() if p.requires_grad]
        copies = mesh is None and launch["num_processes"] > 1
        self.buckets = {p: torch.zeros_like(p) for p in trained} if copies else {}  # DDP's
        self.step_peak = self._step(trained)  # the moments appear

    def _step(self, trained: list[nn.Parameter]) -> int:
        for weight in trained:
            weight.grad = self.buckets.get(weight, torch.zeros_like(weight))
        self.ledger.restart()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.ledger.peak

    def backward(self, rows: int, tokens: int) -> int:
        """Run a micro-batch of sequences; return the peak of bytes."""
        self.scorer.train()
        self.ledger.restart()
        for weight, bucket in self.buckets.items():
            weight.grad = bucket
        layout = layout_of(rows, tokens)
        leash = self.leash.exact_leash
        exact = None if leash is None else self.references.get(leash.name)
        work = partial(inside, self.scorer, lambda: self._loss(layout, exact))
        (work() if exact is None else inside(exact, work)).backward()
        self.scorer.eval()
        self.optimizer.zero_grad(set_to_none=True)
        return self.ledger.peak

    def _loss(self, layout: Layout, exact: Scorer | None) -> Tensor:
        states = self.scorer.hidden(layout)  # [K, H]
        models = [(self.scorer.head(), states)]
        if exact is not None:
            with torch.no_grad():
                models.append((exact.head(), exact.hidden(layout)))
        target, scales = layout.input_ids.flatten(), [None] * len(models)
        options = {"entropy": True, "mixture": self.leash.mixture}
        columns = score_columns(models, target, scales, **options)
        terms = [x for x in columns if x is not None and x.requires_grad]
        if self.scorer.critic is not None:
            terms.append(self.scorer.critic(layout, states))
        return torch.stack([term.sum() for term in terms]).sum()

    def score(self, rows: int, tokens: int) -> int:
        """Score sequences with each reference; return the peak of bytes."""
        self.ledger.restart()
        layout = layout_of(rows, tokens)
        for scorer in self.references.values():
            with torch.no_grad():
                inside(scorer, partial(log_probs, scorer, layout))
        return self.ledger.peak

    def gather(self) -> int:
        """Gather the final model one weight at a time; return the peak of bytes."""
        self.ledger.restart()
        half = self.scorer.placement.half
        for p in self.scorer.model.parameters():
            full(p.detach()).to("cpu", half or p.dtype, copy=True)
        return self.ledger.peak

    def hosts(self, copies: int, ranks: int, *, sharded: bool) -> dict[str, int]:
        """Return the bytes on a node's host of `ranks` that load, resume and write.

        copies: how often the host has the weights that its ranks load.
        """
        parts = [
            t for group in tensors_of(self.scorer, self.optimizer).values() for t in group.values()
        ]
        sizes, loading = [local(part).nbytes for part in parts], self.loaded * copies
        if not sharded:
            return {
                "loading": loading,
                "resuming": loading + sum(sizes),
                "a checkpoint": sum(sizes),
            }
        written = COPIES * min(FILE + max(sizes), sum(sizes))
        resuming = loading + ranks * max(sizes)  # a part of a weight at a time
        return {"loading": loading, "resuming": resuming, "a checkpoint": ranks * written}


def make_reference(
    scorer: Scorer, policy: dict[str, Any], kl: dict[str, Any], *, sharded: bool
) -> Scorer:
    """Return the reference as `policies.load_reference` makes it."""
    if kl["reference"]:
        return make_scorer(policy | {"lora": {"r": 0}}, kl["reference"]).requires_grad_(False)
    if has_adapter(scorer.model):
        moves = kl["refresh_every"] > 0
        return lora.AdapterScorer(scorer, lora.freeze_copy(scorer.model) if moves else None)
    reference = frozen_copy(scorer)
    if not sharded and not kl["refresh_every"]:
        cast_layers(reference)
    return reference


def layout_of(rows: int, tokens: int) -> Layout:
    """Return the layout of sequences of `tokens` tokens."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)  # [R, L]
    position = torch.arange(tokens).expand(rows, tokens)  # [R, L]
    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool)  # [R, 1, L, L]
    return Layout(ids, position, mask, torch.arange(rows * tokens))


def log_probs(scorer: Scorer, layout: Layout) -> Any:
    """Compute the log-probs of all tokens."""
    models = [(scorer.head(), scorer.hidden(layout))]
    return score_columns(models, layout.input_ids.flatten(), [None])


def inside(scorer: Any, call: Callable[[], Any]) -> Any:
    """Call where the scorer's root has its weights."""
    owner = getattr(scorer, "owner", None) or scorer
    return owner.within(call) if isinstance(owner, ShardedScorer) else call()


def measure(parts: Any, settings: dict[str, Any]) -> Figures:
    """Return the figures of rank 0; nothing is loaded, sent or computed."""
    launch, tokens = settings["launch"], tokens_of(settings)
    ranks = launch["num_processes"]
    rows = max(settings["trainer"]["micro_batch_tokens"] // tokens, 1)
    with rank_of(ranks), ExitStack() as stack:
        sharded = launch["strategy"] == "fsdp2" and ranks > 1
        mesh = make_mesh("cpu", ranks, launch["shards"]) if sharded else None
        ledger = stack.enter_context(by_shapes())
        rank = Rank(parts, settings, ledger, mesh)
        weights = list(rank.scorer.parameters())
        resident, large = ledger.now, rank.backward(FAR * rows, tokens)
        once, calls, sent = rank.backward(rows, tokens), dict(ledger.calls), dict(ledger.bytes)
        if rank.buckets:
            calls, sent = {"all-reduce": 1}, {"all-reduce": sum(b.nbytes for b in rank.buckets)}
        model, gathered_host = rank.gather(), ledger.host
        node = min(ranks, NODE)
        hosts = rank.hosts(copies_of(settings["policy"], node), node, sharded=sharded)
        alone = settings["policy"]["engine"] is None and settings["algorithm"]["rows"] == "prompts"
        with rank.scorer.placement.gather() if alone else nullcontext(), rank.scorer.precision():
            gathered, cache = ledger.now, row_bytes(rank.scorer.model, tokens)
            evaluation = rank.score(rows, tokens)
    return Figures(
        weights=sum(p.numel() for p in weights), tokens=tokens, rows=rows, resident=resident,
        update=once, a_row=(large - once) // ((FAR - 1) * rows), step=rank.step_peak,
        calls=calls, sent=sent, gathered=gathered if alone else None, cache=int(cache),
        evaluation=evaluation, model=model,
        hosts=hosts | {"the final model": gathered_host},
    )  # fmt: skip


def copies_of(policy: dict[str, Any], ranks: int) -> int:
    """Return how often a host of `ranks` holds the weights that they load, or share as pages."""
    mapped = read_config(policy["model"]).dtype == getattr(torch, policy["dtype"])
    return 1 if mapped else ranks


def tokens_of(settings: dict[str, Any]) -> int:
    """Return the tokens of the longest sequence, as far as the keys say."""
    policy, samples = settings["policy"], settings["algorithm"]["rows"] == "prompts"
    new = policy["max_new_tokens"] * settings["env"]["max_turns"] if samples else 0
    return (policy["max_prompt_tokens"] or 0) + new or settings["trainer"]["micro_batch_tokens"]


def report(figures: Figures, settings: dict[str, Any], findings: Findings) -> None:
    """Print the figures, and a problem for each that is above the GPU's or the host's memory."""
    launch, card = settings["launch"], settings["preflight_gpu"] * 2**30
    room = max(card - CARD, 0)
    ranks, model = launch["num_processes"], settings["policy"]["model"]
    findings.section(
        "Dry run, from shapes alone: nothing runs on a GPU",
        f"{model}, {figures.weights / 1e9:.2f}e9 weights, launch={launch['strategy']}, "
        f"GPUs: {ranks} of {gib(card)}, for torch {gib(room)}",
        f"a sequence has {figures.tokens} tokens, a micro-batch {figures.rows * figures.tokens}",
    )
    findings.section("Memory of rank 0's GPU")
    for name, size, remedy in phases(figures):
        findings.say(f"{name:<30}{gib(size):>10}")
        if size > FULL * room:
            findings.problem(f"{name}: {gib(size)} of {gib(room)}; {remedy}")
    if figures.gathered is not None:
        count = max(int(FREE_SHARE * (room - figures.gathered) / figures.cache), 0)
        findings.say(f"a sampled row takes {gib(figures.cache)}: {count} rows at a time fit")
    most = figures.rows + int((FULL * room - figures.update) // figures.a_row)
    findings.say(
        f"the largest trainer.micro_batch_tokens that fits: {max(most, 0) * figures.tokens}"
    )
    note_casts(settings["policy"], findings)
    host = min(ranks, NODE) * card
    findings.section(
        f"Memory of the host of {min(ranks, NODE)} ranks, taken to be {gib(host)}, that of its GPUs"
    )
    for name, size in figures.hosts.items():
        findings.say(f"{name:<30}{gib(size):>10}")
        if size > FULL * host:
            fewer = "policy.dtype of the file, or fewer ranks on a host"
            findings.problem(f"{name}: {gib(size)} of the host's {gib(host)}; {fewer}")
    often = "an optimiser step" if launch["strategy"] == "ddp" else "a micro-batch"
    sent = (
        f"{name}: {gib(size)} in {figures.calls[name]} calls" for name, size in figures.sent.items()
    )
    findings.section(f"Collectives of {often}", *sent)


def phases(figures: Figures) -> Iterator[tuple[str, int, str]]:
    """Yield what needs a GPU's memory, its bytes, and what lowers it."""
    shards = "policy.dtype=bfloat16, policy.lora.r=16, or more processes with launch=fsdp2"
    served = "a vLLM server samples: policy/engine=vllm policy.engine.url="
    yield "shards, moments, reference", figures.resident, shards
    less = "lower trainer.micro_batch_tokens, or policy.gradient_checkpointing=true"
    yield "forward and backward", figures.update, less
    yield "optimiser step", figures.step, shards
    if figures.gathered is not None:
        yield "whole policy, a sampled row", figures.gathered + figures.cache, served
    yield "evaluation", figures.evaluation, served
    yield "gathering the final model", figures.model, shards
