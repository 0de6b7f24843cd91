"""A damaged run folder: its pages are drawn of what is left, and a resume names the file."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from runs import asked

from conf.compose import compose_checked
from trainer.reports.__main__ import main as report
from trainer.runs.find import nothing_left

FILES = ("status.json", "metrics.jsonl", "transcripts.jsonl", "config.yaml", "limit.json")
FILES += ("eval.json", "errors/rank0.txt", ".hydra/overrides.yaml", ".hydra/defaults.yaml")
DAMAGES = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no text": lambda path: path.write_bytes(b"\0\xff\xfe\x80[{" * 9),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Write the folder of a run with all of its files."""
    folder = tmp_path_factory.mktemp("sound")
    for name in (".hydra", "errors", "checkpoints/iteration_000001"):
        (folder / name).mkdir(parents=True)
    rows = [{"progress/iteration": i, "reward/mean": 0.5, "kl/ref_sequence": 0.1} for i in (1, 2)]
    reply = {"iteration": 1, "split": "train", "prompt": "a", "response": "b", "reward": 1.0}
    config = compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])
    texts = {
        "status.json": '{"state": "failed", "reason": "x", "iteration": 2}',
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "transcripts.jsonl": json.dumps(reply) + "\n",
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "limit.json": '{"reward": [[0.5, 1.0]], "success": [[0, 1]]}',
        ".hydra/overrides.yaml": "[seed=1]",
    }
    for name in FILES:
        (folder / name).write_text(texts.get(name, "{}"))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_costs_its_own_part_alone(name, damage, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "run")
    DAMAGES[damage](folder / name)
    assert report([str(folder)]) == 0
    if name != "config.yaml":
        assert nothing_left(asked([f"resume={folder}"])) is None
        return
    with pytest.raises(ValueError, match=r"config\.yaml"):
        asked([f"resume={folder}"])
