"""Several tasks in one run, their train rows in fixed proportions."""

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from functools import cached_property

from envs.rewards.compute import compute_rewards
from envs.rows import LazyRows, is_listed
from envs.tasks.task import Message, Response, Reward, Row, Split, Task

MOST_ROWS = 200_000


class Mix(Task):
    """The rows of `tasks` (by name), each as often as its share of `weights` (default: equal).

    Every span of train rows has these shares to within one row; `seed` orders the rows of a task.
    An epoch has `num_rows` rows (default: until every row of every task has occurred, at most
    200,000). Eval rows are the eval rows of all tasks, in turn. Each row also has "task". Reward
    parts are prefixed by the task's name, `sort_digits/exact`, and accuracy is logged by task.

    >>> from envs.tasks import Facts, SortDigits
    >>> task = Mix({"digits": SortDigits(), "facts": Facts()}, weights={"digits": 3, "facts": 1})
    >>> [row["task"] for row in task.rows("train")[:4]]
    ['digits', 'digits', 'facts', 'digits']
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        *,
        weights: Mapping[str, float] | None = None,
        num_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        weights = dict.fromkeys(tasks, 1.0) if weights is None else weights
        finite = all(0 < weight < math.inf for weight in weights.values())
        if not tasks or not finite or set(weights) != set(tasks):
            raise ValueError(
                f"expected a weight for each task, above 0 ({', '.join(tasks) or 'none'}), got "
                f"{dict(weights)}; leave a task out instead of a weight of 0"
            )
        self.tasks, self.seed, self.num_rows = dict(tasks), seed, num_rows
        total = sum(weights.values())
        self.shares = {name: weights[name] / total for name in self.tasks}

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split."""
        return self._train if split == "train" else self._eval

    def demonstrations(self) -> Sequence[Row]:
        """Return the demonstrations of all tasks, in the same proportions."""
        return mixed_rows({n: t.demonstrations() for n, t in self.tasks.items()}, self)

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return the reward of each response by its row's task."""
        out: list[Reward] = [Reward(0.0, {}, False)] * len(rows)
        for name, task in self.tasks.items():
            mine = [i for i, row in enumerate(rows) if row["task"] == name]
            if mine:
                earned = compute_rewards(
                    task, [rows[i] for i in mine], [responses[i] for i in mine]
                )
                for i, reward in zip(mine, earned, strict=True):
                    prefixed = {f"{name}/{part}": value for part, value in reward.parts.items()}
                    parts = dict.fromkeys(self._parts, math.nan) | prefixed  # others: NaN
                    out[i] = dataclasses.replace(reward, parts=parts)
        return out

    def respond(self, row: Row, response: Response) -> list[Message]:
        """Return the next messages by the row's task."""
        return self.tasks[row["task"]].respond(row, response)

    def label(self, row: Row) -> str:
        """Return the name of the row's task."""
        return row["task"]

    def part_names(self) -> list[str]:
        """Return the parts of all tasks, each prefixed by the task's name."""
        return sorted(self._parts)

    @cached_property
    def _parts(self) -> list[str]:
        return [f"{name}/{part}" for name, t in self.tasks.items() for part in t.part_names()]

    @cached_property
    def _train(self) -> LazyRows:
        return mixed_rows({name: task.rows("train") for name, task in self.tasks.items()}, self)

    @cached_property
    def _eval(self) -> list[Row]:
        held_out = [[{**r, "task": n} for r in t.rows("eval")] for n, t in self.tasks.items()]
        return [row for turn in itertools.zip_longest(*held_out) for row in turn if row]


def mixed_rows(sources: Mapping[str, Sequence[Row]], mix: Mix) -> LazyRows:
    """Interleave rows of several sources: next comes the source furthest below its share."""
    needed = max(len(rows) / mix.shares[name] for name, rows in sources.items())
    size = mix.num_rows or min(math.ceil(needed - 1e-9), MOST_ROWS)
    orders = {name: list(range(len(rows))) for name, rows in sources.items()}
    for name, order in orders.items():
        random.Random(f"mix {mix.seed} {name}").shuffle(order)
    counts, places = dict.fromkeys(sources, 0), []
    for _ in range(size):
        name = min(counts, key=lambda n: (counts[n] + 0.5) / mix.shares[n])
        places.append((name, orders[name][counts[name] % len(orders[name])]))
        counts[name] += 1
    listed = all(map(is_listed, sources.values()))

    def row(place: tuple[str, int]) -> Row:
        return {**sources[place[0]][place[1]], "task": place[0]}

    return LazyRows(row, places, listed=listed)
