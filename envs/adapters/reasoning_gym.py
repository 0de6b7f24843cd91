"""The datasets of the library reasoning-gym as tasks, by name: chain_sum, sudoku, ... (over 100).

Rows are generated on access. The dataset's score_answer scores responses in a separate process,
because some datasets evaluate code in a response.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from envs.answers.extraction import split_thoughts, tagged
from envs.rewards.workers import LazyFunction, Workers
from envs.rows import LazyRows
from envs.tasks.task import Response, Reward, Row, Split, Task, assistant, user
from policies.optional_packages import EXTRAS

INSTRUCTION = "Give the final answer alone, inside <answer> and </answer>."
EVAL_SEED = 3 << 30  # train rows begin below 1 << 30; numpy takes seeds below 1 << 32
STRIDE, FURTHER = 997, 50  # step to another row if one is held out, and number of tries
RIGHT = 1 - 1e-6


class ReasoningGym(Task):
    """Questions of the dataset `name`, rewarded by its score, from 0 to 1; 1 is right.

    `config`: the dataset's settings, e.g. {"min_terms": 2}. `num_rows` train rows are a function
    of `seed`; eval rows have other seeds, and no train row has their question. `instruction`
    follows each question. The answer is the text of the last <answer>, else all outside of <think>.
    `timeout`: seconds for scoring one response.
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
        """Return the rows of a split; train rows are generated on access."""
        return self._train if split == "train" else self._eval

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return the dataset's score of each response; 0 for an empty one or the question again."""
        marked = [tagged(response.text)[1] for response in responses]
        texts = [
            answer or split_thoughts(response.text)[1].strip()
            for answer, response in zip(marked, responses, strict=True)
        ]
        entries = [row["entry"] for row in rows]
        judged = [
            i for i, text in enumerate(texts) if text and entries[i]["question"].strip() not in text
        ]
        calls = [(self._settings, texts[i], entries[i]) for i in judged]
        scores: dict[int, Any] = dict(zip(judged, self._judges.map(calls), strict=True))
        return [
            _reward(scores.get(i, 0.0), bool(marked[i]) and response.complete)
            for i, response in enumerate(responses)
        ]

    def demonstrations(self) -> Sequence[Row]:
        """Return the train rows with the library's answers; raise ValueError if it has none."""
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
        question = "\n\n".join(filter(None, (entry["question"], self.instruction)))
        return {"messages": [user(question)], "answer": entry["answer"], "entry": entry}

    def train_row(self, index: int) -> Row:
        """Return a train row; another one if its question is held out."""
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
        entries = (self._eval_set[i] for i in range(len(self._eval_set)))
        return [self.row(e) for e in {entry["question"]: entry for entry in entries}.values()]

    @cached_property
    def _held_out(self) -> set[str]:
        return {row["entry"]["question"] for row in self._eval}


def make_dataset(name: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Return a dataset of the library; raise ValueError for an unknown name or setting."""
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
        with warnings.catch_warnings():  # the library warns of its open data files
            warnings.simplefilter("ignore")
            import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["reasoning_gym"]) from error
    return reasoning_gym


@cache
def judges(timeout: float) -> Workers:
    """Return the process that scores the responses of all tasks with this time-out."""
    return Workers(LazyFunction(make_scorer), timeout=timeout, processes=1)


def make_scorer() -> Callable[[str, str, dict[str, Any]], float]:
    """Return the scorer of (settings, answer, entry); an unreadable answer scores 0."""
    _library()

    @cache
    def dataset(settings: str) -> Any:
        return make_dataset(*json.loads(settings), size=1, seed=0)

    def score(settings: str, answer: str, entry: dict[str, Any]) -> float:
        try:
            return float(dataset(settings).score_answer(answer, entry))
        except Exception:  # some scorers fail on answers of another form
            return 0.0

    return score


def _reward(score: Any, form: bool) -> Reward:
    failed = isinstance(score, Exception)
    total = 0.0 if failed else min(max(score, 0.0), 1.0)
    parts = {"score": total, "format": float(form)}
    return Reward(total, parts, success=total >= RIGHT, errors=int(failed))
