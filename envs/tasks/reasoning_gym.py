"""Every dataset of the library reasoning-gym as a task, by name: chain_sum, sudoku, ... (over 100).

Rows are generated when they are asked for; replies are judged by the dataset's own score_answer, in
a process of its own, because some of them evaluate what a reply says.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from envs.data import LazyRows
from envs.rewards.answers import tagged
from envs.rewards.workers import LazyFunction, Workers
from envs.tasks.math_words import split_thoughts
from envs.tasks.task import Reply, Reward, Row, Split, Task, assistant, user
from policies.optional_packages import EXTRAS

INSTRUCTION = "Give the final answer alone, inside <answer> and </answer>."
EVAL_SEED = 3 << 30  # train rows begin below 1 << 30; numpy takes seeds below 1 << 32
STRIDE, FURTHER = 997, 50  # where the next row is looked for if one is held out, and how often
RIGHT = 1 - 1e-6


class ReasoningGym(Task):
    """Questions of the dataset `name`, rewarded by its score, from 0 to 1; 1 is right.

    `config`: the dataset's own settings, e.g. {"min_terms": 2}. `num_rows` train rows are a
    function of `seed`; the eval rows have seeds of their own, and no train row has their question.
    `instruction` stands below each question. The answer is what stands in the last <answer>, else
    all that is outside of <think>. `timeout` (seconds) is for judging one reply.
    """

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        num_rows: int = 10_000,
        eval_rows: int = 100,
        seed: int = 0,
        instruction: str = INSTRUCTION,
        timeout: float = 10.0,
    ) -> None:
        self.name, self.instruction = name, instruction
        settings = (name, dict(config or {}))
        self._train_set = make_dataset(*settings, size=num_rows, seed=seed * num_rows % (1 << 30))
        self._eval_set = make_dataset(*settings, size=eval_rows, seed=EVAL_SEED)
        self._train = LazyRows(self.train_row, range(num_rows), listed=False)
        self._settings, self._judges = json.dumps(settings), judges(timeout)

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split, the train rows made on use."""
        return self._train if split == "train" else self._eval

    def rewards(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Reward]:
        """Return the dataset's score of each reply; 0 for none, and for the question again."""
        marked = [tagged(reply.text)[1] for reply in replies]
        said = [
            answer or split_thoughts(reply.text)[1].strip()
            for answer, reply in zip(marked, replies, strict=True)
        ]
        entries = [row["entry"] for row in rows]
        own = [
            i for i, text in enumerate(said) if text and entries[i]["question"].strip() not in text
        ]
        calls = [(self._settings, said[i], entries[i]) for i in own]
        scores: dict[int, Any] = dict(zip(own, self._judges.map(calls), strict=True))
        return [
            _reward(scores.get(i, 0.0), bool(marked[i]) and reply.complete)
            for i, reply in enumerate(replies)
        ]

    def demonstrations(self) -> Sequence[Row]:
        """Return the train rows with the library's answers; ValueError where it has none."""
        rows = self.rows("train")
        if not all(isinstance(row["answer"], str) for row in rows):
            raise ValueError(f"expected {self.name} to give answers, got none for SFT")
        form = "<answer>{}</answer>" if self.instruction else "{}"
        return [
            {**row, "messages": [*row["messages"], assistant(form.format(row["answer"]))]}
            for row in rows
        ]

    def row(self, entry: dict[str, Any]) -> Row:
        """Return the row of an entry of the library."""
        asked = "\n\n".join(filter(None, (entry["question"], self.instruction)))
        return {"messages": [user(asked)], "answer": entry["answer"], "entry": entry}

    def train_row(self, index: int) -> Row:
        """Return a train row; one that is held out gives way to another."""
        size = len(self._train_set)
        for step in range(FURTHER):
            entry = self._train_set[(index + step * STRIDE) % size]
            if entry["question"] not in self._held_out:
                return self.row(entry)
        raise ValueError(
            f"expected more different questions of {self.name} than are held out; set "
            f"env.task.eval_rows below {len(self._eval)}, or harder settings"
        )

    @cached_property
    def _eval(self) -> list[Row]:
        found = (self._eval_set[i] for i in range(len(self._eval_set)))
        return [self.row(e) for e in {entry["question"]: entry for entry in found}.values()]

    @cached_property
    def _held_out(self) -> set[str]:
        return {row["entry"]["question"] for row in self._eval}


def make_dataset(name: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Return a dataset of the library; ValueError for a name or a setting that it does not have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _library().create_dataset(name, **{**config, "seed": seed, "size": size})
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"reasoning-gym, {name}: {error}; change env.task.name or env.task.config"
        ) from error


def _library() -> Any:
    try:
        with warnings.catch_warnings():  # of its data files, left open
            warnings.simplefilter("ignore")
            import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["reasoning_gym"]) from error
    return reasoning_gym


@cache
def judges(timeout: float) -> Workers:
    """Return the process that all tasks with this time-out are judged in."""
    return Workers(LazyFunction(make_scorer), timeout=timeout, processes=1)


def make_scorer() -> Callable[[str, str, dict[str, Any]], float]:
    """Return the score of (settings, answer, entry); an answer that cannot be read scores 0."""
    _library()

    @cache
    def dataset(settings: str) -> Any:
        return make_dataset(*json.loads(settings), size=1, seed=0)

    def score(settings: str, answer: str, entry: dict[str, Any]) -> float:
        try:
            return float(dataset(settings).score_answer(answer, entry))
        except Exception:  # some scorers take an answer's form for granted
            return 0.0

    return score


def _reward(score: Any, form: bool) -> Reward:
    failed = isinstance(score, Exception)
    total = 0.0 if failed else min(max(score, 0.0), 1.0)
    parts = {"score": total, "format": float(form)}
    return Reward(total, parts, success=total >= RIGHT, errors=int(failed))
