"""What the command line accepts and refuses, before any model is loaded."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from own_data import words_of
from refusals import refusal
from runs import asked, environment

from conf.build import build, make_leash
from conf.cli import expand
from conf.compose import compose, compose_checked
from policies.optional_packages import ASKING, EXTRAS
from trainer.runs.find import nothing_left

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "envs", "envs.rewards", "envs.tasks", "envs.transforms", "trainer")
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


def targets(node):
    """Yield every `_target_` of a configuration."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key == "_target_":
            yield value
        yield from targets(value)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_names_code_that_exists(name):
    config = compose_checked(words_of(name))
    found = list(targets(config))
    assert len(found) >= 5
    assert not config["allow_targets"]
    for target in found:
        module, _, attribute = target.rpartition(".")
        assert attribute in dir(import_module(module)), target


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_starts_with_the_command_that_runs_it(name):
    lines = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text().splitlines()
    command = f"python train.py experiment={name}" if name != "grpo_smollm" else "python train.py"
    assert lines[:2] == ["# @package _global_", f"# {command}"]


def test_ppo_pays_the_kl_in_the_reward_unless_told_otherwise():
    def place(*words: str) -> tuple[str, str]:
        kl = compose_checked(["algorithm=ppo", *words])["kl"]
        return kl["where"], kl["estimator"]

    assert place() == ("reward", "k1")
    assert place("kl=default") == place("kl.where=loss", "kl.estimator=k3") == ("loss", "k3")


FAULTS = [  # words, and what the line must name
    (["kl.ceoff=0.1"], r"no key kl\.ceoff.*kl\.coeff"),
    (["+kl.ceoff=0.1"], r"no key kl\.ceoff"),
    (["gamma=0.9"], r"algorithm\.gamma"),
    (["algorithm.gamma=0.9"], "belongs to algorithm=ppo"),
    (["num_generations=4"], r"algorithm\.group_size here \(docs/coming_from_trl\.md\)"),
    (["loss_type=dr_grpo"], r"algorithm\.aggregation=constant here"),
    (["env=nope"], "env=nope.*chats"),
    (["experiment=grpo_tny"], r"experiment=grpo_tny.*mean grpo_tiny"),
    (["grpo_tiny"], "cannot read 'grpo_tiny'.*name=value"),
    (["kl.coeff=0,1"], "kl.coeff=0,1 is several values; add -m"),
    (["algorithm=sft"], r"kl\.coeff=0 kl\.measure=false"),
    (["trainer.num_iterations=abc"], "num_iterations to be a whole number, got 'abc'"),
    (["seed=null"], "expected seed to be a whole number, got null"),
    (["policy.stop=END"], r"policy\.stop to be a list"),
    (["policy.model=???"], r"expected policy\.model to be a text"),
    (["policy.temperature=inf"], r"policy\.temperature >= 0, got inf"),
    (["optimizer.betas=[0.9,1.0]"], r"optimizer\.betas to be two numbers"),
    (["experiment=sft_tiny", "algorithm.aggregation=constant"], "token_mean, sequence_mean, got"),
    (["algorithm.minibatches=3"], r"algorithm\.minibatches=3"),
    (["trainer.prompts_per_iteration=3", "launch.num_processes=2"], "launch.num_processes=2"),
    (["policy.temperature=0"], r"policy\.temperature > 0"),
    (["policy.top_k=5"], r"policy\.top_k=0 in training"),
    (["policy.top_p=0.9"], r"policy\.top_p=1 in training"),
    (["policy.min_p=0.1"], r"policy\.min_p=0 in training"),
    (["algorithm.group_size=1"], r"algorithm\.group_size >= 2"),
    (["algorithm=rloo", "algorithm.epochs=2"], "surrogate=reinforce.*2 steps"),
    (["algorithm=dppo", "algorithm.kl_bound=0.1"], "kl_bound is for surrogate=kl_mask"),
    (["algorithm=rloo", "algorithm.clip_low=0.1"], r"algorithm\.clip_low"),
    (["kl=reward", "kl.estimator=full"], r"use kl=reward \(k1\)"),
    (["experiment=sft_tiny", "kl.coeff=0.1"], "samples no replies.*kl.coeff=0"),
    (["launch.offload=true"], r"launch\.offload needs launch=fsdp2"),
    (["trainer.overlap=1"], r"trainer\.overlap needs policy\.engine=vllm"),
    (["policy.vllm.max_num_seqs=3"], r"policy\.vllm\.max_num_seqs is for policy\.engine=vllm"),
    (["trainer.patience=2", "eval.every=0"], r"trainer\.patience"),
    (["eval.limit=1"], r"eval\.limit=1"),
    (["eval.limit=8", "kl.refresh_every=1"], r"eval\.limit=8.*kl\.refresh_every"),
    (["checkpoint.keep_best=true", "checkpoint.every=1"], r"checkpoint\.keep_best"),
    (["policy.model=./nowhere"], r"policy\.model.*\./nowhere"),
    (["env.transforms.code.timeout=1"], r"env\.transforms\.code to be"),
    (["env.transforms.kl._target_=envs.transforms.RetrieveKL"], "a run measures and charges"),
    (["env.task._target_=Facts"], r"env\.task\._target_ to be"),
    (["env=sort_digits", "env.dataset=x.jsonl"], r"env\.dataset"),
    (["experiment=grpo_own"], r"env\.dataset"),
    (["tracker.replies=some"], r"tracker\.replies to be all or a whole number"),
    (["hub=a/b", "mode=export"], "mode=export is about a trained run"),
    (["preflight=true", "mode=chat"], "preflight checks a new training run"),
]


@pytest.mark.parametrize(("words", "line"), FAULTS, ids=[" ".join(words) for words, _ in FAULTS])
def test_a_fault_is_one_line_that_names_the_key(words, line):
    with pytest.raises(ValueError, match=line) as caught:
        asked(words)
    assert "\n" not in str(caught.value)


def test_a_fault_inside_a_file_names_key_and_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "typo.yaml").write_text("# @package _global_\nkl:\n  ceoff: 1\n")
    words = [f"hydra.searchpath=[file://{tmp_path}]", "experiment=typo"]
    assert re.search(r"no key kl\.ceoff \(experiment/typo\.yaml\).*kl\.coeff", refusal(*words))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full", "k3_ratio"])
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_biased_kl_needs_an_explicit_yes(estimator, where):
    sound = {("k1", "reward"), *((name, "loss") for name in ("k2", "k3", "full", "k3_ratio"))}
    words = [f"kl.estimator={estimator}", f"kl.where={where}"]
    if (estimator, where) in sound:
        assert compose_checked(words)["kl"]["where"] == where
        return
    assert f"kl.estimator={estimator} with kl.where={where}" in refusal(*words)
    if estimator not in ("full", "k3_ratio"):  # in the reward these are not computed at all
        compose_checked([*words, "kl.allow_biased=true"])


def test_a_reward_function_in_the_place_of_a_reward_is_told_as_the_override(tmp_path, monkeypatch):
    """What the line says to type is typed, and composes."""
    code = "def own(row, reply): ...\ndef trl(prompts, completions, **columns): ...\n"
    (tmp_path / "rewards_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name, kind in ("own", "Function"), ("trl", "TRLFunction"):
        words = [f"env.rewards.{name}._target_=rewards_of_mine.{name}", "allow_targets=true"]
        (write,) = re.findall("write '(.*)'", refusal(*words))
        assert f"_target_: envs.rewards.{kind}," in write
        compose_checked([write, "allow_targets=true"])


@pytest.fixture
def old_run(tmp_path):
    config = compose_checked(["experiment=grpo_tiny", "seed=5", "policy.model=tiny"])
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return tmp_path


def test_resume_keeps_the_saved_configuration(old_run):
    resume = f"resume={old_run}"
    config = asked([resume, "trainer.num_iterations=400", "checkpoint.every=7"])
    assert (config["seed"], config["resume"]) == (5, str(old_run))
    assert config["trainer"]["num_iterations"] == 400
    assert config["checkpoint"] == {"every": 7, "keep_last": 2, "keep_best": False}
    assert config["optimizer"]["lr"] == pytest.approx(5e-4)


@pytest.mark.parametrize("word", ["optimizer.lr=1", "seed=1", "policy.model=tiny", "env=facts"])
def test_resume_refuses_other_overrides_by_name(old_run, word):
    with pytest.raises(ValueError, match=re.escape(word.partition("=")[0])):
        asked([f"resume={old_run}", word])


def test_resume_uses_what_the_run_was_started_with(old_run):
    config = json.loads((old_run / "config.yaml").read_text())
    config["tracker"] = compose_checked(["tracker=wandb"])["tracker"]
    config["allow_targets"] = True
    config["env"]["rewards"]["mine"] = {"_target_": "envs.rewards.Function", "function": {
        "_target_": "operator.eq", "_partial_": True}}  # fmt: skip
    (old_run / "config.yaml").write_text(json.dumps(config))
    assert asked([f"resume={old_run}"]) == config | {"resume": str(old_run)}


def test_resume_of_what_is_no_run_names_one(old_run):
    with pytest.raises(ValueError, match=r"expected a run folder with config\.yaml, got none"):
        asked([f"resume={old_run / 'none'}"])
    (old_run / "outputs" / "b" / ".hydra").mkdir(parents=True)
    shutil.copy(old_run / "config.yaml", old_run / "outputs" / "b")
    with pytest.raises(ValueError, match=rf"as resume='{old_run}/outputs/b'$"):
        asked([f"resume={old_run / 'outputs'}"])


def test_resume_last_takes_the_newest_run_of_outputs(old_run, monkeypatch):
    monkeypatch.chdir(old_run)
    with pytest.raises(ValueError, match="resume=last"):
        expand(["resume=last"])
    days = [f"outputs/{run}_10-00-00" for run in ("c/2026-11-01", "b/2026-11-02", "a/2026-11-03")]
    for age, day in enumerate([*days, f"{days[2]}_2", f"{days[2]}_10"]):
        (old_run / day / ".hydra").mkdir(parents=True)
        shutil.copy("config.yaml", day)
        os.utime(f"{day}/config.yaml", (100 + age, 100 + age))
    assert expand(["resume=last"])[0] == f"resume={days[2]}_10"
    (old_run / days[0] / "checkpoints" / "iteration_000001").mkdir(parents=True)
    assert expand(["mode=chat", "resume=last"])[1] == f"resume={days[0]}", "it has weights"


def test_resume_of_a_finished_run_says_so(old_run):
    status = {"state": "finished", "iteration": 80}
    (old_run / "status.json").write_text(json.dumps(status))
    config = asked([f"resume={old_run}", "trainer.num_iterations=80"])
    assert "80 of 80" in str(nothing_left(config))
    with pytest.raises(ValueError, match="80 iterations and without a checkpoint"):
        asked([f"resume={old_run}"])
    (old_run / "checkpoints" / "iteration_000080").mkdir(parents=True)
    assert nothing_left(asked([f"resume={old_run}", "trainer.num_iterations=81"])) is None
    with pytest.raises(ValueError, match="80 iterations already, more than 5"):
        asked([f"resume={old_run}", "trainer.num_iterations=5"])
    assert nothing_left({"resume": None, "mode": "train"}) is None


def run_command(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *words]
    env = environment(**variables)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["kl.ceoff=1"],
        ["-m", "seed=1,2", "kl.coeff=0,-1"],
        ["output_dir=/dev/null/run"],
        ["resume=nowhere"],
        ["--cfg", "job", "kl.ceoff=1"],
    ],
)
def test_refused_command_is_one_line_and_leaves_no_run(words, tmp_path):
    ended = run_command(*words, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert not list(tmp_path.rglob("*.yaml"))


def test_hydras_own_flags_show_what_they_always_show(tmp_path):
    """Also for an experiment in the user's own folder, which may choose and set all keys."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    own = "# @package _global_\ndefaults: [grpo_tiny, _self_]\nseed: 7\nkl: {coeff: 0.5}\n"
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(own)
    shown = run_command("--config-dir=mine", "experiment=mine", "--cfg", "job", cwd=tmp_path)
    cfg = OmegaConf.create(shown.stdout)
    assert (cfg.seed, cfg.kl.coeff, cfg.policy.model) == (7, 0.5, "experiment:sft_tiny")
    text = run_command("--help", cwd=tmp_path).stdout
    assert all(name in text for name in EXPERIMENTS)
    assert "experiment/grpo_smollm" in run_command("--info", "defaults", cwd=tmp_path).stdout
    completion = run_command("--shell-completion", "install=bash", cwd=tmp_path).stdout
    assert "hydra_bash_completion" in completion


def test_the_parent_imports_no_torch():
    code = "import sys, conf.cli, conf.api; print({'torch', 'transformers'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr


def test_a_python_without_the_parts_is_told_where_they_are(tmp_path):
    code = "import sys; sys.modules['hydra'] = None; sys.argv[1:] = ['seed=1']\n"
    code += f"sys.path.insert(0, {str(ROOT)!r}); import runpy; runpy.run_path('{ROOT}/train.py')"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ".venv/bin/python in place of python" in ended.stderr


def test_what_builds_a_part_names_a_misspelt_argument():
    with pytest.raises(ValueError, match=r"task\.num_row: envs.*takes .*; did you mean num_rows\?"):
        build({"_target_": "envs.tasks.SortDigits", "num_row": 3}, where="task")


def test_a_part_gets_its_keys_by_name_and_what_its_node_gives_comes_first():
    cfg = OmegaConf.create(compose_checked(["algorithm.clip_high=0.3", "algorithm.clip_low=0.1"]))
    leash = make_leash(cfg)
    made = build(cfg.algorithm.objective, cfg.algorithm, leash=leash)
    assert (made.bounds.low, made.bounds.high) == (0.1, 0.3)
    made = build({**cfg.algorithm.objective, "clip_high": 0.7}, cfg.algorithm, leash=leash)
    assert (made.bounds.low, made.bounds.high) == (0.1, 0.7)


def test_an_overlong_penalty_of_chats_of_several_turns_knows_all_of_them():
    words = ["experiment=grpo_calculator_tiny", "algorithm=dapo"]
    limit = refusal(*words).rpartition("max_tokens=")[2]
    one = compose_checked(["experiment=grpo_calculator_tiny"])["policy"]["max_new_tokens"]
    assert int(limit) == 2 * one
    compose_checked([*words, f"algorithm.after_rollout.overlong.max_tokens={limit}"])


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("peft", ["policy.lora.r=8"]),
        ("math_verify", ["env=math", "env.dataset=nobody/nothing"]),
        ("reasoning_gym", ["env=reasoning_gym", "env.task.name=chain_sum"]),
        ("vaderSentiment", ["experiment=ppo_sentiment_smollm"]),
        ("ray", ["env.transforms.kl._target_=envs.transforms.RayRetrieveKL"]),
        ("vllm", ["policy._target_=policies.vLLMWrapper"]),
    ],
)
def test_a_missing_package_is_told_by_the_parent_with_its_extra(package, words, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(*words) == EXTRAS[package]


def test_every_extra_is_in_the_package_and_asked_for_by_something_that_exists():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in EXTRAS.values():
        extra = re.search(r"pip install -e '\.\[(\w+)\]'", line)
        assert extra[1] in declared["optional-dependencies"]
    names = {n for p in PACKAGES for n in import_module(p).__all__}
    assert set(ASKING) <= names


@pytest.mark.parametrize("name", ["model", "errors", "checkpoints", "metrics.jsonl"])
def test_a_folder_with_files_that_a_run_would_replace_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="already holds a run"):
        asked(["experiment=grpo_tiny", f"output_dir={tmp_path}"])


def test_the_place_of_a_run_follows_its_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = compose(["experiment=grpo_tiny"], with_hydra=True).hydra.run.dir
    assert re.fullmatch(r"outputs/grpo_tiny/[\d_-]+", place)
    assert compose([f"output_dir={tmp_path}/a"], with_hydra=True).hydra.run.dir == f"{tmp_path}/a"
