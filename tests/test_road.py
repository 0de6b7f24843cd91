"""How much a start of `python train.py` walks through, measured in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("train", "conf", "policies", "envs", "trainer")
MEASURE = """
import json, sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl

composed = []
compose = ConfigLoaderImpl.load_configuration
ConfigLoaderImpl.load_configuration = lambda *a, **k: composed.append(a) or compose(*a, **k)
{body}
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print(json.dumps({{"composed": len(composed), "files": [f for f in files if f],
                  "modules": sorted(sys.modules)}}))
"""
STARTED = """
import train

class Started(Exception):
    '''In place of the worker.'''

def start(config, folder, **ours):
    raise Started

train.launch = start
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
    [["experiment=grpo_tiny"], ["experiment=grpo_tiny", "kl.coeff=0.1"], ["experiment=ppo_tiny"]],
    ids=" ".join,
)
def test_the_parent_is_light_and_composes_at_most_twice(words, tmp_path):
    found = measure(STARTED.format(words=words), tmp_path)
    lines = lines_of_ours(found["files"])
    assert "train.py" in lines
    assert sum(lines.values()) <= 4000, lines
    assert found["composed"] <= 2
    assert not {"torch", "transformers", "trainer.reports.sweep_page"} & {*found["modules"]}
    assert not any(name.startswith("trainer.reports.") for name in found["modules"])


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--help"]], ids=" ".join)
def test_what_only_shows_something_composes_once_and_loads_no_torch(flag, tmp_path):
    body = f"import train\ntry: train.cli({flag!r})\nexcept SystemExit: pass"
    body = f"sys.argv[1:] = {flag!r}\n{body}"
    found = measure(body, tmp_path)
    assert found["composed"] <= 1
    assert not {"torch", "transformers", "tensordict"} & {*found["modules"]}
    assert list(tmp_path.iterdir()) == []
