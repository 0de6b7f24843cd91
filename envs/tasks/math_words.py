"""Word problems with a number at the end, as in GSM8K (Cobbe et al. 2021, arXiv:2110.14168).

The right answer is the data's solution after "####" (or in <answer> tags, or \\boxed), else all of
it. Numbers are compared as exact fractions; $ % , and units do not count.
Thoughts, between <think> tags or before a bare </think>, are not part of the answer.
Left out on purpose: symbolic equality. Answers that are no numbers must be the same text.
"""

import re
import warnings
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

from envs.tasks.dataset import DatasetTask
from envs.tasks.task import Response, Reward, Row

# A minus after a letter or digit is a dash ("5-3" ends in 3). At most 40 digits, to bound the cost
# of endless digits.
EXPONENT = r"(?:[eE][+-]?\d+)?"
NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?!\d)"
    rf"{EXPONENT}(?:/0{{0,9}}[1-9]\d{{0,20}})?|(?<![\w.])-?\.\d{{1,40}}(?!\d){EXPONENT}"
)
LARGEST = 999  # exponent: 1e999999999 would fill the memory
# Possessive, and up to the next tag only: linear in any text.
ANSWER_TAG = re.compile(r"<answer>((?:[^<]++|<(?!/?answer>))*+)</answer>", re.IGNORECASE)
THINK, THOUGHT = "<think>", "</think>"
BOXED = "\\boxed{"


class MathWords(DatasetTask):
    """Word problems from a data set, rewarded for the right final number.

    `dataset` and the rest as in `envs.chat_rows.load_chats`; a row's "final" is its right answer.
    The parts: correct (the reward), format (the response marks its answer and ends by itself). Data
    of which half or more of the answers neither hold a number nor mark a text are a ValueError, a
    smaller share is a warning.

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
        """Return the row with its right answer as "final"."""
        final = final_answer(row["answer"])
        if not final:
            fault = f"row {row['index']}, answer: expected a final answer after its mark"
            raise ValueError(f"{fault}, got {row['answer'][-60:]!r}; correct or remove the row")
        return {**row, "final": final}

    def reward(self, row: Row, response: Response) -> Reward:
        """Return 1 if the response's final answer is the right one, else 0."""
        answer, marked = extract_answer(response.text)
        correct = same_answer(answer, row["final"])
        parts = {"correct": float(correct), "format": float(marked and response.complete)}
        return Reward(total=parts["correct"], parts=parts, success=correct)


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the first thought of a text, and the text outside of all thoughts.

    A thought begins at <think>, or at the start of the text if the prompt ended in it, and ends at
    </think>; a thought without an end is dropped with the rest of the text.

    >>> split_thoughts("<think>6 * 7</think> 42"), split_thoughts("6 * 7</think> 42 <think>or")
    (('6 * 7', ' 42'), ('6 * 7', ' 42 '))
    """
    end, begin = text.find(THOUGHT), text.find(THINK)
    if end >= 0 and not 0 <= begin < end:
        text = THINK + text
    thoughts, outside, place = [], [], 0
    while (begin := text.find(THINK, place)) >= 0:
        outside.append(text[place:begin])
        end = text.find(THOUGHT, begin)
        if end < 0:
            break
        thoughts.append(text[begin + len(THINK) : end])
        place = end + len(THOUGHT)
    else:
        outside.append(text[place:])
    return (thoughts[0].strip() if thoughts else ""), "".join(outside)


def marked_answer(text: str) -> str | None:
    """Return the last answer that a text marks by ####, <answer> or \\boxed; None without one.

    >>> marked_answer("so \\\\boxed{\\\\frac{1}{2}} it is"), marked_answer("7 it is")
    ('\\\\frac{1}{2}', None)
    """
    marks = []
    if "####" in text:
        at = text.rindex("####")
        marks.append((at, (text[at + 4 :].strip().splitlines() or [""])[0]))
    marks += [(match.start(), match[1]) for match in ANSWER_TAG.finditer(text)]
    if BOXED in text:
        at = text.rindex(BOXED)
        marks.append((at, _braced(text[at + len(BOXED) :])))
    return max(marks)[1] if marks else None


def final_answer(text: str) -> str:
    """Return the marked answer of a text (see `marked_answer`), else all of it."""
    marked = marked_answer(text)
    return (text if marked is None else marked).strip()


def extract_answer(text: str) -> tuple[str, bool]:
    """Return the answer of a response, without thoughts, and whether the response marks it.

    >>> extract_answer("<think>#### 41</think> It is #### 42"), extract_answer("</think> 42 it is")
    (('42', True), ('42 it is', False))
    """
    outside = split_thoughts(text)[1]
    return final_answer(outside), marked_answer(outside) is not None


def _braced(text: str) -> str:
    """Return the text before the brace that closes one opened just before `text`."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:place]
    return text


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None without one, or beyond 1e999.

    >>> last_number("about -$1,234.50, or 25% of it"), last_number("none")
    (Fraction(25, 1), None)
    """
    matches = NUMBER.findall(_bare(text))
    return exactly(matches[-1].replace(",", "")) if matches else None


def exactly(number: str) -> Fraction | None:
    """Return the value of "-1.5", "1e5" or "1/2"; None beyond 1e999."""
    over, _, under = number.partition("/")
    exponent = over.lower().partition("e")[2].lstrip("+-").lstrip("0")
    if len(exponent) > len(str(LARGEST)):
        return None
    return Fraction(over) / Fraction(under or 1)


def same_answer(answer: str, right: str) -> bool:
    """Return whether a final answer is the right one: the same number, else the same text.

    >>> same_answer("so 18 dollars", "$18.0"), same_answer("Blue.", "blue")
    (True, True)
    """
    number = last_number(right)
    rest = NUMBER.sub("", _bare(right))
    if number is not None and not re.sub(r"[\s%.]|[a-zA-Z]{3,}", "", rest):
        return last_number(answer) == number
    return bool(_words(right)) and _words(answer) == _words(right)


def _bare(text: str) -> str:
    return text.replace("\u2212", "-").replace("\\", "").replace("$", "")


def _words(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
