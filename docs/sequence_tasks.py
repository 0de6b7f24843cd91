"""Two tasks whose early tokens decide what the later ones cost, and where training on them ends.

    PYTHONPATH=. python docs/sequence_tasks.py

A response is right if all of its digits are even, so each digit costs KL. EvenDigits: any number of
digits. MarkedDigits: many after the mark "a", few after "b". Trained runs: docs/kl_sequence.md.

Training with a coefficient c ends at reference * exp(value of the next state / c) in each state.
The value is the reward minus c KL of the later states with the exact gradient, and the reward alone
with `full` in the loss.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.tasks import Response, Reward, Row
from envs.tasks.task import Generated, assistant, user

EVEN = 0.8  # chance of an even digit in the demonstrations
MOST = 24  # digits of a response, of EvenDigits at least 1
NUMBERS = {"a": 24, "b": 4}  # of digits after the mark


class EvenDigits(Generated):
    """Write even digits; the numbers of digits in the demonstrations are uniform.

    >>> EvenDigits().reward({}, Response("402", True, [])).total
    1.0
    """

    def __init__(self, *, seed: int = 0, num_rows: int = 20_000) -> None:
        super().__init__(seed=seed, num_rows=num_rows)

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        return [{"messages": [user(str(rng.randrange(10**6)))]} for _ in range(count)]

    def reward(self, row: Row, response: Response) -> Reward:
        parts = {"digits": float(len(response.text))}
        return _judged(response, response.text, parts)

    def play(self, row: Row, rng: random.Random) -> list:
        return [assistant(_digits(rng))]


class MarkedDigits(EvenDigits):
    """Write a mark and even digits, as many as the mark says; both marks are equally frequent.

    >>> MarkedDigits().reward({}, Response("b4022", True, [])).total
    1.0
    """

    def reward(self, row: Row, response: Response) -> Reward:
        mark, digits = response.text[:1], response.text[1:]
        number = digits if len(digits) == NUMBERS.get(mark) else ""
        return _judged(response, number, {"a": float(mark == "a")})

    def play(self, row: Row, rng: random.Random) -> list:
        mark = rng.choice("ab")
        return [assistant(mark + _digits(rng, NUMBERS[mark]))]


def _judged(response: Response, digits: str, parts: dict[str, float]) -> Reward:
    right = response.complete and bool(digits) and set(digits) <= set("02468")
    return Reward(float(right), parts, success=right)


def _digits(rng: random.Random, number: int | None = None) -> str:
    kinds = rng.choices(["02468", "13579"], [EVEN, 1 - EVEN], k=MOST)
    return "".join(map(rng.choice, kinds[: number or rng.randint(1, MOST)]))


@dataclass(frozen=True)
class Means:
    """Means over a policy's responses from a state on: reward, KL in nats, a count."""

    reward: float = 0.0
    kl: float = 0.0
    count: float = 0.0


def choose(options: Sequence[tuple[float, Means]], coeff: float, *, exact: bool) -> Means:
    """Return the means of a state at the end of training.

    `options`: chance of each next state by the reference, and the means of that state.
    """
    pulls = [p * math.exp(m.reward / coeff - m.kl * exact) for p, m in options if p]
    chances = [pull / sum(pulls) for pull in pulls]
    out = Means()
    for q, (p, m) in zip(chances, [each for each in options if each[0]], strict=True):
        kl = m.kl + math.log(q / p)
        out = Means(out.reward + q * m.reward, out.kl + q * kl, out.count + q * m.count)
    return out


def even_digits(coeff: float, *, exact: bool) -> Means:
    """Return the means of EvenDigits; the count is the number of digits."""
    state = Means(reward=1.0)
    for done in reversed(range(MOST)):
        stop = 1 / (MOST - done + 1) if done else 0.0  # `done` is one of the lengths left
        more = Means(state.reward, state.kl, state.count + 1)
        wrong = Means(count=1 + (MOST - done - 1) / 2)  # then it writes on as the reference does
        options = [(stop, Means(reward=1.0)), ((1 - stop) * EVEN, more)]
        options += [((1 - stop) * (1 - EVEN), wrong)]
        state = choose(options, coeff, exact=exact)
    return state


def marked_digits(coeff: float, *, exact: bool) -> Means:
    """Return the means of MarkedDigits; the count is the share of "a"."""
    marks = []
    for mark, number in NUMBERS.items():
        state = Means(1.0, 0.0, float(mark == "a"))
        for _ in range(number):
            odd = Means(count=state.count)
            state = choose([(EVEN, state), (1 - EVEN, odd)], coeff, exact=exact)
        marks.append((0.5, state))
    return choose(marks, coeff, exact=exact)


def least_kl(ends: Callable[..., Means], reward: float) -> float:
    """Return the KL of the best policy with this reward."""
    low, high = 1e-2, 1e3  # of the coefficient
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ends(middle, exact=True).reward > reward else (low, middle)
    return ends(low, exact=True).kl


if __name__ == "__main__":
    print("| task, `kl.coeff` | gradient | digits or share of a | reward | KL, nats | efficiency |")
    print("|---|---|---|---|---|---|")
    for ends in (even_digits, marked_digits):
        for coeff in (0.1, 0.2, 0.2 * 8 / 7, 0.5):  # the third: 0.2 in the loss, groups of 8
            for exact in (False, True):
                end = ends(coeff, exact=exact)
                cells = (end.count, end.reward, end.kl, least_kl(ends, end.reward) / end.kl)
                name = (
                    f"{ends.__name__}, {coeff:.3g} | {'exact' if exact else '`full` in the loss'}"
                )
                print(f"| {name} | {' | '.join(f'{x:.2f}' for x in cells)} |")
