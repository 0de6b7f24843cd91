"""Weighted sums of rewards for one task (`env.rewards`)."""

import math
import warnings
from collections.abc import Mapping, Sequence

from envs.rewards.compute import columns_hint, compute_rewards, error_location
from envs.rewards.functions import RewardFunction, Score, SetupError
from envs.tasks.task import Message, Response, Reward, Row, Split, Task, rewards_anything


class Rewarded(Task):
    """A task whose reward is `task_weight` times its own plus the weighted `rewards`.

    `rewards` by name; the reward part of that name is the unweighted score, math.nan if it does not
    apply. Success is the task's. For a task without rewards a total above 0 is a success, and a
    response without any applicable reward is dropped; without `rewards` too, every reward is 0.

    >>> from envs.rewards import Function
    >>> from envs.tasks import SortDigits
    >>> short = Function(lambda row, response: len(response.text) < 9, weight=0.5)
    >>> task = Rewarded(SortDigits(num_rows=1), {"short": short})
    >>> done = task.reward(SortDigits().row("21"), Response("12", True, []))
    >>> done.total, done.parts
    (1.5, {'exact': 1.0, 'format': 1.0, 'short': 1.0})
    """

    def __init__(
        self, task: Task, rewards: Mapping[str, RewardFunction], *, task_weight: float = 1.0
    ) -> None:
        for name, function in rewards.items():
            if not isinstance(function, RewardFunction):
                raise ValueError(
                    f"env.rewards.{name}: expected an envs.rewards.RewardFunction, got "
                    f"{type(function).__name__}; envs.rewards.Function takes any function"
                )
        self.task, self.functions, self.task_weight = task, dict(rewards), task_weight
        self.judges = rewards_anything(task)
        self.rewarded = self.judges or bool(rewards)
        self._warned: set[str] = set()  # functions whose first error was printed

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the task's rows."""
        return self.task.rows(split)

    def demonstrations(self) -> Sequence[Row]:
        """Return the task's demonstrations."""
        return self.task.demonstrations()

    def respond(self, row: Row, response: Response) -> list[Message]:
        """Return the task's messages after the response."""
        return self.task.respond(row, response)

    def right_otherwise(self, rows: Sequence[Row], responses: Sequence[Response]) -> dict[str, int]:
        """Return the task's responses that would be right by another `env.match`."""
        return self.task.right_otherwise(rows, responses)

    def label(self, row: Row) -> str | None:
        """Return the task's label of the row."""
        return self.task.label(row)

    def part_names(self) -> list[str]:
        """Return the parts of the task and the names of the rewards, without computing any."""
        parts = self.task.part_names() if self.judges else []
        if shared := sorted(set(parts) & set(self.functions)):
            raise ValueError(
                f"expected names in env.rewards other than the task's parts {', '.join(parts)}, "
                f"got {', '.join(shared)}; rename"
            )
        return sorted([*parts, *self.functions])

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return the sum of all rewards of each response."""
        base = [Reward(0.0, {}, False)] * len(rows)
        if self.judges:
            base = compute_rewards(self.task, rows, responses)
        scores = {name: f.scores(rows, responses) for name, f in self.functions.items()}
        return [
            self._sum(reward, {name: column[i] for name, column in scores.items()}, rows[i])
            for i, reward in enumerate(base)
        ]

    def _sum(self, base: Reward, scores: Mapping[str, Score], row: Row) -> Reward:
        """Return the task's reward with these scores added."""
        total, parts = self.task_weight * base.total, dict(base.parts)
        errors, dropped = base.errors, base.dropped
        for name, score in scores.items():
            function = self.functions[name]
            if isinstance(score, Exception):
                self._tell(name, score, row)
                errors, parts[name] = errors + 1, math.nan
                dropped |= function.on_error == "drop_group"
                continue
            parts[name] = score
            if not math.isnan(score):
                total += function.weight * score
        left_out = bool(scores) and all(math.isnan(parts[name]) for name in scores)
        applied = self.judges or errors or not left_out
        success = base.success if self.judges else total > 0
        return Reward(total, parts, success, errors, dropped or not applied)

    def _tell(self, name: str, error: Exception, row: Row) -> None:
        """Raise the error if it ends the run, else warn of the first error of each function."""
        if isinstance(error, SetupError):
            raise ValueError(f"env.rewards.{name}: {error}") from error
        text = f"reward {name}: {type(error).__name__}: {error}"
        notes = "; ".join(getattr(error, "__notes__", ()))  # added in another process
        if place := notes or error_location(error):
            text += f" ({place}{columns_hint(error, [row])})"
        action = self.functions[name].on_error
        if action == "raise":
            remedy = "correct the function, or set its on_error to zero or drop_group"
            raise RuntimeError(f"{text}; {remedy}") from error
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{text} (on_error={action}; counted in reward/errors)", stacklevel=2)
