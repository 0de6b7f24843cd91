"""What the parent finds wrong with data files, tasks of one's own and places to write to."""

import json
from pathlib import Path
from typing import Protocol, TypedDict

import pytest
import torch
from omegaconf import ListConfig
from refusals import refusal

from conf.build import make_task
from conf.compose import compose_checked
from envs.tasks import DatasetTask, Reply, Reward, SortDigits, Task
from policies.random import fold, uniforms

ROOT = Path(__file__).parents[1]
GROUPS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in (ROOT / "conf").glob("*/*.yaml")
    if path.parent.name != "experiment" and path.stem not in ("verifiers", "openenv")  # test_others
)
ROW = {"question": "1 + 1?", "answer": "#### 2"}
OTHER = {"question": "2 + 2?", "answer": "#### 4"}
OWN = ("env=own", "allow_targets=true")
HERE = "test_config_data"
PARTIAL = "{_partial_: true}"
JUDGE = ["env.rewards.judge._target_=envs.rewards.Judge"]


class Words(Task):
    """A task of one's own without a data set."""

    def __init__(self, *, words: list[str] | None = None, share: float = 0.5) -> None:
        if share > 1:
            raise KeyError("share")
        self.words = words or ["sea"]

    def rows(self, split):
        return [{"messages": [{"role": "user", "content": word}]} for word in self.words]

    def reward(self, row, reply):
        return Reward(total=0.0, parts={}, success=False)


class Silent(Words):
    def rows(self, split):
        return [] if split == "eval" else super().rows(split)


class Bare(DatasetTask):
    """A task with a data set and no reward."""


class Handing(Bare):
    """A task that hands on what it does not know."""

    def __init__(self, dataset, *, limit: int = 3, **kwargs) -> None:
        super().__init__(dataset, **kwargs)

    def reward(self, row, reply):
        return Reward(total=0.0, parts={}, success=False)


class Loose(SortDigits):
    """A task that hands on what it does not know to one without a data set."""

    def __init__(self, bonus: float = 1.0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.bonus = bonus


class Cells(TypedDict):
    level: int


class Named(Protocol):
    name: str


def short(row, reply, *, limit: int = 9) -> float:
    return float(len(reply.text) <= limit)


def added(name: str, partial: str = "{_partial_: true, limit: 3}") -> list[str]:
    """Return the words that add a function of this file as the reward "own"."""
    keys = {"_target_": "envs.rewards.Function", "function": partial, "weight": "0.5"}
    words = [f"env.rewards.own.{key}={value}" for key, value in keys.items()]
    return [*words, f"env.rewards.own.function._target_={HERE}.{name}", "allow_targets=true"]


def needs(group: str) -> list[str]:
    """Return what a group file leaves to the user, or goes with."""
    offline = ["kl.coeff=0", "kl.measure=false"]
    return {
        "env=own": [f"env.task._target_={HERE}.Words", "allow_targets=true"],
        "env=answers": ["env.dataset=data.jsonl"],
        "env=chats": ["env.dataset=data.jsonl"],
        "env=prompts": ["env.dataset=data.jsonl", "env.columns.question=question", *added("short")],
        "tracker=accelerate": ["tracker.kind=mlflow"],
        "env=reasoning_gym": ["env.task.name=chain_sum"],
        "env=learnt_reward": ["env.task.reward_model=experiment:rm_tiny"],
        "env=preferences": ["algorithm=reward", *offline],
        "algorithm=sft": offline,
        "algorithm=minor_sft": offline,
        "algorithm=reward": ["env=preferences", *offline],
    }.get(group, [])


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(ROW)}\n{json.dumps(OTHER)}\n")
    return tmp_path


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_file_composes_with_what_it_leaves_to_the_user(group):
    name, _, file = group.partition("=")
    words = [group, *needs(group)]
    if group == "policy=qwen":
        assert compose_checked(words)["policy"]["model"].startswith("Qwen/")
    else:
        assert compose_checked(words)[name]
    if file == "own":
        assert "env.task._target_" in refusal(group)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("bin.jsonl", b"\x00\x01\xff\xfe", ["bin.jsonl, line 0: cannot be read"]),
        ("broken.jsonl", b'{"question": "a", "answer": "b"}\n{oops', ["broken.jsonl, line 2"]),
        ("cols.jsonl", b'{"problem": "a", "label": "b"}', ["'question'", "problem, label"]),
        ("empty.jsonl", b"", ["empty.jsonl", "it is empty"]),
        ("bad.parquet", b"PAR1" * 9, ["bad.parquet: cannot be read"]),
        ("cell.jsonl", b'{"question": "a", "answer": {}}', ["row 0, answer", "{} (dict)"]),
        (
            "final.jsonl",
            b'{"question": "a", "answer": "1"}\n{"question": "b", "answer": "####"}',
            ["row 1, answer", "final answer"],
        ),
    ],
)
def test_data_file_is_read_before_a_worker_starts(place, name, content, parts):
    (place / name).write_bytes(content)
    line = refusal("env=gsm8k", f"env.dataset={name}")
    assert [part for part in parts if part not in line] == []
    assert {path.name for path in place.iterdir()} == {"data.jsonl", name}


def test_columns_are_renamed_on_the_command_line(place):
    rows = [{"problem": row["question"], "solution": row["answer"]} for row in (ROW, OTHER)]
    (place / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["env.columns.question=problem", "env.columns.answer=solution"]
    task = make_task(compose_checked(["env=gsm8k", "env.dataset=d.jsonl", *words])["env"])
    rows = [row for split in ("train", "eval") for row in task.rows(split)]
    asked = {row["messages"][0]["content"]: row["final"] for row in rows}
    assert asked == {"1 + 1?": "2", "2 + 2?": "4"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["env=facts", "env.dataset=data.jsonl"], ["data.jsonl", "env=gsm8k"]),
        (["env=facts", "env.columns.answer=a"], ["env.columns={'answer': 'a'}", "Facts"]),
        (["env=sort_digits", "env.task.min_digits=x"], ["SortDigits", "int"]),
        (["env=sort_digits", "env.task.min_digits=9"], ["min_digits <= max_digits", "9 and 5"]),
        ([*OWN, f"env.task._target_={HERE}.Wrods"], ["has no Wrods; did you mean Words?"]),
        ([*OWN, f"env.task._target_={HERE}.Words", "env.task.wordss=1"], ["did you mean words?"]),
        (
            [
                *OWN,
                f"env.task._target_={HERE}.Handing",
                "env.dataset=data.jsonl",
                "env.task.limitt=3",
            ],
            ["env.task.limitt", f"{HERE}.Handing takes", "did you mean limit?"],
        ),
        (["env=gsm8k", "env.dataset=./rows"], ["rows: cannot be read"]),
        (
            [*OWN, "env.task._target_=no_such_file.Task"],
            [
                "No module named 'no_such_file'",
                "PYTHONPATH",
            ],
        ),
        ([*OWN, "env.task._target_=collections.Counter"], ["envs.tasks.Task", "Counter"]),
        (
            [*OWN, f"env.task._target_={HERE}.short", "env.dataset=data.jsonl"],
            [f"{HERE}.short", "reads none"],
        ),
        (["env=prompts", "env.dataset=data.jsonl"], ["'prompt', got question, answer"]),
        ([*OWN, f"env.task._target_={HERE}.Words", "env.task.words=5"], ["Words: TypeError", HERE]),
        ([*OWN, f"env.task._target_={HERE}.Words", "env.task.share=2"], ["KeyError", HERE]),
        ([*OWN, f"env.task._target_={HERE}.Silent"], ["rows('eval')", "got none"]),
        ([*OWN, f"env.task._target_={HERE}.Bare"], ["env.dataset="]),
        (
            [*OWN, f"env.task._target_={HERE}.Bare", "env.dataset=data.jsonl"],
            ["rewards nothing", "override reward"],
        ),
        (
            [*OWN, f"env.task._target_={HERE}.Words", "algorithm=sft", *needs("algorithm=sft")],
            ["override demonstrations"],
        ),
        (["algorithm=reward", *needs("algorithm=sft")], ["Facts, preferences()", "got none"]),
        (["env=facts", "env.task=chain_sum"], ["env.task", "chain_sum"]),
        (["env=reasoning_gym", "env.task.name=chain_sun"], ["'chain_sun'", "env.task.name"]),
        (
            ["env=reasoning_gym", "env.task.name=chain_sum", "env.task.config.min_term=2"],
            ["'min_term'", "env.task.name, config"],
        ),
        (["env=mix", "env.task.weights.words=1"], ["weight for each task"]),
        (["env.rewards.a=3"], ["env.rewards.a", "_target_", "3"]),
        (
            ["env.rewards.a._target_=envs.rewards.Jugde"],
            ["has no Jugde", "did you mean Judge?"],
        ),
        ([*JUDGE, "env.rewards.judge.url=x", "env.rewards.judge.model=m"], ["http://"]),
        (
            [*JUDGE, "env.rewards.judge.weight=high"],
            ["env.rewards.judge"],
        ),
        (added("short")[:-1], ["env.rewards.own.function._target_", "allow_targets"]),
        (added("short", "{}"), ["env.rewards.own.function", "_partial_: true"]),
        (
            ["env.rewards.own={_target_: envs.rewards.TRLFunction, function: my.own}"],
            ["env.rewards.own", "my.own"],
        ),
        (added("shrot"), ["shrot"]),
    ],
)
def test_task_that_cannot_be_made_or_used_is_one_line(words, parts):
    message = refusal(*words)
    assert [part for part in parts if part not in message] == []


def test_keywords_that_are_handed_on_are_given_what_a_base_names():
    words = ["experiment=grpo_tiny", *OWN, f"env.task._target_={HERE}.Loose"]
    task = make_task(compose_checked([*words, "env.task.num_rows=7", "env.task.bonus=2"])["env"])
    assert (len(task.rows("train")), task.bonus) == (7, 2)
    assert "env.dataset=data.jsonl" in refusal(*words, "env.dataset=data.jsonl")
    handing = [*OWN, f"env.task._target_={HERE}.Handing", "env.dataset=data.jsonl"]
    env = compose_checked([*handing, "env.eval_dataset=data.jsonl"])["env"]
    assert [len(make_task(env).rows(split)) for split in ("train", "eval")] == [2, 2]


def test_words_of_hydra_are_no_arguments():
    words = ["env=own", f"env.task._target_={HERE}.Words", "env.task.words=[sea]", *added("short")]
    words += ["env.task._convert_=none", "env.rewards.own._recursive_=true"]
    task = make_task(compose_checked(words)["env"])
    assert type(task.task.words) is ListConfig


def test_rewards_of_a_configuration_are_added_to_the_tasks_own():
    env = compose_checked(["env=sort_digits", "env.task_weight=0.5", *added("short")])["env"]
    task = make_task(env)
    row, chat = task.task.row("21"), [{"role": "user", "content": ""}]
    assert task.reward(row, Reply("12", True, chat)).total == pytest.approx(0.5 + 0.5)
    assert task.reward(row, Reply("1200", True, chat)).parts["own"] == 0, "limit=3"
    assert type(make_task(compose_checked(["env=sort_digits"])["env"])).__name__ == "SortDigits"


def test_task_that_rewards_nothing_takes_those_of_the_configuration(place):
    words = [*OWN[:1], f"env.task._target_={HERE}.Bare", "env.dataset=data.jsonl", *added("short")]
    task = make_task(compose_checked(words)["env"])
    assert task.rewards(task.rows("eval")[:1], [Reply("ab", True, [])])[0].total == 0.5


def test_own_task_with_data_sees_all_cells_of_a_row(place):
    rows = [ROW | {"level": 7}, OTHER | {"level": 7}]
    (place / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Bare("d.jsonl", columns={"question": None})
    assert task.rows("train")[0]["columns"] in rows


def test_largest_and_smallest_seed_reach_the_sampler():
    for seed in (2**63 - 1, -(2**63)):
        assert compose_checked([f"seed={seed}"])["seed"] == seed
        torch.Generator().manual_seed(seed)
        assert 0 <= uniforms(fold(seed, 0)[None], torch.tensor([0])).item() < 1
    with pytest.raises((RuntimeError, OverflowError, ValueError), match=r"[Oo]verflow"):
        fold(2**63)


def test_chat_template_may_be_a_file(place):
    template = place / "my.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
                        "{% endfor %}")  # fmt: skip
    compose_checked([f"policy.chat_template={template}"])
