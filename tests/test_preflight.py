"""preflight=true: its arithmetic by hand and by brute force, and what it finds in real runs."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import train as train_by_command
from tensordict import TensorDict

import train
from conf.preflight_and_modes import asked
from trainer.modes.preflight import costs
from trainer.modes.preflight.checks import idle_share
from trainer.modes.preflight.costs import at_limits, saves
from trainer.modes.preflight.footprint import Peak, memory_of
from trainer.modes.preflight.play import Phase
from trainer.modes.preflight.tokens import learnt

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


def test_idle_groups_by_enumeration():
    rates, group = [0.18, 0.5, 1.0], 4
    expected = 0.0
    for rate in rates:
        for replies in itertools.product([True, False], repeat=group):
            if len(set(replies)) == 1:
                expected += math.prod(rate if right else 1 - rate for right in replies)
    assert idle_share(rates, group) == pytest.approx(expected / len(rates))
    # p = 0.18: 70 %, 45 %, 20 % and 4 % of the groups of 2, 4, 8 and 16
    found = [round(idle_share([0.18], size), 2) for size in (2, 4, 8, 16)]
    assert found == [0.70, 0.45, 0.20, 0.04]


def test_a_phase_is_scaled_to_the_limits_but_not_what_is_there_whatever_the_length():
    phase = Phase(seconds=1.0, before=100, peak=130)
    assert at_limits(phase, scale=2.0) == 160
    assert at_limits(phase, scale=0.5) == 130, "what was measured can happen"
    assert at_limits(phase, scale=2.0, gradients=20) == 140
    assert at_limits(phase, scale=2.0, gradients=50) == 130


def test_checkpoints_are_counted_as_the_loop_writes_them():
    for total, every in itertools.product(range(1, 13), range(6)):
        due = [i for i in range(1, total + 1) if every and (i == total or i % every == 0)]
        assert saves(total, every) == len(due)


def test_whether_rows_end_by_an_end_that_is_learnt():
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
    assert learnt(batch, frozenset([end])) == (1, 0)
    batch.set("loss_mask", real)
    assert learnt(batch, frozenset([end])) == (0, 2)


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
    assert "= 240 steps" in done.text
    assert "16 rows in 1 micro-batches" in done.text
    ended = re.findall(r"row \d of 16, (\d+) of \d+ tokens learnt", done.text)
    sampled = re.findall(r"^ +(\d+) sampled  yes ", done.text, re.M)
    assert len(ended) == 2
    assert sum(map(int, ended)) == sum(map(int, sampled))
    assert done.text.count("prompt   -      Sort the digits in ascending order: ") == 2
    assert " ? " not in done.text.partition("Tokens: ")[2].partition("Rewards")[0]
    assert list(place.iterdir()) == []


def test_problems_are_named_with_a_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))  # no warm-up is in it
    few = ("trainer.micro_batch_tokens=20", "optimizer.warmup=241", "env.overlong=error")
    found = look(tmp_path, "policy.max_prompt_tokens=20", "policy.max_new_tokens=492", *few)
    said = capsys.readouterr().out
    assert found == 3
    assert "experiment sft_tiny would be trained first" in said
    assert "optimizer.warmup=241 is longer than the run's 240 steps" in said
    assert "longer than trainer.micro_batch_tokens: it goes alone" in said
    assert "train rows exceed 20 tokens" in said
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


def test_idle_groups_and_a_full_disk_are_problems(tmp_path, capsys, monkeypatch, small_run):
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Free(10))
    monkeypatch.setattr(costs, "memory_of", lambda _: 2**20)
    needs, real = [], costs.disk_need
    monkeypatch.setattr(costs, "disk_need", lambda *a: needs.append(real(*a)) or needs[-1])
    words = ("policy.model=tiny", "checkpoint.every=10", "checkpoint.keep_last=2")
    assert look(tmp_path, *words, "trainer.overlap=1") >= 3  # an untrained model is never right
    said = capsys.readouterr().out
    assert "update needs up to " in said
    saved = sorted((small_run.folder / "checkpoints").glob("iteration_*"))  # of the same model
    took = sum(p.stat().st_size for p in saved[-1].rglob("*.safetensors"))
    model = (small_run.folder / "model" / "model.safetensors").stat().st_size
    assert needs[0]["checkpoint"] == pytest.approx(took + model, rel=0.02)  # and older weights
    assert "trainer.overlap=1: beside each of them" in said
    assert needs[0]["checkpoints"] == 3 * needs[0]["checkpoint"]  # one more while it is written
    assert needs[0]["model"] == pytest.approx(model, rel=0.02)
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
        (["preflight=true", "resume=somewhere"], "preflight checks a new run"),
    ],
)
def test_a_preflight_that_makes_no_sense_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        asked(words)


def test_the_table_of_preferences(tmp_path, capsys):
    config = asked(["experiment=rm_tiny", *SMALL[1:3], "policy.device=cpu"])
    assert config is not None
    train.train(OmegaConf.create(config), tmp_path / "look")
    said = capsys.readouterr().out.partition("row 1 of ")[2].partition("ok: ")[0]
    # a reply behind what both say is learnt from where they differ on, up to the end of its turn
    kinds = ["template", "prompt", "template", "reply", "template"]
    for row in said.split("row 2 of "):
        found = re.findall(r"^ +\d+ (\w+) +(yes|-) ", row, re.M)
        assert [kind for kind, _ in itertools.groupby(kind for kind, _ in found)] == kinds
        assert found[-1] == ("template", "yes")
        assert row.rstrip().endswith("<|im_end|>  <- end of turn")
