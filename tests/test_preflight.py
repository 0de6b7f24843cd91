"""preflight=true: its arithmetic by hand and by brute force, and what it finds in real runs."""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import train as train_by_command
from tensordict import TensorDict

import train
from conf.preflight_and_modes import asked
from policies.packing import pack_rows
from trainer.memory import Peak, memory_of
from trainer.modes.preflight import sums
from trainer.modes.preflight.rows import Lengths, learnt, marked

SMALL = (
    *("experiment=grpo_tiny", "preflight=true", "trainer.prompts_per_iteration=4"),
    *("algorithm.group_size=4", "eval.max_rows=4", "eval.num_samples=1", "seed=3"),
    *("env.task.num_rows=40", "policy.device=cpu"),
)


def look(folder: Path, *words: str) -> float:
    """Do a preflight in this process; return how many problems it found."""
    config = asked([*SMALL, *words])
    assert config is not None
    return train.train(OmegaConf.create(config), folder)


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_are_counted_as_the_update_cuts_them(seed):
    draw = random.Random(seed)
    group, ranks, minibatches = draw.choice([1, 2, 4, 7]), draw.choice([1, 2]), draw.choice([1, 3])
    prompts = ranks * minibatches * draw.randint(1, 6)
    longest, limit = draw.randint(3, 40), draw.randint(1, 400)
    cut = sums.Batches(prompts, group, ranks, minibatches, epochs=1, iterations=1)
    rows = prompts // ranks // minibatches * group
    attention = torch.ones(rows, longest, dtype=torch.bool)
    parts = pack_rows(attention, limit, group_id=torch.arange(rows) // group)
    assert cut.backwards(limit=limit, longest=longest) == len(parts)


def test_batches_by_hand():
    cut = sums.Batches(prompts=8, group=4, ranks=2, minibatches=2, epochs=3, iterations=10)
    assert (cut.sequences, cut.per_rank, cut.per_step, cut.steps) == (32, 16, 16, 60)


def test_idle_groups_by_enumeration():
    rates, group = [0.18, 0.5, 1.0], 4
    expected = 0.0
    for rate in rates:
        for replies in itertools.product([True, False], repeat=group):
            if len(set(replies)) == 1:
                expected += math.prod(rate if right else 1 - rate for right in replies)
    assert sums.idle_share(rates, group) == pytest.approx(expected / len(rates))
    # p = 0.18: 70 %, 45 %, 20 % and 4 % of the groups of 2, 4, 8 and 16
    found = [round(sums.idle_share([0.18], size), 2) for size in (2, 4, 8, 16)]
    assert found == [0.70, 0.45, 0.20, 0.04]


def test_evaluations_and_checkpoints_are_counted_as_the_loop_has_them():
    for total, every in itertools.product(range(1, 13), range(6)):
        due = [i for i in range(1, total + 1) if i == total or (every and i % every == 0)]
        assert sums.evaluations(total, every) == 1 + len(due)
        assert sums.saves(total, every) == (len(due) if every else 0)


def test_memory_by_hand():
    shape = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32}
    sizes = sums.Sizes(
        weights=1000, reference=500, trained=250, gradient=1000, half=False, **shape,
        intermediate=192, vocabulary=400, width=4,
    )  # fmt: skip
    assert sizes.moments == 2000
    assert sizes.cache(rows=3, tokens=10) == 3 * 10 * 2 * 2 * 64 * 4
    assert sizes.activations(1) == 2 * (12 * 64 + 4 * 64 + 4 * 192) * 4
    assert sizes.logits(5) == 5 * 400 * 4
    assert sizes.logits(10**9) == 2**28
    # four of 30 tokens, a forward of 60: two of them, with a prompt each, 20 kept
    needed = sums.memory(sizes, sums.Rows(4, prompt=20, new=10), limit=60)
    assert needed["loaded"] == 1500
    assert needed["generate"] == 3500 + sizes.cache(4, 30) + 12 * 4 * 400
    assert needed["update"] == 4500 + sizes.activations(60) + 4 * 20 * 400 * 4
    assert sums.Rows(4, prompt=20, new=10, shared=4).forward(120) == (60, 40)


def test_disk_is_what_checkpoints_take(tmp_path, small_run):
    saved = sorted((small_run.folder / "checkpoints").glob("iteration_*"))
    took = sum(p.stat().st_size for p in saved[-1].rglob("*.safetensors"))
    sizes = sums.Sizes(
        weights=132_800 * 4, reference=0, trained=132_800, gradient=132_800 * 4, half=False,
        layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=192, vocabulary=400,
        width=4,
    )  # fmt: skip
    need = sums.disk(sizes, adapter=False, moves=False, saved=8, keep_last=2, keep_best=False)
    assert need["checkpoint"] == pytest.approx(took, rel=0.02)
    assert need["checkpoints"] == 3 * need["checkpoint"]  # one more while it is written
    model = small_run.folder / "model" / "model.safetensors"
    assert need["model"] == pytest.approx(model.stat().st_size, rel=0.02)


def test_what_is_learnt_is_marked_and_its_end_is_looked_at():
    from policies.models import find_model, load_tokenizer

    tokenizer = load_tokenizer(find_model("tiny"))
    end = tokenizer.eos_token_id
    texts = ["Paris is", "Paris"]
    rows = [[*tokenizer(text)["input_ids"], end] for text in texts]
    size = max(map(len, rows))
    ids = torch.tensor([row + [0] * (size - len(row)) for row in rows])
    real = torch.tensor([[i < len(row) for i in range(size)] for row in rows])
    keep = real.clone()
    keep[0, -1], keep[1] = False, False
    batch = TensorDict({"loss_mask": keep}, [2])
    batch.set(("tokens", "full"), ids)
    batch.set(("masks", "all_attention_mask"), real)
    assert marked(batch, 0, tokenizer, colour=False).plain == "[[Paris is]]<|im_end|>"
    assert marked(batch, 1, tokenizer, colour=True).plain == "Paris<|im_end|>"
    assert learnt(batch, frozenset([end])) == (1, 0)
    batch.set("loss_mask", real)
    assert learnt(batch, frozenset([end])) == (0, 2)


def test_lengths_against_limits():
    found = Lengths(sorted([5, 9, 7, 30]), 4)
    assert (found.at(0), found.at(1), found.above(8), found.above(None)) == (5, 30, 2, 0)


def test_the_peak_is_that_of_its_own_time():
    held = torch.ones(2**24)  # 64 MiB
    first = Peak(torch.device("cpu"))
    assert first.highest() >= first.now() > held.nbytes
    before = first.highest()
    more = torch.ones(2**25)
    assert first.highest() > before + 0.9 * more.nbytes
    assert memory_of(torch.device("cpu")) > first.highest()


def test_a_sound_run_has_no_problem_and_leaves_nothing(tmp_path):
    place = tmp_path / "here"
    place.mkdir()
    done = train_by_command(*SMALL, f"output_dir={place / 'run'}", "checkpoint.every=10")
    assert done.code == 0, done.text
    assert "preflight: no problem found" in done.text
    waits = ["playing iterations", "Tokens: a real sampled reply", "timing a batch", "Time, by a"]
    assert waits == sorted(waits, key=done.text.index), "what takes a while is said before"
    assert "4 prompts x 4 = 16 sequences an iteration" in done.text
    assert "80 (iterations) x 1 = 80 steps" in done.text
    assert list(place.iterdir()) == []


def test_problems_are_named_with_a_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))  # no warm-up is in it
    few = ("trainer.micro_batch_tokens=20", "optimizer.warmup=81")
    found = look(tmp_path, "policy.max_prompt_tokens=20", "policy.max_new_tokens=492", *few)
    said = capsys.readouterr().out
    assert found >= 3
    assert "experiment sft_tiny would be trained first" in said
    assert "optimizer.warmup=81 is longer than the run's 80 steps" in said
    assert "longer than trainer.micro_batch_tokens: it goes alone" in said
    assert "prompts are longer than policy.max_prompt_tokens=20" in said
    assert "do not fit the model's 512 positions" in said
    assert f"preflight: {found:g} problems:" in said


def test_a_template_whose_ends_are_not_learnt_is_a_problem(tmp_path, capsys):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}\n{% else %}{{ m['content'] }}\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = tmp_path / "endless.jinja"
    path.write_text(template)
    words = ["experiment=sft_tiny", *SMALL[1:3], *SMALL[4:], f"policy.chat_template={path}"]
    config = asked(words)
    assert config is not None
    found = train.train(OmegaConf.create(config), tmp_path / "look")
    assert found == 1
    assert "no row ends by an end of turn" in capsys.readouterr().out


def test_idle_groups_and_a_full_disk_are_problems(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trainer.modes.preflight.costs.shutil.disk_usage", lambda _: Free(10))
    assert look(tmp_path, "policy.model=tiny") >= 2  # an untrained model is never right
    said = capsys.readouterr().out
    assert "groups earn one reward all over: nothing would be learnt" in said
    assert "write elsewhere with output_dir=" in said


class Free:
    """What shutil.disk_usage returns, as far as it is read."""

    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["preflight=true", "mode=chat"], "preflight checks training, got mode=chat"),
        (["preflight=true", "-m", "seed=1"], "preflight is about one run, got -m"),
        (["preflight=true", "resume=somewhere"], "preflight checks a new run"),
    ],
)
def test_a_preflight_that_makes_no_sense_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        asked(words)
