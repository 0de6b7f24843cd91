"""Preferences: prompts with a better and a worse reply, to train a reward model on.

Without a data set of its own it uses the packaged pairs of sorted digits: the right answer against
the digits as they were, in descending order, with two of them swapped, or with one replaced.
"""

from collections.abc import Sequence
from pathlib import Path

from envs.tasks.dataset import DatasetTask
from envs.tasks.task import Row

SORTED_DIGITS = Path(__file__).parent / "data" / "sorted_digits_preferences.json"


class Preferences(DatasetTask):
    """Rows of a data set with a column "rejected" beside the prompt and the better answer.

    The rest as in `DatasetTask`; `columns` may say that the better answer is called "chosen".

    >>> row = Preferences().preferences()[0]
    >>> sorted(row["chosen"]) == list(row["chosen"]), row["chosen"] != row["rejected"]
    (True, True)
    """

    packaged = str(SORTED_DIGITS)

    def prepare(self, row: Row) -> Row:
        """Return the row with its "chosen" and "rejected" reply."""
        rejected = row["columns"].get("rejected")
        if not isinstance(rejected, str) or rejected == row["answer"]:
            raise ValueError(
                f"row {row['index']}, rejected: expected a text other than the answer, got "
                f"{rejected!r:.80}; correct or remove the row"
            )
        return {**row, "chosen": row["answer"], "rejected": rejected}

    def preferences(self) -> Sequence[Row]:
        """Return the train rows."""
        return self._rows["train"]
