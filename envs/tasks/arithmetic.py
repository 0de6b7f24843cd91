"""Sums of two whole numbers: "What is 47 + 85?", generated, with exact answers.

Held out is one problem in eight, by a hash of its numbers and sign; a + b and b + a are one.
A reply is right if, its working aside ("47 + 85 ="), it names the right number and no other.
"""

import hashlib
import operator
import random
import re

from envs.tasks.generated import Generated
from envs.tasks.math_words import said_answer
from envs.tasks.task import Reply, Reward, Row, user

QUESTION = "What is {} {} {}?"
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\d)", re.ASCII)
HELD_OUT = 8  # one problem in so many
MOST_DIGITS = 100


class Arithmetic(Generated):
    """Questions such as "What is 47 + 85?" with the signs in `operators`, of "+-*".

    The numbers have `min_digits` to `max_digits` digits; no answer is below 0. `num_rows` train
    rows are a function of `seed`; the eval rows, all different and at most 200, do not depend on
    it. 0.9 of the reward is for the right number, 0.1 for the form: a number alone, with an end.

    >>> task = Arithmetic(num_rows=10)
    >>> row = task.row(47, "+", 85)
    >>> row["messages"][0]["content"], row["answer"]
    ('What is 47 + 85?', '132')
    >>> texts = ("132", "It is 132.", "131", "131 or 132")
    >>> [task.reward(row, Reply(text, True, [])).total for text in texts]
    [1.0, 0.9, 0.1, 0.0]
    """

    def __init__(
        self,
        *,
        operators: str = "+-",
        min_digits: int = 1,
        max_digits: int = 2,
        num_rows: int = 20_000,
        seed: int = 0,
    ) -> None:
        if not operators or set(operators) - set(SIGNS) or len(set(operators)) < len(operators):
            raise ValueError(f"expected operators among {''.join(SIGNS)}, got {operators!r}")
        if not 1 <= min_digits <= max_digits <= MOST_DIGITS:
            raise ValueError(
                f"expected 1 <= min_digits <= max_digits <= {MOST_DIGITS}, got {min_digits} and "
                f"{max_digits}"
            )
        super().__init__(seed=seed, num_rows=num_rows)
        self.operators = operators
        self.min_digits, self.max_digits = min_digits, max_digits

    def row(self, left: int, sign: str, right: int) -> Row:
        """Return the row that asks for this."""
        return {
            "messages": [user(QUESTION.format(left, sign, right))],
            "problem": f"{left} {sign} {right}",
            "answer": str(SIGNS[sign](left, right)),
        }

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return 0.9 for the right number plus 0.1 for nothing beside it."""
        exact = said_number(reply.text, row["problem"]) == int(row["answer"])
        form = reply.complete and re.fullmatch(r"-?\d+", reply.text.strip(), re.ASCII) is not None
        return Reward(
            total=(9 * exact + form) / 10,
            parts={"exact": float(exact), "format": float(form)},
            success=exact and reply.complete,
        )

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        """Return rows of a split; those of eval differ, so that there may be fewer."""
        rows: dict[object, Row] = {}
        for place in range(100 * count):
            sign = rng.choice(self.operators)
            left, right = (self._number(rng) for _ in range(2))
            left, right = (max(left, right), min(left, right)) if sign == "-" else (left, right)
            if is_held_out(left, sign, right) == held_out:
                key = _same(left, sign, right) if held_out else place
                rows.setdefault(key, self.row(left, sign, right))
            if len(rows) == count:
                break
        if not rows:
            raise ValueError(
                f"expected problems to hold out among those of {self.max_digits} digits with "
                f"{self.operators}, found none; allow more"
            )
        return list(rows.values())

    def _number(self, rng: random.Random) -> int:
        size = rng.randint(self.min_digits, self.max_digits)
        return rng.randrange(0 if size == 1 else 10 ** (size - 1), 10**size)


def said_number(text: str, problem: str) -> int | None:
    """Return the one whole number that a reply names beside its working; None for none or several.

    >>> said_number("47 + 85 = 132", "47 + 85"), said_number("47 + 85", "47 + 85")
    (132, None)
    """
    said = said_answer(text)[0].replace("\u2212", "-")
    echo = r"\s*".join(map(re.escape, problem.split()))
    found = set(NUMBER.findall(re.sub(rf"(?<!\d){echo}(?!\d)", "", said)))
    values = {number.replace(",", "") for number in found}
    if len(values) != 1 or "." in (value := values.pop()) or len(value) > 3 * MOST_DIGITS:
        return None
    return int(value)


def _same(left: int, sign: str, right: int) -> str:
    """Return one name for a problem and for the one with its numbers exchanged."""
    return f"{min(left, right)} {sign} {max(left, right)}"


def is_held_out(left: int, sign: str, right: int) -> bool:
    """Return whether a problem belongs to eval.

    >>> is_held_out(12, "+", 3) == is_held_out(3, "+", 12)
    True
    """
    digest = hashlib.sha256(_same(left, sign, right).encode()).digest()
    return digest[0] % HELD_OUT == 0
