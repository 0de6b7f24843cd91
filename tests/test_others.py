"""Environments of the real verifiers and OpenEnv (make test-others), checked by hand."""

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from refusals import refusal
from runs import lines, metrics, train_here

from envs.tasks import OpenEnv, Reply, Verifiers
from envs.tasks.task import assistant, user

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("default")]  # their warnings
TINY = (
    "experiment=grpo_tiny",
    "policy.model=tiny",
    "tracker=jsonl",
    "trainer.prompts_per_iteration=4",
    "algorithm.group_size=4",
    "eval.every=0",
    "eval.max_rows=4",
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
    """Tell how many tries are left; a one ends the game."""

    async def setup_state(self, state):
        state["left"] = 2
        return state

    @vf.stop
    async def one(self, state):
        return any("1" in step["completion"][-1]["content"] for step in state["trajectory"])

    async def env_response(self, messages, state, **_):
        state["left"] -= 1
        return [{"role": "user", "content": f"{state['left']} left"}]

def load_environment(kind="single", size=40, held_out=0, extra=None):
    rows = [{"question": f"Say {i}", "answer": str(i)} for i in range(size)]
    funcs, weights = [exact, short], [1.0, 0.5]
    if extra:
        funcs, weights = [*funcs, globals()[extra]], [*weights, 0.25]
    given = {
        "dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:held_out]) if held_out else None,
        "rubric": vf.Rubric(funcs=funcs, weights=weights),
        "system_prompt": "Be brief.",
    }
    if kind == "again":
        return Again(max_turns=3, **given)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=2, **given)
    return vf.SingleTurnEnv(**given)
'''
SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    word: str

class Seen(Observation):
    text: str = ""

class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, offset=0, **_):
        self.digit = (random.Random(seed).randrange(10) + offset) % 10
        return Seen(text=f"Game {seed}: a digit?")

    def step(self, action, timeout_s=None, **_):
        word = action.word.strip()
        if not word[:1].isdigit():
            return Seen(text="no digit", reward=-0.5, done=True)
        if int(word[0]) == self.digit:
            return Seen(text="yes", reward=1.0, done=True)
        return Seen(text=("> " if int(word[0]) < self.digit else "< ") + word[0], reward=0.25)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Words, Guess, Seen, max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Put the module of an environment where Python finds it."""
    (tmp_path / "shop_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield "shop_env"
    sys.modules.pop("shop_env", None)


@pytest.fixture(scope="module", params=[1, 32], ids=["one_session", "many_sessions"])
def server(request, tmp_path_factory):
    """Start the server of a word game on a free port; return its address and its sessions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen([sys.executable, str(script), str(port), str(request.param)])
    try:
        limit = time.perf_counter() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                assert process.poll() is None
                assert time.perf_counter() < limit, "the server did not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", request.param
    finally:
        process.kill()
        process.wait()


def say(row: dict, *messages: dict, complete: bool = True) -> Reply:
    return Reply(messages[-1]["content"], complete, [*row["messages"], *messages])


def by_hand(kind: str, answer: str, text: str) -> float:
    """Return what the library's own rubric gives a text, called without leash."""
    import shop_env
    from verifiers.types import AssistantMessage, State

    env = shop_env.load_environment(kind)
    state = State(input={"answer": answer}, trajectory=[], completion=None)
    state["prompt"], state["completion"] = [], [AssistantMessage(content=text)]
    asyncio.run(env.rubric.score_rollout(state))
    return state["reward"]


def test_a_single_turn_environment_gives_rows_and_rewards(shop):
    task = Verifiers(shop, arguments={"held_out": 3})
    assert [len(task.rows(split)) for split in ("train", "eval")] == [40, 3]
    assert task.part_names() == ["exact", "num_turns", "short"]
    rows = task.rows("train")[:4]
    assert [row["messages"][-1] for row in rows] == [user(f"Say {i}") for i in range(4)]
    replies = [
        say(row, assistant(text)) for row, text in zip(rows, ("0", "abc", "", "44"), strict=True)
    ]
    rewards = task.rewards(rows, replies)
    want = [by_hand("single", str(i), reply.text) for i, reply in enumerate(replies)]
    assert [reward.total for reward in rewards] == pytest.approx(want)
    assert rewards[1].parts == {"exact": 0.0, "short": 0.5, "num_turns": 1.0}
    assert [reward.success for reward in rewards] == [True, False, True, False], "0.5 and more"
    assert [task.respond(row, reply) for row, reply in zip(rows, replies, strict=True)] == [[]] * 4


def test_a_tenth_of_the_data_is_held_out_where_the_environment_has_none(shop):
    task = Verifiers(shop)
    said = {
        split: {row["messages"][-1]["content"] for row in task.rows(split)}
        for split in ("train", "eval")
    }
    assert (len(said["train"]), len(said["eval"])) == (36, 4)
    assert not said["train"] & said["eval"]


def test_a_chat_of_several_turns_ends_by_the_environment_or_by_max_turns(shop):
    for most, texts, followed in (
        (3, ["a", "b", "c"], ["1 left", "0 left"]),
        (2, ["a", "b"], ["1 left"]),
        (3, ["a", "1"], ["1 left"]),
    ):
        task = Verifiers(shop, arguments={"kind": "again"}, max_turns=most)
        row, said, heard, rewards = task.rows("train")[0], [], [], []
        for text in texts:
            said.append(assistant(text))
            reply = say(row, *said)
            rewards += task.rewards([row], [reply])
            said += task.respond(row, reply)
            heard += [message["content"] for message in task.respond(row, reply)]
        assert heard == followed
        answer = row["messages"][-1]["content"].removeprefix("Say ")
        assert [r.total for r in rewards[:-1]] == [0.0] * (len(texts) - 1)
        assert rewards[-1].total == pytest.approx(by_hand("again", answer, texts[-1]))
        assert rewards[-1].parts["num_turns"] == len(texts)
    with pytest.raises(ValueError, match=r"env\.max_turns"):
        Verifiers(shop, arguments={"kind": "again"})


def test_rewards_that_compare_replies_see_those_to_one_prompt(shop):
    task = Verifiers(shop, arguments={"extra": "longest"})
    first, second = task.rows("train")[:2]
    rows, texts = [first] * 3 + [second] * 2, ["a", "bb", "cc", "a", ""]
    got = task.rewards(rows, [say(r, assistant(t)) for r, t in zip(rows, texts, strict=True)])
    assert [reward.parts["longest"] for reward in got] == [0, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="compares replies to"):
        Verifiers(shop, arguments={"kind": "again", "extra": "longest"}, max_turns=3)


def test_calls_of_tools_are_read_and_answered(shop):
    task = Verifiers(shop, arguments={"kind": "tools"}, max_turns=2)
    row = task.rows("train")[0]
    call = assistant('Hm. <tool name="add">{"a": 2, "b": 3}</tool>')
    reply = say(row, call)
    task.rewards([row], [reply])
    assert task.respond(row, reply) == [{"role": "tool", "content": "5"}]
    (done,) = task.rewards([row], [say(row, call, *task.respond(row, reply), assistant("5"))])
    assert (done.parts["add_calls"], done.parts["num_turns"]) == (1, 2)


def test_a_reward_function_that_fails_drops_its_reply_and_is_counted(shop):
    task = Verifiers(shop, arguments={"extra": "broken"})
    row = task.rows("train")[0]
    with pytest.warns(UserWarning, match="shop_env: KeyError"):
        (reward,) = task.rewards([row], [say(row, assistant("a"))])
    assert (reward.errors, reward.dropped) == (1, True)


def test_an_environment_is_imported_on_the_users_word_and_leaves_signals_alone(shop):
    words = ["experiment=grpo_tiny", "env=verifiers", f"env.task={shop}"]
    assert "allow_targets=true" in refusal(*words)
    assert shop not in sys.modules
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Verifiers(shop)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(Exception, match="not_there"):
        Verifiers("not_there")


def test_a_run_in_verifiers_learns_from_the_rubrics_own_rewards(shop, tmp_path):
    words = [*TINY, "env=verifiers", f"env.task={shop}", "allow_targets=true"]
    words += ["env.task.arguments.kind=again", "env.max_turns=3", "trainer.num_iterations=2"]
    found = train_here(tmp_path / "run", *words)
    found = [line for line in found if "reward/raw_mean" in line]
    assert len(found) == 2
    for line in found:
        total = line["reward_part/exact"] + 0.5 * line["reward_part/short"]
        assert line["reward/raw_mean"] == pytest.approx(total, abs=1e-6)
        assert line["reward/errors"] == 0


def played(seed: int, texts: list[str]) -> tuple[float, list[str]]:
    """Return what a game of the server is worth, and what it says, by its rules."""
    digit, total, said = random.Random(seed).randrange(10), 0.0, []
    for text in texts:
        word = text.strip()
        if not word[:1].isdigit():
            return total - 0.5, said
        if int(word[0]) == digit:
            return total + 1, said
        said.append(f"{'>' if int(word[0]) < digit else '<'} {word[0]}")
        total += 0.25
    return total, said


def test_games_of_a_server_are_played_by_their_rules_with_any_number_of_sessions(server):
    url, sessions = server
    task = OpenEnv(url, observation="text", action="word", at_once=sessions, right_from=1.0)
    rows, games = (
        task.rows("train")[2:8],
        [["1", "9", "4"], ["5", "x"], ["7"], list("024"), ["a"], ["3"]],
    )
    assert rows[0]["messages"] == [user("Game 2: a digit?")]
    assert task.rows("eval")[0]["messages"] == [user(f"Game {1 << 30}: a digit?")]
    totals, chats = [0.0] * 6, [[] for _ in games]
    for turn in range(3):
        on = [i for i, game in enumerate(games) if turn < len(game) and len(chats[i]) == 2 * turn]
        for i in on:
            chats[i].append(assistant(games[i][turn]))
        replies = [say(rows[i], *chats[i]) for i in on]
        rewards = task.rewards([rows[i] for i in on], replies)
        for i, reply, reward in zip(on, replies, rewards, strict=True):
            totals[i] += reward.total
            assert reward.parts == {"reward": reward.total}
            assert reward.success == (totals[i] >= 1)
            chats[i] += task.respond(rows[i], reply)
    task.close()
    for row, game, total, chat in zip(rows, games, totals, chats, strict=True):
        want, said = played(row["seed"], game)
        assert total == want
        assert [m["content"] for m in chat if m["role"] == "user"] == said


def test_faults_of_a_server_are_named(server):
    url = server[0]
    for keys, says in (
        ({"observation": "txt"}, r"env\.task\.observation"),
        ({"url": "http://127.0.0.1:9"}, "reset: "),
        ({"action": "wrod"}, "step: "),
    ):
        task = OpenEnv(**{"url": url, "observation": "text", "action": "word", **keys})
        with pytest.raises(ValueError, match=says):
            task.rewards(task.rows("train")[:1], [say(task.rows("train")[0], assistant("1"))])


def by_length(text: str) -> dict:
    """Return an action that any policy can take."""
    return {"word": str(len(text) % 10)}


def test_a_run_on_a_server_goes_on_to_the_bit(server, tmp_path):
    url, sessions = server
    words = [*TINY, "env=openenv", f"env.task.url={url}", "env.max_turns=3", "checkpoint.every=1"]
    words += ["env.task.observation=text", f"env.task.at_once={min(8, sessions)}"]
    words += ["env.task.action={_target_: test_others.by_length, _partial_: true}"]
    words.append("allow_targets=true")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_here(whole, *words, "trainer.num_iterations=3")
    if sessions > 1:  # the first run keeps the only one
        train_here(parts, *words, "trainer.num_iterations=2")
        train_here(parts, *words, f"resume={parts}", "trainer.num_iterations=3")
        ran = [[m for m in metrics(run) if m["progress/iteration"] == 3] for run in (whole, parts)]
        assert ran[0] == ran[1] != []
    for row in (row for row in lines(whole / "transcripts.jsonl") if row["kind"] == "train"):
        assert row["reward"] == row["parts"]["reward"]
