"""A damaged run folder: its pages are drawn of what is left, and a resume names the file."""

import pytest
import yaml
from support.pages import write_run, write_words
from support.runs import asked

from conf.compose import compose_checked
from trainer.pages.__main__ import main as report
from trainer.pages.sweep_page import write_sweep
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.runs.discover import nothing_left

CONFIG = compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])
FILES = {
    "config.yaml": yaml.safe_dump(CONFIG, sort_keys=False),
    "frontier.json": '{"reward": [[0.5, 1.0]], "success": [[0, 1]]}',
    **dict.fromkeys(("eval.json", "errors/rank0.txt", ".hydra/defaults.yaml"), "{}"),
}
WRITTEN = ("status.json", "metrics.jsonl", "transcripts.jsonl", ".hydra/overrides.yaml")
WRONG = {  # values of another type
    "config.yaml": yaml.safe_dump(
        CONFIG | {"trainer": CONFIG["trainer"] | {"num_iterations": "x"}}
    ),
    "status.json": '{"state": [], "iteration": "x", "seconds": "x", "machine": 1, "notes": 1}',
    "metrics.jsonl": '{"progress/iteration": "x", "kl/coeff": []}\n',
}


@pytest.mark.parametrize("name", [*FILES, *WRITTEN])
def test_a_damaged_file_costs_its_own_part_alone(name, tmp_path):
    folder = write_words(write_run(tmp_path / "run", iterations=2), "seed=1")
    for place in ("errors", "checkpoints/iteration_000001"):
        (folder / place).mkdir(parents=True)
    for file, text in FILES.items():
        (folder / file).write_text(text)
    whole = (folder / name).read_bytes()
    cuts = [whole[: len(whole) * part // 4] for part in range(4)]
    wrong = [text.encode() for file, text in WRONG.items() if file == name]
    for damaged in (None, b"\0\xff\xfe\x80[{" * 9, *cuts, *wrong):
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        assert report([str(folder)]) == 0
        write_sweep(tmp_path)
        if name != "config.yaml":
            assert nothing_left(asked([f"resume={folder}"])) is None
            JsonlTracker(folder, resume=True).resume(1, "", again=False, seconds=0.0)
        else:
            with pytest.raises(ValueError, match=r"config\.yaml"):
                asked([f"resume={folder}"])
        (folder / name).touch()
