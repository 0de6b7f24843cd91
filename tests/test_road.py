"""How much a start of `python train.py` walks through, measured in a fresh process."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from conf.compose import compose_checked
from conf.start import set_up

ROOT = Path(__file__).parents[1]
OURS = ("train", "conf", "policies", "envs", "trainer")
MEASURE = """
import json, sys, time
from hydra._internal.config_loader_impl import ConfigLoaderImpl

composed = []
compose = ConfigLoaderImpl.load_configuration
ConfigLoaderImpl.load_configuration = lambda *a, **k: composed.append(a) or compose(*a, **k)
{body}
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print(json.dumps({{"composed": len(composed), "files": [f for f in files if f],
                  "modules": sorted(sys.modules), "cpu": time.process_time()}}))
"""
STARTED = """
import conf.shell, train

class Started(Exception):
    '''In place of the worker.'''

def start(config, folder, **ours):
    raise Started

conf.shell.launch = start
try:
    train.cli({words!r})
except Started:
    pass
"""


def measure(body: str, cwd: Path) -> dict:
    """Run code in a fresh process; return how often it composed, and the modules it has loaded."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{MEASURE.format(body=body)}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def lines_of_ours(files: list[str]) -> dict[str, int]:
    """Return the lines of each file of this project among those loaded."""
    paths = {Path(file) for file in files if Path(file).is_relative_to(ROOT)}
    ours = {path for path in paths if path.relative_to(ROOT).parts[0].removesuffix(".py") in OURS}
    return {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sorted(ours)
    }


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=grpo_tiny"],
        ["experiment=grpo_tiny", "kl.coeff=0.1"],
        ["experiment=ppo_tiny"],
        ["experiment=grpo_tiny", "algorithm=dapo", "policy=qwen", "seed=3"],
    ],
    ids=" ".join,
)
def test_the_parent_is_light_and_composes_at_most_twice_and_its_warm_up(words, tmp_path):
    found = measure(STARTED.format(words=words), tmp_path)
    lines = lines_of_ours(found["files"])
    assert "train.py" in lines
    assert sum(lines.values()) <= 4_350, lines
    assert found["composed"] <= 3
    assert not {"torch", "transformers", "trainer.reports.sweep_page"} & {*found["modules"]}
    assert not any(name.startswith("trainer.reports.") for name in found["modules"])


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--help"]], ids=" ".join)
def test_what_only_shows_something_composes_once_and_loads_no_torch(flag, tmp_path):
    body = f"import train\ntry: train.cli({flag!r})\nexcept SystemExit: pass"
    body = f"sys.argv[1:] = {flag!r}\n{body}"
    found = measure(body, tmp_path)
    assert found["composed"] <= 1
    assert found["cpu"] < 1.5, "a second on a quiet core"
    assert not {"torch", "transformers", "tensordict"} & {*found["modules"]}
    assert list(tmp_path.iterdir()) == []


WORKER = """
import json, sys
sys.path.insert(0, {root!r})
import train
code = train.worker({config!r}, {folder!r}, {checked!r})
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print(json.dumps({{"code": code, "files": [f for f in files if f]}}))
"""


def test_a_grpo_worker_imports_what_a_run_uses_and_nothing_else(tmp_path):
    """The terminal, the files and the diagnosis included; pages are drawn by another process."""
    set_up()
    words = ["policy.model=tiny", "trainer.num_iterations=1", "eval.max_rows=4", "tracker=none"]
    config = compose_checked(["experiment=grpo_tiny", *words, "policy.max_new_tokens=4"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(text := yaml.safe_dump(config))
    words = {"config": str(folder / "config.yaml"), "folder": str(folder)}
    checked = f"checked={sha256(text.encode()).hexdigest()}"
    code = WORKER.format(root=str(ROOT), checked=checked, **words)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0
    lines = lines_of_ours(found["files"])
    assert "trainer/update.py" in lines
    assert sum(lines.values()) <= 12_200, lines
    unused = (
        "ray",
        "mcp",
        "lora",
        "gae",
        "importance_sampling",
        "demonstrations",
        "sweep",
        "shell",
    )
    unused += ("parsing", "token_dists", "value_head", "reward_model", "sandbox", "launch", "check")
    unused += ("report", "chart", "panels", "markup", "replies", "sweep_page", "mirror", "chat")
    unused += ("browser", "frontier", "sweep_jobs", "sweep_replies")
    unused += ("saved_configs", "experiment_models", "masks")
    loaded = {Path(file).stem for file in lines}
    assert sum(n for file, n in lines.items() if file.startswith("trainer/reports")) <= 905
    runs = [file for file in lines if file.startswith("trainer/runs/")]
    assert sum(lines[file] for file in runs) <= 530, runs
    assert not loaded & {*unused}
    assert not any(file.startswith(("trainer/torchrl", "policies/distributions")) for file in lines)
