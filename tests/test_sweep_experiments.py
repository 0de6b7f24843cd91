"""Sweeps that come with an experiment file, and a search by Optuna."""

import importlib.util
import re
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from runs import SMALL

from conf import explain
from conf.compose import check_words, compose_checked, compose_joined, expand, set_up
from trainer.sweep import read_rows

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("kl_sweep_*.yaml"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", [[], ["seed=7,8,9", "trainer.num_iterations=3"], ["kl.coeff=5"]])
def test_the_jobs_are_those_that_hydra_makes(name, words):
    words = [f"experiment={name}", *words]
    params = explain.compose_raw([f"experiment={name}"], hydra=True).hydra.sweeper.params
    given = [*(f"{key}={values}" for key, values in params.items()), *words]
    parsed = OverridesParser.create().parse_overrides(given)
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    assert expand(words) == jobs
    assert compose_checked(jobs[-1])["kl"]["coeff"] == float(jobs[-1][0].partition("=")[2])


def test_a_sweep_of_tiny_models_is_grpo_tiny_but_for_what_is_swept():
    job = expand(["experiment=kl_sweep_tiny"])[0]
    plain = ["experiment=grpo_tiny", "kl.coeff=0", "seed=1"]
    assert compose_checked(job) == compose_checked(plain)


def test_a_sweep_without_the_flag_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    set_up()
    word = "experiment=kl_sweep_tiny"
    remedy = f"python train.py -m {word}; for one run give kl.coeff=... seed=..."
    with pytest.raises(ValueError, match=re.escape(f"a sweep over kl.coeff, seed: {remedy}")):
        check_words([word])
    with pytest.raises(ValueError, match=r"a sweep over seed: .* give seed=\.\.\.$"):
        compose_joined([word, "kl.coeff=1"], ranks=2)
    assert list(tmp_path.iterdir()) == []
    check_words([word, "kl.coeff=1", "seed=3"])  # as sweep.html words a job


@pytest.mark.learn
def test_optuna_searches_for_reward_less_kl(tmp_path):
    spec = importlib.util.spec_from_file_location("optuna_sweep", ROOT / "docs" / "optuna_sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = [word for word in SMALL if not word.startswith(("kl.coeff", "trainer.num", "eval"))]
    words += ["trainer.num_iterations=2", "eval.num_samples=0", "eval.greedy=false"]
    folder = tmp_path / "search"
    module.search(folder, 1, words)
    study = module.search(folder, 1, words)  # goes on
    rows = read_rows(folder)
    assert [row.job for row in rows] == ["000", "001"]
    for row, trial in zip(rows, study.trials, strict=True):
        assert trial.value == pytest.approx(row.reward - module.LAMBDA * row.kl)
        assert float(row.overrides["kl.coeff"]) == pytest.approx(trial.params["kl.coeff"], rel=1e-3)
    assert (folder / "sweep.html").is_file()
