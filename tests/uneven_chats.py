"""A task whose chats have one, two and three turns."""

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs.tasks.task import Reply, Reward, Task
from policies.random import fold

FEW_SHOT = [
    {"role": "user", "content": "Sort 2 1"},
    {"role": "assistant", "content": "1 2"},
    {"role": "user", "content": "Sort 4 3"},
]


class Uneven(Task):
    """Rows of one, two and three turns; turn k earns k, also when the chat is cut."""

    def rows(self, split: str) -> list[dict]:
        return [{"messages": FEW_SHOT, "turns": n} for n in (1, 2, 3)]

    def reward(self, row: dict, reply: Reply) -> Reward:
        turn = sum(m["role"] == "assistant" for m in reply.messages) - 1
        return Reward(total=turn, parts={"turn": float(turn)}, success=turn == row["turns"])

    def respond(self, row: dict, reply: Reply) -> list[dict]:
        turn = sum(m["role"] == "assistant" for m in reply.messages) - 1
        return [] if turn >= row["turns"] else [{"role": "user", "content": "again"}]


def start(task: Task, count: int | None = None) -> TensorDict:
    rows = list(task.rows("train"))[:count]
    td = TensorDict({"stream": fold(0, torch.arange(len(rows)))}, batch_size=[len(rows)])
    return td.set("row", NonTensorStack(*[NonTensorData(r) for r in rows]))
