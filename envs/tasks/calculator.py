"""Multiply two numbers with a calculator tool: two turns, for the tiny model.

A reply "calc: 57*83" is a call: the result is a message of role tool, and the policy replies again.
Any other reply is the answer. The tiny model cannot multiply; it must learn to call without a typo
and to copy the result, which is always right.
The demonstrations call in a quarter of the cases only, and with a typo in 30 % of those.
One in eight pairs of factors, in any order, is held out by a hash.
"""

import random
import re
import zlib

from envs.tasks.task import Generated, Message, Reply, Reward, Row, assistant, user

QUESTION = "What is {} * {}?"
CALL = re.compile(r"calc: ([0-9]{1,6})([-+*])([0-9]{1,6})")
WORK = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
FACTORS = range(32, 100)  # every product has four digits
HELD_OUT = 8  # one pair of factors in 8
CALLS, TYPOS = 0.25, 0.3  # shares: of the demonstrations, and of their calls


class Calculator(Generated):
    """Questions such as "What is 57 * 83?", with `env.max_turns=2` for a call and the answer.

    `num_rows` train rows and 200 eval rows with factors of 32 to 99, a function of `seed`; the eval
    rows do not depend on it. The reward is 1 for a reply that is the right number and ends by
    itself, else 0. `reward_part/called` counts the calls with a result.

    >>> task = Calculator(num_rows=10)
    >>> row = task.row(57, 83)
    >>> task.respond(row, Reply("calc: 57*83", True, []))
    [{'role': 'tool', 'content': '4731'}]
    >>> task.reward(row, Reply("4731", True, [])).total
    1.0
    """

    def __init__(self, *, seed: int = 0, num_rows: int = 20_000) -> None:
        super().__init__(seed=seed, num_rows=num_rows)

    def row(self, a: int, b: int) -> Row:
        """Return the row that asks for a product."""
        return {"messages": [user(QUESTION.format(a, b))], "factors": [a, b], "answer": str(a * b)}

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return 1 for a reply of exactly the answer, else 0."""
        exact = reply.complete and reply.text.strip() == row["answer"]
        parts = {"exact": float(exact), "called": float(calculate(reply) is not None)}
        return Reward(total=float(exact), parts=parts, success=exact)

    def respond(self, row: Row, reply: Reply) -> list[Message]:
        """Return the result of a call; an answer ends the episode."""
        result = calculate(reply)
        return [] if result is None else [{"role": "tool", "content": result}]

    def play(self, row: Row, rng: random.Random) -> list[Message]:
        """Answer directly, or use the calculator."""
        if rng.random() >= CALLS:
            return [assistant(row["answer"])]
        a, b = row["factors"]
        typed = f"{a}*{b}"
        if rng.random() < TYPOS:
            place = rng.choice([0, 1, 3, 4])
            wrong = rng.choice([d for d in "123456789" if d != typed[place]])
            typed = typed[:place] + wrong + typed[place + 1 :]
        call = Reply(f"calc: {typed}", True, [])
        (result,) = self.respond(row, call)
        return [assistant(call.text), result, assistant(result["content"])]

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            a, b = rng.choice(FACTORS), rng.choice(FACTORS)
            if is_held_out(a, b) == held_out:
                rows.append(self.row(a, b))
        return rows


def calculate(reply: Reply) -> str | None:
    """Return the result of a reply that is exactly a call, None for any other reply.

    >>> calculate(Reply("calc: 7-9", True, [])), calculate(Reply("calc: 7/9", True, []))
    ('-2', None)
    """
    call = CALL.fullmatch(reply.text.strip()) if reply.complete else None
    return str(WORK[call[2]](int(call[1]), int(call[3]))) if call else None


def is_held_out(a: int, b: int) -> bool:
    """Return whether a pair of factors, in any order, belongs to eval.

    >>> is_held_out(12, 34) == is_held_out(34, 12)
    True
    """
    return zlib.crc32(f"{min(a, b)}*{max(a, b)}".encode()) % HELD_OUT == 0
