"""The base of tasks: rows that start chats, and rewards of responses.

A row is one data example, a dict with "messages" (the prompt) and data for the reward.
A custom task subclasses `Task`, overrides `rows` and `reward`, and is named by `_target_`.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from envs.rows import Message, Row

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Response:
    """A response of the policy: its text, whether an end-of-turn token ended it, the chat."""

    text: str
    complete: bool
    messages: list[Message]  # the full chat, this response last


@dataclass(frozen=True)
class Reward:
    """The reward of a response, its logged parts, and whether accuracy counts it as right.

    A part that does not apply to the response is math.nan: its mean leaves the response out.
    `errors` counts failed reward functions; `dropped` excludes the response and its group from
    training.
    """

    total: float
    parts: dict[str, float]
    success: bool
    errors: int = 0
    dropped: bool = False


class Task:
    """The base of all tasks.

    >>> class Polite(Task):
    ...     def rows(self, split):
    ...         return [{"messages": [{"role": "user", "content": "Ask me for the salt."}]}]
    ...     def reward(self, row, response):
    ...         polite = float("please" in response.text.lower())
    ...         return Reward(total=polite, parts={"please": polite}, success=polite == 1)
    >>> Polite().reward({}, Response("The salt, please.", True, [])).total
    1.0
    """

    rewarded = True  # False: every reward is 0, so evaluations show no accuracy

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split; train and eval must have no row in common."""
        raise NotImplementedError(f"{type(self).__name__} has no rows: override rows(split)")

    def reward(self, row: Row, response: Response) -> Reward | float:
        """Return the reward of a response to a row; uses `rewards` if only that is overridden."""
        if type(self).rewards is not Task.rewards:
            return self.rewards([row], [response])[0]
        raise NotImplementedError(
            f"{type(self).__name__} rewards nothing, it is for SFT; override reward(row, response)"
        )

    def rewards(
        self, rows: Sequence[Row], responses: Sequence[Response]
    ) -> Sequence[Reward | float]:
        """Return the reward of each response; override it if batches are cheaper."""
        return [self.reward(row, response) for row, response in zip(rows, responses, strict=True)]

    def respond(self, row: Row, response: Response) -> list[Message]:
        """Return the messages after the response; [] ends the episode."""
        return []

    def demonstrations(self) -> Sequence[Row]:
        """Return the rows for SFT, with a last message of the assistant."""
        raise NotImplementedError(
            f"{type(self).__name__} has no demonstrations: override demonstrations()"
        )

    def make_example(self) -> Row:
        """Return one typical row, for specs and documentation."""
        return self.rows("train")[0]

    def part_names(self) -> list[str]:
        """Return the names of the reward parts, from the reward of an empty response."""
        row = self.make_example()
        empty = Response("", True, [*row["messages"], assistant("")])
        value = self.rewards([row], [empty])[0]
        return sorted(value.parts) if isinstance(value, Reward) else []

    def right_otherwise(self, rows: Sequence[Row], responses: Sequence[Response]) -> dict[str, int]:
        """Return how many responses would be right by another `env.match`, by its name."""
        return {}

    def label(self, row: Row) -> str | None:
        """Return the label for a separate accuracy of such rows, or None."""
        return None


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": content}


@contextmanager
def naming(row: Row) -> Iterator[None]:
    """Add the row's index to a ValueError that its chat raises in the block."""
    try:
        yield
    except ValueError as error:
        if "index" not in row:
            raise
        raise ValueError(f"row {row['index']}: {error}") from error


def rewards_anything(task: Task) -> bool:
    """Return whether a task overrides `reward` or `rewards`."""
    kind = type(task)
    return kind.reward is not Task.reward or kind.rewards is not Task.rewards


class Unrewarded(Task):
    """The rows and the turns of a task, without its rewards."""

    rewarded = False

    def __init__(self, task: Task) -> None:
        self.task = task

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the task's rows."""
        return self.task.rows(split)

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return a reward of 0 for each response."""
        return [Reward(0.0, {}, False)] * len(rows)

    def respond(self, row: Row, response: Response) -> list[Message]:
        """Return the task's messages after the response."""
        return self.task.respond(row, response)


class Generated(Task):
    """Base of tasks with generated rows; override `sample_rows`, and `play` if needed.

    `num_rows` train rows are a function of `seed`; the eval rows do not depend on it.
    """

    eval_rows = 200

    def __init__(self, *, seed: int, num_rows: int) -> None:
        self.seed, self.num_rows = seed, num_rows

    def sample_rows(self, rng: random.Random, count: int, *, held_out: bool) -> list[Row]:
        """Return `count` rows of a split; no row is in both splits."""
        raise NotImplementedError(f"{type(self).__name__} has no rows: override sample_rows")

    def play(self, row: Row, rng: random.Random) -> list[Message]:
        """Return the messages that demonstrate a row, by default its answer."""
        return [assistant(row["answer"])]

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split."""
        return self._train if split == "train" else self._eval

    def demonstrations(self) -> Sequence[Row]:
        """Return the train rows with demonstrated responses."""
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
