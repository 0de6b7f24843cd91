"""docs/scaling.md has the tables of benchmarks/simulate_scale.py, whose parts are right by hand."""

import random
from dataclasses import replace

import pytest
import torch
from runs import ROOT
from transformers import Qwen2ForCausalLM

from benchmarks import simulate_scale as paper
from benchmarks.measure import peak_bytes
from policies.load import _checkpoint_layers as checkpoint_layers
from policies.scorer import Scorer

PAGE = (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("table", [paper.table_of_sizes, paper.table_of_nodes])
def test_the_page_has_the_tables_of_the_script(table):
    assert "\n".join(table()) in PAGE, "docs/scaling.md: python -m benchmarks.simulate_scale"


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


def test_a_step_of_one_gpu_by_hand():
    plan = replace(paper.PLANS[0], prompts=1)
    tokens = 8 * (200 + sum(2.718281828 ** (-t / 1000) for t in range(4096)))
    products = 2 * tokens * (494_032_768 + 24 * 896 * tokens / 8)
    found = paper.step(plan)
    assert found.tokens == pytest.approx(tokens, rel=1e-3)
    assert found.score == pytest.approx(2 * products / (0.4 * 989e12) * paper.slowest(1), rel=1e-3)
    assert found.update == pytest.approx(2 * found.score)
    least = 4096 * (paper.STEP + 2 * 494_032_768 / (0.6 * 3.35e12))
    assert 0.5 * least < found.sample < 1.1 * least  # the longest of 8 replies is shorter
    assert paper.step(paper.PLANS[2]).seconds > paper.step(paper.PLANS[2], stragglers=False).seconds


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
