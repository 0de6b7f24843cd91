"""Sort the digits of a short number: a synthetic task for the tiny model.

Three of four demonstrations are wrong on purpose (descending, or unchanged), so that SFT teaches
only the format, and RL the order.
One in eight multisets of digits is held out by a hash: no train row has the digits of an eval row
in any order.
"""

import random
import zlib
from collections.abc import Sequence

from envs.tasks.task import Generated, Response, Reward, Row, assistant, user

QUESTION = "Sort the digits in ascending order: {}"
HELD_OUT = 8  # one multiset of digits in 8
MOST_DIGITS = 100
# Kinds of demonstrated answers, in percent.
ANSWERS = {"ascending": 25, "descending": 45, "unchanged": 30}


class SortDigits(Generated):
    """Questions such as "Sort the digits in ascending order: 44287".

    `num_rows` train rows and 200 eval rows of `min_digits` to `max_digits` digits, a function of
    `seed`; the eval rows do not depend on it. 0.9 of the reward is for the exact answer, 0.1 for
    the form: digits only, as many as asked, ended by itself.

    >>> task = SortDigits(num_rows=10)
    >>> row = task.row("44287")
    >>> row["messages"][0]["content"], row["answer"]
    ('Sort the digits in ascending order: 44287', '24478')
    >>> task.reward(row, Response("44287", True, [])).total
    0.1
    """

    def __init__(
        self, *, seed: int = 0, num_rows: int = 20_000, min_digits: int = 3, max_digits: int = 5
    ) -> None:
        if not 1 <= min_digits <= max_digits <= MOST_DIGITS:
            raise ValueError(
                f"expected 1 <= min_digits <= max_digits <= {MOST_DIGITS}, got {min_digits} and "
                f"{max_digits}"
            )
        super().__init__(seed=seed, num_rows=num_rows)
        self.min_digits, self.max_digits = min_digits, max_digits

    def row(self, digits: str) -> Row:
        """Return the row that asks for these digits."""
        answer = "".join(sorted(digits))
        return {"messages": [user(QUESTION.format(digits))], "digits": digits, "answer": answer}

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 0.9 for the sorted digits plus 0.1 for the form."""
        text = response.text.strip()
        exact = text == row["answer"]
        digits = text.isascii() and text.isdigit() and len(text) == len(row["answer"])
        form = digits and response.complete
        return Reward(
            total=(9 * exact + form) / 10,
            parts={"exact": float(exact), "format": float(form)},
            success=exact and response.complete,
        )

    def demonstrations(self) -> Sequence[Row]:
        """Return the train rows with answers, about a quarter of them right."""
        rng = random.Random(f"demonstrations {self.seed}")
        kinds = rng.choices(list(ANSWERS), list(ANSWERS.values()), k=self.num_rows)
        return [
            {**row, "messages": [*row["messages"], assistant(_answer(row, kind))]}
            for row, kind in zip(self.rows("train"), kinds, strict=True)
        ]

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            size = rng.randint(self.min_digits, self.max_digits)
            row = self.row(str(rng.randrange(10**size)).zfill(size))
            if is_held_out(row["answer"]) == held_out:
                rows.append(row)
        return rows


def is_held_out(digits: str) -> bool:
    """Return whether numbers made of these digits, in any order, belong to eval.

    >>> is_held_out("312") == is_held_out("123")
    True
    """
    return zlib.crc32("".join(sorted(digits)).encode()) % HELD_OUT == 0


def _answer(row: Row, kind: str) -> str:
    if kind == "unchanged":
        return row["digits"]
    return row["answer"] if kind == "ascending" else row["answer"][::-1]
