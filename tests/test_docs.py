"""What README and docs promise: commands compose, Python runs, links lead somewhere."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from runs import environment, jobs_of

import trainer
from conf import schema
from conf.build import make_task
from conf.cli import expand
from conf.compose import compose_checked
from conf.hints import other_names
from envs.tasks import Reply
from policies.load import load_policy

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TRL = "docs/coming_from_trl.md"
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "SECURITY")]
PAGES += sorted(DOCS.glob("*.md"))
ELSEWHERE = {"env=verifiers", "env=openenv", "env=brief"}  # need a package, or a file of the page
OPEN = ("env.task.", "env.rewards.", "env.transforms.", "policy.chat_template_kwargs.")


def script(name: str) -> ModuleType:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block(language: str, number: int = 0, *, page: str = "docs/own_task.md") -> str:
    """Return a block of code of a page."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)[number]


def commands() -> list[str]:
    """Return every train.py command of the pages that can be composed as it stands."""
    text = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
    found = re.findall(r"python train\.py(?: (?:[^\n`|#(]|(?<=\w)\()*)?", text)
    return sorted({c.strip() for c in found if not re.search("resume=|--cfg|--config-dir", c)})


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Go to a folder with the files that the pages speak of, and the code of docs/own_task.md."""
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Say {i}."},
                {"role": "assistant", "content": i},
            ]
        }
        for i in "abc"
    ]
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    found = {"problems": rows, "my": rows, "chats": chats, "pairs": pairs}
    for name, lines_ in found.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines_)))
    (tmp_path / "sums.jsonl").write_text(block("json", page=TRL))
    (tmp_path / "my_tasks.py").write_text(block("python"))
    (tmp_path / "my_rewards.py").write_text(block("python", page=TRL))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_tasks", "my_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("command", commands())
def test_documented_command_composes(command, place) -> None:
    named = command.replace("/path/to/model", str(place / "model")).replace("<date_time>", "old")
    words = expand(shlex.split(named.replace("outputs/sft/model", str(place / "model")))[2:])
    overrides = [w for w in words if not w.startswith("-") and "..." not in w]
    if ELSEWHERE & {*overrides} or overrides[-1:] == ["policy.engine=vllm"]:
        return
    jobs = jobs_of(overrides) if "-m" in words else [overrides]
    for job in (jobs[0], jobs[-1]) if jobs[1:] else jobs:
        assert compose_checked(job)["trainer"]["num_iterations"] >= 1


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]+))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_the_index_names_every_page_and_script() -> None:
    names = {path.name for path in DOCS.iterdir() if path.suffix in (".md", ".py")} - {"README.md"}
    listed = set(re.findall(r"\]\((\w+\.(?:md|py))\)", (DOCS / "README.md").read_text()))
    assert names == listed, f"docs/README.md: {names ^ listed}"


def test_the_configuration_page_is_of_this_code() -> None:
    stale = script("make_configuration").page() != (DOCS / "configuration.md").read_text()
    assert not stale, "docs/configuration.md is stale; run: python docs/make_configuration.py"


@cache
def known_keys() -> set[str]:
    """Return the keys of docs/configuration.md and the sections that they are in."""
    keys = re.findall(r"^\| `([\w.]+)` \|", (DOCS / "configuration.md").read_text(), re.M)
    parts = {key.rpartition(".")[0] for key in keys}
    return {*keys, *parts, "env.reset", "env.step", "eval.json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_and_files_that_a_page_names_exist(page) -> None:
    text = page.read_text()
    if page.stem in ("coming_from_trl", "coming_from_verl"):
        text = re.sub(r"^\| [^|]+ \|", "|", text, flags=re.M)  # theirs
    groups = "|".join(part for part in schema.declared() if "=" not in part)
    for key in re.findall(rf"`((?:{groups})\.[a-z_.]+[a-z_])(?==|`| )", text):
        python = key.startswith("trainer.") and hasattr(trainer, key.partition(".")[2])
        file = (ROOT / f"{key.replace('.', '/')}.py").exists()
        known = key.removesuffix("._target_") in known_keys() or key.startswith(OPEN)
        assert known or python or file, f"{page.name}: {key}"
    for group, name in re.findall(rf"[` ]({groups}|experiment)=(\w+)", text):
        if (group, name) != ("env", "brief") and f"experiment={name}" != "experiment=mine":
            assert (ROOT / "conf" / group / f"{name}.yaml").exists(), f"{page.name}: {name}"
    folders = "conf|policies|envs|trainer|tests|docs|benchmarks"
    for name in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|yaml|md|json|svg))", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_what_names_of_other_libraries_stand_for_exists() -> None:
    for library in other_names().values():
        for file in library.keys() - {"page"}:
            for name, means in library[file].items():
                words = [*means.values()] if isinstance(means, dict) else [means.split(" = ")[0]]
                for word in " ".join(w.partition(";")[0] for w in words if w).split():
                    key = word.partition("=")[0]
                    if not re.fullmatch(r"[a-z_.]+", key):
                        continue  # of a node within the value
                    group = (ROOT / "conf" / key).is_dir()
                    python = hasattr(trainer, key.partition(".")[2])
                    assert key in known_keys() or group or python, f"{name}: {key}"


def test_the_script_by_hand_learns_and_leaves_the_built_model_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = load_policy("tiny", max_new_tokens=9)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    rewards = script("by_hand").train(policy, iterations=16)
    assert len(set(rewards)) > 8
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4]) > 0
    moved = policy.model.state_dict()
    assert any((before[name] - value).abs().max() > 1e-3 for name, value in moved.items())
    again = load_policy("tiny").model.state_dict()  # the built model is read, never written
    assert all((before[name] == value).all() for name, value in again.items())


def test_own_task_page_makes_rows_and_shows_what_a_try_prints(place, capsys) -> None:
    (place / "my.jsonl").unlink()  # the page writes it
    subprocess.run(["bash", "-euc", block("bash")], check=True)
    assert len((place / "my.jsonl").read_text().splitlines()) == 30
    exec(block("python", 1), {})
    assert capsys.readouterr().out == block("text")
    words = shlex.split(block("bash", 2))[2:]
    assert make_task(compose_checked(words)["env"]).rows("train")
    with pytest.raises(ValueError, match="allow_targets"):
        compose_checked([word for word in words if word != "allow_targets=true"])


def test_own_task_page_adds_a_reward(place) -> None:
    with (place / "my_tasks.py").open("a") as file:
        file.write('def polite(row, reply): return float("please" in reply.text)')
    (place / "configs" / "env").mkdir(parents=True)
    (place / "configs" / "env" / "brief.yaml").write_text(block("yaml") + block("yaml", 1))
    words = ["--config-dir=configs", "env=brief", "allow_targets=true", "--cfg", "job", "--resolve"]
    shown = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        env=environment(PYTHONPATH=str(place)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    task = make_task(yaml.safe_load(shown.stdout)["env"])
    row = task.rows("eval")[0]
    for text, total in (("please", 0.2 + 0.2), (row["answer"], 1.0)):
        assert task.reward(row, Reply(text, True, [])).total == pytest.approx(total)


def test_trl_page_takes_data_and_function_as_they_are(place) -> None:
    command = block("bash", page=TRL).replace("\\\n", " ")
    task = make_task(compose_checked(shlex.split(command)[2:])["env"])
    rows = [*task.rows("train"), *task.rows("eval")]
    assert {row["messages"][0]["content"] for row in rows} == {"What is 2 + 2?", "What is 3 * 4?"}
    texts = [row["columns"]["answer"] for row in rows]
    rewards = task.rewards(rows * 2, [Reply(f"It is {t}.", True, []) for t in [*texts, "7", "7"]])
    assert [(r.total, r.success) for r in rewards] == [(1, True)] * 2 + [(0, False)] * 2


def test_environments_page_shows_rewards_that_compose(place) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    shown = [yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    (rewards,) = [block["env"]["rewards"] for block in shown if "rewards" in block.get("env", {})]
    rewards["helpful"]["model"] = "experiment:rm_tiny"  # the page names a folder of one's own
    code = "def short(row, reply, *, limit): return 1\ndef run_tests(row, reply): return 1"
    code += "\ndef clear(completions, **columns): return [1] * len(completions)"
    (place / "my_rewards.py").write_text(code)
    given = json.dumps(rewards, separators=(", ", ": "))
    given = re.sub(r'"(\w+)": ', r"\1: ", given)
    env = compose_checked(["env=sort_digits", f"env.rewards={given}", "allow_targets=true"])["env"]
    assert make_task(env).part_names() == sorted(["exact", "format", *rewards])
    (mix,) = [block["task"] for block in shown if "task" in block]
    mix["tasks"]["words"]["dataset"] = str(place / "my.jsonl")
    task = make_task({**env, "rewards": {}, "task": mix})
    assert task.shares == {"words": pytest.approx(2 / 3), "facts": pytest.approx(1 / 3)}


def test_environments_page_runs_as_it_stands():
    page = (ROOT / "docs" / "environments.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert code
    exec(compile("\n".join(code), "docs/environments.md", "exec"), {})
