"""A damaged run folder: its pages are drawn of what is left, and a resume names the file."""

import json

import pytest
import yaml
from runs import asked

from conf.compose import compose_checked
from trainer.reports.__main__ import main as report
from trainer.runs.find import nothing_left

CONFIG = compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])
ROWS = [{"progress/iteration": i, "reward/mean": 0.5, "kl/ref_sequence": 0.1} for i in (1, 2)]
FILES = {
    "status.json": '{"state": "failed", "reason": "x", "iteration": 2}',
    "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "transcripts.jsonl": '{"iteration": 1, "split": "train", "prompt": "a", "response": "b"}\n',
    "config.yaml": yaml.safe_dump(CONFIG, sort_keys=False),
    "limit.json": '{"reward": [[0.5, 1.0]], "success": [[0, 1]]}',
    ".hydra/overrides.yaml": "[seed=1]",
    **dict.fromkeys(("eval.json", "errors/rank0.txt", ".hydra/defaults.yaml"), "{}"),
}
DAMAGES = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no text": lambda path: path.write_bytes(b"\0\xff\xfe\x80[{" * 9),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_costs_its_own_part_alone(name, damage, tmp_path):
    for folder in (".hydra", "errors", "checkpoints/iteration_000001"):
        (tmp_path / folder).mkdir(parents=True)
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    DAMAGES[damage](tmp_path / name)
    assert report([str(tmp_path)]) == 0
    if name != "config.yaml":
        assert nothing_left(asked([f"resume={tmp_path}"])) is None
        return
    with pytest.raises(ValueError, match=r"config\.yaml"):
        asked([f"resume={tmp_path}"])
