"""preflight=true: its arithmetic by hand and by brute force, and what it finds in real runs."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import asked
from runs import train as train_by_command
from templates_by_family import CHATML, GEMMA, LLAMA3, QWEN3
from tensordict import TensorDict

import train
from policies.chats.chat_template import Renderer
from policies.load import load_policy
from trainer.modes.preflight import costs
from trainer.modes.preflight.costs import at_limits, memory_of
from trainer.modes.preflight.play import Phase, restart_peak
from trainer.modes.preflight.tokens import count_ends, table
from trainer.runtime import peak
from trainer.transcripts import token_texts

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


def test_a_phase_is_scaled_to_the_limits_but_not_what_is_there_whatever_the_length():
    phase = Phase(seconds=1.0, before=100, peak=130)
    assert at_limits(phase, scale=2.0) == 160
    assert at_limits(phase, scale=0.5) == 130, "what was measured can happen"
    assert at_limits(phase, scale=2.0, gradients=20) == 140
    assert at_limits(phase, scale=2.0, gradients=50) == 130


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
    assert count_ends(batch, frozenset([end])) == (1, 0)
    batch.set("loss_mask", real)
    assert count_ends(batch, frozenset([end])) == (0, 2)


def test_the_peak_is_that_of_its_own_time():
    held = torch.ones(2**24)  # 64 MiB
    cpu = torch.device("cpu")
    now = restart_peak(cpu)
    before = peak(cpu)
    assert before >= now > held.nbytes
    more = torch.ones(2**25)
    assert peak(cpu) > before + 0.9 * more.nbytes
    assert memory_of(cpu) > peak(cpu)


def test_a_sound_run_has_no_problem_and_leaves_nothing(tmp_path):
    place = tmp_path / "here"
    place.mkdir()
    done = train_by_command(*SMALL, f"output_dir={place / 'run'}", "checkpoint.every=10")
    assert done.code == 0, done.text
    assert "preflight: no problem found" in done.text
    assert "= 240 steps" in done.text
    learnt = re.findall(r"row \d+ of 16, (\d+) of \d+ tokens learnt", done.text)
    runs = re.findall(r"^ +(\d+) yes ", done.text, re.M)
    assert len(learnt) == 2
    assert sum(map(int, learnt)) == sum(map(int, runs))
    assert list(place.iterdir()) == []


def test_problems_are_named_with_a_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))  # no warm-up is in it
    few = ("trainer.micro_batch_tokens=20", "optimizer.warmup=241")
    found = look(tmp_path, "policy.max_prompt_tokens=20", "policy.max_new_tokens=492", *few)
    said = capsys.readouterr().out
    assert found == 1, said
    assert "experiment sft_tiny would be trained first" in said
    assert "optimizer.warmup=241 is longer than the run's 240 steps" in said
    assert "train rows exceed 20 tokens" in said
    assert f"preflight: {found:g} problem:" in said


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


def test_idle_groups_memory_and_a_full_disk_are_problems(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Free(10))
    monkeypatch.setattr(costs, "memory_of", lambda _: 2**20)
    words = ("policy.model=tiny", "checkpoint.every=10", "checkpoint.keep_last=2")
    assert look(tmp_path, *words) >= 3  # an untrained model is never right
    printed = capsys.readouterr().out
    assert "needs up to " in printed
    assert "3 checkpoints of " in printed  # one more while it is written
    model = 4 * sum(p.numel() for p in load_policy("tiny").model.parameters())
    found = re.search(r"the run writes (\d+) MiB", printed)
    assert int(found[1]) == round((3 * 3 * model + model) / 2**20)
    assert "groups earn one reward all over: nothing would be learnt" in printed
    assert "write elsewhere with output_dir=" in printed


class Free:
    """What shutil.disk_usage returns, as far as it is read."""

    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    "words",
    [["preflight=true", "mode=chat"], ["preflight=true", "resume=somewhere"]],
)
def test_a_preflight_that_makes_no_sense_is_refused(words):
    with pytest.raises(ValueError, match="leave mode and resume out"):
        asked(words)


@pytest.mark.parametrize(
    ("family", "learnt", "behind"),
    [
        (CHATML, "13<|im_end|>", True),
        (QWEN3, "<think>\\n\\n</think>\\n\\n13<|im_end|>", True),
        (LLAMA3, "13<|eot_id|>", False),
        (GEMMA, "13<end_of_turn>", True),
    ],
    ids=["chatml", "qwen3", "llama3", "gemma"],
)
def test_the_table_of_a_demonstration_by_family(family, learnt, behind):
    tokenizer = family.tokenizer()
    chat = [{"role": "user", "content": "Sort 31 " * 60}, {"role": "assistant", "content": "13"}]
    row = Renderer(tokenizer, family.text).render(chat, require_assistant=True)
    lines = [line.plain for line in table(token_texts(row.ids, tokenizer), row.assistant)]
    assert max(map(len, lines)) < 80
    assert [line.split()[1] for line in lines] == ["learnt", "-", "yes", "-"][: 3 + behind]
    assert lines[2].endswith(f"yes    {learnt}")
    assert "..." in lines[1]
