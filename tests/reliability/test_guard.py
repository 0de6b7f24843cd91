"""Files of strangers on real command lines: nothing of theirs runs, and one line says why."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TRAIN = ["trainer.num_iterations=2", "tracker=none", "policy.max_new_tokens=4"]
pytestmark = pytest.mark.reliability


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with leash as a user has it, and with a module of a stranger."""
    place = tmp_path_factory.mktemp("place")
    for name in ("conf", "envs", "policies", "trainer", "train.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    (place / "victim").mkdir()
    (place / "stranger.py").write_text(
        "from pathlib import Path\n"
        "def mark(*a, **k): (Path(__file__).parent / 'MARK').write_text('x')\n"
        "mark()\n"
    )
    return place


def leash(place: Path, *words: str, **env: str) -> subprocess.CompletedProcess:
    """Run a command line there; return what it said."""
    return subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def refused(place: Path, done: subprocess.CompletedProcess, *said: str) -> None:
    """Assert that a command was refused in one line, and that nothing of a stranger ran."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert [part for part in said if part not in lines[0]] == []
    assert not list(place.glob("MARK*"))
    assert (place / "victim").is_dir()


def experiment(place: Path, said: dict) -> str:
    text = yaml.safe_dump({"defaults": ["grpo_tiny", "_self_"], **said})
    (place / "conf" / "experiment" / "evil.yaml").write_text("# @package _global_\n" + text)
    return "experiment=evil"


def transform(target: str, **arguments) -> dict:
    return {"env": {"transforms": {"x": {"_target_": target, **arguments}}}}


MCP = {"_target_": "envs.transforms.MCPServer", "command": ["touch", "MARK_mcp"]}
EVIL = {"_target_": "stranger.mark"}
CASES = {
    "E.target.19": transform("trainer.runs.launch.run", script="s.py", config="a", folder="b"),
    "E.target.20": transform("trainer.runs.run_files.write_text", path="MARK_w", text="x"),
    "E.target.21": transform("trainer.checkpoint.discard", folder="victim"),
    "E.target.22": transform(**{k.strip("_"): v for k, v in MCP.items()}),
    "E.target.23": transform("envs.transforms.ToolRegistry", services=[MCP]),
    "E.target132.import": transform("trainer.runs.targets.import_module", name="stranger"),
    "E.hydra.12": {"allow_targets": True, **transform("stranger.mark")},
    "E.callback.10": {"hydra": {"callbacks": {"x": EVIL}}},
    "E.hydra132.03": {"hydra": {"job_logging": {"handlers": {"x": {"class": "stranger.mark"}}}}},
    "E.hydra132.04": {"hydra": {"hydra_logging": {"handlers": {"x": {"()": "stranger.mark"}}}}},
}


@pytest.mark.parametrize("case", CASES)
def test_an_experiment_file_of_a_stranger_runs_nothing(case, place):
    word = experiment(place, CASES[case])
    refused(place, leash(place, word, *TRAIN))
    if "hydra" in CASES[case]:
        refused(place, leash(place, "-m", word, "seed=1,2", *TRAIN))


@pytest.mark.parametrize("flag", ["--cfg=job", "--cfg=hydra", "--info=all"])
def test_flags_that_show_a_configuration_run_nothing_of_it(flag, place):
    word = experiment(place, {"hydra": {"callbacks": {"x": EVIL}}})
    leash(place, *flag.split("="), word)
    assert not list(place.glob("MARK*"))


def test_a_secret_on_the_command_line_is_nowhere(place):
    for words in (["+env.task.api_key=sk-PLANTED-1"], ["-m", "+env.task.api_key=sk-PLANTED-1,b"]):
        done = leash(place, "experiment=grpo_tiny", *words)
        refused(place, done, "env.task.api_key", "oc.env")
        assert "PLANTED" not in done.stdout + done.stderr
    done = leash(place, "experiment=grpo_tiny", "env.dataset=https://me:PLANTED12@host/x.jsonl")
    assert "PLANTED" not in done.stdout + done.stderr
    for path in [*place.glob("outputs/**/*"), *place.glob("multirun/**/*")]:
        assert "PLANTED" not in str(path)
        assert not path.is_file() or b"PLANTED" not in path.read_bytes()


def test_a_run_of_ones_own_class_goes_on_with_leave_given_again(place):
    (place / "mine.py").write_text(
        "from trainer.objectives import SFTObjective\nclass Mine(SFTObjective): ...\n"
    )
    words = [
        "experiment=sft_tiny",
        "algorithm.objective._target_=mine.Mine",
        "output_dir=run",
        "checkpoint.every=1",
    ]
    refused(place, leash(place, *words, *TRAIN), "allow_targets=true")
    done = leash(place, *words, *TRAIN, "allow_targets=true")
    assert done.returncode == 0, done.stderr
    for more in (
        ["trainer.num_iterations=3"],
        ["mode=evaluate", "output_dir=evaluated"],
        ["mode=export", "output_dir=exported"],
        ["mode=chat"],
    ):
        again = ["resume=run", *more]
        refused(place, leash(place, *again), "allow_targets=true", "somebody else's")
        if more != ["mode=chat"]:
            done = leash(place, *again, "allow_targets=true")
            assert done.returncode == 0, done.stderr
    assert (place / "exported" / "config.json").is_file()
