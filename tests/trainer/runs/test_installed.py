"""An installed leash: its command and its files, without the clone."""

import shutil
import subprocess
import sys

import pytest
from support.runs import ROOT, environment

OWN = "# @package _global_\ndefaults: [grpo_tiny, _self_]\ntrainer: {num_iterations: 2}\n"


@pytest.mark.runs
def test_the_command_trains_from_another_folder_with_an_experiment_of_its_own(tmp_path):
    clone, site, own = tmp_path / "clone", tmp_path / "site", tmp_path / "mine/experiment/own.yaml"
    left_out = shutil.ignore_patterns(".*", "docs", "tests", "benchmarks", "outputs", "multirun")
    shutil.copytree(ROOT, clone, ignore=left_out)  # a build writes beside the files
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--target", site)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *offline, clone], check=True)
    shutil.rmtree(clone)
    own.parent.mkdir(parents=True)
    own.write_text(OWN)
    words = ["--config-dir=mine", "experiment=own", "eval.max_rows=4", "output_dir=run"]
    env = environment(PYTHONPATH=str(site))
    subprocess.run([site / "bin" / "leash", *words], cwd=tmp_path, env=env, check=True)
    assert "leash mode=chat resume=" in (tmp_path / "run" / "report.html").read_text()
