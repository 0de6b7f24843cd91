"""What a real run leaves for its report: tokens, groups, defaults, machine."""

import re

import psutil
import pytest
from runs import SMALL, launch, lines, wait_for

from trainer.reports.__main__ import main
from trainer.runs.run_files import load_run

pytestmark = pytest.mark.runs


def test_tokens_add_up_to_their_reply(small_run):
    rows = lines(small_run.folder / "transcripts.jsonl")
    last = [r for r in rows if r["kind"] == "train" and r["iteration"] == 16]
    kept = {r["rank"]: r for r in last if "rank" in r}
    assert {"best", "worst"} <= set(kept) <= {"best", "median", "worst"}
    assert kept["worst"]["reward"] <= kept["best"]["reward"]
    for row in kept.values():
        pieces = row["pieces"]
        assert sum(pieces["kl"]) == pytest.approx(row["kl"], abs=0.02)  # three digits each
        same = [row["advantage"]] * len(pieces["text"])
        assert pieces["advantage"] == pytest.approx(same, rel=0.01)
        assert "".join(pieces["text"]).removesuffix("<|im_end|>") == row["response"]
        assert len(pieces["log_prob"]) == len(same)
        assert max(pieces["log_prob"]) <= 0


def test_the_replies_to_a_prompt_are_kept_together_with_its_answer(small_run):
    rows = lines(small_run.folder / "transcripts.jsonl")
    size = load_run(small_run.folder).config["algorithm"]["group_size"]
    for iteration in range(1, 17):
        own = [r for r in rows if r["kind"] == "train" and r["iteration"] == iteration]
        groups = [[r for r in own if r["group"] == g] for g in {r["group"] for r in own}]
        assert 16 <= len(own) <= 19
        assert sum(len(group) == size for group in groups) == 16 // size
        assert all(len({r["prompt"] for r in group}) == 1 for group in groups)
    for row in rows:
        digits, reverse = re.findall(r"\d", row["prompt"]), "descending" in row["prompt"]
        assert row["answer"] == "".join(sorted(digits, reverse=reverse))


def test_a_page_is_there_while_the_run_goes_on_and_tells_when_it_was_killed(small_run, tmp_path):
    folder = tmp_path / "run"
    words = [word for word in SMALL if not word.startswith("trainer.num_iterations")]
    process = launch(*words, "trainer.num_iterations=500", f"output_dir={folder}")
    page = folder / "report.html"
    wait_for(lambda: page.exists() and 'aria-label="Reward"' in page.read_text(), process)
    assert "data-reload" in page.read_text()
    assert load_run(folder).state == "running"
    ranks = psutil.Process(process.pid).children(recursive=True)
    for one in (psutil.Process(process.pid), *ranks):
        one.kill()
    process.communicate()
    psutil.wait_procs(ranks)
    assert load_run(folder).state == "killed"
    assert main([str(folder)]) == 0
    assert "data-reload" not in page.read_text()
