"""Environments of the real verifiers (make test-others), checked by hand."""

import signal
import sys

import pytest
from support.runs import refusal, train_here

from envs.tasks import Response, Verifiers
from envs.tasks.task import assistant, user

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("default")]  # their warnings
TINY = (
    *("experiment=grpo_tiny", "policy.model=tiny", "tracker=jsonl", "eval.every=0"),
    *("trainer.prompts_per_iteration=4", "algorithm.group_size=4", "eval.max_rows=4"),
    *("env.max_turns=3", "allow_targets=true"),
)
ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset

async def exact(completion, answer):
    return float(completion[-1]["content"] == answer)

def short(completion, state, limit=6):
    return 1.0 - min(len(completion[-1]["content"]), limit) / limit

def longest(completions) -> list[float]:
    sizes = [len(said[-1]["content"]) for said in completions]
    return [float(size == max(sizes)) for size in sizes]

def broken(completion, answer):
    raise KeyError(answer)

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

class Again(vf.MultiTurnEnv):
    @vf.stop
    async def one(self, state):
        return any("1" in step["completion"][-1]["content"] for step in state["trajectory"])

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"{2 - len(state['trajectory'])} left"}]

def load_environment(kind="single", second="short"):
    rows = [{"question": f"Say {i}", "answer": str(i)} for i in range(40)]
    rubric = vf.Rubric(funcs=[exact, globals()[second]], weights=[1.0, 0.5])
    given = {"dataset": Dataset.from_list(rows), "rubric": rubric, "system_prompt": "Be brief."}
    if kind == "again":
        return Again(max_turns=3, **given)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=2, **given)
    return vf.SingleTurnEnv(**given)
'''


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Put the module of an environment where Python finds it."""
    (tmp_path / "shop_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield "shop_env"
    sys.modules.pop("shop_env", None)


def play(task, row: dict, *texts: str) -> tuple[list, list[str]]:
    """Say the texts in one chat; return the rewards and what was heard."""
    said, heard, rewards = list(row["messages"]), [], []
    for text in texts:
        said.append(assistant(text))
        response = Response(text, True, list(said))
        rewards += task.rewards([row], [response])
        said += (answer := task.respond(row, response))
        heard += [message["content"] for message in answer]
    return rewards, heard


def test_verifiers_give_rows_and_the_rewards_of_the_rubric(shop):
    words = ["experiment=grpo_tiny", "env=verifiers", f"env.task.name={shop}"]
    assert "allow_targets=true" in refusal(*words)
    assert shop not in sys.modules, "imported on the user's word alone"
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    task = Verifiers(shop)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    train, held_out = ([row["messages"][-1] for row in task.rows(s)] for s in ("train", "eval"))
    assert len(held_out) == 4, "a tenth, where the environment has no data for evaluation"
    every = [user(f"Say {i}") for i in range(40)]
    assert sorted([*train, *held_out], key=every.index) == every
    ((done,), heard) = play(task, task.rows("train")[0], "abc")
    assert (done.total, done.success, heard) == (0.25, False, [])
    assert done.parts == {"exact": 0.0, "short": 0.5, "num_turns": 1.0}
    assert task.part_names() == sorted(done.parts)


def test_rewards_see_all_responses_to_a_prompt_or_fail_and_drop_them(shop):
    task = Verifiers(shop, arguments={"second": "longest"})
    first, second = task.rows("train")[:2]
    rows, texts = [first] * 3 + [second] * 2, ["a", "bb", "cc", "a", ""]
    pairs = zip(rows, texts, strict=True)
    got = task.rewards(rows, [Response(t, True, [*r["messages"], assistant(t)]) for r, t in pairs])
    assert [reward.parts["longest"] for reward in got] == [0, 1, 1, 1, 0]
    with pytest.warns(UserWarning, match="shop_env"):
        ((done,), _) = play(Verifiers(shop, arguments={"second": "broken"}), first, "a")
    assert (done.errors, done.dropped) == (1, True)


@pytest.mark.parametrize(
    ("kind", "most", "texts", "heard"),
    [
        ("again", 3, ["a", "b", "c"], ["1 left", "0 left"]),
        ("again", 3, ["a", "1"], ["1 left"]),
        ("tools", 2, ['<tool name="add">{"a": 2, "b": 3}</tool>', "5"], ["5"]),
    ],
)
def test_a_chat_goes_on_until_verifiers_or_max_turns_end_it(shop, kind, most, texts, heard):
    task = Verifiers(shop, arguments={"kind": kind}, max_turns=most)
    row = task.rows("train")[3]
    rewards, found = play(task, row, *texts)
    assert found == heard
    right = row["messages"][-1]["content"] == f"Say {texts[-1]}"
    want = [0.0] * (len(texts) - 1) + [right + 0.5 * (1 - 1 / 6)]
    assert [reward.total for reward in rewards] == pytest.approx(want)
    assert rewards[-1].parts["num_turns"] == len(texts)


def test_a_run_in_verifiers_learns_from_the_rubrics_own_rewards(shop, tmp_path):
    words = ["env=verifiers", f"env.task.name={shop}", "env.task.arguments.kind=again"]
    found = train_here(tmp_path / "run", *TINY, *words, "trainer.num_iterations=2")
    found = [line for line in found if "reward/raw_mean" in line]
    assert len(found) == 2
    for line in found:
        total = line["reward_part/exact"] + 0.5 * line["reward_part/short"]
        assert line["reward/raw_mean"] == pytest.approx(total, abs=1e-6)
        assert line["reward/errors"] == 0
