"""Hydra's manual, chapter by chapter, through the command line of train.py in fresh processes.

Runs end at once: their worker only writes that it has finished.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import ROOT, environment

from trainer.pages.summary import repeat_command
from trainer.pages.sweep_jobs import load_sweep, results
from trainer.runs.run_files import dig, load_run

pytestmark = pytest.mark.runs
TRAIN = """
import json, pathlib, sys
if sys.argv[1:2] == ["--worker"]:
    ended = json.dumps({"state": "finished", "objective": 0.25, "iteration": 240})
    pathlib.Path(sys.argv[2], "status.json").write_text(ended)
    sys.exit()
sys.path.insert(0, ROOT)
import train
from trainer.runs import launch
launch.SCRIPT = pathlib.Path(__file__)
sys.exit(train.main())
"""
FILES = {
    "own/experiment/mine.yaml": """
        # @package _global_
        defaults:
          - grpo_tiny
          - optional nothing: here
          - override /policy: tiny
          - override /kl: own
          - _self_
        allow_targets: true
        seed: 7
        policy: {model: tiny}
        env:
          rewards:
            a: &equal
              _target_: envs.rewards.Function
              function: {_target_: operator.eq, _partial_: true}
            b: *equal
    """,
    "own/experiment/sub/deep.yaml": """
        # @package _global_
        defaults: [/experiment/mine, _self_]
        seed: 8
    """,
    "own/experiment/sweep.yaml": """
        # @package _global_
        defaults: [mine]
        hydra: {mode: MULTIRUN, sweeper: {params: {seed: "1,2"}}}
    """,
    "own/kl/own.yaml": "defaults: [reward, _self_]\nrefresh_every: 5\n",
    "own/extra/small.yaml": "# @package policy\nmax_new_tokens: 5\n",
    "own/primary.yaml": """
        defaults: [config, override experiment: mine, _self_]
        seed: 9
    """,
    "main/primary.yaml": """
        defaults: [config, override experiment: mine, _self_]
        hydra: {searchpath: ["pkg://conf", "file://own"]}
        seed: 10
    """,
    "main/bare.yaml": """
        defaults: [_schema, policy: tiny, env: sort_digits, kl: default, teacher: default,
          algorithm: grpo, optimizer: adamw, trainer: default, eval: default, checkpoint: default,
          tracker: jsonl, launch: ddp, _self_]
        hydra: {searchpath: ["pkg://conf"], run: {dir: "${run_dir:}"}}
    """,
    "callback_of_mine.py": """
        from pathlib import Path
        from hydra.experimental.callback import Callback
        class Note(Callback):
            def on_job_end(self, config, **_):
                Path("noted").write_text(str(config.seed))
    """,
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Go to a folder with a user's own files."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(text))
    (tmp_path / "train.py").write_text(TRAIN.replace("ROOT", repr(str(ROOT))))
    return tmp_path


def text_of(block: str) -> str:
    """Return an indented block as a text of its own."""
    lines = block.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


def command(line: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the words of a line as a shell reads them."""
    words = [sys.executable, "train.py", *shlex.split(line.replace("$PWD", os.getcwd()))]
    env = environment(PYTHONPATH=os.getcwd(), **changes)
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


def folder_of(ended: subprocess.CompletedProcess[str]) -> Path:
    """Return the folder of a run that has ended without a fault."""
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return Path(re.findall("starting in (.*)", ended.stdout)[0]).absolute()


def values_of(folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return {key: dig(config, *key.split(".")) for key in keys}


MINE = "--config-dir=own experiment=mine"
OWN = {"seed": 7, "kl.refresh_every": 5, "kl.where": "reward"}
RUNS = {
    "override grammar: quotes, lists, dicts, casts, null, empty": (
        "experiment=grpo_tiny policy.model=tiny 'policy.system_prompt=\"a, b = [c] it'\\''s\"' "
        "'policy.stop=[x, \"y z\"]' 'policy.chat_template_kwargs={thinking: false, n: 3}' "
        "seed=int(4.0) policy.max_prompt_tokens=null policy.chat_template='' "
        "'trainer.stop_at=\"reward/mean 0.9\"' 'optimizer.betas=[0.5,0.9]'",
        {
            "policy.system_prompt": "a, b = [c] it's",
            "policy.stop": ["x", "y z"],
            "policy.chat_template_kwargs": {"thinking": False, "n": 3},
            "seed": 4,
            "policy.max_prompt_tokens": None,
            "policy.chat_template": "",
            "trainer.stop_at": "reward/mean 0.9",
            "optimizer.betas": [0.5, 0.9],
        },
    ),
    "override grammar: +, ++, ~, escapes, interpolation": (
        f"{MINE} +policy.chat_template_kwargs.x=1 ++policy.chat_template_kwargs.y=2 ++seed=3 "
        "'policy.system_prompt=a\\,b' 'eval.max_rows=${trainer.prompts_per_iteration}' "
        "trainer.prompts_per_iteration=6 ~env.rewards.a",
        {
            "policy.chat_template_kwargs": {"x": 1, "y": 2},
            "seed": 3,
            "policy.system_prompt": "a,b",
            "eval.max_rows": 6,
            "env.rewards.a": None,
            "env.rewards.b._target_": "envs.rewards.Function",
        },
    ),
    "config groups: a file, of one's own, appended": (
        "--config-dir=own experiment=grpo_tiny policy.model=tiny kl=own +extra=small",
        {"kl.refresh_every": 5, "kl.where": "reward", "policy.max_new_tokens": 5},
    ),
    "packages: a group at another place": (
        "--config-dir=own experiment=grpo_tiny +experiment@_global_=mine seed=1",
        {"seed": 1, "policy.model": "tiny"},
    ),
    "defaults list: override, optional, relative and absolute": (
        "-cd own experiment=sub/deep",
        OWN | {"seed": 8},
    ),
    "--config-dir, a file with its ending": ("--config-dir own experiment=mine.yaml", OWN),
    "--config-name": ("--config-dir=own --config-name=primary", OWN | {"seed": 9}),
    "--config-path": ("-cp $PWD/main -cn primary.yaml", OWN | {"seed": 10}),
    "no experiment": ("~experiment policy.model=tiny", {"policy.model": "tiny"}),
    "no experiment in a primary configuration": (
        "--config-path=$PWD/main --config-name=bare",
        {"policy.model": "tiny", "kl.coeff": 0.02},
    ),
    "searchpath": ("'hydra.searchpath=[file://own]' experiment=mine", OWN),
    "searchpath in a primary configuration": (
        "--config-path=$PWD/main --config-name=primary kl=full",
        {"seed": 10, "kl.estimator": "full"},
    ),
    "hydra.job, hydra.verbose": (
        f"{MINE} hydra.job.name=mine hydra.job.chdir=true hydra.verbose=true "
        "hydra/job_logging=default +hydra.job.env_set.X=1",
        OWN,
    ),
    "hydra.output_subdir": (f"{MINE} hydra.output_subdir=null", OWN),
}


REPEATED = [name for name in RUNS if "--config" in name or "searchpath" in name or "no exp" in name]


@pytest.mark.parametrize("chapter", RUNS)
def test_a_run_has_the_values_of_its_words_and_files_and_its_page_the_command_that_repeats_it(
    chapter, place
):
    line, expected = RUNS[chapter]
    folder = folder_of(command(line))
    assert values_of(folder, expected) == expected
    if chapter in REPEATED:
        repeat = repeat_command(load_run(folder)).partition("train.py ")[2]
        again = folder_of(command(repeat))
        assert again != folder
        assert values_of(again, expected) == expected


def test_a_callback_is_called_at_the_end_of_a_job(place):
    ended = command(f"{MINE} '+hydra.callbacks.a={{_target_: callback_of_mine.Note}}'")
    assert ended.returncode == 0, ended
    assert (place / "noted").read_text() == "7"


SWEEPS = {  # words of a sweep, and its jobs with the values of each
    "comma, range, choice": (
        f"-m {MINE} seed=range(1,3) 'kl.coeff=choice(0.5)'",
        {f"kl.coeff=0.5,seed={s}": {"kl.coeff": 0.5, "seed": s} for s in (1, 2)},
    ),
    "glob, sort": (
        "-m --config-dir=own 'experiment=glob(mine*)' 'seed=sort(3,1,reverse=true)'",
        {f"experiment=mine,seed={s}": {"seed": s, "kl.refresh_every": 5} for s in (3, 1)},
    ),
    "groups, lists": (
        f"-m {MINE} kl=own,full 'policy.stop=[a,b],[c]'",
        {
            f"kl={kl},policy.stop=[{','.join(stop)}]": {"kl.estimator": kind, "policy.stop": stop}
            for kl, kind in (("own", "k1"), ("full", "full"))
            for stop in (["a", "b"], ["c"])
        },
    ),
    "sweeper params and mode in a file": (
        "--config-dir=own experiment=sweep",
        {f"seed={s}": OWN | {"seed": s} for s in (1, 2)},
    ),
    "hydra.mode, hydra.sweep, searchpath": (
        "hydra.mode=MULTIRUN 'hydra.searchpath=[file://own]' experiment=mine seed=1,2 "
        "hydra.sweep.dir=here 'hydra.sweep.subdir=${hydra.job.num}'",
        {str(s - 1): OWN | {"seed": s} for s in (1, 2)},
    ),
    "override_dirname, primary configuration": (
        "-m -cd own -cn primary seed=1,2 kl.coeff=0,1 hydra.job.config.override_dirname.kv_sep=_ "
        "hydra.job.config.override_dirname.exclude_keys=[seed] "
        "'hydra.sweep.subdir=${hydra.job.override_dirname}-${seed}'",
        {f"kl.coeff_{c}-{s}": {"kl.coeff": c, "seed": s} for c in (0, 1) for s in (1, 2)},
    ),
}


@pytest.mark.parametrize("chapter", SWEEPS)
def test_a_sweep_has_a_job_for_each_value_and_commands_that_repeat_and_continue_it(chapter, place):
    line, expected = SWEEPS[chapter]
    ended = command(line)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    folder = Path(re.findall("sweep    (.*)/sweep.html", ended.stdout)[0])
    jobs = {str(path.parent.relative_to(folder)) for path in folder.rglob("config.yaml")}
    jobs = {job for job in jobs if not job.endswith(".hydra")}
    assert jobs == {*expected}
    for job, values in expected.items():
        assert values_of(folder / job, values) == values
    if "searchpath" not in chapter and "primary" not in chapter:
        return
    again = re.findall("again    .*train.py (.*)", ended.stdout)[0]
    assert command(f"{again} hydra.run.dir=again hydra.sweep.dir=again").returncode == 0
    (repeated,) = (place / "again").rglob("run.log")
    assert values_of(repeated.parent, values) in expected.values()
    (folder / job / "status.json").write_text('{"state": "failed"}')
    rest = re.findall("continue with: .*train.py (.*)", results(load_sweep(folder))[-1])[0]
    ended = command(rest)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("finished already") == len(jobs) - 1


PRINTS = {
    "--cfg job": (f"{MINE} --cfg job", r"^seed: 7$"),
    "--cfg hydra": (f"{MINE} -c hydra -p hydra.run", r"dir: \$\{run_dir:\}"),
    "--cfg all, --package": (f"{MINE} --cfg all -p kl", "refresh_every: 5"),
    "--cfg job, --resolve": (
        f"{MINE} 'seed=${{eval.max_rows}}' eval.max_rows=3 --cfg job --resolve",
        "^seed: 3$",
    ),
    "--info": ("--info all --config-dir=own experiment=mine", r"own[\s\S]*experiment/mine"),
    "--help": ("--config-dir=own --help", r"experiment: .*\bmine\b"),
    "--hydra-help": ("--hydra-help", "hydra/launcher: .*basic"),
    "completion: install": ("-sc install=bash", "complete "),
}


@pytest.mark.parametrize("chapter", PRINTS)
def test_a_flag_prints(chapter, place):
    line, pattern = PRINTS[chapter]
    ended = command(line)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert re.search(pattern, ended.stdout, re.M), ended.stdout


def test_completion_offers_the_keys_and_files_that_there_are(place):
    line = "train.py experiment=mi"
    ended = command("-sc query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert ended.stdout.split() == ["experiment=minor_sft_tiny"]


REFUSED = {
    "~kl": "kl=default.*kl.coeff=0",
    "~tracker=jsonl": "tracker=.*none",
    "~seed": "seed=",
    "~env.rewards": "env.rewards=",
    "-m seed=1,2 output_dir=here": "hydra.sweep.dir=here",
    "--config-dir=own experiment=mien": "experiment=mien.*mine",
    "experiment=own/experiment/mine.yaml": "experiment=own.*--config-dir=<folder> experiment=mine",
    "--config-name=nope": "--config-name=nope",
    "--config-dir=nowhere": "nowhere",
    "-m 'seed=interval(1,2)'": "INTERVAL",
    "--cfg job -m seed=1,2": "--cfg",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_be_ignored_or_is_not_there_is_refused_in_one_line(line, place):
    ended = command(line)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert re.fullmatch(f"error: .*{REFUSED[line]}.*\n", ended.stderr), ended.stderr
    assert not [*place.rglob("config.yaml")]
