"""Commands of README and docs that need a run, or another program than train.py, go through too.

What starts a run is composed in test_docs.py.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import ROOT, asked, environment

from conf.cli import expand
from conf.compose import compose_checked

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "SECURITY")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
PIP = {"lm-eval", "inspect-ai", "mlflow", "optuna"}  # what leash has no extra for


def found(pattern: str) -> list[str]:
    return sorted({match.strip() for match in re.findall(pattern, TEXT, re.M)})


def of_a_run() -> list[str]:
    return [c for c in found(r"python train\.py [^\n`|#(]*") if "resume=" in c]


def words_of(command: str, program: str) -> list[str]:
    """Return a command's words behind its program, less what a page explains beside it."""
    told = re.split(r" {2,}", command.partition(program)[2].strip())[0]
    return shlex.split(told.replace("<run folder>", "run").replace("<date_time>", "when"))


@pytest.fixture
def runs(tmp_path, monkeypatch, small_run) -> Path:
    """Go to a folder with a finished run in outputs/; other places of the pages lead to it."""
    folder = tmp_path / "outputs" / "grpo_tiny" / "2026-01-01_00-00-00"
    shutil.copytree(small_run.folder, folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("command", of_a_run())
def test_a_command_on_a_run_passes_all_checks(command, runs):
    words = [
        word if word == "resume=last" or not word.startswith("resume=") else f"resume={runs}"
        for word in words_of(command, "train.py")
    ]
    words = expand(words)
    (resumed,) = [word.removeprefix("resume=") for word in words if word.startswith("resume=")]
    assert Path(resumed).resolve() == runs
    config = asked(words)
    assert f"mode={config['mode']}" in [*words, "mode=train"]
    assert config["resume"] is not None


@pytest.mark.parametrize("command", found(r"python train\.py [^\n`|(#]*--cfg[^\n`|(#]*"))
def test_a_command_that_shows_the_configuration_does(command, tmp_path):
    words = [sys.executable, str(ROOT / "train.py"), *words_of(command, "train.py")]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "coeff: " in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", found(r"torchrun --[^\n`|(#]*train\.py[^\n`|(#]*"))
def test_a_command_of_a_launcher_composes(command):
    ranks = int(re.findall(r"nproc[-_]per[-_]node[ =](\d+)", command)[0])
    words = [*words_of(command, "train.py"), f"launch.num_processes={ranks}"]
    assert compose_checked(words)["launch"]["num_processes"] == ranks


def test_reports_are_written_as_the_pages_say(runs):
    commands = [c for c in found(r"python -m trainer\.reports [^\n`|(#]*") if "..." not in c]
    assert len(commands) >= 3
    sweep = Path("sweep")
    shutil.copytree(runs, sweep / "seed=5")
    (sweep / "sweep.json").write_text('{"jobs": ["seed=5"], "words": [], "ended": true}')
    for command in (c for c in commands if "--limit" not in c):  # test_modes.py samples one
        place = sweep if "--table" in command else runs
        words = words_of(re.sub(r"\S*<[^>]*>\S*", str(place), command), "-m trainer.reports")
        words = [re.sub(r"^docs/", "", word) for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "trainer.reports", *words],
            env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_modules_scripts_targets_and_extras_are_there():
    for module in found(r"python -m ([\w.]+)"):
        assert module.startswith("vllm.") or importlib.util.find_spec(module), module
    for script in found(r"python (docs/\S+\.py|tests/\S+\.py|benchmarks/\S+\.py)"):
        assert (ROOT / script).is_file(), script
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = {*found(r"`make ([a-z-]+)[ `]"), *found(r"^make ([a-z-]+)\b(?=$| {2}| ARGS)")}
    assert {"setup", "run", "test"} <= named <= {*targets}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in found(r"pip install -e '\.\[([\w,]+)\]'"):
        assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    assert {*found(r"pip install ([a-z]\S*?)(?=[`\s,;:)])")} - {"that"} <= PIP
