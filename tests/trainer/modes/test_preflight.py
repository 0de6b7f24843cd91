"""preflight=true: its arithmetic by hand, and what it finds in real runs."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from support.runs import asked
from support.runs import train as train_by_command

import train
from policies.load import load_policy
from policies.models.find import find_model, load_tokenizer
from trainer.modes.preflight import costs
from trainer.modes.preflight.costs import at_limits, largest_micro_batch, memory_of, note_casts
from trainer.modes.preflight.profile import Findings, Phase, restart_peak
from trainer.modes.preflight.tokens import table
from trainer.runtime import peak_memory

SMALL = (
    *("preflight=true", "trainer.prompts_per_iteration=4", "eval.max_rows=4", "eval.num_samples=1"),
    *("env.task.num_rows=40", "policy.device=cpu", "seed=3"),
)
RL = (*SMALL, "experiment=grpo_tiny", "algorithm.group_size=4")


def look(folder: Path, *words: str) -> float:
    """Do a preflight in this process; return how many problems it found."""
    return train.train(OmegaConf.create(asked(words)), folder)


def test_a_phase_is_scaled_to_the_limits_but_not_what_is_there_whatever_the_length():
    phase = Phase(seconds=1.0, before=100, peak=130)
    assert at_limits(phase, scale=2.0) == 160
    assert at_limits(phase, scale=0.5) == 130, "what was measured can happen"
    assert at_limits(phase, scale=2.0, gradients=20) == 140
    assert at_limits(phase, scale=2.0, gradients=50) == 130


@pytest.mark.parametrize(("room", "fits"), [(160, 200), (115, 50), (90, 0)])
def test_the_largest_micro_batch_is_what_the_growth_per_token_leaves_room_for(room, fits):
    phase = Phase(seconds=1.0, before=80, peak=130)  # with 20 bytes of gradients, 30 for 100 tokens
    assert largest_micro_batch(phase, tokens=100, room=room, gradients=20) == fits


def test_a_gpu_has_what_torch_holds_or_can_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 20)
    assert memory_of(torch.device("cuda")) == 50


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (("policy.lora.r=4",), True),
        (("policy.lora.r=4", "policy.dtype=bfloat16"), False),
        (("policy.lora.r=4", "policy.autocast=null"), False),
        ((), False),
    ],
)
def test_float32_weights_that_lora_freezes_are_noted(words, noted, capsys):
    note_casts(asked(("experiment=grpo_qwen", *words))["policy"], Findings())
    assert ("policy.dtype=bfloat16" in capsys.readouterr().out) == noted


@pytest.mark.parametrize("size", [1, 63, 500, 5000])
def test_the_table_shows_up_to_600_letters_of_a_run(size):
    text = "".join(f"{i:04} " for i in range(size // 5 + 1))[:size]
    _, *lines, ids = (line.plain for line in table([*range(size)], [*text], [False] * size))
    shown = "".join(line[14:] for line in lines)
    assert shown == (text if size <= 600 else f"{text[:300]}...{text[-300:]}")
    assert max(map(len, lines)) <= 77
    assert lines[0].split()[:2] == [str(size), "-"]
    assert len(ids) < 77


def test_the_peak_is_that_of_its_own_time():
    kept, cpu = torch.ones(2**24), torch.device("cpu")  # 64 MiB
    now, before = restart_peak(cpu), peak_memory(cpu)
    assert before >= now > kept.nbytes
    more = torch.ones(2**25)
    assert peak_memory(cpu) > before + 0.9 * more.nbytes
    assert memory_of(cpu) > peak_memory(cpu)


@pytest.mark.runs
def test_a_sound_run_has_no_problem_and_leaves_nothing(tmp_path):
    done = train_by_command(*RL, f"output_dir={tmp_path / 'run'}")
    assert done.code == 0, done.text
    assert "preflight: no problem found" in done.text
    assert "= 240 steps" in done.text
    learnt = re.findall(r"row \d+ of 16, (\d+) of \d+ tokens learnt", done.text)
    parts = re.findall(r"^ +(\d+) yes ", done.text, re.M)
    assert len(learnt) == 2
    assert sum(map(int, learnt)) == sum(map(int, parts))
    decode = load_tokenizer(find_model("tiny")).decode
    runs = re.findall(r" yes +(\S+)\n +ids ([\d ]+)\n", done.text)
    assert [decode(list(map(int, ids.split()))) for _, ids in runs] == [text for text, _ in runs]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.runs
def test_what_would_be_trained_first_is_no_problem_of_responses(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))  # no warm-up is in it
    assert look(tmp_path, *RL, "optimizer.warmup=241") == 1
    printed = capsys.readouterr().out
    assert "sft_tiny would be trained first" in printed
    assert "optimizer.warmup=241" in printed


@pytest.mark.runs
def test_a_template_whose_ends_are_not_learnt_is_a_problem(tmp_path, capsys):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}\n{% else %}{{ m['content'] }}\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (path := tmp_path / "endless.jinja").write_text(template)
    words = ("experiment=sft_tiny", "policy.model=tiny", f"policy.chat_template={path}")
    assert look(tmp_path, *SMALL, *words) == 1
    assert "no row ends by an end of turn that is learnt" in capsys.readouterr().out


@pytest.mark.runs
def test_idle_groups_memory_and_a_full_disk_are_problems(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    monkeypatch.setattr(costs, "memory_of", lambda _: 2**20)
    words = ("policy.model=tiny", "checkpoint.every=10", "checkpoint.keep_last=2")
    assert look(tmp_path, *RL, *words) >= 3  # an untrained model is never right
    printed = capsys.readouterr().out
    model = 4 * sum(p.numel() for p in load_policy("tiny").model.parameters())
    found = re.search(r"the run writes (\d+) MiB", printed)
    assert int(found[1]) == round((3 * 3 * model + model) / 2**20)  # one more while it is written
    for remedy in ("algorithm.group_size", "output_dir=", "trainer.micro_batch_tokens"):
        assert remedy in printed
    for name in ("generate", "score", "update", "evaluation", "gathering the model"):
        assert re.search(rf"^  {name} +\S+ [MG]iB +\S+ [MG]iB$", printed, re.M), printed
    assert "the largest trainer.micro_batch_tokens that fits: 0\n" in printed
