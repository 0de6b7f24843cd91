"""preflight_gpu: a dry run's figures beside an independent count, and beside real tensors."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.runs import asked, train
from transformers import AutoModelForCausalLM, Qwen2Config

from conf.plan import plan
from policies.decoding import GROWTH, LOGITS
from policies.load import weights_of
from policies.models.fast.layers import replace_layers
from policies.models.find import find_model, load_model
from policies.models.shard_files import COPIES
from policies.scorer import Scorer
from trainer.optimizer import make_optimizer
from trainer.scale.dry_run.cluster import Figures, Rank, measure
from trainer.scale.dry_run.ledger import Ledger, by_shapes, rank_of
from trainer.scale.shards import make_mesh

WIDTH, LAYERS, VOCABULARY, MIDDLE, HEADS, KEYS = 64, 3, 512, 192, 4, 2
LAYER = 2 * (WIDTH * WIDTH + WIDTH * WIDTH // 2) + 2 * WIDTH + 3 * WIDTH * MIDDLE + 2 * WIDTH
OUTSIDE = 2 * VOCABULARY * WIDTH + WIDTH  # embeddings, head, norm
WEIGHTS = LAYERS * LAYER + OUTSIDE
TOKENS = 24 + 40  # of a sequence
WORDS = ["experiment=grpo_tiny", "preflight=true", "preflight_gpu=80", "policy.autocast=bfloat16"]
WORDS += ["policy.max_prompt_tokens=24", "policy.max_new_tokens=40", "kl.estimator=k3_ratio"]
WORDS += ["trainer.micro_batch_tokens=128"]
FSDP2 = ["launch=fsdp2", "launch.num_processes=4"]
QWEN = ["experiment=grpo_qwen", *WORDS[1:3], "trainer.micro_batch_tokens=4096", "kl.coeff=0"]
QWEN += ["kl.measure=false"]


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KEYS,
        tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    config().save_pretrained(tmp_path)
    return f"policy.model={tmp_path}"


def figures(*words: str) -> Figures:
    settings = asked(words)
    return measure(plan(settings), settings)


def test_a_rank_of_four_holds_and_sends_what_the_weights_say(folder):
    found, size = figures(*WORDS, folder, *FSDP2), 4 * WEIGHTS
    few = 8192  # bytes of rotary frequencies and AdamW's counts
    assert found.weights == WEIGHTS
    assert (found.tokens, found.rows) == (TOKENS, 2)
    quarters = 4  # weights, two moments, reference
    assert found.resident == pytest.approx(quarters * size / 4, abs=few)
    assert found.step >= found.resident + size / 4, "and gradients"
    twice = 4 * LAYERS * LAYER  # a layer is gathered again for its backward
    assert found.sent == {"all-gather": size + twice, "reduce-scatter": size}
    assert found.calls == {"all-gather": 2 * LAYERS + 1, "reduce-scatter": LAYERS + 1}
    assert found.gathered == pytest.approx(found.resident + size, abs=few)
    keys = LAYERS * 2 * KEYS * (WIDTH // HEADS) * TOKENS * 2  # in bfloat16
    assert found.cache == GROWTH * keys + LOGITS * 4 * VOCABULARY
    assert found.gathered is not None
    assert found.gathered + 4 * OUTSIDE < found.evaluation < found.gathered + 3 * size
    largest = 4 * VOCABULARY * WIDTH
    assert found.resident + largest <= found.model <= found.resident + 3 * largest
    assert found.hosts["loading"] == pytest.approx(4 * size, abs=few)
    assert found.hosts["resuming"] == pytest.approx(4 * size + largest, abs=few), "4 quarters"
    assert found.hosts["a checkpoint"] == pytest.approx(COPIES * 3 * size, abs=4 * few)
    assert found.hosts["the final model"] == pytest.approx(size, abs=few)


@pytest.mark.parametrize("word", ["policy.dtype=bfloat16", "policy.lora.r=4"])
def test_a_transfer_to_an_engine_gathers_one_weight_at_a_time(folder, word):
    settings = asked([*WORDS, folder, *FSDP2, word])
    with rank_of(4), ExitStack() as stack:
        mesh = make_mesh("cpu", 4)
        ledger = stack.enter_context(by_shapes())
        rank = Rank(plan(settings), settings, ledger, mesh)
        ledger.restart()
        before, half = ledger.now, rank.scorer.placement.half
        sent = sum(weight.nbytes for _, weight in weights_of(rank.scorer).stream(half=half))
    largest = 4 * VOCABULARY * WIDTH
    assert sent == WEIGHTS * (2 if half else 4)
    assert before + largest <= ledger.peak <= before + 3 * largest


@pytest.mark.runs
@pytest.mark.parametrize(("dtype", "copies"), [("bfloat16", 1), ("float32", 4)])
def test_ranks_that_load_the_dtype_of_the_file_share_its_pages(dtype, copies, folder):
    path = folder.removeprefix("policy.model=")
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(path)
    model = load_model(find_model(path), dtype=dtype)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [(*(int(end, 16) for end in line[0].split("-")), line[-1]) for line in maps]
    for p in model.parameters():
        (name,) = (name for start, end, name in files if start <= p.data_ptr() < end)
        assert name.endswith("model.safetensors") == (copies == 1)
    size = sum(p.nbytes for p in model.parameters())
    found = figures(*WORDS, folder, *FSDP2, f"policy.dtype={dtype}")
    assert found.hosts["loading"] == pytest.approx(copies * size, rel=0.01)


@pytest.mark.runs
def test_copies_of_shards_send_their_gradients_once_more(folder):
    whole, halves = (figures(*WORDS, folder, *FSDP2, *more) for more in ((), ("launch.shards=2",)))
    assert halves.resident == pytest.approx(2 * whole.resident, rel=0.01)
    assert halves.sent == whole.sent | {"all-reduce": 4 * WEIGHTS // 2}


@pytest.mark.runs
@pytest.mark.parametrize("more", [(), ("launch.num_processes=4",)])
def test_peaks_are_those_of_real_tensors(folder, more):
    found = figures(*WORDS, folder, "kl.measure=false", "kl.coeff=0", *more)
    ids = torch.randint(VOCABULARY, (found.rows, TOKENS))  # [B, T]
    every = torch.ones_like(ids, dtype=torch.bool)
    with Ledger() as ledger:
        model = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa").eval()
        replace_layers(model)
        scorer = Scorer(model, autocast=torch.bfloat16)
        optimizer = make_optimizer(scorer, lr=1e-3)
        for _ in range(2):  # the second has moments
            ledger.restart()
            scorer(ids, every, entropy=True).log_probs.sum().backward()
            peak = ledger.peak
            ledger.restart()
            optimizer.step()
            step = ledger.peak
            optimizer.zero_grad(set_to_none=True)
    buckets = 4 * WEIGHTS if more else 0
    assert found.resident - buckets == pytest.approx(ledger.now, rel=0.02)
    assert peak * 0.97 <= found.update <= peak * 1.03 + buckets
    assert step <= found.step <= step + buckets
    assert found.sent == ({"all-reduce": buckets} if more else {})


@pytest.mark.runs
@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=ppo", "algorithm.critic.kind=separate", "kl.estimator=k1", *FSDP2),
        ("policy.lora.r=4", *FSDP2),
        (
            "kl.estimator=full",
            "policy.dtype=bfloat16",
            "policy.gradient_checkpointing=true",
            *FSDP2,
        ),
        ("kl.refresh_every=1", "kl.refresh_decay=0.5"),
        ("experiment=sft_tiny",),
    ],
    ids=str,
)
def test_it_plays_what_the_keys_ask_for(folder, words):
    plain = figures(*WORDS, folder, *(FSDP2 if FSDP2[0] in words else ()))
    found = figures(*WORDS, folder, *words)
    assert found.weights >= WEIGHTS
    assert found.resident != plain.resident or found.gathered != plain.gathered


@pytest.mark.runs
def test_one_process_plays_a_rank_of_many(tmp_path):
    model = tmp_path / "model"
    config().save_pretrained(model)
    words = [*WORDS, f"policy.model={model}", "launch=fsdp2", "launch.num_processes=64"]
    words += ["trainer.prompts_per_iteration=64", f"output_dir={tmp_path / 'run'}"]
    done = train(*words)
    assert done.code == 0, done.text
    assert "64 of 80.0 GiB" in done.text
    done = train(*words, "preflight_gpu=0.0001")
    assert done.code == 1, done.text
    for name in ("forward and backward", "whole policy", "evaluation"):
        assert f"problem: {name}" in done.text
    assert "largest trainer.micro_batch_tokens that fits: 0" in done.text


@pytest.mark.scale
@pytest.mark.parametrize(
    ("words", "held", "step", "whole", "gathered", "reduced", "host"),
    [  # of a separate script, GiB, without the reference
        (("policy.model=Qwen/Qwen2.5-7B", "launch.num_processes=8"),
         10.6, 51.2, 39.0, 52.7, 28.4, 227),
        (("policy.model=Qwen/Qwen2.5-32B-Instruct", "launch.num_processes=64",
          "policy.dtype=bfloat16", "policy.gradient_checkpointing=true",
          "trainer.prompts_per_iteration=64"),
         5.7, 17.9, 66.8, 119, 122, 61),
    ],
)  # fmt: skip
def test_large_models(words, held, step, whole, gathered, reduced, host):
    found = figures(*QWEN, "launch=fsdp2", *words)
    sizes = (
        found.resident,
        max(found.update, found.step),
        found.gathered,
        *found.sent.values(),
        found.hosts["loading"],
    )
    expected = (held, step, whole, gathered, reduced, host)
    assert [size / 2**30 for size in sizes if size] == pytest.approx(expected, rel=0.03)


def test_the_packaged_shapes_have_the_published_numbers_of_weights():
    from trainer.scale.dry_run.cluster import read_config

    published = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "14B": 14.770}
    published |= {"32B": 32.764, "72B": 72.706}  # 1e9
    for name, count in published.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read_config(f"Qwen/Qwen2.5-{name}-Instruct"))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(count, abs=5e-4)
