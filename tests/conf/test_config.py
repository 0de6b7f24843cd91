"""What the command line accepts and refuses, before any model is loaded."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from support.runs import ROOT, asked, environment, refusal

from conf.cli import expand
from conf.compose import compose_checked
from conf.plan import plan
from conf.resume import read_saved, resumed_if_held
from envs.tasks import Reward, Task
from policies.optional_packages import EXTRAS
from trainer.runs.discover import nothing_left

HERE = "test_config"
FILES = sorted((ROOT / "conf").glob("*/*.yaml"))
EXPERIMENTS = [path.stem for path in FILES if path.parent.name == "experiment"]
GROUPS = [f"{p.parent.name}={p.stem}" for p in FILES if p.parent.name != "experiment"]
OWN = ("env=own", "allow_targets=true")
UNJUDGED = ("eval.num_samples=0", "eval.greedy=false")
SEARCH = "hydra.searchpath=[file://.]"
OFFLINE = ("kl.coeff=0", "kl.measure=false")
ROWS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]


class Words(Task):
    """A task of one's own without a data set."""

    def rows(self, split):
        return [{"messages": [{"role": "user", "content": "sea"}]}]

    def reward(self, row, response):
        return Reward(total=0.0, parts={}, success=False)


def short(row, response, *, limit: int = 9) -> float:
    return float(len(response.text) <= limit)


def own(task: str, *words: str) -> list[str]:
    """Return the words of a task of this file."""
    return [*OWN, f"env.task._target_={HERE}.{task}", *words]


def added(function: str, partial: str = "{_partial_: true, limit: 3}") -> list[str]:
    """Return the words that add a function of this file as the reward "own"."""
    keys = {"_target_": "envs.rewards.Function", "function": partial, "weight": "0.5"}
    words = [f"env.rewards.own.{key}={value}" for key, value in keys.items()]
    return [*words, f"env.rewards.own.function._target_={HERE}.{function}", "allow_targets=true"]


GOES_WITH = {  # what a group file leaves to the user, or needs beside it
    "env=own": own("Words")[1:],
    "env=answers": ["env.dataset=data.jsonl"],
    "env=chats": ["env.dataset=data.jsonl"],
    "env=prompts": ["env.dataset=data.jsonl", "env.columns.question=question", *added("short")],
    "tracker=accelerate": ["tracker.kind=mlflow"],
    "env=reasoning_gym": ["env.task.name=chain_sum"],
    "env=learnt_reward": ["env.task.reward_model=experiment:rm_tiny"],
    "env=preferences": ["algorithm=reward", *OFFLINE, *UNJUDGED],
    "optimizer=adamw_8bit": ["allow_targets=true"],
    "algorithm=distil": ["kl.reference=tiny"],
    "algorithm=sft": OFFLINE,
    "algorithm=minor_sft": OFFLINE,
    "algorithm=reward": ["env=preferences", *OFFLINE, *UNJUDGED],
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """Go to a folder with data files, an old run and a module that leash's own hides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for folder in ("run/model", "envs", "experiment"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "envs" / "mine.py").touch()
    (tmp_path / "experiment" / "bare.yaml").write_text("kl:\n  coeff: 1\n")
    (tmp_path / "experiment" / "typo.yaml").write_text("# @package _global_\nkl:\n  ceoff: 1\n")
    (tmp_path / "torn.jsonl").write_text(json.dumps(ROWS[0]) + "\n{oops")
    return tmp_path


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_names_code_that_exists_and_is_read_back(name, place):
    rows = ["env.dataset=data.jsonl"] if name.endswith("_own") else []
    rows += ["kl.reference=tiny", "env=answers"] if name == "distil_own" else []
    config = compose_checked([f"experiment={name}", *rows])
    assert not config["allow_targets"]
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    targets = re.findall(r"_target_: ([\w.]+)\.(\w+)", (place / "config.yaml").read_text())
    assert len(targets) >= 5
    for module, attribute in targets:
        assert attribute in dir(import_module(module))
    assert read_saved(place) == config


@pytest.mark.parametrize("group", [g for g in GROUPS if not g.endswith(("verifiers", "8bit"))])
def test_every_group_file_composes_with_what_it_leaves_to_the_user(group):
    assert compose_checked([group, *GOES_WITH.get(group, [])])


FAULTS = [  # words, and the key that the line names
    (["kl.ceoff=0.1"], r"no key kl\.ceoff.*kl\.coeff"),
    (["policy.model=${oc.env:ABSENT}"], r"policy\.model.*ABSENT"),
    (["algorithm.gamma=0.9"], "algorithm=ppo"),
    (["loss_type=dr_grpo"], r"loss_type.*algorithm\.aggregation=constant"),
    (["loss_type=sapo"], r"loss_type.*docs/coming_from_trl\.md"),
    (["epsilon_high=0.3"], r"algorithm\.clip_high.*cispo"),
    (["actor.kl.init_coef=0.1"], r"kl\.coeff.*docs/coming_from_verl\.md"),
    (["algorithm=dpo"], r"algorithm=dpo.*docs/algorithms\.md"),
    (["env=nope"], "env=nope.*chats"),
    (["experiment=grpo_tny"], r"experiment=grpo_tny.*grpo_tiny"),
    (["grpo_tiny"], "'grpo_tiny'"),
    (["kl.coeff=0,1"], "kl.coeff=0,1.*-m"),
    (["trainer.num_iterations=abc"], r"trainer\.num_iterations.*'abc'"),
    (["experiment=sft_tiny", "algorithm.aggregation=constant"], r"algorithm\.aggregation"),
    (["algorithm.minibatches=3"], r"algorithm\.minibatches"),
    (["trainer.prompts_per_iteration=3", "launch.num_processes=2"], r"launch\.num_processes"),
    (["policy.temperature=0"], r"policy\.temperature"),
    (["policy.top_k=5"], r"policy\.top_k"),
    (["algorithm.group_size=1"], r"algorithm\.group_size"),
    (["algorithm=rloo", "algorithm.epochs=2"], r"algorithm\.surrogate"),
    (["experiment=grpo_tools_tiny", "algorithm=dapo"], r"overlong\.max_tokens"),
    (["experiment=sft_tiny", "kl.coeff=0.1"], r"kl\.coeff"),
    (["experiment=sft_tiny", "kl.measure=true"], r"kl\.estimator=k3_ratio"),
    (["experiment=rm_tiny", "kl.measure=true", "kl=full"], r"kl\.measure"),
    (["algorithm=distil"], r"kl\.reference"),
    (["algorithm=distil", "kl.reference=tiny", "kl=reward"], r"kl\.where"),
    (["algorithm=distil", "kl.reference=tiny", "kl.coeff=0"], r"kl\.coeff"),
    (["teacher.reference={a:tiny,b:tiny}"], r"teacher\.column"),
    (["teacher.reference={a:tiny,b:./nowhere}", "teacher.column=x"], r"teacher\.reference\.b"),
    (["env=reviews", "teacher.reference={a:tiny}", "teacher.column=x"], r"teacher\.column=x.*None"),
    (["env=reviews", "teacher.hint='{x}'"], r"teacher\.hint: .*messages, subject.*\{x\}"),
    (["teacher.reference={}", "teacher.column=x"], r"teacher\.reference"),
    (["kl.jsd_weight=1"], r"kl\.jsd_weight"),
    (["launch.offload=true"], r"launch\.offload"),
    (["launch=fsdp2", "launch.num_processes=2", "trainer.overlap=1"], r"trainer\.overlap"),
    (["launch.shards=2"], r"launch\.shards"),
    (["trainer.overlap=1"], r"trainer\.overlap.*policy\.engine\.url"),
    (["policy.engine.max_num_seqs=3"], r"policy\.engine"),
    (["trainer.patience=2", "eval.every=0"], r"trainer\.patience"),
    (["eval.frontier=8", "kl.refresh_every=1"], r"eval\.frontier"),
    (["eval.forward_kl=1", "kl.refresh_every=1"], r"eval\.forward_kl"),
    (["experiment=sft_tiny", "eval.forward_kl=1"], r"eval\.forward_kl.*kl\.estimator=full"),
    (["eval.retain=torn.jsonl"], r"eval\.forward_kl=1"),
    (["eval.forward_kl=1", "eval.retain=torn.jsonl"], r"eval\.retain.*torn.jsonl, line 2"),
    (["eval.forward_kl=1", "eval.retain=nowhere.jsonl"], r"set eval\.retain="),
    (["checkpoint.keep_best=true", "checkpoint.every=1"], r"checkpoint\.keep_best"),
    (["policy.model=./nowhere"], r"policy\.model"),
    (["env.transforms.kl._target_=envs.transforms.RetrieveKL"], r"env\.transforms\.kl\._target_"),
    (["env.rewards.a=3"], r"env\.rewards\.a"),
    (["env.rewards.a._target_=envs.rewards.Jugde"], "Jugde.*Judge"),
    (added("short", "{}"), r"_partial_.*env\.rewards\.own\.function"),
    (["env=sort_digits", "env.task.num_row=3"], "num_row.*num_rows"),
    (["env=sort_digits", "env.dataset=data.jsonl"], r"env\.dataset"),
    (["env=gsm8k", "env.dataset=torn.jsonl"], "torn.jsonl, line 2"),
    (["env=own"], r"env\.task\._target_"),
    (own("Words", "algorithm=sft", *OFFLINE), "demonstrations"),
    ([*OWN, "env.task._target_=envs.mine.Task"], f"{ROOT / 'envs'}"),
    ([*OWN, "env.task._target_=no_such_file.Task"], "no_such_file.*PYTHONPATH"),
    (["experiment=grpo_own"], r"env\.dataset"),
    (["experiment=rm_tiny", "eval.num_samples=2"], r"eval\.num_samples=0 eval\.greedy=false"),
    (["preflight=true", "mode=chat"], "preflight"),
    (["preflight_gpu=80"], r"preflight_gpu.*preflight=true"),
    (["experiment=grpo_tiny", "output_dir=run"], "run already holds a run"),
    ([SEARCH, "experiment=typo"], r"kl\.ceoff.*experiment/typo\.yaml.*kl\.coeff"),
    ([SEARCH, "experiment=bare"], r"experiment/bare\.yaml: .*# @package _global_"),
    (["resume=nowhere"], r"nowhere.*config\.yaml"),
]


@pytest.mark.parametrize(("words", "key"), FAULTS, ids=[" ".join(words) for words, _ in FAULTS])
def test_a_fault_is_one_line_that_names_the_key(words, key):
    with pytest.raises(ValueError, match=key) as caught:
        asked(words)
    assert "\n" not in str(caught.value)


PACKAGES = {"peft": "policy.lora.r=8", "vllm": "policy/engine=vllm"}


@pytest.mark.parametrize(("package", "word"), PACKAGES.items())
def test_a_missing_package_is_refused_with_its_extra(package, word, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(word) == EXTRAS[package]


def test_a_part_gets_the_keys_of_its_node_and_others_by_name():
    words = ["algorithm.clip_low=0.1", "+algorithm.objective.clip_high=0.7"]
    parts = plan(compose_checked(words))
    bounds = parts.objective(leash=parts.leash).bounds
    assert (bounds.low, bounds.high) == (0.1, 0.7)


@pytest.fixture
def old_run(tmp_path) -> Path:
    config = compose_checked(["experiment=grpo_tiny", "seed=5", "policy.model=tiny"])
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return tmp_path


def test_resume_changes_the_keys_that_it_may_and_keeps_the_rest(old_run):
    words = ["trainer.num_iterations=400", "checkpoint.every=7"]
    saved, config = read_saved(old_run), asked([f"resume={old_run}", *words])
    assert config.pop("resume") == str(old_run)
    assert config["trainer"].pop("num_iterations") == 400
    assert config["checkpoint"].pop("every") == 7
    del saved["resume"], saved["trainer"]["num_iterations"], saved["checkpoint"]["every"]
    assert config == saved


def test_a_job_of_a_sweep_goes_on_with_the_date_of_its_start(old_run):
    config = read_saved(old_run)
    (old_run / "config.yaml").write_text(json.dumps(config | {"date": "2024-07-26"}))
    assert resumed_if_held(old_run, config)["date"] == "2024-07-26"
    with pytest.raises(ValueError, match="date"):
        resumed_if_held(old_run, config | {"date": "2024-07-27"})


@pytest.mark.parametrize("words", [["resume=auto"], []])  # typed, or under torchrun
def test_resume_auto_begins_goes_on_and_refuses_another_configuration(words, tmp_path, monkeypatch):
    if not words:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    words = expand(["experiment=grpo_tiny", "policy.model=tiny", *words])
    with pytest.raises(ValueError, match="output_dir"):
        asked(words)
    words.append(f"output_dir={tmp_path}")
    config = asked(words)
    assert config["resume"] is None
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    config = asked([*words, "trainer.num_iterations=400"])
    assert (config["resume"], config["trainer"]["num_iterations"]) == (str(tmp_path), 400)
    with pytest.raises(ValueError, match=r"kl\.coeff"):
        asked([*words, "kl.coeff=1"])


OF_THE_RUN = (
    "eval.max_rows=4",
    "eval.forward_kl=1",
    "eval.temperature=0.5",
    "kl.coeff=1",
    "env.match=words",
)


@pytest.mark.parametrize("word", OF_THE_RUN)  # the last one is a key of some files only
def test_resume_refuses_other_eval_rows_temperatures_and_coefficients(old_run, word):
    with pytest.raises(ValueError, match=f"{word.partition('=')[0]} cannot change here"):
        asked(expand([f"resume={old_run}", word]))


def test_resume_last_takes_the_newest_run_and_a_mode_the_newest_with_weights(old_run):
    with pytest.raises(ValueError, match="resume=last"):
        expand(["resume=last"])
    days = ["outputs/b/2026-11-01", "outputs/a/2026-11-02", "outputs/a/2026-11-02_2"]
    for age, day in enumerate(days):
        (old_run / day / ".hydra").mkdir(parents=True)
        shutil.copy("config.yaml", day)
        os.utime(f"{day}/config.yaml", (100 + age, 100 + age))
    assert expand(["resume=last"]) == [f"resume={days[2]}"]
    (old_run / days[0] / "checkpoints" / "iteration_000001").mkdir(parents=True)
    assert expand(["mode=chat", "resume=last"]) == ["mode=chat", f"resume={days[0]}"]


def test_resume_of_a_finished_run_has_nothing_left_unless_more_is_asked_for(old_run):
    (old_run / "status.json").write_text('{"state": "finished", "iteration": 80}')
    resume = f"resume={old_run}"
    assert "80 of 80" in str(nothing_left(asked([resume, "trainer.num_iterations=80"])))
    with pytest.raises(ValueError, match="checkpoint"):
        asked([resume])
    (old_run / "checkpoints" / "iteration_000080").mkdir(parents=True)
    assert nothing_left(asked([resume, "trainer.num_iterations=81"])) is None


@pytest.mark.parametrize(
    "word",
    [
        "kl.coeff=0,-1",
        "resume=auto",
        "+env.task.api_key=planted-1,planted-2",
        "policy.system_prompt='${oc.env:MY_PAT}',b",
    ],
)
def test_a_sweep_checks_all_jobs_first_and_is_refused_in_one_line(word, place):
    before = {path for path in place.rglob("*") if path.is_file()}
    command = [sys.executable, str(ROOT / "train.py"), "-m", "seed=1,2", word]
    env = environment(MY_PAT="planted-secret")
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert word.partition("=")[0].strip("+") in line
    assert "planted" not in line
    assert {path for path in place.rglob("*") if path.is_file()} == before


def test_the_last_word_wins():
    """As a script gives them that ends with "$@"; in a sweep too."""
    words = ["experiment=grpo_tiny", "seed=1", "kl.coeff=0.1", "kl=reward", "seed=3", "kl.coeff=0"]
    config = compose_checked(words)
    assert (config["seed"], config["kl"]["coeff"], config["kl"]["where"]) == (3, 0, "reward")


STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({**STEP, "SLURM_PROCID": "0"}, True),  # srun -n 2 python train.py
        ({**STEP, "SLURM_PROCID": "1"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({**STEP, "WORLD_SIZE": "4", "RANK": "0"}, False),  # srun -n 2 torchrun
        ({**STEP, "WORLD_SIZE": "1"}, False),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, False),  # in the script of sbatch -n 2
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun -n 1 in it
    ],
)
def test_tasks_that_would_be_whole_runs_are_refused(monkeypatch, variables, refused):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="num_processes=2") if refused else nullcontext():
        expand([])
