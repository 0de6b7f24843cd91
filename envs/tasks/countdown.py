"""Countdown: make a target from numbers, each used at most once; generated, always solvable.

A problem is drawn with its solution: the numbers are joined two by two, in whole positive steps.
Held out are whole multisets of numbers, one in eight by a hash. What solves a problem is checked
exactly, by `envs.rewards.answers`.
"""

import hashlib
import random
from collections.abc import Sequence

from envs.rewards.answers import countdown_value, solves_countdown
from envs.tasks.generated import Generated
from envs.tasks.math_words import said_answer
from envs.tasks.task import Reply, Reward, Row, user

QUESTION = (
    "Make {target} from the numbers {numbers} with + - * / and brackets; use each number at most "
    "once. Answer with the expression alone."
)
HELD_OUT = 8  # one multiset of numbers in so many
FEWEST, MOST = 2, 8  # numbers


class Countdown(Generated):
    """Questions such as "Make 24 from the numbers 2, 3, 4 ...".

    `min_numbers` to `max_numbers` numbers from 1 to `largest`, the target from 1 to
    `largest_target` and none of the numbers. `num_rows` train rows are a function of `seed`; the
    200 eval rows do not depend on it. 0.9 of the reward is for a solution, 0.1 for any expression
    of the numbers.

    >>> task = Countdown(num_rows=10)
    >>> row = task.row([2, 3, 4], 24, "(2 * 3) * 4")
    >>> texts = ("2 * 3 * 4 = 24", "4 + 3", "24", "6 * 4")
    >>> [task.reward(row, Reply(text, True, [])).total for text in texts]
    [1.0, 0.1, 0.0, 0.0]
    """

    def __init__(
        self,
        *,
        min_numbers: int = 3,
        max_numbers: int = 4,
        largest: int = 25,
        largest_target: int = 100,
        num_rows: int = 10_000,
        seed: int = 0,
    ) -> None:
        if not FEWEST <= min_numbers <= max_numbers <= MOST:
            raise ValueError(
                f"expected {FEWEST} <= min_numbers <= max_numbers <= {MOST}, got {min_numbers} and "
                f"{max_numbers}"
            )
        if largest < 5 or largest_target < 10 or num_rows < 1:
            raise ValueError(
                "expected largest >= 5, largest_target >= 10 and num_rows >= 1, got "
                f"{largest}, {largest_target} and {num_rows}"
            )
        self.min_numbers, self.max_numbers = min_numbers, max_numbers
        self.largest, self.largest_target = largest, largest_target
        super().__init__(seed=seed, num_rows=num_rows)

    def row(self, numbers: Sequence[int], target: int, solution: str) -> Row:
        """Return the row that asks for this; `solution` is one of its answers."""
        shown = ", ".join(map(str, numbers))
        return {
            "messages": [user(QUESTION.format(target=target, numbers=shown))],
            "numbers": list(numbers),
            "problem": f"target={target}, numbers={','.join(map(str, numbers))}",
            "answer": solution,
        }

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return 0.9 for a solution plus 0.1 for an expression of the numbers."""
        said, _ = said_answer(reply.text)
        target = row["problem"].partition(",")[0].removeprefix("target=")
        left, equals, right = said.partition("=")
        said = left if equals and right.strip() == target else said
        solved = solves_countdown(said, row["problem"])
        formed = countdown_value(said, row["numbers"]) is not None
        return Reward(
            total=(9 * solved + formed) / 10,
            parts={"solved": float(solved), "expression": float(formed)},
            success=solved and reply.complete,
        )

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            size = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.largest) for _ in range(size)]
            if is_held_out(numbers) != held_out:
                continue
            target, solution = combine(rng, numbers)
            if target <= self.largest_target and target not in numbers:
                rows.append(self.row(numbers, target, solution))
        return rows


def combine(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Return a random result of joining all numbers, each step whole and positive, and how.

    >>> target, solution = combine(random.Random(0), [3, 5])
    >>> eval(solution) == target
    True
    """
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, one), (b, other) = sorted((parts.pop(), parts.pop()), reverse=True)
        steps = {"+": a + b, "*": a * b} | ({"-": a - b} if a > b else {})
        steps |= {"/": a // b} if a % b == 0 else {}
        sign = rng.choice(list(steps))
        parts.append((steps[sign], f"({one} {sign} {other})"))
    value, text = parts[0]
    return value, text[1:-1]


def is_held_out(numbers: Sequence[int]) -> bool:
    """Return whether problems with these numbers, in any order, belong to eval.

    >>> is_held_out([3, 1, 2]) == is_held_out([1, 2, 3])
    True
    """
    digest = hashlib.sha256(" ".join(map(str, sorted(numbers))).encode()).digest()
    return digest[0] % HELD_OUT == 0
