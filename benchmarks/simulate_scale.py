"""What GRPO takes on GPUs and nodes, by a cost model: memory, step time, tokens a second, a sync.

    python -m benchmarks.simulate_scale [--models 7B 32B]

Nothing here has run on a GPU: constants are of data sheets and papers, or assumed, as each says.
Weights, gradients, moments and reference are counted as preflight=true counts them, on the models
without their numbers (torch's meta device); `activations` and `gathered` are formulas, which
`python -m benchmarks.memory` compares with what a CPU takes.

An iteration samples, hands its weights over, scores and updates, one after the other. Sampling
reads the weights and the cache for each token of all rows at once, and ends with the longest row;
a forward takes 2 operations a weight and token, an update 8 (the layers are computed twice), and
the weights that are gathered meanwhile take their time where it is longer. Layers compute padding
too: micro-batches are those of `pack_rows`, of drawn replies (benchmarks/drawn_replies.py). Every
phase waits for the slowest of its nodes, and for the rank that has most to compute. Left out:
rewards, evaluations, checkpoints, AdamW's own step.

Letters: N weights, T tokens, n GPUs.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.drawn_replies import GROUP, MEAN, MOST, PROMPT, mean_length, micro_batches
from policies.token_distribution import SLICE
from trainer.modes.preflight.costs import held_by

FLOPS = 989e12  # a second, bfloat16: NVIDIA's data sheet of the H100 SXM
BANDWIDTH = 3.35e12  # bytes a second of its memory: the same
MEMORY = 80e9  # bytes: the same
NVLINK = 450e9  # bytes a second out of a GPU to others of its node: the same, one way
NETWORK = 50e9  # bytes a second out of a GPU to other nodes: 400 Gbit/s, arXiv:2407.21783, 3.3.1
NODE = 8  # GPUs: the same
TRAINED = 0.40  # share of FLOPS in products: 0.38 to 0.43 in arXiv:2407.21783, table 4
READ = 0.6  # share of BANDWIDTH in sampling: assumed
LINKED = 0.7  # share of NVLINK and NETWORK: assumed
COPIED = 20e9  # bytes a second between a GPU and its CPU: assumed (PCIe 5 x16 has 64e9)
STEP = 3e-3  # seconds that a step of the sampler takes beside its reads: assumed
SPREAD = 0.03  # of the logarithm of the time of a node: assumed
STALLED, LATE = 0.01, 0.5  # share of the phases in which a node takes half as long again: assumed

AT_ONCE = 256  # rows of an engine: policy.vllm.max_num_seqs by default
DRAWS = 8  # iterations that micro-batches are drawn of
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A model, by the numbers of its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tied: bool

    @property
    def keys(self) -> int:
        """Return the width of the keys of a token."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def root(self) -> int:
        """Return the weights of embeddings and head."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden


@dataclass(frozen=True)
class Plan:
    """How a model is trained: `trains` and `samples` are GPUs, an engine has `split` of them.

    No samples: the GPU that trains. `tokens` are those of a micro-batch, products are in bfloat16
    if `half`.
    """

    name: str
    shape: Shape
    launch: str
    trains: int
    samples: int = 0
    split: int = 1
    prompts: int = 128
    tokens: int = 16384
    half: bool = True
    checkpointed: bool = True

    @property
    def shards(self) -> bool:
        """Return whether weights are spread over the GPUs that train."""
        return self.launch == "fsdp2"


# Numbers of Qwen2.5-*-Instruct's config.json.
PLANS = (
    Plan("0.5B", Shape(896, 24, 14, 2, 4864, 151936, True), "ddp", 1, prompts=32),
    Plan("1.5B", Shape(1536, 28, 12, 2, 8960, 151936, True), "ddp", 4, 4),
    Plan("7B", Shape(3584, 28, 28, 4, 18944, 152064, False), "fsdp2", 8, 8),
    Plan("32B", Shape(5120, 64, 40, 8, 27648, 152064, False), "fsdp2", 16, 16, split=4),
)


def config(shape: Shape) -> Qwen2Config:
    """Return the configuration of a model."""
    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        tie_word_embeddings=shape.tied,
    )


@cache
def parameters(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Return the weights of a model without their numbers."""
    with torch.device("meta"):
        return tuple(Qwen2ForCausalLM(config(shape)).parameters())


@cache
def weights(plan: Plan) -> int:
    """Return N."""
    return sum(p.numel() for p in parameters(plan.shape))


def memory(plan: Plan) -> dict[str, float]:
    """Return the bytes of a GPU that trains, by part.

    Of `half` shards `policy.dtype=bfloat16`, whose shards are float32 and whose reference is half;
    without shards `policy.autocast=bfloat16`.
    """
    own, spread = parameters(plan.shape), plan.trains if plan.shards else 1
    other = torch.bfloat16 if plan.shards and plan.half else torch.float32
    moments = [torch.empty_like(p) for p in own for _ in range(2)]
    parts = held_by(own, [p.to(other) for p in own], moments, whole=True)
    parts = {name: size / spread for name, size in parts.items()}
    parts["buckets"] = parts["gradients"] if plan.trains > 1 and not plan.shards else 0.0  # DDP's
    return parts | {"gathered": gathered(plan), "activations": activations(plan, plan.tokens)}


def gathered(plan: Plan) -> float:
    """Return the bytes of weights that are whole, or cast, while a layer is computed.

    Shards: embeddings, head and two layers, with gradients, which are reduced in float32. Else
    autocast's copies of all weights.
    """
    each = 2 if plan.half else 4
    if not plan.shards:
        return 2.0 * weights(plan) if plan.half else 0.0
    root = plan.shape.root
    layer = (weights(plan) - root) / plan.shape.layers
    return (each + each + 4) * root + (2 * each + each + 4) * layer


def activations(plan: Plan, tokens: int) -> float:
    """Return the bytes that a micro-batch needs beside weights and gradients, all tokens learnt.

    What all layers save, or if they are `checkpointed` their inputs and what one saves; then the
    worse of a layer's backward and the head's: a slice of logits in float32 with its log-softmax
    and their gradients, and of several slices the gradients of the head. The multiples are
    measured (tests/test_on_paper.py).
    """
    each, of = 2 if plan.half else 4, plan.shape
    wide = 2 if plan.half and plan.shards else 4  # autocast adds up layers in float32
    norms = 0 if not plan.half else 4 * of.hidden if plan.shards else 14 * of.hidden
    layer = tokens * (each * (7 * of.hidden + 4 * of.keys + 4 * of.inner) + norms)
    kept = of.layers * (tokens * wide * of.hidden if plan.checkpointed else layer)
    head = each * of.vocabulary * of.hidden
    slices = -(-tokens * of.vocabulary // SLICE)
    logits = 3 * 4 * min(SLICE, tokens * of.vocabulary) + (2 * head if slices > 1 else 0)
    return kept + max((1.35 if plan.checkpointed else 0.35) * layer + head, logits)


def forward(plan: Plan, tokens: float, length: float, kept: float | None = None) -> float:
    """Return the operations of a forward of tokens in rows of a length; the head's of those kept.

    None: of all.
    """
    of = plan.shape
    attention = 2 * of.layers * of.hidden * length / 2  # half of all pairs
    head = of.vocabulary * of.hidden * (tokens if kept is None else kept)
    return 2 * (tokens * (weights(plan) - of.root + attention) + head)


@dataclass(frozen=True)
class Step:
    """Seconds of an iteration's phases, and its tokens, prompts counted."""

    sample: float
    sync: float
    score: float
    update: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole."""
        return self.sample + self.sync + self.score + self.update


def step(plan: Plan, *, stragglers: bool = True) -> Step:
    """Return what an iteration takes."""
    sent, count = 2 * weights(plan), plan.trains
    link = LINKED * (NVLINK if count <= NODE else NETWORK) * count / max(count - 1, 1)
    # Without shards gradients are reduced once, in float32, at the end.
    reduced = 2 * 2 * sent / link if count > 1 and not plan.shards else 0.0
    once = products(plan, sent / link if plan.shards else 0.0)
    late = slowest(math.ceil(count / NODE)) if stragglers else 1.0
    return Step(
        sample(plan) * (slowest(math.ceil(max(plan.samples, 1) / NODE)) if stragglers else 1.0),
        sync_seconds(plan),
        late * 2 * once,  # the reference, and the policy for importance sampling
        late * (4 * once + reduced),  # of shards: gathered twice, reduced in float32
        plan.prompts * GROUP * (PROMPT + mean_length()),
    )


def products(plan: Plan, gather: float) -> float:
    """Return the seconds of a forward of all micro-batches, none shorter than `gather`.

    With shards all ranks compute a micro-batch at a time, else each goes on alone to the last.
    """
    speed, total = FLOPS * TRAINED, 0.0
    for draw in range(DRAWS):
        ranks = [
            [max(forward(plan, *part) / speed, gather) for part in parts]
            for parts in micro_batches(plan.prompts, plan.trains, plan.tokens, draw)
        ]
        together = map(max, zip_longest(*ranks, fillvalue=gather))
        total += sum(together) if plan.shards else max(map(sum, ranks))
    return total / DRAWS


def sample(plan: Plan) -> float:
    """Return the seconds in which all replies are sampled, by engines that each have their share.

    As many rows at once as the cache holds, but AT_ONCE; then the last get fewer, to the longest.
    """
    engines = max(plan.samples, 1) // plan.split
    rows = math.ceil(plan.prompts * GROUP / engines)
    body, token = 2 * weights(plan), 4 * plan.shape.layers * plan.shape.keys  # bytes
    free = 0.9 * MEMORY * plan.split - body - (0 if plan.samples else sum(memory(plan).values()))
    at_once = max(min(rows, AT_ONCE, int(free / token / (PROMPT + MEAN))), 1)

    def seconds(active: float, length: float) -> float:
        read = (body + active * (PROMPT + length) * token) / (BANDWIDTH * READ)
        # Half of all pairs is of whole rows: a token that is sampled sees all before it.
        computed = forward(plan, active, 2 * (PROMPT + length)) / (FLOPS * TRAINED)
        return STEP + max(read, computed) / plan.split

    prompts = forward(plan, rows / GROUP * PROMPT, PROMPT) / (FLOPS * TRAINED * plan.split)
    full = (rows - at_once) / at_once * mean_length() * seconds(at_once, MEAN)
    tail, stride = 0.0, 16
    for length in range(0, MOST, stride):
        left = math.exp(-length / MEAN)
        any_left = -math.expm1(at_once * math.log1p(-left)) if left < 1 else 1.0
        tail += stride * any_left * seconds(max(at_once * left, 1.0), length)
    return prompts + full + tail


def sync_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of a hand-over: of the weights, and what passes between GPUs in all."""
    one = (2.0 if plan.shards else 4.0) * weights(plan)
    passed = one * (plan.trains - 1) if plan.shards else 0.0  # every rank gathers
    return {"weights": one, "passed": passed + one * plan.samples}


def sync_seconds(plan: Plan) -> float:
    """Return the seconds of a hand-over by NCCL: gathered, to the CPU and back, sent."""
    one = sync_bytes(plan)["weights"]
    if not plan.samples:
        return 2 * one / (BANDWIDTH * READ)  # in the process: read and written
    link = NVLINK if plan.trains <= NODE else NETWORK
    gather = one / (link * LINKED) + 2 * one / COPIED if plan.shards else 0.0
    return gather + one / (NETWORK * LINKED)


@cache
def slowest(nodes: int) -> float:
    """Return the mean time of the slowest of several nodes, 1 being the median of one.

    The integral of P(one is slower); nothing is drawn.

    >>> [round(slowest(n), 2) for n in (1, 8, 64)]
    [1.01, 1.08, 1.28]
    """

    def below(x: float) -> float:  # the normal distribution of log x
        return 0.5 * math.erfc(-math.log(x) / SPREAD / math.sqrt(2)) if x > 0 else 0.0

    width, total = 1e-3, 0.0
    for i in range(2500):
        x = (i + 0.5) * width
        total += 1 - ((1 - STALLED) * below(x) + STALLED * below(x / (1 + LATE))) ** nodes
    return total * width


def table_of_sizes(plans: Sequence[Plan] = PLANS) -> Iterator[str]:
    """Yield the rows of the table of models."""
    yield "| | " + " | ".join(plan.name for plan in plans) + " |"
    yield "|---" * (len(plans) + 1) + "|"
    yield from (_row(name, cells) for name, cells in _sizes(plans))


def _sizes(plans: Sequence[Plan]) -> Iterator[tuple[str, list[str]]]:
    parts, steps = [memory(p) for p in plans], [step(p) for p in plans]
    yield "launch file", [f"`launch={p.launch}`" for p in plans]
    yield "GPUs that train", [str(p.trains) for p in plans]
    yield "GPUs that sample", [_engines(p) for p in plans]
    yield "prompts of 8 replies an iteration", [str(p.prompts) for p in plans]
    yield "weights, million", [f"{weights(p) / 1e6:,.0f}" for p in plans]
    for name in parts[0]:
        yield f"{name}, GiB a GPU", [f"{part[name] / GIB:.1f}" for part in parts]
    yield "together, GiB of 74.5", [f"{sum(part.values()) / GIB:.1f}" for part in parts]
    for name in ("sample", "sync", "score", "update"):
        yield f"{name}, s", [f"{getattr(s, name):.1f}" for s in steps]
    yield "an iteration, s", [f"{s.seconds:.0f}" for s in steps]
    yield "tokens a second", [f"{s.tokens / s.seconds:,.0f}" for s in steps]
    yield "a sync hands over, GiB", [f"{sync_bytes(p)['weights'] / GIB:.1f}" for p in plans]
    yield "and passes between GPUs, GiB", [f"{sync_bytes(p)['passed'] / GIB:.0f}" for p in plans]


def _engines(plan: Plan) -> str:
    if not plan.samples:
        return "the same"
    return f"{plan.samples // plan.split} x {plan.split}" if plan.split > 1 else str(plan.samples)


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def table_of_nodes(most: int = 64) -> Iterator[str]:
    """Yield the rows of the table of nodes: 7B, half of the nodes train and half sample."""
    yield "| nodes | sample, s | score, update, s | iteration, s | tokens a second | of linear |"
    yield "|---|---|---|---|---|---|"
    nodes, first = 2, 0.0
    while nodes <= most:
        plan = _on(nodes)
        even, found = step(plan, stragglers=False), step(plan)
        rate = found.tokens / found.seconds
        first = first or rate / nodes
        learn = [s.score + s.update for s in (even, found)]
        cells = [f"{even.sample:.1f} to {found.sample:.1f}", f"{learn[0]:.1f} to {learn[1]:.1f}"]
        cells += [f"{even.seconds:.0f} to {found.seconds:.0f}", f"{rate:,.0f}"]
        yield _row(str(nodes), [*cells, f"{rate / nodes / first:.2f}"])
        nodes *= 2


def _on(nodes: int) -> Plan:
    gpus = nodes // 2 * NODE
    return replace(PLANS[2], trains=gpus, samples=gpus, prompts=1024)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table of models, and that of nodes where 7B is one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate_scale")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    names = [plan.name for plan in PLANS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="columns")
    chosen = parser.parse_args(words).models
    print(*table_of_sizes([plan for plan in PLANS if plan.name in chosen]), sep="\n")
    if "7B" in chosen:
        print("", *table_of_nodes(), sep="\n")


if __name__ == "__main__":
    main()
