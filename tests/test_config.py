"""What the command line accepts and refuses, before any model is loaded."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from own_data import OWN, words_of
from refusals import refusal

import train
from conf import names
from conf.build import build, make_leash
from conf.command_line import spell_out, swept_by_experiment
from conf.compose import compose_checked, compose_raw
from conf.resume import load_for_resume
from conf.start import read_command
from policies.optional_packages import ASKING, EXTRAS
from trainer.runs.find import nothing_left
from trainer.runs.lock import held
from trainer.runs.nodes import arguments_in_source
from trainer.runs.saved_configs import as_today, holds_same
from trainer.runs.targets import arguments_of, find_target, takes_any

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
    for target in found:
        module, _, attribute = target.rpartition(".")
        home = import_module(module)
        assert attribute in dir(home), target


def test_own_rows_are_asked_for_in_one_line():
    for name in OWN:
        with pytest.raises(ValueError, match=r"env.dataset: expected a file .* got none"):
            compose_checked([f"experiment={name}"])


SILENT = [name for name in EXPERIMENTS if "measure: false" in
          (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()]  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_an_experiment_without_replies_does_not_switch_the_leash_off_for_an_algorithm(
    name, algorithm
):
    words = [*words_of(name), f"algorithm={algorithm}"]
    if name == "rm_tiny":  # its rows have no reward
        words.append("env=sort_digits")
    said = refusal(*words)
    assert f"experiment={name} samples no replies and switches the KL off" in said
    like = f"{algorithm}_{name.partition('_')[2]}"
    assert (f"take experiment={like}" in said) == (like in EXPERIMENTS)
    more = ["kl.measure=true", "kl.coeff=0.02"], ["kl.measure=true"], ["kl.measure=false"]
    for words_more in more:
        assert compose_checked([*words, *words_more])
    assert compose_checked([*words_of("sft_own"), "algorithm=minor_sft"])


def test_a_module_that_is_not_there_is_looked_for_where_python_does(tmp_path, monkeypatch):
    words = ["env=own", "env.task._target_=beside_me.Mine", "allow_targets=true"]
    (tmp_path / "beside_me.py").write_text("import lacking_one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert f"it lies in {tmp_path}: write PYTHONPATH=. in front" in refusal(*words)
    monkeypatch.syspath_prepend(tmp_path)
    said = refusal(*words)  # it is found, and what it imports is not
    assert "No module named 'lacking_one'" in said
    assert "envs is /" in refusal("env=own", "env.task._target_=envs.no.Such", "allow_targets=true")
    assert "looked in" not in said


def test_a_system_prompt_is_that_of_the_env_that_brings_it():
    found = {}
    for path in (ROOT / "conf" / "env").glob("*.yaml"):
        words = ["experiment=grpo_qwen", f"env={path.stem}"]
        found[path.stem] = compose_raw(words, files_only=True).policy.system_prompt
    said = "Reason step by step, then give the final number after ####."
    assert {env: prompt for env, prompt in found.items() if prompt is not None} == {
        "gsm8k": said,
        "python_tool": said,  # the word problems of GSM8K too
    }
    for name in EXPERIMENTS:  # tests/reliability composes each with each env
        assert "system_prompt" not in (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    own = compose_checked(["experiment=grpo_qwen", "policy.system_prompt=Mine"])
    assert own["policy"]["system_prompt"] == "Mine"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_starts_with_the_command_that_runs_it(name):
    lines = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text().splitlines()
    flag = "-m " if swept_by_experiment([f"experiment={name}"]) else ""
    command = f"python train.py {flag}experiment={name}"
    command = "python train.py" if name == "grpo_smollm" else command
    assert lines[:2] == ["# @package _global_", f"# {command}"]


def test_ppo_pays_the_kl_in_the_reward_unless_told_otherwise():
    def place(*words: str) -> tuple[str, str]:
        kl = compose_checked(["algorithm=ppo", *words])["kl"]
        return kl["where"], kl["estimator"]

    assert place() == ("reward", "k1")
    assert place("kl=default") == place("kl.where=loss", "kl.estimator=k3") == ("loss", "k3")
    assert compose_checked(["algorithm=ppo", "experiment=grpo_tiny"])["kl"]["where"] == "reward"


FAULTS = [  # one a kind
    # Names.
    (["kl.ceoff=0.1"], ["no key kl.ceoff", "did you mean kl.coeff"]),
    (["+kl.ceoff=0.1"], ["no key kl.ceoff", "did you mean kl.coeff"]),
    (["gamma=0.9"], ["no key gamma; did you mean algorithm.gamma?"]),
    (["algorithm.gamma=0.9"], ["algorithm.gamma here; it belongs to algorithm=ppo"]),
    (["algorithm.objective.estimator=k1"], ["no key algorithm.objective.est", "mean kl.estimator"]),
    (["algorithm.kl_ctrl.kl_coef=0.1"], ["kl_ctrl.kl_coef=0.1 is kl.coeff=0.1 here"]),
    (["+algorithm.objective.leash=1"], ["algorithm.objective.leash is made by the run"]),
    (["experiment=ppo_tiny", "algorithm=grpo"], ["ppo_tiny.yaml sets", "leave algorithm=grpo out"]),
    (["algorithm.shaping.overlong.buffer=3"], ["shaping is algorithm.after_rollout here"]),
    (["algorithm.mismatch._target_=trainer.Mismatch"], ["mismatch is algorithm.after_rollout"]),
    (["env=nope"], ["env=nope", "chats", "facts"]),
    (["kl=0.1"], ["kl=0.1", "default", "did you mean kl.coeff=0.1?"]),
    (["experiment=grpo_tiny", "kl=0.1"], ["kl=0.1", "did you mean kl.coeff=0.1?"]),
    (["trainer=20"], ["did you mean trainer.num_iterations=20?"]),
    (["experiment=grpo_tny"], ["did you mean experiment=grpo_tiny or"]),
    (["experiment=none_such"], ["sft_tiny, "]),
    (["algorithm=sft"], ["got kl.coeff=0.02, kl.measure=true", "kl.coeff=0 kl.measure=false"]),
    # Words.
    (["grpo_tiny"], ["name=value, got 'grpo_tiny'; did you mean experiment=grpo_tiny?"]),
    (["experiment", "=", "grpo_tiny"], ["experiment=grpo_tiny, without blanks"]),
    (["seed=1", "seed=2"], ["seed is given 2 times", "-m seed=a,b"]),
    (["kl.coeff=0,1"], ["to sweep them: -m kl.coeff=0,1"]),
    (["~kl"], ["~kl: no key can be removed", "kl=..."]),
    (["hydra=launcher/basic"], ["chosen beside -m"]),
    (["+seed=3"], ["leave the + out: seed="]),
    (["seed=1", "env.dataset=~/a"], ["cannot read env.dataset=~/a", """'env.dataset="~/a"'"""]),
    # Types, ranges, values.
    (["trainer.num_iterations=abc"], ["num_iterations to be a whole number, got 'abc'"]),
    (["policy.stop=END"], ["expected policy.stop to be a list, [a, b], got 'END'"]),
    (["seed=null"], ["expected seed to be a whole number, got null"]),
    (["env.columns=q"], ["expected keys in env.columns", "env.columns.question", "'q'"]),
    (["kl.coeff.x=3"], ["no key kl.coeff.x; kl.coeff is a number"]),
    (["policy.model=???"], ["policy.model", "got none"]),
    (["env.dataset=${HOME}/a"], ["env.dataset: there is no key HOME", "${oc.env:HOME}"]),
    (["policy.temperature=inf"], ["policy.temperature >= 0 and finite", "inf"]),
    (["optimizer.betas=[0.9,1.0]"], ["optimizer.betas", "two numbers", "below 1"]),
    (["experiment=sft_tiny", "algorithm.aggregation=constant"], ["_mean, sequence_mean, got"]),
    (["kl.coeff=0,0.1"], ["kl.coeff=0,0.1 is several values; add -m to sweep them: -m kl.coeff"]),
    (["kl.coeff=range(1,3)"], ["several values; add -m to sweep them: -m kl.coeff=range(1,3)"]),
    (["algorithm=grpo,ppo"], ["algorithm=grpo,ppo is several values; add -m to sweep them"]),
    (["policy.stop=a,b"], ["-m policy.stop=a,b; for one list: 'policy.stop=[a,b]'"]),
    (["policy.system_prompt=a,b"], ["""for one text: 'policy.system_prompt="a,b"'"""]),
    # What goes together, the machine, the disk.
    (["algorithm.minibatches=3"], ["minibatches=3"]),
    (["policy.temperature=0"], ["policy.temperature > 0, got 0"]),
    (["algorithm.group_size=1"], ["group_size >= 2", "got 1"]),
    (["algorithm=rloo", "algorithm.epochs=2"], ["surrogate=reinforce", "2 steps", "clip"]),
    (["algorithm=dppo", "algorithm.kl_bound=0.1"], ["kl_bound is for surrogate=kl_mask", "=0.05"]),
    (
        ["algorithm.tv_bound=0.1"],
        ["tv_bound is for", "got surrogate=clip; give that, or set algorithm.tv_bound=0.15"],
    ),
    (["algorithm=rloo", "algorithm.clip_low=0.1"], ["clip_low", "=clip or cispo", "clip_low=0.2"]),
    (["algorithm=rloo", "algorithm.ratio=sequence"], ["ratio is for", "set algorithm.ratio=token"]),
    (["algorithm=cispo", "algorithm.dual_clip=9"], ["=clip or tv_mask or", "dual_clip=null"]),
    (
        ["kl.where=reward", "kl.estimator=k3"],
        ["k3 in the reward has no", "; use kl=reward (k1), or set kl.allow_biased"],
    ),
    (["kl=reward", "kl.estimator=full"], ["own token; use kl=reward (k1)"]),
    (["experiment=sft_tiny", "kl.coeff=0.1"], ["samples no replies", "kl.coeff=0"]),
    (["launch.num_processes=4096"], ["launch.num_processes", f"{os.cpu_count()} cores", "4096"]),
    (["policy.model=./nowhere"], ["policy.model", "./nowhere", "config.json"]),
    (["policy.model=experiment:nope"], ["policy.model=experiment:nope", "sft_tiny"]),
    (["policy.chat_template='{% if %}'"], ["policy.chat_template", "line 1"]),
    # Nodes.
    (["algorithm.source._target_=trainer.Rolouts"], ["Rolouts", "did you mean trainer.Rollouts"]),
    (
        ["env.transforms.a={_target_: envs.transforms.Compose, b: [{_target_: os.system}]}"],
        ["env.transforms.a.b[0]._target_=os.system", "allow_targets=true"],
    ),
    (["algorithm.after_rollout={m: {_target_: trainer.Mismatch}}"], ["is trainer.ImportanceSam"]),
    (["algorithm.after_rollout={m: {_target_: trainer.OverlongPenalty, bufer: 1}}"], ["buffer?"]),
    (["+algorithm.objective.where=reward"], ["algorithm.objective.where: trainer.GRPOObj"]),
    (["+algorithm.source.taks=1"], ["algorithm.source.taks: trainer.Rollouts takes"]),
    (["algorithm=ppo", "+algorithm.objective.clip_lo=1"], ["trainer.PPOObjective", "clip_low?"]),
    (["algorithm=ppo", "+algorithm.advantage.whitn=1"], ["algorithm.advantage.whitn", "whiten?"]),
    (
        ["env.transforms.a={_target_: envs.transforms.StepCounter, max_step: 3}"],
        ["env.transforms.a.max_step", "did you mean max_steps?"],
    ),
    (["algorithm.source._target_=policies.cache.os.system"], ["policies.cache.os.system"]),
    (["env.task._target_=Facts"], ["expected env.task._target_ to be", "got 'Facts'"]),
    (["env.transforms.code.timeout=1"], ["expected env.transforms.code._target_"]),
    (["env=math", "env.dataset=nobody/nothing", "env.task.symbolc=1"], ["symbolc", "symbolic?"]),
    (["env=mix", "env.task.weights.arithmetics=2"], ["arithmetics", "mean arithmetic?"]),
]


@pytest.mark.parametrize(("words", "parts"), FAULTS)
def test_fault_is_one_line_that_says_what_to_do(words, parts):
    message = refusal(*words)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("word", ["kl.coeff=0,0.1", "seed=1,2", "kl.estimator=k1,k2", "env=a,b"])
def test_a_list_or_a_text_is_offered_where_a_key_takes_one_alone(word):
    message = refusal(word)
    assert "add -m" in message
    assert not re.search(r"for one|\[|Sweep\(", message)


def test_all_unknown_keys_of_a_command_line_are_told_at_once_a_line_each(capsys):
    assert train.cli(["learning_rate=1", "kl.coeff=0.1", "num_generations=4", "kl.coef=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        f"error: there is no key {key}" for key in ("learning_rate", "num_generations", "kl.coef")
    ]
    assert lines[2].endswith("did you mean kl.coeff?"), "one letter is no question"


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
    for key in ("reward", "reward_fn"):
        write, allow = re.findall("write '(.*)' (.*?) ", refusal(f"{key}=rewards_of_mine.own"))[0]
        compose_checked([write, allow])


def test_rows_that_lack_something_are_told_which_task_takes_them(tmp_path):
    for text, words in {
        "text": ("experiment=sft_own", "bare texts are not supported"),
        "question": ("experiment=grpo_own", "env=prompts env.columns.question=question"),
    }.items():
        path = tmp_path / f"{text}.jsonl"
        path.write_text("".join(f'{{"{text}": "{i}"}}\n' for i in range(30)))
        experiment, says = words
        assert says in refusal(experiment, f"env.dataset={path}", "policy.model=tiny")


@pytest.mark.parametrize("algorithm", ["sft", "minor_sft", "reward"])
def test_an_algorithm_without_replies_names_an_experiment_of_it(algorithm):
    names = re.findall(
        r"(\w+_own|\w+_tiny)", refusal(f"algorithm={algorithm}").partition(" or give")[0]
    )
    assert names
    for name in names:
        if not name.endswith("own"):
            source = compose_checked([f"experiment={name}"])["algorithm"]["source"]
            assert source == compose_raw([f"algorithm={algorithm}"]).algorithm.source


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full", "k3_ratio"])
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_biased_kl_needs_an_explicit_yes(estimator, where):
    sound = {("k1", "reward"), *((name, "loss") for name in ("k2", "k3", "full", "k3_ratio"))}
    words = [f"kl.estimator={estimator}", f"kl.where={where}"]
    if (estimator, where) in sound:
        assert compose_checked(words)["kl"]["where"] == where
    else:
        assert "kl.allow_biased=true" in refusal(*words)
        if estimator not in ("full", "k3_ratio"):  # in the reward these are not computed at all
            compose_checked([*words, "kl.allow_biased=true"])


@pytest.fixture
def old_run(tmp_path):
    config = compose_checked(["experiment=grpo_tiny", "seed=5", "policy.model=tiny"])
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return tmp_path


def test_resume_keeps_the_saved_configuration(old_run):
    config = load_for_resume(str(old_run), ["trainer.num_iterations=200", "checkpoint.every=7"])
    assert (config["seed"], config["resume"]) == (5, str(old_run))
    assert config["trainer"]["num_iterations"] == 200
    assert config["checkpoint"] == {"every": 7, "keep_last": 2, "keep_best": False}
    assert config["optimizer"]["lr"] == pytest.approx(5e-4)


@pytest.mark.parametrize("word", ["optimizer.lr=1", "seed=1", "policy.model=tiny", "env=facts"])
def test_resume_refuses_other_overrides_by_name(old_run, word):
    with pytest.raises(ValueError, match=word.partition("=")[0].replace(".", r"\.")) as caught:
        load_for_resume(str(old_run), [word])
    assert "trainer.num_iterations" in str(caught.value)


def test_resume_of_what_is_no_run_names_one(old_run):
    with pytest.raises(ValueError, match=r"expected a run folder with a config\.yaml"):
        load_for_resume(str(old_run / "none"), [])
    with pytest.raises(ValueError, match=rf"got a file; give resume={old_run}$"):
        load_for_resume(str(old_run / "config.yaml"), [])
    for name, when in ("b", 30), ("a", 20), ("c", 10):
        (old_run / "outputs" / name).mkdir(parents=True)
        shutil.copy(old_run / "config.yaml", old_run / "outputs" / name)
        os.utime(old_run / "outputs" / name / "config.yaml", (when, when))
    with pytest.raises(ValueError, match=rf"of runs; the newest is resume='{old_run}/outputs/b'$"):
        load_for_resume(str(old_run / "outputs"), [])
    (old_run / "sweep" / "seed=1").mkdir(parents=True)
    (old_run / "sweep" / "multirun.yaml").write_text("")
    shutil.copy(old_run / "config.yaml", old_run / "sweep" / "seed=1")
    with pytest.raises(ValueError, match=rf"got a sweep.*resume='{old_run}/sweep/seed=1'$"):
        load_for_resume(str(old_run / "sweep"), [])


def test_resume_last_takes_the_newest_run_of_outputs(old_run, monkeypatch, capsys):
    monkeypatch.chdir(old_run)
    assert train.cli(["mode=export", "resume=last"]) == 2
    assert "resume=last: there is no run in outputs" in capsys.readouterr().err
    for name, when in ("a/1", 30), ("b/2", 40), ("a/3", 20):
        (old_run / "outputs" / name).mkdir(parents=True)
        shutil.copy(old_run / "config.yaml", old_run / "outputs" / name)
        os.utime(old_run / "outputs" / name / "config.yaml", (when, when))
    assert spell_out(["resume=last", "seed=1"]) == ["resume=outputs/b/2", "seed=1"]
    (old_run / "outputs" / "a" / "1" / "metrics.jsonl").touch()  # it wrote again
    assert train.cli(["mode=export", "resume=last", "seed=2"]) == 2
    said = capsys.readouterr()
    assert said.out == "resume=outputs/b/2\n"
    assert "seed cannot change in mode=export" in said.err


def test_resume_last_is_the_run_that_started_last_and_has_ended(old_run, monkeypatch, capsys):
    monkeypatch.chdir(old_run)
    runs = ("c/2026-11-01", "b/2026-11-02", "a/2026-11-03")
    days = [Path(f"outputs/{run}_10-00-00") for run in runs]
    for age, day in enumerate([*days, Path(f"{days[2]}_2"), Path(f"{days[2]}_10")]):
        (day / "checkpoints" / "iteration_000001").mkdir(parents=True)
        shutil.copy("config.yaml", day)
        os.utime(day / "config.yaml", (100 - age, 100 - age))  # the oldest wrote last
    newest, other = Path(f"{days[2]}_10"), Path(f"{days[2]}_2")
    assert spell_out(["resume=last"]) == [f"resume={newest}"]
    assert capsys.readouterr().out == ""
    (other / "checkpoints" / "iteration_000001").rmdir()  # nothing to go on with
    with held(newest), held(days[2]):
        assert spell_out(["resume=last"]) == [f"resume={days[1]}"]
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("still running: ")
        assert str(newest) in line
        assert f"{days[2]}," in f"{line.partition(';')[0]},"
        for day in days[:2]:
            (day / "checkpoints" / "iteration_000001").rmdir()
        assert spell_out(["resume=last"]) == [f"resume={newest}"], "which is refused as running"


def test_a_python_without_the_parts_is_told_where_they_are(tmp_path):
    code = "import sys; sys.modules['hydra'] = None; sys.argv[1:] = ['seed=1']\n"
    code += f"sys.path.insert(0, {str(ROOT)!r}); import runpy; runpy.run_path('{ROOT}/train.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert ".venv/bin/python in place of python" in line


@pytest.mark.parametrize(
    "words",
    [
        ["kl.ceoff=1"],
        ["-m", "seed=1,2", "kl.coeff=0,-1"],
        ["resume="],
        ["experiment=grpo_tiny", "~kl"],
        ["-m", "grpo_tiny", "seed=1,2"],
        ["env=gsm8k", "env.dataset=no.jsonl"],
        ["output_dir=/dev/null/run"],
        ["-m", "seed=1,2", "hydra.sweep.dir=/dev/null/sweep"],
        ["-m", "seed=1,2", "output_dir=here"],
        ["-m", "kl.coeff=interval(0,1)"],
        ["--cfg", "job", "resume=nowhere"],
    ],
)
def test_refused_command_leaves_nothing_on_disk(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.cli(words) == 2
    assert list(tmp_path.iterdir()) == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


@pytest.fixture
def quiet_log():
    """Take back what Hydra's --info sets up: a log of all that happens in this process."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    for handler in [h for h in logging.root.handlers if type(h) is logging.StreamHandler]:
        logging.root.removeHandler(handler)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--experiment", "grpo_tiny"], "no flag --experiment; write experiment=grpo_tiny"),
        (["--resume=X", "seed=1"], "no flag --resume; write resume=X"),
        (["--seed", "kl.coeff=1"], "no flag --seed; write seed=..."),
        (["--learning-rate", "1e-5"], "learning_rate=1e-5 is optimizer.lr=1e-5 here"),
        (
            ["--config", "my.yaml"],
            "no flag --config; a file of keys lies in conf/exp",
        ),
        (["--config-name=a/b.yml"], "no flag --config-name; a file of keys"),
        (["-p", "kl"], "-p is about what --cfg prints; write --cfg job -p kl"),
        (["--cfg"], "expected --cfg job, hydra or all, got none"),
        (["--cfg", "job", "kl.ceoff=1"], "no key kl.ceoff; did you mean kl.coeff?"),
        (["--cfg=job", "-p", "kl", "kl=0.1"], "did you mean kl.coeff=0.1?"),
        (["--info", "defaults", "experiment=grpo_tny"], "mean experiment=grpo_tiny or"),
        (["-c", "job", "grpo_tny=1", "seed"], "expected name=value, got 'seed'"),
        (["-x"], "no flag -x; see --help"),
    ],
)
def test_flag_that_is_none_of_hydras_is_refused_in_one_line(words, said, capsys, quiet_log):
    assert train.cli(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_flags_of_hydra_are_left_to_it():
    for words in (["--cfg", "job", "-p", "kl"], ["--cfg=all"], ["--info", "defaults"], ["-h"]):
        assert read_command(words) is None


def test_help_names_every_experiment_and_no_schema(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    listed = re.findall(r"^  (\S+) +(.*(?:\n   .*)*)", done.stdout, re.MULTILINE)
    about = {name: " ".join(text.split()) for name, text in listed if name in EXPERIMENTS}
    assert sorted(about) == EXPERIMENTS
    assert "sorts digits" in about["grpo_tiny"]
    assert "python train.py resume=outputs" in done.stdout
    assert "--cfg job" in done.stdout
    assert "schema" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_output_dir_that_holds_a_run_is_refused(old_run):
    message = refusal(f"output_dir={old_run}")
    assert f"resume={old_run}" in message
    assert compose_checked([f"output_dir={old_run / 'new'}"])["output_dir"] == str(old_run / "new")


@pytest.mark.parametrize("value", ["some", "-1", "1.5"])
def test_how_many_replies_are_kept_is_all_or_a_number(value):
    assert "expected tracker.replies to be all or a whole number, got" in refusal(
        f"tracker.replies={value}"
    )
    for good in ("all", "0", "64"):
        assert compose_checked([f"tracker.replies={good}"])["tracker"]["replies"] == good


def test_a_run_goes_on_with_a_bound_that_its_surrogate_never_read(old_run):
    """Such a bound was taken once, and cannot change on resume."""
    config = json.loads((old_run / "config.yaml").read_text())
    config["algorithm"] |= {"kl_bound": 0.1, "tv_bound": 0.3}
    (old_run / "config.yaml").write_text(json.dumps(config))
    assert load_for_resume(str(old_run), [])["algorithm"]["kl_bound"] == 0.1


def test_resume_takes_keys_of_the_saved_tracker(old_run):
    config = json.loads((old_run / "config.yaml").read_text())
    config["tracker"] = compose_checked(["tracker=wandb"])["tracker"]
    (old_run / "config.yaml").write_text(json.dumps(config))
    assert load_for_resume(str(old_run), ["tracker.project=mine"])["tracker"]["project"] == "mine"


def test_resume_of_a_finished_run_says_so(old_run):
    status = {"state": "finished", "iteration": 80}
    (old_run / "status.json").write_text(json.dumps(status))
    line = nothing_left(old_run, 80)
    assert line is not None
    assert "80 of 80" in line
    longer = 81
    with pytest.raises(ValueError, match="80 iterations and without a checkpoint"):
        nothing_left(old_run, longer)
    (old_run / "checkpoints" / "iteration_000080").mkdir(parents=True)
    assert nothing_left(old_run, longer) is None
    shorter = 5
    with pytest.raises(ValueError, match="80 iterations already, more than 5"):
        nothing_left(old_run, shorter)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("ceoff: 1", ["no key kl.ceoff", "(conf/experiment/typo.yaml)", "did you mean kl.coeff"]),
        ("coeff: high", ["kl.coeff to be a number, got 'high' (conf/experiment/typo.yaml)"]),
        ("measure: null", ["kl.measure to be true or false, got null (conf/experiment/typo.yaml)"]),
    ],
)
def test_fault_inside_an_experiment_file_names_key_and_file(line, parts, monkeypatch, tmp_path):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    text = f"# @package _global_\nkl:\n  {line}\n"
    (tmp_path / "conf" / "experiment" / "typo.yaml").write_text(text)
    monkeypatch.setattr(names, "FOLDER", tmp_path / "conf")
    message = refusal("experiment=typo")
    assert [part for part in parts if part not in message] == []


def test_text_from_the_environment_is_looked_up_again_and_not_saved(monkeypatch):
    monkeypatch.setenv("MY_PROMPT", "hunter2-is-secret")
    words = ["policy.system_prompt=${oc.env:MY_PROMPT}", "policy.stop=['${policy.system_prompt}']"]
    config = compose_checked(words)
    assert "hunter2" not in json.dumps(config)
    seen = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    assert seen["policy"]["system_prompt"] == "hunter2-is-secret"
    assert seen["policy"]["stop"] == ["hunter2-is-secret"]


def test_an_overlong_penalty_of_chats_of_several_turns_knows_all_of_them():
    words = ["experiment=grpo_calculator_tiny", "algorithm=dapo"]
    assert "algorithm.after_rollout.overlong.max_tokens=" in refusal(*words)
    limit = refusal(*words).rpartition("max_tokens=")[2]
    one = compose_checked(["experiment=grpo_calculator_tiny"])["policy"]["max_new_tokens"]
    assert int(limit) == 2 * one
    compose_checked([*words, f"algorithm.after_rollout.overlong.max_tokens={limit}"])


NO_HUB = ["env.dataset=nobody/nothing"]  # of the hub: the parent does not make the task
TOOLS = ["env=python_tool", *NO_HUB]
SERVICES = "env.transforms.tools.registry.services"


def test_arguments_read_in_source_are_those_of_the_imported_class():
    count = 0
    for package in ("trainer", "envs.transforms", "envs.tasks"):
        for name in import_module(package).__all__:
            read, thing = arguments_in_source(f"{package}.{name}"), find_target(f"{package}.{name}")
            count += read is not None
            assert read is None or (not takes_any(thing) and {*read} == {*arguments_of(thing)}), (
                name
            )
    for path in (ROOT / "conf" / "algorithm").glob("*.yaml"):
        for target in targets(yaml.safe_load(path.read_text())):
            assert arguments_in_source(target) is not None, target
    assert count > 50


def test_what_builds_a_part_of_ones_own_tells_a_misspelt_argument_too():
    with pytest.raises(ValueError, match=r"task\.num_row: envs.*takes .*; did you mean num_rows\?"):
        build({"_target_": "envs.tasks.SortDigits", "num_row": 3}, where="task")


def test_a_part_gets_its_keys_by_name_and_what_its_node_gives_comes_first():
    cfg = OmegaConf.create(compose_checked(["algorithm.clip_high=0.3", "algorithm.clip_low=0.1"]))
    leash = make_leash(cfg)
    made = build(cfg.algorithm.objective, cfg.algorithm, leash=leash)
    assert (made.bounds.low, made.bounds.high) == (0.1, 0.3)
    made = build({**cfg.algorithm.objective, "clip_high": 0.7}, cfg.algorithm, leash=leash)
    assert (made.bounds.low, made.bounds.high) == (0.1, 0.7)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("peft", ["policy.lora.r=8"]),
        ("math_verify", ["env=math", *NO_HUB]),
        ("reasoning_gym", ["env=reasoning_gym", "env.task=chain_sum"]),
        ("verifiers", ["env=verifiers", "env.task=my_env", "allow_targets=true"]),
        (
            "openenv",
            ["env=openenv", *(f"env.task.{k}=x" for k in ("url", "observation", "action"))],
        ),
        ("vaderSentiment", ["experiment=ppo_sentiment_smollm"]),
        ("tensorboard", ["tracker=tensorboard"]),
        ("trackio", ["tracker=trackio"]),
        ("ray", ["env.transforms.kl._target_=envs.transforms.RayRetrieveKL"]),
        ("vllm", ["policy._target_=policies.vLLMWrapper"]),
        (
            "mcp",
            [*TOOLS, SERVICES + ".files={_target_: envs.transforms.MCPServer, command: [files]}"],
        ),
    ],
)
def test_a_missing_package_is_told_by_the_parent_with_its_extra(package, words, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(*words) == EXTRAS[package]
    if package == "peft":
        compose_checked(["policy.lora.r=0"])
        with pytest.raises(ValueError, match=r"-e '\.\[lora\]'"):  # before the first job of a sweep
            read_command(["-m", "policy.lora.r=0,8"])


def test_all_missing_packages_are_told_at_once(monkeypatch):
    for package in ("peft", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    both = [EXTRAS[package] for package in ("peft", "trackio")]
    words = ["policy.lora.r=8", "tracker=trackio"]
    assert refusal(*words) == refusal(*words, "preflight=true") == "; ".join(both)


def test_a_class_of_ones_own_may_have_the_name_of_one_of_leash(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.syspath_prepend(tmp_path)
    code = "from envs.tasks import SortDigits\nclass Reviews(SortDigits): ..."
    (tmp_path / "my_own_reviews.py").write_text(code)
    compose_checked(["env=own", "env.task._target_=my_own_reviews.Reviews", "allow_targets=true"])


def test_every_extra_is_in_the_package_and_asked_for_by_something_that_exists():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in EXTRAS.values():
        asked = re.search(r"pip install -e '\.\[(\w+)\]'", line)
        assert asked[1] in declared["optional-dependencies"]
    names = {n for p in PACKAGES for n in import_module(p).__all__}
    assert set(ASKING) <= names


@pytest.mark.parametrize("name", ["model", "errors", "checkpoints", "metrics.jsonl"])
@pytest.mark.parametrize("key", ["output_dir", "hydra.run.dir"])
def test_a_folder_with_files_that_a_run_would_replace_is_refused(tmp_path, key, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="already holds a run"):
        read_command(["experiment=grpo_tiny", f"{key}={tmp_path}"])


def test_a_run_that_was_saved_with_the_names_of_before_goes_on(tmp_path):
    config = compose_checked(["experiment=dapo_tiny", "algorithm.dual_clip=3"])
    before = json.loads(json.dumps(config))
    algorithm = before["algorithm"]
    algorithm["clip_ratio"] = algorithm.pop("dual_clip")
    del algorithm["mask"], before["env"]["overlong"], before["policy"]["chat_template_kwargs"]
    algorithm["shaping"], algorithm["mismatch"] = algorithm.pop("after_rollout"), None
    algorithm["source"]["shaping"] = algorithm["shaping"]
    algorithm["advantage"] |= {"group_size": 8, "baseline": "group_mean", "whiten": False}
    algorithm["objective"] |= {"clip_high": 0.28, "clip_ratio": 3.0}
    assert as_today(before) == config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    assert holds_same(tmp_path, config)
    assert load_for_resume(str(tmp_path), []) == {**config, "resume": str(tmp_path)}
    algorithm["objective"]["clip_high"] = 0.5  # given in the node, beside the algorithm's key
    assert as_today(before)["algorithm"]["objective"]["clip_high"] == 0.5


@pytest.mark.parametrize("word", ["kl=[1,2]", "checkpoint=[1]", f"trainer.num_iterations={10**30}"])
def test_lists_for_groups_and_numbers_beyond_all_counting_are_one_line(word):
    assert word.partition("=")[0] in refusal(word)
