"""Tasks whose rows and rewards are known."""

from envs.tasks.task import Response, Reward, Task, assistant, user


class Words(Task):
    """Prompts of different lengths; a response earns the share of even ids in its text length."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    def rows(self, split: str) -> list[dict]:
        texts = ["Sort 3", "Sort the digits 4 4 2 8 7", "Write", "the house with the other people"]
        return [{"messages": [{"role": "user", "content": t}], "answer": t} for t in texts]

    def demonstrations(self) -> list[dict]:
        return [
            {"messages": [*r["messages"], {"role": "assistant", "content": r["answer"][::-1]}]}
            for r in self.rows("train")
        ]

    def reward(self, row: dict, response: Response) -> Reward:
        value = (len(response.text) % 3) / 2
        return Reward(total=value, parts={"length": value}, success=value == 1)

    def respond(self, row: dict, response: Response) -> list[dict]:
        said = sum(m["role"] == "assistant" for m in response.messages)
        return [] if said >= self.turns else [{"role": "user", "content": "again"}]


class Many(Words):
    """Eight prompts; responses to some of them all earn the same."""

    flat = ("Sort 1", "Sort 4", "Sort 6")

    def rows(self, split: str) -> list[dict]:
        texts = [f"Sort {i}" for i in range(8)]
        return [{"messages": [{"role": "user", "content": t}], "answer": t} for t in texts]

    def reward(self, row: dict, response: Response) -> Reward:
        value = 0.25 if row["answer"] in self.flat else float(sum(map(ord, response.text)))
        return Reward(total=value, parts={}, success=False)


class Flat(Many):
    flat = tuple(f"Sort {i}" for i in range(8))


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
