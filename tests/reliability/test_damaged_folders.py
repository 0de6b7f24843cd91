"""A damaged run folder and the real command: it is resumed to the bit, or ends with one line.

Each case begins with a run of four iterations that was killed in the fourth.
"""

import json
import shutil
from pathlib import Path

import pytest
from faulty import TINY, one_error
from runs import lines, metrics, train

pytestmark = pytest.mark.reliability
NEWEST = "checkpoints/iteration_000002"
DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "gone": lambda path: path.unlink(),
    "garbled": lambda path: path.write_bytes(b"\0\xff{" * 99),
}
PASSED_OVER = (
    "status.json",
    "metrics.jsonl",
    "transcripts.jsonl",
    f"{NEWEST}/MANIFEST.json",
    f"{NEWEST}/state.json",
    f"{NEWEST}/optimizer.safetensors",
    f"{NEWEST}/model/model.safetensors",
)


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory) -> Path:
    """Return the folder of a run that nothing happened to, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = train(*TINY, "checkpoint.keep_last=9", f"output_dir={folder}")
    assert done.code == 0, done.text
    return folder


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """Return a copy of it as a kill after its second checkpoint has left it."""
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "model")
    for number in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"iteration_00000{number}")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "iteration": 3}))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_run_goes_on_to_the_bit_past_a_damaged_file(name, damage, killed, whole):
    """From the checkpoint before where the newest one is damaged; lost lines stay lost."""
    DAMAGES[damage](killed / name)
    done = train(f"resume={killed}")
    assert done.code == 0, done.text
    assert ("skipped damaged iteration_000002" in done.text) == name.startswith(NEWEST)
    models = [folder / "model" / "model.safetensors" for folder in (killed, whole)]
    assert models[0].read_bytes() == models[1].read_bytes()
    after = {
        f: [row for row in metrics(f) if row["progress/iteration"] > 2] for f in (killed, whole)
    }
    assert after[killed] == after[whole]
    if "jsonl" not in name:
        assert metrics(killed) == metrics(whole)
        assert lines(killed / "transcripts.jsonl") == lines(whole / "transcripts.jsonl")


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_its_configuration_a_run_does_not_go_on_and_keeps_what_it_has(damage, killed):
    DAMAGES[damage](killed / "config.yaml")
    before = (killed / "metrics.jsonl").read_bytes()
    done = train(f"resume={killed}")
    assert done.code in (1, 2)
    assert "config.yaml" in one_error(done.text)
    assert (killed / "metrics.jsonl").read_bytes() == before
    assert (killed / NEWEST).is_dir()
