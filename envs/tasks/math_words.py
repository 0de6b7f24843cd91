"""Word problems with a number at the end, as in GSM8K (Cobbe et al. 2021, arXiv:2110.14168).

The right answer is the data's solution after "####" (or in <answer> tags, or \\boxed), else all of
it. Numbers are compared as exact fractions (envs/answers/numbers.py), other answers as texts.
"""

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

from envs.answers.comparison import same_answer
from envs.answers.extraction import extract_answer, marked_answer
from envs.answers.numbers import last_number
from envs.tasks.dataset import DatasetTask, right_answers
from envs.tasks.task import Response, Reward, Row


class MathWords(DatasetTask):
    """Word problems from a data set, rewarded for the right final number.

    Arguments: see `envs.chat_rows.load_chats`. A row has "finals", its right answers. The parts are
    correct (the reward) and format (the response marks its answer and ends by itself). Raise
    ValueError if half or more of the data's answers neither contain a number nor mark a text; warn
    if fewer do.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text(
    ...     '{"question": "6 times 7?", "answer": "Six sevens are #### 42"}\\n'
    ...     '{"question": "6 times 8?", "answer": "#### 48"}'
    ... )
    >>> task = MathWords(str(path), eval_dataset=str(path))
    >>> row = task.rows("train")[0]
    >>> [task.reward(row, Response(text, True, [])).total for text in ("It is $42.00.", "42 or 43")]
    [1.0, 0.0]
    """

    numbers = True  # whether right answers should contain a number

    def __init__(self, dataset: str | Sequence[str] | None = None, **data: Any) -> None:
        super().__init__(dataset, **data)
        answers = [row["answer"] for row in chain(*self._rows.values())] if self.numbers else []
        odd = [a for a in answers if marked_answer(a) is None and last_number(a) is None]
        if odd:
            fault = f"{len(odd)} of {len(answers)} right answers hold no number, as {odd[0]!r:.60}"
            if 2 * len(odd) >= len(answers):
                raise ValueError(f"{fault}; mark them by ####, or use env=answers")
            warnings.warn(f"{fault}: only a response of the same text earns these", stacklevel=2)

    def prepare(self, row: Row) -> Row:
        """Return the row with its right answers as "finals"."""
        return {**row, "finals": right_answers(row)}

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 if the response's final answer is right, else 0."""
        answer, marked = extract_answer(response.text)
        correct = any(same_answer(answer, right) for right in row["finals"])
        parts = {"correct": float(correct), "format": float(marked and response.complete)}
        return Reward(total=parts["correct"], parts=parts, success=correct)
