"""What a task is: rows to start chats from, and what a reply to one earns.

A row is one data example, a dict with "messages" (the prompt) and whatever the reward needs.
A user's own task subclasses `Task`, overrides `rows` and `reward`, and is named by `_target_`.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envs.places import is_own, place_of

Row = dict[str, Any]
Message = dict[str, Any]  # {"role": ..., "content": ...}
Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Reply:
    """What the policy said: its text, whether it ended by its own end-of-turn token, the chat."""

    text: str
    complete: bool
    messages: list[Message]  # the whole chat, this reply last


@dataclass(frozen=True)
class Reward:
    """What a reply earns, its logged parts, and whether accuracy counts it as right.

    A part that does not apply to the reply is math.nan: its mean leaves the reply out. `errors` is
    how many reward functions failed on it; `dropped`: nobody may learn from it or its group.
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
    ...     def reward(self, row, reply):
    ...         said = float("please" in reply.text.lower())
    ...         return Reward(total=said, parts={"please": said}, success=said == 1)
    >>> Polite().reward({}, Reply("The salt, please.", True, [])).total
    1.0
    """

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split; train and eval share none."""
        raise NotImplementedError(f"{type(self).__name__} has no rows: override rows(split)")

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return what a reply to this row earns; by `rewards`, where only that is overridden."""
        if type(self).rewards is not Task.rewards:
            return self.rewards([row], [reply])[0]
        raise NotImplementedError(
            f"{type(self).__name__} rewards nothing, it is for SFT; override reward(row, reply)"
        )

    def rewards(self, rows: Sequence[Row], replies: Sequence[Reply]) -> Sequence[Reward]:
        """Return what each reply earns; override it where many at once are cheaper."""
        return [self.reward(row, reply) for row, reply in zip(rows, replies, strict=True)]

    def respond(self, row: Row, reply: Reply) -> list[Message]:
        """Return the messages that follow the reply; none ends the episode."""
        return []

    def demonstrations(self) -> Sequence[Row]:
        """Return the rows for SFT: their last message is the assistant's."""
        raise NotImplementedError(
            f"{type(self).__name__} has no demonstrations: override demonstrations()"
        )

    def make_example(self) -> Row:
        """Return one typical row, for specs and documentation."""
        return self.rows("train")[0]

    def part_names(self) -> list[str]:
        """Return the names of the reward parts, which an empty reply shows."""
        row = self.make_example()
        empty = Reply("", True, [*row["messages"], assistant("")])
        return sorted(self.rewards([row], [empty])[0].parts)

    def label(self, row: Row) -> str | None:
        """Return the name under which accuracy on this row is logged apart; None: it is not."""
        return None


def rewards_of(task: Task, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Reward]:
    """Return what a task gives each reply; ValueError unless that is a Reward each.

    An error of the task's own code is noted with its file and line.
    """
    name = type(task).__name__
    try:
        rewards = task.rewards(rows, replies)
    except (KeyboardInterrupt, SystemExit) as stop:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise  # it may be somebody's Ctrl-C; in a run that is a signal, not an exception
        where = f"in the reward of {name}, {place_of(stop)}"
        raise RuntimeError(f"{type(stop).__name__} {where}") from stop
    except Exception as error:
        if not is_own(error):
            error.add_note(f"in the reward of {name}, {place_of(error)}{_hint(error, rows)}")
        raise
    got = len(rewards) if isinstance(rewards, Sequence) else repr(rewards)[:80]
    if got != len(rows):
        raise ValueError(f"expected {len(rows)} rewards of {name}.rewards, one a reply, got {got}")
    for reward in rewards:
        if not isinstance(reward, Reward):
            raise ValueError(
                f"expected an envs.tasks.Reward of {name}, got {reward!r:.80} "
                f"({type(reward).__name__}); return Reward(total=1.0, parts={{}}, success=True)"
            )
    return list(rewards)


def _hint(error: Exception, rows: Sequence[Row]) -> str:
    """Return where a key is that a row lacks but its data has."""
    key, cells = (error.args or (None,))[0], rows[0].get("columns") if rows else None
    if not isinstance(error, KeyError) or not cells or key in rows[0]:
        return ""
    return f'; the cells of the data are in row["columns"]: {", ".join(map(str, cells))}'


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": content}


def check_split(split: str) -> None:
    """Refuse a split that is neither train nor eval."""
    if split not in ("train", "eval"):
        raise ValueError(f"expected split train or eval, got {split!r}")


def rewards_anything(task: Task) -> bool:
    """Return whether a task has a reward of its own."""
    kind = type(task)
    return kind.reward is not Task.reward or kind.rewards is not Task.rewards
