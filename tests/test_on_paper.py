"""docs/scaling.md has the tables of benchmarks/simulate_scale.py, whose parts are right by hand."""

import random
from dataclasses import replace

import pytest
import torch
from runs import ROOT
from transformers import Qwen2ForCausalLM

from benchmarks import simulate_scale as paper
from benchmarks.drawn_replies import micro_batches, replies
from benchmarks.measure import peak_bytes
from policies.load import _checkpoint_layers as checkpoint_layers
from policies.scorer import Scorer

PAGE = (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("table", [paper.table_of_sizes, paper.table_of_nodes])
def test_the_page_has_the_tables_of_the_script(table):
    assert "\n".join(table()) in PAGE, "docs/scaling.md: python -m benchmarks.simulate_scale"


def test_the_example_of_two_nodes_has_the_numbers_of_the_script():
    plan = paper.PLANS[2]
    assert (plan.name, plan.trains, plan.samples) == ("7B", 8, 8)
    gib = {name: size / 2**30 for name, size in paper.memory(plan).items()}
    took, many = paper.step(plan), paper.step(replace(plan, prompts=1024))
    sent, passed = (size / 2**30 for size in paper.sync_bytes(plan).values())
    phases = " + ".join(f"{s:.0f}" for s in (took.sample, took.sync, took.score, took.update))
    own = " + ".join(f"{gib[name]:.1f}" for name in ("weights", "gradients", "optimizer"))
    for cell in (
        f"{own} GiB",
        f"{gib['reference']:.1f} GiB",
        f"{gib['gathered']:.1f} + {gib['activations']:.1f} GiB",
        f"{sum(gib.values()):.1f} of {paper.MEMORY / 2**30:.1f} GiB",
        f"{phases} = {took.seconds:.0f} s, {took.tokens / took.seconds:,.0f} tokens a second",
        f"{many.seconds:.0f} s, {many.tokens / many.seconds:,.0f} tokens a second",
        f"{sent:.1f} GiB handed over, {passed:.0f} GiB between GPUs",
    ):
        assert f" | {cell} |" in PAGE, cell


def test_the_script_says_what_it_takes_and_prints_the_models_that_are_named(capsys):
    with pytest.raises(SystemExit) as ended:
        paper.main(["--help"])
    assert ended.value.code == 0
    assert "--models" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        paper.main(["--modles", "7B"])
    paper.main(["--models", "0.5B"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "| | 0.5B |"
    assert "| together, GiB of 74.5 | 13.0 |" in rows


def test_models_have_the_weights_that_their_cards_say():
    counted = [paper.weights(plan) for plan in paper.PLANS]
    assert counted == [494_032_768, 1_543_714_304, 7_615_616_512, 32_763_876_352]


def test_a_weight_takes_16_bytes_of_all_gpus_and_what_the_reference_has():
    for plan in paper.PLANS:
        parts, gpus = paper.memory(plan), plan.trains if plan.shards else 1
        own = sum(parts[name] for name in ("weights", "optimizer", "gradients"))
        assert own * gpus == 16 * paper.weights(plan)
        assert parts["reference"] * gpus == (2 if plan.shards else 4) * paper.weights(plan)
        assert sum(parts.values()) < 0.95 * paper.MEMORY


@pytest.mark.parametrize("nodes", [1, 4, 32])
def test_the_slowest_of_several_nodes_by_drawing_them(nodes):
    draw = random.Random(0)

    def node() -> float:
        late = 1 + paper.LATE if draw.random() < paper.STALLED else 1.0
        return late * draw.lognormvariate(0, paper.SPREAD)

    drawn = [max(node() for _ in range(nodes)) for _ in range(20_000)]
    assert paper.slowest(nodes) == pytest.approx(sum(drawn) / len(drawn), abs=3e-3)


def by_hand(lengths: list[int]) -> float:
    """Return the operations of a forward of one prompt's replies by 0.5B, head of replies alone."""
    body, head = 494_032_768 - 151936 * 896, 151936 * 896
    longest = 200 + max(lengths)
    each = max(16384 // longest, 1)
    operations = 2.0 * sum(lengths) * head
    for pieces in (lengths[i : i + each] for i in range(0, 8, each)):
        width = 200 + max(pieces)
        operations += 2 * len(pieces) * width * (body + 24 * 896 * width)
    return operations


def test_a_step_of_one_gpu_by_hand():
    plan = replace(paper.PLANS[0], prompts=1)
    tokens = 8 * (200 + sum(2.718281828 ** (-t / 1000) for t in range(4096)))
    products = sum(by_hand(replies(1, seed).tolist()) for seed in range(paper.DRAWS))
    products /= paper.DRAWS
    found = paper.step(plan)
    assert found.tokens == pytest.approx(tokens, rel=1e-3)
    assert found.score == pytest.approx(2 * products / (0.4 * 989e12) * paper.slowest(1), rel=1e-3)
    assert found.update == pytest.approx(2 * found.score)
    least = 4096 * (paper.STEP + 2 * 494_032_768 / (0.6 * 3.35e12))
    assert 0.5 * least < found.sample < 1.1 * least  # the longest of 8 replies is shorter
    assert paper.step(paper.PLANS[2]).seconds > paper.step(paper.PLANS[2], stragglers=False).seconds


def test_groups_stay_whole_so_padding_is_nearly_half_of_what_is_computed():
    """The numbers that docs/scaling.md says of 16 prompts and micro-batches of 16,384 tokens."""
    padded, real, parts = 0, 0, 0
    for seed in range(20):
        (rank,) = micro_batches(16, 1, 16384, seed)
        parts += len(rank)
        padded += sum(tokens for tokens, _, _ in rank)
        real += int(replies(16, seed).sum()) + 16 * 8 * 200
        assert sum(kept for _, _, kept in rank) == replies(16, seed).sum()
        assert max(tokens for tokens, _, _ in rank) <= 16384
    assert padded / real == pytest.approx(1.9, abs=0.05)
    assert parts / 20 == pytest.approx(30, abs=0.5)
    assert padded / parts == pytest.approx(9500, abs=100)


def test_ranks_with_shards_wait_for_each_other_in_every_micro_batch():
    plan = replace(paper.PLANS[2], trains=2, prompts=4)
    alone = [micro_batches(4, 2, plan.tokens, seed) for seed in range(paper.DRAWS)]
    assert all(len(ranks) == 2 and all(ranks) for ranks in alone)
    spread = paper.products(replace(plan, launch="ddp"), 0.0)
    assert spread < paper.products(plan, 0.0) <= paper.products(plan, 1.0)
    most = sum(max(map(len, ranks)) for ranks in alone) / paper.DRAWS
    assert paper.products(plan, 1e3) == pytest.approx(1e3 * most), "each takes what a gather takes"


def test_ddp_has_buckets_as_large_as_the_gradients():
    for plan in paper.PLANS:
        parts = paper.memory(plan)
        several = plan.launch == "ddp" and plan.trains > 1
        assert parts["buckets"] == (parts["gradients"] if several else 0)


@pytest.mark.parametrize("half", [False, True])
def test_activations_are_near_what_autograd_holds(half):
    shape = paper.Shape(256, 2, 4, 2, 1024, 512, tied=True)
    launch = "fsdp2" if half else "ddp"
    plan = paper.Plan("", shape, launch, 1, half=half, checkpointed=half)
    model = Qwen2ForCausalLM(paper.config(shape)).to(torch.bfloat16 if half else torch.float32)
    if half:
        checkpoint_layers(model)
    scorer = Scorer(model).train()
    ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)

    def work() -> None:
        scorer(ids, mask).log_probs.mean().backward()

    work()  # the gradients are there
    assert paper.activations(plan, ids.numel()) == pytest.approx(peak_bytes(work), rel=0.2)
