"""What README and docs promise: commands compose, examples run, links lead somewhere."""

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import environment, lines

from conf import names
from conf.build import make_task
from conf.compose import compose_checked
from conf.sweep import list_jobs
from envs.tasks import Reply
from policies.load import load_policy

ROOT = Path(__file__).parent.parent
TRL = "docs/coming_from_trl.md"
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def commands() -> list[str]:
    """Return every train.py command of the pages that can be composed as it stands."""
    text = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
    found = re.findall(r"python train\.py(?: [^\n`|#(]*)?", text)
    needs_a_run = ("resume=", "--cfg")
    return sorted({c.strip() for c in found if not any(n in c for n in needs_a_run)})


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


def block(language: str, number: int = 0, *, page: str = "docs/own_task.md") -> str:
    """Return a block of code of a page."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)[number]


@pytest.mark.parametrize("command", commands())
def test_documented_command_composes(command, place) -> None:
    named = command.replace("/path/to/model", str(place / "model")).replace("<date_time>", "old")
    named = named.replace("outputs/sft/model", str(place / "model"))
    words = shlex.split(named)[2:]
    overrides = [w for w in words if not w.startswith("-") and "..." not in w]
    if {"env=verifiers", "env=openenv"} & {*overrides}:
        return  # needs their packages: test_others.py
    if overrides[-1:] == ["policy.engine=vllm"]:
        return  # needs its package: test_vllm_runs.py
    if "env=brief" in overrides:
        return  # needs the file that the page shows: see below
    jobs = list_jobs(overrides) if "-m" in words else [overrides]
    for job in (jobs[0], jobs[-1]) if jobs[1:] else jobs:
        assert compose_checked(job)["trainer"]["num_iterations"] >= 1


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_script_by_hand_learns_and_leaves_the_built_model_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("by_hand", ROOT / "docs/by_hand.py")
    by_hand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    policy = load_policy("tiny", max_new_tokens=9)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    rewards = by_hand.train(policy, iterations=16)
    assert len(set(rewards)) > 8
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4]) > 0
    moved = policy.model.state_dict()
    assert any((before[name] - value).abs().max() > 1e-3 for name, value in moved.items())
    again = load_policy("tiny").model.state_dict()  # the built model is read, never written
    assert all((before[name] == value).all() for name, value in again.items())


def test_own_task_page_shows_what_a_try_prints(place, capsys) -> None:
    exec(block("python", 1), {})
    assert capsys.readouterr().out == block("text")


def test_own_task_page_runs_as_it_stands_at_tiny_size(place) -> None:
    (place / "my.jsonl").unlink()  # the page writes it
    tiny = (
        "experiment=grpo_tiny policy.model=tiny trainer.num_iterations=2 "
        "trainer.prompts_per_iteration=4 "
        "algorithm.group_size=2 eval.num_samples=1 checkpoint.every=0 output_dir=run"
    )
    leash = shlex.join([sys.executable, str(ROOT / "train.py")])
    script = block("bash") + block("bash", 2).strip().replace("python train.py", leash)
    done = subprocess.run(
        ["bash", "-euc", f"{script} {tiny}"],
        env=environment(PYTHONPATH=str(place)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = lines(place / "run" / "metrics.jsonl")
    assert len(rows) == 3
    assert 0 <= rows[-1]["reward_part/short"] <= 1
    assert len(lines(place / "my.jsonl")) == 30
    prompts = {line["prompt"] for line in lines(place / "run" / "transcripts.jsonl")}
    assert all(prompt.startswith("What is the opposite of ") for prompt in prompts)


def test_own_task_page_quotes_what_is_said_without_permission(place) -> None:
    words = shlex.split(block("bash", 2))[2:]
    with pytest.raises(ValueError, match="allow_targets") as caught:
        compose_checked([word for word in words if word != "allow_targets=true"])
    assert f"error: {caught.value}" in (ROOT / "docs/own_task.md").read_text().splitlines()


def test_own_task_page_adds_a_reward(place, monkeypatch) -> None:
    polite = 'def polite(row, reply): return float("please" in reply.text)'
    assert polite in (ROOT / "docs/own_task.md").read_text()
    with (place / "my_tasks.py").open("a") as file:
        file.write(polite)
    shutil.copytree(ROOT / "conf", place / "conf")
    (place / "conf" / "env" / "brief.yaml").write_text(block("yaml") + block("yaml", 1))
    monkeypatch.setattr(names, "FOLDER", place / "conf")
    task = make_task(compose_checked(["env=brief", "allow_targets=true"])["env"])
    row = task.rows("eval")[0]
    for text, total in (("please", 0.2 + 0.2), (row["answer"], 1.0)):
        assert task.reward(row, Reply(text, True, [])).total == pytest.approx(total)


def test_trl_page_takes_data_and_function_as_they_are(place) -> None:
    command = block("bash", page=TRL).replace("\\\n", " ")
    config = compose_checked(shlex.split(command)[2:])
    before = ast.parse(block("python", 1, page=TRL))  # what it says to TRL is what leash gets
    calls = [node for node in ast.walk(before) if isinstance(node, ast.Call)]
    told = {k.arg: getattr(k.value, "value", None) for call in calls for k in call.keywords}
    assert told["num_generations"] == config["algorithm"]["group_size"]
    assert told["max_completion_length"] == config["policy"]["max_new_tokens"]
    assert told["beta"] == config["kl"]["coeff"]
    assert told["model"] == config["policy"]["model"]
    assert told["data_files"] == config["env"]["dataset"]
    task = make_task(config["env"])
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
    assert task.shares == {"words": pytest.approx(2 / 3), "sums": pytest.approx(1 / 3)}


def test_environments_page_runs_as_it_stands():
    page = (ROOT / "docs" / "environments.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert len(code) == 3
    exec(compile("\n".join(code), "docs/environments.md", "exec"), {})
