"""Whose code a configuration runs: leash's own parts in their places, and nobody else's unasked."""

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from refusals import refusal

import trainer
from conf import names
from conf.compose import HYDRA, compose_checked, compose_experiment
from conf.preflight_and_modes import asked
from conf.resume import load_for_resume
from conf.start import begin, read_command, set_up
from trainer.runs.failures import complain
from trainer.runs.launch import prepare
from trainer.runs.nodes import belongs, parts, parts_at

ROOT = Path(__file__).parents[1]
MARK = "my_marking_module"
NO_PARTS = (  # of the public names of trainer: what a run makes itself, and classes for Python
    "AdaptiveKLController Checkpoints CISPOLoss ConstantKLController DAPO Display EntropyBonus "
    "Evaluate GAE GRPOLoss KLControllerBase LLMCollector Leash LinearKLController MCAdvantage "
    "NoReference Observer Observers PPOLoss PromptData Reference RolloutFromModel Runtime SFTLoss "
    "Stopped TargetKLController TopKRewardSelector Trainer Update get_dataloader "
    "make_kl_controller make_optimizer make_schedule train"
)


@pytest.fixture
def marking(tmp_path, monkeypatch):
    """Return a file that exists once a module of a stranger was imported or called."""
    (tmp_path / f"{MARK}.py").write_text(
        "from pathlib import Path\n"
        "def mark(*a, **k): Path(__file__).with_name('MARK').write_text('x')\n"
        "mark()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "MARK"


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """Return a copy of conf/ that the command line reads, to put a file of a stranger in."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("*.py"))
    monkeypatch.setattr(names, "FOLDER", tmp_path / "conf")
    return tmp_path / "conf"


def write_experiment(conf: Path, **said) -> str:
    """Write an experiment file like grpo_tiny that says more; return the word that names it."""
    text = "# @package _global_\n" + yaml.safe_dump({"defaults": ["grpo_tiny", "_self_"], **said})
    (conf / "experiment" / "evil.yaml").write_text(text)
    return "experiment=evil"


def test_every_public_name_of_trainer_is_a_part_or_known_to_be_none():
    places = [place for place in parts() if place not in ("programs", "env.**")]
    found = {name for place in places for name in parts_at(place.replace("*", "x"))}
    ours = {name.partition(".")[2] for name in found if name.startswith("trainer.")}
    assert ours.isdisjoint(NO_PARTS.split())
    assert ours | set(NO_PARTS.split()) == set(trainer.__all__)
    for place in places:
        here = parts_at(place.replace("*", "x"))
        assert len(here) >= 2, place
        for name in here:  # the file says what Python says
            package, _, last = name.rpartition(".")
            thing = getattr(import_module(package), last)
            kinds = [k.rpartition(".") for k in parts()[place]]
            kinds = [getattr(import_module(home), last) for home, _, last in kinds]
            is_class = isinstance(thing, type)
            assert issubclass(thing, tuple(kinds)) if is_class else thing in kinds, name
    assert belongs("envs.rewards.GSM8KRewardParser", "env.transforms.x.transforms[0]")


def test_no_page_and_no_message_names_the_package_of_somebody_else():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\n") if name] or [*ROOT.rglob("*.md")]
    said = re.compile(r"pip3? +install[^`\n]*['\" ]leash(?![-\w.])|\bleash\[[a-z]+\]")
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in files
        if path.suffix in {".md", ".py", ".yaml", ".txt", ".toml"} and path.is_file()
        for found in said.finditer(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


FILE = "{_target_: trainer.runs.run_files.write_text, path: MARK, text: x}"
TOOLS = "env.transforms.tools.registry.services.x"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("env.transforms.x={_target_: trainer.runs.launch.run, script: a, config: b}", "no part"),
        (f"env.transforms.x={FILE}", "no part"),
        (f"algorithm.after_rollout={{x: {FILE}}}", "no part of leash for algorithm.after_rollout"),
        ("env.transforms.x={_target_: trainer.checkpoint.discard, folder: a}", "no part"),
        ("env.task._target_=envs.rewards.Judge", "no part of leash for env.task"),
        ("env.task._target_=envs.tasks.facts.Facts", "did you mean envs.tasks.Facts"),
        ("algorithm.objective._target_=trainer.Runtime", "no part"),
        ("tracker._target_=trainer.Rollouts", "trainer.JsonlTracker"),
        ("policy._target_=policies.load_reference", "policies.load_policy"),
        ("env.columns={a: {_target_: envs.tasks.Facts}}", "env.columns"),
        (f"{TOOLS}={{_target_: envs.transforms.MCPServer, command: [a]}}", "starts any program"),
        ("env.transforms.x={_target_: envs.transforms.MCPServer, command: [a]}", "any program"),
        (f"env.rewards.x={{_target_: {MARK}.mark}}", "allow_targets=true"),
        (f"{TOOLS}=[{{a: [{{_target_: {MARK}.mark}}]}}]", "allow_targets=true"),
        (f"env.task.x={{_target_: {MARK}.mark, _partial_: true}}", "allow_targets=true"),
        ("env.task.x={_target_: conf.compose.compose_raw}", "allow_targets=true"),
        ("env.task.x={_target_: trainer.runs.targets.import_module, name: os}", "no part"),
    ],
)
def test_only_parts_of_leash_are_named_unasked_each_in_its_place(word, said, marking):
    env = ["env=python_tool"] if word.startswith(TOOLS) else []
    message = refusal("experiment=grpo_tiny", *env, word)
    assert said in message
    assert not marking.exists()


@pytest.mark.parametrize("allow", [True, "${allowed}"])
def test_a_file_of_conf_cannot_allow_itself_code(allow, conf, marking):
    word = write_experiment(
        conf, allow_targets=allow, env={"rewards": {"x": {"_target_": f"{MARK}.mark"}}}
    )
    assert "allow_targets" in refusal(word)
    assert not marking.exists()
    (conf / "env" / "evil.yaml").write_text("defaults: [sort_digits]\nrewards: {}\n")
    assert compose_checked(["env=evil"])["allow_targets"] is False


def test_a_file_of_conf_cannot_sweep_the_leave_to_run_code(conf):
    word = write_experiment(conf, hydra={"sweeper": {"params": {"+allow_targets": "true"}}})
    for words in (["-m", word], [word]):
        with pytest.raises(ValueError, match="on the command line alone"):
            read_command(words)


EVIL = {"_target_": f"{MARK}.mark"}
LOGGING = {"version": 1, "handlers": {"x": {"class": f"{MARK}.mark"}}}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("callbacks", {"x": EVIL}),
        ("launcher", EVIL),
        ("sweeper", EVIL),
        ("job_logging", LOGGING),
        ("job", {"env_set": {"PATH": "/evil"}}),
    ],
)
def test_what_a_file_of_conf_says_of_hydra_runs_nothing(key, said, conf, marking):
    word = write_experiment(conf, hydra={key: said})
    assert f"sets hydra.{key}" in refusal(word)
    with pytest.raises(ValueError, match="hydra"):
        read_command(["-m", word, "seed=1,2"])
    assert not marking.exists()
    if key == "job":  # conf/config.yaml comes after a file of conf/env
        return
    package = f"# @package hydra.{key}\n" + yaml.safe_dump(said)
    (conf / "env" / "evil.yaml").write_text(package)
    assert f"hydra.{key}" in refusal("env=evil")


def test_what_a_file_of_conf_may_say_of_hydra(conf, tmp_path):
    params = {"seed": "1,2"}
    said = {"run": {"dir": str(tmp_path / "r")}, "sweep": {"subdir": "x"}, "job": {"name": "me"}}
    write_experiment(conf, hydra={**said, "sweeper": {"params": params}})
    assert read_command(["experiment=evil", "seed=1"]).folder == tmp_path / "r"
    assert {*HYDRA} > {"callbacks", "launcher", "hydra_logging", "searchpath"}


@pytest.mark.parametrize("mode", ["train", "chat", "evaluate", "export"])
def test_a_run_folder_of_somebody_else_runs_no_code(mode, tmp_path, marking):
    config = compose_checked(["experiment=grpo_tiny"])
    config["allow_targets"] = True
    config["algorithm"]["objective"] = {"_target_": f"{MARK}.mark"}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    words = [f"resume={folder}"]
    if mode != "train":
        words += [f"mode={mode}"] + [f"output_dir={tmp_path / 'out'}"] * (mode == "export")
    read = asked if mode != "train" else read_command
    with pytest.raises(ValueError, match=r"allow_targets=true .*somebody else's"):
        read(words)
    assert not marking.exists()
    if mode == "train":
        assert load_for_resume(str(folder), ["allow_targets=true"])["allow_targets"] is True
    else:
        assert asked([*words, "allow_targets=true"])["allow_targets"] is True


def test_a_warm_up_of_ones_own_class_has_the_leave_of_the_command_line(conf, marking):
    (marking.parent / "mine.py").write_text("from envs.tasks import SortDigits as Mine\n")
    write_experiment(conf, env={"task": {"_target_": "mine.Mine"}})
    with pytest.raises(ValueError, match="allow_targets=true"):
        compose_experiment("evil")
    words = ["experiment=grpo_tiny", "allow_targets=true", "seed=3"]
    config = compose_experiment("evil", words)
    assert (config["env"]["task"]["_target_"], config["seed"]) == ("mine.Mine", 0)
    assert compose_experiment("sft_tiny", words) == compose_experiment("sft_tiny")


@pytest.mark.parametrize(
    "word",
    [
        "+env.task.api_key=sk-planted-123",
        "+env.task.judge={token: planted-12345}",
        "+env.task.client_secret=planted-12345",
        "+env.task.password='planted 12345'",
        "+env.task.tokens=[planted-12345]",
        "+env.task.note=planted-by-value",
        "env.dataset=https://user:planted-12@host/x.jsonl",
    ],
)
def test_a_secret_is_looked_up_and_not_typed(word, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "planted-by-value")
    message = refusal("experiment=grpo_tiny", word)
    place = re.match(r"\+?([\w.]+)", word)[1]
    assert message.startswith(place)
    assert "${oc.env:NAME}" in message
    assert "planted" not in message
    with pytest.raises(ValueError, match=r"oc\.env") as caught:
        read_command(["-m", "experiment=grpo_tiny", f"{word},1", f"hydra.sweep.dir={tmp_path}"])
    assert "planted" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_a_secret_by_its_name_is_typed(monkeypatch):
    monkeypatch.setenv("PLACE", "sk-planted-123")
    for word in (
        "+env.task.api_key=${oc.env:PLACE}",
        "+env.task.answer_key=B",
        "+env.task.key_variable=OPENAI_API_KEY",
        "+env.task.max_tokens=16000000",
        "policy.system_prompt='The password: swordfish. token=abc'",
        "policy.stop=[a_long_word_to_stop_at]",
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            compose_checked(["experiment=grpo_tiny", word, "trainer.num_iterations=-1"])
        assert "trainer.num_iterations" in str(caught.value)


def test_a_secret_that_is_looked_up_stands_in_no_file_of_a_new_run(tmp_path, monkeypatch):
    """As docs/tracking.md says to give one."""
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-PLANTED-0123456789")
    set_up()
    words = ["experiment=grpo_tiny", "policy.model=tiny", f"output_dir={tmp_path / 'run'}"]
    words.append("policy.system_prompt=a ${oc.env:MY_JUDGE_KEY}")
    job = read_command(words)
    begin(job)
    prepare(job.config, job.folder, script=Path(), compose=lambda _: {})
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {".hydra/overrides.yaml", "config.yaml"} <= {
        path.relative_to(tmp_path / "run").as_posix() for path in files
    }
    assert [path for path in files if b"PLANTED" in path.read_bytes()] == []
    assert "oc.env:MY_JUDGE_KEY" in (tmp_path / "run" / ".hydra" / "overrides.yaml").read_text()


BY_KEY = "a/${oc.env:MY_JUDGE_KEY}"
FOLDERS = [
    ("hydra", {"run": {"dir": BY_KEY}}),
    ("hydra", {"sweep": {"subdir": BY_KEY}}),
    ("output_dir", BY_KEY),
]


@pytest.mark.parametrize(("key", "value"), FOLDERS)
def test_a_file_of_a_stranger_puts_no_secret_into_the_name_of_a_folder(key, value, conf):
    word = write_experiment(conf, **{key: value})
    assert "$MY_JUDGE_KEY, which is a secret" in refusal(word)
    with pytest.raises(ValueError, match="which is a secret"):
        read_command(["-m", word, "seed=1,2"])
    assert compose_checked([write_experiment(conf, output_dir="${oc.env:HOME}/x")])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: !!python/object/apply:os.system ['touch MARK']", "evil.yaml, line 3: cannot be read"),
        ("x: !mine 3", "evil.yaml, line 3: cannot be read"),
        ("x: [", "cannot be read as YAML"),
        ("x: " + "[" * 3000 + "]" * 3000, "nested too deep"),
    ],
)
def test_a_file_that_is_no_yaml_of_ours_is_told_in_one_line(text, said, conf):
    word = write_experiment(conf)
    path = conf / "experiment" / "evil.yaml"
    path.write_text(f"# @package _global_\ndefaults: [grpo_tiny, _self_]\n{text}\n")
    told = refusal(word)
    assert said in told


def test_a_complaint_does_not_steer_the_terminal(capfd):
    complain(ValueError("model \x1b]52;c;ZXZpbA==\x07 and \x1b[2J\x9b1m: not there"))
    said = capfd.readouterr().err
    assert all(letter.isprintable() for letter in said.rstrip("\n"))
    assert "ZXZpbA==" in said
