"""Questions whose right answer is a short text: yes, Paris, 42."""

from typing import Any

from envs.rewards.answers import holds_words, plain, similarity
from envs.tasks.dataset import DatasetTask
from envs.tasks.math_words import final_answer, said_answer
from envs.tasks.task import Reply, Reward, Row

MATCHES = ("exact", "words", "normalised", "fuzzy")


class Answers(DatasetTask):
    """Questions of a data set, rewarded for the right answer, which is any text or number.

    What a reply says is what it marks by ####, <answer> or \\boxed, else all of it, its thoughts
    left out. `match`: how that and the right answer are compared.
    exact: the same characters. normalised: the same words, without case, punctuation and spacing; a
    number by its value. words: the reply says the right answer as whole words somewhere, also one
    that says every answer there is. fuzzy: alike by at least `threshold`, a typing error in ten
    letters at 0.9; the part `similarity` says how much.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text('{"question": "Is 7 prime?", "answer": "yes"}\\n' * 2)
    >>> task = Answers(str(path), eval_dataset=str(path), match="normalised")
    >>> row = task.rows("train")[0]
    >>> [task.reward(row, Reply(text, True, [])).total for text in ("Yes.", "Yes, it is.")]
    [1.0, 0.0]
    """

    def __init__(
        self,
        dataset: str | None = None,
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
        """Return the row with its right answer as "final"."""
        final = final_answer(row["answer"])
        if not final or not plain(final) or final == "NaN":  # pandas writes what is missing so
            raise ValueError(
                f"row {row['index']}, answer: expected a text after its mark, got "
                f"{row['answer']!r:.80}; correct or remove the row"
            )
        return {**row, "final": final}

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return 1 if the reply says the right answer, else 0."""
        said, right = said_answer(reply.text)[0], row["final"]
        if self.match == "fuzzy":
            alike = similarity(said, right)
            correct = alike >= self.threshold
            return Reward(float(correct), {"correct": correct, "similarity": alike}, correct)
        same = {"words": holds_words, "exact": str.__eq__}.get(self.match)
        correct = same(said, right) if same else plain(said) == plain(right)
        return Reward(float(correct), {"correct": float(correct)}, success=correct)
