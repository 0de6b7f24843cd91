"""Short factual questions with one checkable answer; SmolLM2 answers about half greedily.

The kinds are capitals, countries of cities, continents of countries, opposites and plurals
(data/facts.json). The list has the subjects whose answer SmolLM2 completes with probability above
0.3 after the start of a response ("The capital of X is"); two in five of each kind, drawn at
random, are held out. A fact and its reverse (the capital of France, the country of Paris) are in
the same split, so that evaluation tests the form of the response, not facts seen in training.
A response is right if it names the answer, no other answer of the same kind, and ends by itself.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from envs.tasks.task import Response, Reward, Row, Split, Task, assistant, user

DATA = Path(__file__).with_name("data") / "facts.json"
# Letters that Unicode does not decompose into a base letter and an accent.
LETTERS = str.maketrans(
    {"\xf8": "o", "\u0142": "l", "\u0111": "d", "\u0131": "i", "\xe6": "ae", "\u0153": "oe"}
)


class Facts(Task):
    """Questions such as "What is the capital of France?".

    A row also has "kind", "subject" and "answers" (the names that are right).

    >>> task = Facts()
    >>> row = next(row for row in task.rows("train") if row["subject"] == "France")
    >>> row["messages"], row["answers"]
    ([{'role': 'user', 'content': 'What is the capital of France?'}], ['Paris'])
    >>> task.reward(row, Response("It is PARIS.", True, [])).total
    1.0
    >>> task.reward(row, Response("Paris or Rome.", True, [])).parts
    {'named': 1.0, 'ended': 1.0, 'single': 0.0}
    """

    def __init__(self, *, dataset: str | None = None) -> None:
        path = Path(dataset).expanduser() if dataset else DATA
        self._rows, self._names, self._forms = _load(path)

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the questions of a split, in the order of the data file."""
        return self._rows[split]

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 for a response that names only the right answer and ends by itself, else 0."""
        answers = {plain_text(name) for name in row["answers"]}
        question = f" {plain_text(row['messages'][-1]['content'])} "
        named = set(self._names[row["kind"]].findall(plain_text(response.text)))
        others = {name for name in named - answers if f" {name} " not in question}
        parts = {
            "named": float(bool(named & answers)),
            "ended": float(response.complete),
            "single": float(not others),
        }
        right = all(parts.values())
        return Reward(total=float(right), parts=parts, success=right)

    def label(self, row: Row) -> str:
        """Return the kind."""
        return row["kind"]

    def demonstrations(self) -> Sequence[Row]:
        """Return each train question with a one-sentence answer."""
        out = []
        for row in self._rows["train"]:
            text = self._forms[row["kind"]].format(subject=row["subject"], answer=row["answers"][0])
            out.append({**row, "messages": [*row["messages"], assistant(text)]})
        return out


def plain_text(text: str) -> str:
    """Return the words of a text without case, accents and punctuation, with single spaces.

    >>> plain_text("Bras\\xedlia, N'Djamena!")
    'brasilia n djamena'
    """
    plain = unicodedata.normalize("NFKD", text.casefold().translate(LETTERS))
    letters = "".join(c for c in plain if not unicodedata.combining(c))
    return " ".join(re.findall(r"[^\W_]+", letters))


@cache
def _load(path: Path) -> tuple[dict[str, list[Row]], dict[str, re.Pattern], dict[str, str]]:
    """Return the rows of each split, and per kind the pattern of all answers, the response form."""
    rows: dict[str, list[Row]] = {"train": [], "eval": []}
    names, forms = {}, {}
    for kind, data in _read(path).items():
        for split, split_rows in rows.items():
            for subject, answers in data[split].items():
                messages = [user(data["question"].format(subject=subject))]
                about = {"kind": kind, "subject": subject, "answers": answers}
                split_rows.append({"messages": messages, **about})
        known = {plain_text(a) for s in rows for group in data[s].values() for a in group}
        # Longest first, so that "New York" does not match "York".
        choice = "|".join(sorted(known, key=len, reverse=True))
        names[kind] = re.compile(rf"(?<!\w)(?:{choice})(?!\w)")
        forms[kind] = data["response"]
    return rows, names, forms


def _read(path: Path) -> dict[str, dict]:
    """Return the kinds of a facts file; raise ValueError for other data sets."""
    with suppress(ValueError, AttributeError):
        kinds = json.loads(path.read_bytes())
        expected = {"question", "response", "train", "eval"}
        if all(expected <= data.keys() for data in kinds.values()):
            return kinds
    raise ValueError(
        f"{path}: expected {{kind: {{question, response, train, eval}}}} as in {DATA}; rows of "
        "your own are for env=gsm8k, env=answers or env=own"
    )
