"""Tasks with rows of a data set; a subclass adds the reward."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.answers.choices import chosen_letter
from envs.answers.extraction import extract_answer
from envs.chat_rows import load_chats
from envs.rows import map_rows
from envs.tasks.task import Response, Reward, Row, Split, Task

SORTED_DIGITS = Path(__file__).parent / "data" / "sorted_digits_preferences.json"


class DatasetTask(Task):
    """Rows of a file or of the hub, read by `envs.chat_rows.load_chats`.

    A row has "messages" (the prompt), "response" (the data's message), "answer" (the right text),
    "index", "columns" (all cells by column name) and the additions of `prepare`. Override `reward`.
    `skip_bad_rows` leaves out rows that cannot be read, or that `prepare` refuses.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> row = '{"question": "%s", "answer": "yes", "level": 3}'
    >>> _ = path.write_text("\\n".join(row % name for name in ("Now?", "Then?")))
    >>> class Short(DatasetTask):
    ...     def reward(self, row, response):
    ...         short = float(len(response.text) <= row["columns"]["level"])
    ...         return Reward(total=short, parts={"short": short}, success=short == 1)
    >>> task = Short(str(path))
    >>> task.reward(task.rows("train")[0], Response("Yes", True, [])).total
    1.0
    """

    packaged: str | None = None  # the default data file
    answers = True  # whether every row needs an answer
    rejected = False  # whether every row also needs a rejected response
    chats_first = False  # whether a column of whole chats has priority over an answer column

    def __init__(
        self,
        dataset: str | Sequence[str] | None = None,
        *,
        eval_dataset: str | Sequence[str] | None = None,
        columns: Mapping[str, str | None] | None = None,
        split: str = "train",
        eval_split: str | None = None,
        seed: int = 0,
        skip_bad_rows: bool = False,
    ) -> None:
        self._rows = load_chats(
            dataset or self.packaged,
            eval_dataset=eval_dataset,
            columns=columns,
            split=split,
            eval_split=eval_split,
            seed=seed,
            answers=self.answers,
            rejected=self.rejected,
            chats_first=self.chats_first,
            prepare=self.prepare,
            skip_bad_rows=skip_bad_rows,
        )

    def prepare(self, row: Row) -> Row:
        """Return the row with additions for the reward; raise ValueError for a faulty row."""
        return row

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the prompts of a split with the data's answers."""
        return self._rows[split]

    def demonstrations(self) -> Sequence[Row]:
        """Return the train chats, ending with the response; raise ValueError without a response."""
        return map_rows(_demonstration, self._rows["train"])


def _demonstration(row: Row) -> Row:
    if "response" not in row:
        raise ValueError(
            f"row {row['index']}: expected a response to learn, got a right answer alone "
            f"({row['origin'].describe()}); judge by it with experiment=grpo_own, or name a column "
            "of responses with env.columns.question and env.columns.answer"
        )
    return {**row, "messages": [*row["messages"], row["response"]]}


def right_answers(row: Row) -> list[str]:
    """Return the right answers of a row, without thoughts and without the text before a mark.

    Raise ValueError if no text can equal the answer: a call, unit tests, an empty text.
    """
    answers = row.get("answers", [row["answer"]])
    finals = [extract_answer(answer)[0] for answer in answers]
    tests = all(name in finals[0] for name in ('"inputs"', '"outputs"'))
    if row.get("response", {}).get("tool_calls") or tests:
        got = "unit tests" if tests else "a call of a tool"
        remedy = "use env=prompts with a reward of your own (env.rewards)"
        raise ValueError(f"row {row['index']}, answer: expected a text, got {got}; {remedy}")
    if not all(finals):
        raise ValueError(
            f"row {row['index']}, answer: expected a text after its mark, got "
            f"{row['answer'][-80:]!r}; correct or remove the row (env.skip_bad_rows=true)"
        )
    return finals


class Prompts(DatasetTask):
    """Prompts without answers, for `env.rewards`; a response with a reward above 0 is right.

    A row has an "answer" only if `columns` names its column; "columns" has all cells.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "prompts.jsonl"
    >>> _ = path.write_text('{"question": "Now?", "solution": 4}')
    >>> Prompts(str(path), eval_dataset=str(path)).rows("train")[0]["columns"]["solution"]
    4
    """

    answers = False

    def demonstrations(self) -> Sequence[Row]:
        """Raise NotImplementedError: there are no responses to imitate."""
        raise NotImplementedError("Prompts has no responses to imitate; use env=chats for SFT")


def prompts_to_retain(data: str | Sequence[str]) -> Prompts:
    """Return the prompts of eval.retain; raise ValueError with this key."""
    try:
        return Prompts(data, eval_dataset=data)
    except ValueError as error:
        text = re.sub(r"env\.(eval_)?dataset", "eval.retain", str(error))
        if "env.columns" in text:  # which does not name those of eval.retain
            text = f"{text.partition('; ')[0]}; rename the column of the prompts to prompt"
        raise ValueError(f"eval.retain: {text}") from error


class Chats(DatasetTask):
    """Full chats with a last message of the assistant, for SFT.

    A response is right if it has the same words as the data's. A row whose response calls a tool
    gets no reward.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
    >>> row = '{"question": "%s", "answer": "yes"}'
    >>> _ = path.write_text("\\n".join(row % name for name in ("Now?", "Then?")))
    >>> [m["role"] for m in Chats(str(path)).demonstrations()[0]["messages"]]
    ['user', 'assistant']
    """

    chats_first = True

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 for a response with the words, or the option, of the data's response, else 0."""
        learnt = row.get("response", {})
        if learnt.get("tool_calls"):
            return Reward(total=0.0, parts={"exact": math.nan}, success=False, dropped=True)
        right = row.get("answers", [learnt.get("content", row["answer"])])
        exact = response.text.split() in [text.split() for text in right]
        if "options" in row:
            exact = chosen_letter(response.text, row["options"]) == row["answer"]
        return Reward(
            total=float(exact), parts={"exact": float(exact)}, success=exact and response.complete
        )


class Preferences(DatasetTask):
    """Rows of a data set with a column "rejected" in addition to prompt and better response.

    Pairs of equal responses are left out. Everything else as in `DatasetTask`. The packaged pairs
    have sorted digits and wrong ones (unchanged, descending, two swapped, one replaced).

    >>> row = Preferences().preferences()[0]
    >>> sorted(row["chosen"]) == list(row["chosen"]), row["chosen"] != row["rejected"]
    (True, True)
    """

    packaged = str(SORTED_DIGITS)
    rejected = True

    def prepare(self, row: Row) -> Row:
        """Return the row with its better response as "chosen"."""
        return {**row, "chosen": row["answer"]}

    def preferences(self) -> Sequence[Row]:
        """Return the train rows."""
        return self._rows["train"]
