"""The chat environment: what reset and step write, turn by turn."""

import math

import pytest
import torch
from contracts import Words
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs.chat_env import ChatEnv
from envs.tasks.task import Reply, Reward, Task, assistant, user
from policies.chats.history import History
from policies.random import fold

ASKED = ["One?", "Two?", "Three?"]


class Counting(Task):
    """Earn the number of this turn; the row says how many turns the chat has."""

    def __init__(self) -> None:
        self.seen: list[Reply] = []

    def reward(self, row: dict, reply: Reply) -> Reward:
        self.seen.append(reply)
        turn = sum(m["role"] == "assistant" for m in reply.messages)
        return Reward(total=turn, parts={"turn": turn, "half": turn / 2}, success=turn == 2)

    def respond(self, row: dict, reply: Reply) -> list[dict]:
        turn = sum(m["role"] == "assistant" for m in reply.messages)
        return [] if turn >= row["turns"] else [{"role": "tool", "content": f"result {turn}"}]


def row(text: str, turns: int = 1) -> dict:
    return {"messages": [user(text)], "turns": turns}


def data(*rows: dict) -> TensorDict:
    td = TensorDict({"stream": fold(3, torch.arange(len(rows)))}, batch_size=[len(rows)])
    return td.set("row", NonTensorStack(*[NonTensorData(r) for r in rows]))


def reply(td: TensorDict, texts: str, complete: list[bool] | None = None) -> TensorDict:
    """Write the replies, a word each, as a policy would."""
    words = texts.split()
    pairs = zip(words, complete or [True] * len(words), strict=True)
    said = History.from_chats([[assistant(t) | {"is_complete": c}] for t, c in pairs])
    full = td["history"].prompt.extend(said, inplace=False, dim=-1)
    return td.set(("history", "full"), full)


def test_reset_repeats_each_prompt_in_a_row_with_a_stream_of_its_own():
    env = ChatEnv(Counting(), group_size=2)
    td = env.reset(data(*map(row, ASKED)))
    asked = [chat[-1]["content"] for chat in td["history", "prompt"].chats()]
    assert asked == [t for t in ASKED for _ in range(2)]
    assert td["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
    want = [int(fold(fold(3, i), s)) for i in range(3) for s in range(2)]
    assert td["stream"].tolist() == want
    assert len(set(want)) == 6
    assert [r["messages"][0]["content"] for r in list(td["row"])] == asked
    numbered = data(*map(row, ASKED)).set("group_id", torch.tensor([7, 5, 9]))
    assert env.reset(numbered)["group_id"].tolist() == [7, 7, 5, 5, 9, 9], "the caller's own"


def test_a_query_is_enough_without_a_task():
    env = ChatEnv(group_size=2, data_key="question", system_prompt="Be brief.")
    out = env.reset(TensorDict({"question": ASKED}, batch_size=[3]))
    chats = out["history", "prompt"].chats()
    system = {"role": "system", "content": "Be brief."}
    assert chats[4:] == [[system, user("Three?")]] * 2
    out = env.step(reply(out, "yes " * 6))
    assert out["next", "reward"].tolist() == [[0.0]] * 6
    assert not out["next", "done"].any(), "only a task or a turn limit ends an episode"
    assert list(out["next", "question"]) == [t for t in ASKED for _ in range(2)]
    own = [{"role": "system", "content": "Mine."}, user("Hi")]
    out = env.reset(TensorDict({"question": [own]}, batch_size=[1]))
    assert out["history", "prompt"].chats() == [own] * 2, "it has a system prompt"


def test_step_writes_the_outcome_of_each_chat():
    task = Counting()
    env = ChatEnv(task, max_turns=3)
    td = env.reset(data(row("One?", 1), row("Two?", 2), row("Three?", 9)))
    out = env.step(reply(td, "a b c", [True, True, False]))["next"]
    want = {"reward": [[1.0]] * 3, "success": [[False]] * 3, "done": [[True], [False], [False]]}
    assert {key: out[key].tolist() for key in want} == want
    assert set(out["reward_part"].keys()) == {"turn", "half"}
    assert out["reward_part", "half"].tolist() == [[0.5]] * 3
    assert [(r.text, r.complete) for r in task.seen] == [("a", True), ("b", True), ("c", False)]
    assert task.seen[0].messages == [user("One?"), assistant("a")]
    chats = out["history", "prompt"].chats()
    assert [c[-1]["role"] for c in chats] == ["assistant", "tool", "tool"]
    assert chats[2][-1]["content"] == "result 1"


def test_how_an_episode_ends():
    """(turns of the row, reply complete) -> after a limit of two turns."""
    env = ChatEnv(Counting(), max_turns=2)
    td = env.reset(data(row("a", 2), row("b", 2), row("c", 5), row("d", 5)))
    complete = [True, False, True, False]
    out = env.step(reply(td, "x " * 4, complete))["next"]
    assert not out["done"].any()
    out = env.step(reply(out, "y " * 4, complete))["next"]
    assert out["terminated"].flatten().tolist() == [True, False, False, False]
    assert out["truncated"].flatten().tolist() == [False, True, True, True]
    assert out["done"].all()
    assert out["success"].all(), "the second turn of Counting is a success"


class Lenient(Words):
    """Report a part only where it applies; earn no number for a bad word."""

    def reward(self, row: dict, reply: Reply) -> Reward:
        parts = {"length": 1.0} | ({"polite": 1.0} if "please" in reply.text else {})
        return Reward(total=math.nan if "bad" in reply.text else 1.0, parts=parts, success=True)


def test_rewards_that_cannot_be_averaged_are_an_error():
    """A mean over the replies needs the part of each, and numbers."""
    start = data(*Words().rows("train")[:2])
    env = ChatEnv(Lenient())
    env.step(reply(env.reset(start), "a b"))
    for made, texts, says in (
        (env, "please please", "'length', 'polite'"),
        (ChatEnv(Lenient()), "a please", "'length', 'polite'"),
        (env, "a bad", r"Lenient.*'bad'"),
    ):
        with pytest.raises(ValueError, match=says):
            made.step(reply(made.reset(start), texts))


def test_what_is_missing_is_named():
    env = ChatEnv(Counting())
    with pytest.raises(RuntimeError, match="got None"):
        env.reset()
    with pytest.raises(RuntimeError, match="'row' or 'query'"):
        env.reset(data(row("Hi")).select("stream"))
    with pytest.raises(ValueError, match="assistant's '4'"):
        env.reset(data({"messages": [user("2 + 2?"), assistant("4")]}))
