"""Find the answer in a text: after ####, in <answer> tags or \\boxed, after "The answer is".

Thoughts are between <think> tags or before a </think> without <think>.
"""

import re

# Possessive, and up to the next tag only: linear in any text.
ANSWER_TAG = re.compile(r"<answer>((?:[^<]++|<(?!/?answer>))*+)</answer>", re.IGNORECASE)
THINK, THINK_END = "<think>", "</think>"
BOXED = "\\boxed{"
# At the start of a sentence of the last line: "**Answer:** 34", "So the final answer is 34."
PHRASE = re.compile(
    r"(?:^|[.!?:] )[ *_#]{0,9}(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:final |correct )?"
    r"answer[ *_]{0,9}(?:is:?|:)[ *_]{0,9}(?=\S)",
    re.IGNORECASE,
)


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the first thought of a text, and the text outside of all thoughts.

    A thought begins at <think>, or at the start of the text if the prompt ended in <think>, and
    ends at </think>. A thought without an end reaches to the end of the text.

    >>> split_thoughts("<think>6 * 7</think> 42"), split_thoughts("6 * 7</think> 42 <think>or")
    (('6 * 7', ' 42'), ('6 * 7', ' 42 '))
    """
    end, begin = text.find(THINK_END), text.find(THINK)
    if end >= 0 and not 0 <= begin < end:
        text = THINK + text
    thoughts, outside, place = [], [], 0
    while (begin := text.find(THINK, place)) >= 0:
        outside.append(text[place:begin])
        end = text.find(THINK_END, begin)
        if end < 0:
            break
        thoughts.append(text[begin + len(THINK) : end])
        place = end + len(THINK_END)
    else:
        outside.append(text[place:])
    return (thoughts[0].strip() if thoughts else ""), "".join(outside)


def tagged(text: str) -> tuple[str, str]:
    """Return the contents of the first <think> and of the last <answer> outside of it, or "".

    >>> tagged("<think>6 * 7</think> <answer>41</answer> no, <answer>42</answer>")
    ('6 * 7', '42')
    """
    thought, outside = split_thoughts(text)
    answers = ANSWER_TAG.findall(outside)
    return thought, answers[-1].strip() if answers else ""


def marked_answer(text: str) -> str | None:
    """Return the last answer that a text marks, None without one.

    The marks are ####, <answer> and \\boxed; without these, in the last line "Answer: 7" or "The
    answer is 7".

    >>> marked_answer("so \\\\boxed{\\\\frac{1}{2}} it is"), marked_answer("7 it is")
    ('\\\\frac{1}{2}', None)
    >>> marked_answer("So the answer is 7."), marked_answer("Add 3.\\n**Final answer: 7**")
    ('7.', '7')
    """
    marks = []
    if "####" in text:
        at = text.rindex("####")
        marks.append((at, (text[at + 4 :].strip().splitlines() or [""])[0]))
    marks += [(match.start(), match[1]) for match in ANSWER_TAG.finditer(text)]
    if BOXED in text:
        at = text.rindex(BOXED)
        marks.append((at, _braced(text[at + len(BOXED) :])))
    if marks:
        return max(marks)[1]
    last = text.strip().rpartition("\n")[2]
    ends = [phrase.end() for phrase in PHRASE.finditer(last)]
    return last[ends[-1] :].removesuffix("**") if ends else None


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
    """Return `text` up to the brace that closes the brace just before it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:place]
    return text
