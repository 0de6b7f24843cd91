"""Multiply two numbers with a calculator as a tool: two turns, for the tiny model.

The tiny model cannot multiply; it must learn to call `multiply` without a typo and to copy the
result, which is always right.
Only half of the demonstrations call the tool, and 30 % of these calls have a typo.
One in eight pairs of factors, in any order, is held out by a hash.
"""

import random
import zlib

from envs.tasks.task import Generated, Message, Response, Reward, Row, assistant, user

QUESTION = "What is {} * {}?"
FACTORS = range(32, 100)  # every product has four digits
HELD_OUT = 8  # one pair of factors in 8
CALLS, TYPOS = 0.5, 0.3  # share of the demonstrations, share of their calls


class Calculator(Generated):
    """Questions such as "What is 57 * 83?", for a tool multiply(a, b) and `env.max_turns=2`.

    `num_rows` train rows and 200 eval rows with factors of 32 to 99, a function of `seed`; the eval
    rows do not depend on it. The reward is 1 for a response that is the right number and ends by
    itself, else 0.

    >>> task = Calculator(num_rows=10)
    >>> task.reward(task.row(57, 83), Response("4731", True, [])).total
    1.0
    """

    def __init__(self, *, seed: int = 0, num_rows: int = 20_000) -> None:
        super().__init__(seed=seed, num_rows=num_rows)

    def row(self, a: int, b: int) -> Row:
        """Return the row that asks for a product."""
        return {"messages": [user(QUESTION.format(a, b))], "factors": [a, b], "answer": str(a * b)}

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 for a response of exactly the answer, else 0."""
        exact = response.complete and response.text.strip() == row["answer"]
        return Reward(total=float(exact), parts={"exact": float(exact)}, success=exact)

    def play(self, row: Row, rng: random.Random) -> list[Message]:
        """Answer directly, or use the calculator."""
        if rng.random() >= CALLS:
            return [assistant(row["answer"])]
        typed = list("{}{}".format(*row["factors"]))
        if rng.random() < TYPOS:
            place = rng.randrange(4)
            typed[place] = rng.choice([d for d in "123456789" if d != typed[place]])
        a, b = int("".join(typed[:2])), int("".join(typed[2:]))
        function = {"name": "multiply", "arguments": {"a": a, "b": b}}
        call = {"type": "function", "id": "call00000", "function": function}
        result = {"role": "tool", "name": "multiply", "tool_call_id": "call00000"}
        return [
            {**assistant(""), "tool_calls": [call]},
            {**result, "content": str(a * b)},
            assistant(str(a * b)),
        ]

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            a, b = rng.choice(FACTORS), rng.choice(FACTORS)
            if is_held_out(a, b) == held_out:
                rows.append(self.row(a, b))
        return rows


def is_held_out(a: int, b: int) -> bool:
    """Return whether a pair of factors, in any order, belongs to eval.

    >>> is_held_out(12, 34) == is_held_out(34, 12)
    True
    """
    return zlib.crc32(f"{min(a, b)}*{max(a, b)}".encode()) % HELD_OUT == 0


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.

    """
    return a * b
