"""Files of strangers on real command lines: nothing of theirs runs, and one line says why."""

import json
import os
import shutil
import subprocess
import sys
import time
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
        timeout=600,
        check=False,
    )


def refused(place: Path, done: subprocess.CompletedProcess, *said: str) -> None:
    """Assert that a command was refused in one line, and that nothing of a stranger ran."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert lines[0].isprintable()
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
    "partial": transform("stranger.mark", _partial_=True),
    "nested": transform("envs.transforms.Compose", transforms=[[EVIL]]),
    "arguments": transform("envs.transforms.Compose", _args_=[EVIL], _recursive_=False),
    "oc.create": {"env": {"transforms": {"x": "${oc.create:{_target_:stranger.mark}}"}}},
    "oc.decode": {"env": {"transforms": {"x": "${oc.decode:'{_target_: stranger.mark}'}"}}},
    "searchpath": {"hydra": {"searchpath": ["file:///tmp/evil"]}},
    "launcher": {"defaults": ["grpo_tiny", {"override /hydra/launcher": "joblib"}, "_self_"]},
    "sweeper": {"hydra": {"sweeper": EVIL}},
    "params": {
        "hydra": {"sweeper": {"params": {"+hydra.callbacks.x": "{_target_: stranger.mark}"}}}
    },
    "folder": {"output_dir": "a/${oc.env:PLANTED_KEY}"},
    "elsewhere": {"defaults": ["grpo_tiny", {"override /env": "../../../tmp/evil"}, "_self_"]},
    "terminal": {"policy": {"model": "\x1b]52;c;ZXZpbA==\x07"}},
    "E.hydra132.04": {"hydra": {"hydra_logging": {"handlers": {"x": {"()": "stranger.mark"}}}}},
}


@pytest.mark.parametrize("case", CASES)
def test_an_experiment_file_of_a_stranger_runs_nothing(case, place):
    word = experiment(place, CASES[case])
    planted = {"PLANTED_KEY": "sk-PLANTED-1"}
    refused(place, leash(place, word, *TRAIN, **planted))
    if "hydra" in CASES[case]:
        refused(place, leash(place, "-m", word, "seed=1,2", *TRAIN, **planted))


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


def test_a_config_that_is_changed_before_its_worker_reads_it_runs_nothing(place):
    """Somebody who may write the run folder races the parent."""
    words = ["experiment=grpo_tiny", "policy.model=tiny", *TRAIN, "output_dir=raced"]
    starting = subprocess.Popen(
        [sys.executable, "train.py", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = place / "raced" / "config.yaml"
    while not path.exists():
        time.sleep(0.001)
    changed = yaml.safe_load(path.read_text())
    changed |= {"allow_targets": True}
    changed["env"]["transforms"] = {"x": EVIL}
    path.write_text(yaml.safe_dump(changed))
    said = starting.communicate(timeout=600)[1]
    assert starting.returncode == 1
    assert "is no longer what was checked: it was changed; start again" in said
    assert not list(place.glob("MARK*"))


def test_a_stranger_s_run_folder_shows_no_script_and_moves_no_terminal(place):
    """Whatever stands in its files: the pages are text, and so is what chat and resume say."""
    words = ["experiment=grpo_tiny", "policy.model=tiny", "output_dir=shown", *TRAIN[:1]]
    assert leash(place, *words).returncode == 0
    folder = place / "shown"
    evil = (
        '</script><script>alert(1)</script><img src=x onerror=alert(2)>" onclick="alert(3)\x1b[2J'
    )

    def spoil(value):
        if isinstance(value, dict):
            return {key: spoil(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [spoil(inner) for inner in value]
        return evil if isinstance(value, str) else value

    for name in ("transcripts.jsonl", "metrics.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        more = {evil: 1.0, f"reward_part/{evil}": 1.0} if name == "metrics.jsonl" else {}
        spoilt = [json.dumps(spoil(line) | more) + "\n" for line in lines]
        (folder / name).write_text("".join(spoilt))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(spoil(status) | {"state": "failed"}))
    code = "from trainer.reports.report import write_report; write_report('shown')"
    subprocess.run([sys.executable, "-c", code], cwd=place, check=True)
    page = (folder / "report.html").read_text()
    for raw in ("<script>alert", "<img src=x", '" onclick="', "\x1b"):
        assert raw not in page


def test_a_reward_of_ones_own_is_tried_before_a_model_is_loaded(place):
    (place / "rewards_of_mine.py").write_text(
        "from envs.tasks import SortDigits\n"
        "class Plain(SortDigits):\n"
        "    def reward(self, row, reply):\n"
        "        return len(reply.text) / 10\n"
        "class Wrong(SortDigits):\n"
        "    def reward(self, row, reply):\n"
        "        return row['level']\n"
    )
    words = ["experiment=grpo_tiny", "policy.model=tiny", "allow_targets=true", *TRAIN]
    for name, code in (("Plain", 0), ("Wrong", 1)):
        done = leash(
            place, *words, f"env.task._target_=rewards_of_mine.{name}", f"output_dir={name}"
        )
        assert done.returncode == code, done.stderr
    assert f"KeyError: 'level' (in the reward of Wrong, {place}/rewards_of_mine.py, line 7)" in (
        done.stderr
    )
    status = json.loads((place / "Wrong" / "status.json").read_text())
    assert "model" not in status, "none was loaded"
