"""Competition mathematics (MATH, Hendrycks et al. 2021, arXiv 2103.03874): answers in \\boxed{}."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from envs.answers.comparison import same_mathematics, symbolic_check
from envs.answers.extraction import extract_answer
from envs.rewards.workers import LazyFunction, Workers
from envs.tasks.math_words import MathWords
from envs.tasks.task import Response, Reward, Row
from policies.optional_packages import EXTRAS


class MathProblems(MathWords):
    """Problems with a formula as answer; the response marks it by \\boxed, <answer> or ####.

    Answers are compared as numbers and plain LaTeX; with `symbolic`, unequal answers also by
    math-verify, in a separate process for at most `timeout` seconds each, unless the answer only
    repeats a formula of the question. Rows and parts as in `MathWords`.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "one.jsonl"
    >>> row = r'{"question": "Half of 3?", "answer": "It is $\\\\boxed{\\\\frac{3}{2}}$."}'
    >>> _ = path.write_text(row)
    >>> task = MathProblems(str(path), eval_dataset=str(path), symbolic=False)
    >>> texts = (r"$\\boxed{1.5}$", "1.5", r"\\boxed{1}")
    >>> [task.reward(task.rows("train")[0], Response(text, True, [])).total for text in texts]
    [1.0, 0.0, 0.0]
    """

    numbers = False

    def __init__(
        self,
        dataset: str | Sequence[str] | None = None,
        *,
        symbolic: bool = True,
        timeout: float = 10.0,
        processes: int = 1,
        **data: Any,
    ) -> None:
        super().__init__(dataset, **data)
        if symbolic and find_spec("math_verify") is None:
            raise ImportError(EXTRAS["math_verify"])
        self.symbolic = symbolic
        self._workers = Workers(LazyFunction(symbolic_check), timeout=timeout, processes=processes)

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 if the response's marked answer is right, else 0."""
        return self.rewards([row], [response])[0]

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return the reward of each response; a failed comparison counts as an error."""
        answers = [extract_answer(response.text) for response in responses]
        texts = [answer if marked else "" for answer, marked in answers]
        results: list[Any] = [
            any(same_mathematics(answer, right) for right in row["finals"])
            for row, answer in zip(rows, texts, strict=True)
        ]
        if self.symbolic:
            open_ = [i for i, row in enumerate(rows) if not results[i] and _is_new(texts[i], row)]
            places = [(i, right) for i in open_ for right in rows[i]["finals"]]
            compared = self._workers.map([(texts[i], right) for i, right in places])
            for (i, _), result in zip(places, compared, strict=True):
                results[i] = results[i] is True or result
        marks = zip(results, answers, responses, strict=True)
        return [_reward(result, marked, response) for result, (_, marked), response in marks]


def _is_new(answer: str, row: Row) -> bool:
    """Return whether an answer is not merely a part of the question ("2+3" does not answer it)."""
    bare = re.sub(r"\s", "", answer)
    return bool(bare) and bare not in re.sub(r"\s", "", row["messages"][-1]["content"])


def _reward(result: Any, marked: bool, response: Response) -> Reward:
    failed = isinstance(result, Exception)
    parts = {"correct": float(result is True), "format": float(marked and response.complete)}
    return Reward(parts["correct"], parts, success=result is True, errors=int(failed))
