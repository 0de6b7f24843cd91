"""Chats from a data set: SFT on `messages`, or on question and answer columns."""

from collections.abc import Mapping, Sequence

from envs.data import load_chats
from envs.tasks.task import Reply, Reward, Row, Split, Task, assistant, check_split


class Chats(Task):
    """Whole chats whose last message is the assistant's, for SFT.

    `dataset` and the rest as in `envs.data.load_chats`. A row's "messages" are the prompt, its
    "answer" is the assistant's last message; a reply is right if it says the same words.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
    >>> row = '{"question": "%s", "answer": "yes"}'
    >>> _ = path.write_text("\\n".join(row % name for name in ("Now?", "Then?")))
    >>> [m["role"] for m in Chats(str(path)).demonstrations()[0]["messages"]]
    ['user', 'assistant']
    """

    def __init__(
        self,
        dataset: str | None = None,
        *,
        eval_dataset: str | None = None,
        columns: Mapping[str, str] | None = None,
        split: str = "train",
        eval_split: str | None = None,
        seed: int = 0,
    ) -> None:
        self._rows = load_chats(
            dataset,
            eval_dataset=eval_dataset,
            columns=columns,
            split=split,
            eval_split=eval_split,
            seed=seed,
        )

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the prompts of a split with the data's own answers."""
        check_split(split)
        return self._rows[split]

    def reward(self, row: Row, reply: Reply) -> Reward:
        """Return 1 for a reply with the words of the data's answer, else 0."""
        exact = reply.text.split() == row["answer"].split()
        return Reward(
            total=float(exact), parts={"exact": float(exact)}, success=exact and reply.complete
        )

    def demonstrations(self) -> Sequence[Row]:
        """Return the train chats, the answer as their last message."""
        return with_answers(self._rows["train"])


def with_answers(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their answer as the last message."""
    return [{**row, "messages": [*row["messages"], assistant(row["answer"])]} for row in rows]
