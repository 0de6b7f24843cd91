"""Tasks that make up their own rows: drawn from a seed, some of them held out for eval."""

import random
from collections.abc import Sequence
from functools import cached_property

from envs.tasks.task import Message, Row, Split, Task, assistant


class Generated(Task):
    """The base of tasks that make up their rows; override `sample_rows`, and `play` where needed.

    `num_rows` train rows are a function of `seed`; the eval rows do not depend on it.
    """

    eval_rows = 200

    def __init__(self, *, seed: int, num_rows: int) -> None:
        self.seed, self.num_rows = seed, num_rows

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        """Return `count` rows of a split; no row is held out and not."""
        raise NotImplementedError(f"{type(self).__name__} has no rows: override sample_rows")

    def play(self, row: Row, rng: random.Random) -> list[Message]:
        """Return the messages that demonstrate a row: its answer, unless a subclass says more."""
        return [assistant(row["answer"])]

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split."""
        return self._train if split == "train" else self._eval

    def demonstrations(self) -> Sequence[Row]:
        """Return the train rows played through."""
        rng = random.Random(f"demonstrations {self.seed}")
        return [
            {**row, "messages": [*row["messages"], *self.play(row, rng)]} for row in self._train
        ]

    @cached_property
    def _train(self) -> list[Row]:
        return self.sample_rows(random.Random(f"train {self.seed}"), self.num_rows, held_out=False)

    @cached_property
    def _eval(self) -> list[Row]:
        return self.sample_rows(random.Random("eval"), self.eval_rows, held_out=True)
