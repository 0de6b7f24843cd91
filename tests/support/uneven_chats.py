"""A task of chats with one, two and three turns; rows and responses as environments read them."""

from collections.abc import Sequence

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs.tasks.task import Response, Reward, Task, assistant, user
from policies.chats.history import History
from policies.random import fold

FEW_SHOT = [user("Sort 2 1"), assistant("1 2"), user("Sort 4 3")]


class Uneven(Task):
    """Rows of one, two and three turns; turn k earns k, also when the chat is cut."""

    def rows(self, split: str) -> list[dict]:
        return [{"messages": FEW_SHOT, "turns": n} for n in (1, 2, 3)]

    def reward(self, row: dict, response: Response) -> Reward:
        turn = sum(m["role"] == "assistant" for m in response.messages) - 1
        return Reward(total=turn, parts={"turn": float(turn)}, success=turn == row["turns"])

    def respond(self, row: dict, response: Response) -> list[dict]:
        turn = sum(m["role"] == "assistant" for m in response.messages) - 1
        return [] if turn >= row["turns"] else [user("again")]


def data(*rows: dict) -> TensorDict:
    """Return what an environment is reset with: rows, each with a stream of its own."""
    td = TensorDict({"stream": fold(0, torch.arange(len(rows)))}, batch_size=[len(rows)])
    return td.set("row", NonTensorStack(*[NonTensorData(row) for row in rows]))


def responded(td: TensorDict, *texts: str, complete: Sequence[bool] = ()) -> TensorDict:
    """Write the responses as a policy would, in history mode."""
    pairs = zip(texts, complete or [True] * len(texts), strict=True)
    said = History.from_chats([[assistant(t) | {"is_complete": c}] for t, c in pairs])
    full = td["history"].prompt.extend(said, inplace=False, dim=-1)
    return td.set(("history", "full"), full)


def start(task: Task, count: int | None = None) -> TensorDict:
    return data(*list(task.rows("train"))[:count])
