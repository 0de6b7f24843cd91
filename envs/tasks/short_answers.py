"""Questions whose right answer is a short text: yes, Paris, 42."""

from collections.abc import Sequence
from copy import copy
from typing import Any

from envs.answers.choices import chosen_letter
from envs.answers.comparison import holds_words, plain, same_text, similarity
from envs.answers.extraction import extract_answer
from envs.tasks.dataset import DatasetTask, right_answers
from envs.tasks.task import Response, Reward, Row

MATCHES = ("exact", "words", "normalised", "fuzzy")
LOOSER = {"exact": ("normalised", "words"), "normalised": ("words",), "fuzzy": ("words",)}


class Answers(DatasetTask):
    """Questions of a data set, rewarded for the right answer, which is any text or number.

    A response's answer is what it marks (`envs.answers.extraction.marked_answer`), else all of it
    without thoughts. It is right if it matches one of the right answers by `match`; options are
    compared by `envs.answers.choices.chosen_letter`.
    exact: the same characters. normalised: the same words, without case, punctuation and spacing; a
    number by its value. words: the response contains the right answer as whole words, even if it
    lists every possible answer. fuzzy: a similarity of at least `threshold` (0.9: one typing error
    in ten letters), which is logged as the part `similarity`.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text('{"question": "Is 7 prime?", "answer": "yes"}\\n' * 2)
    >>> task = Answers(str(path), eval_dataset=str(path), match="normalised")
    >>> row = task.rows("train")[0]
    >>> [task.reward(row, Response(text, True, [])).total for text in ("Yes.", "Yes, it is.")]
    [1.0, 0.0]
    """

    def __init__(
        self,
        dataset: str | Sequence[str] | None = None,
        *,
        match: str = "normalised",
        threshold: float = 0.9,
        **data: Any,
    ) -> None:
        if match not in MATCHES:
            raise ValueError(f"expected match in {', '.join(MATCHES)}, got {match!r}")
        self.match, self.threshold = match, threshold
        super().__init__(dataset, **data)

    def prepare(self, row: Row) -> Row:
        """Return the row with its right answers as "finals"."""
        finals = right_answers(row)
        # pandas writes a missing value as "NaN".
        if finals == ["NaN"] or not all(map(plain, finals)):
            raise ValueError(
                f"row {row['index']}, answer: expected a text, got {row['answer']!r:.80}; correct "
                "or remove the row (env.skip_bad_rows=true)"
            )
        return {**row, "finals": finals}

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 if the response's answer is right, else 0."""
        if "options" in row:
            correct = chosen_letter(response.text, row["options"]) == row["answer"]
            return Reward(float(correct), {"correct": float(correct)}, success=correct)
        answer = extract_answer(response.text)[0]
        if self.match == "fuzzy":
            alike = max(similarity(answer, right) for right in row["finals"])
            correct = alike >= self.threshold
            return Reward(float(correct), {"correct": correct, "similarity": alike}, correct)
        same = {"words": holds_words, "exact": str.__eq__}.get(self.match, same_text)
        correct = any(same(answer, right) for right in row["finals"])
        return Reward(float(correct), {"correct": float(correct)}, success=correct)

    def right_otherwise(self, rows: Sequence[Row], responses: Sequence[Response]) -> dict[str, int]:
        """Return how many responses would be right by each looser match."""
        counts = {}
        for match in LOOSER.get(self.match, ()):
            other = copy(self)
            other.match = match
            counts[match] = sum(reward.success for reward in other.rewards(rows, responses))
        return counts
