"""Reward functions written for TRL: its keywords, its columns, None, async, errors of one reply."""

import functools
import math

import pytest

from envs.rewards import Function, Rewarded, TRLFunction
from envs.tasks import Reply, SortDigits, Task

ASKED = {"role": "user", "content": "Half of 8?"}
FIRST = {"role": "system", "content": "Be brief."}
FOUR = {"role": "assistant", "content": "4"}


def chat(text: str, *before: dict) -> Reply:
    said = {"role": "assistant", "content": text}
    return Reply(text, True, [*(before or (ASKED,)), said])


def row(question, **cells) -> dict:
    """Return a row as `load_chats` reads it from a column `prompt`."""
    messages = [ASKED] if isinstance(question, str) else question
    return {"messages": messages, "question": question, "columns": {"prompt": question, **cells}}


TEXT, MESSAGES = row("Half of 8?", answer="4"), row([ASKED], answer="4", completion="4")


@pytest.mark.parametrize(
    ("conversational", "data", "prompt", "completion"),
    [
        (None, TEXT, "Half of 8?", "4"),
        (None, MESSAGES, [FIRST, ASKED], [FOUR]),
        (True, TEXT, [FIRST, ASKED], [FOUR]),
        (False, MESSAGES, "Half of 8?", "4"),
        (None, SortDigits().row("312"), [FIRST, ASKED], [FOUR]),
    ],
)
def test_prompts_completions_and_columns_are_those_of_trl(conversational, data, prompt, completion):
    def seen(**kwargs) -> list[float]:
        asked.append(kwargs)
        return [0.0] * len(kwargs["completions"])

    asked = []
    function = TRLFunction(seen, conversational=conversational)
    assert function.scores([data] * 2, [chat("4", FIRST, ASKED)] * 2) == [0, 0]
    columns = {"answer": "4"} if "columns" in data else {"digits": "312", "answer": "123"}
    want = {"prompts": prompt, "completions": completion, **columns}
    assert asked == [{name: [value] * 2 for name, value in want.items()}]
    assert function.scores([], []) == []


def test_async_functions_also_behind_a_wrapper():
    async def waiting(completions, answer, *, scale, **kwargs):
        return [scale * (c == a) for c, a in zip(completions, answer, strict=True)]

    rows, replies = [row("a", answer="4"), row("b", answer="5")], [chat("4")] * 2
    for function in (functools.partial(waiting, scale=3), lambda **k: waiting(**k, scale=3)):
        assert TRLFunction(function).scores(rows, replies) == [3.0, 0.0]


def test_an_error_costs_its_own_reply_alone_unless_it_ends_the_run():
    def number(completions, **kwargs):
        return [float(text) for text in completions]

    rows, replies = [row("a")] * 4, [chat("1"), chat("x"), chat("nan"), chat("3")]
    got = TRLFunction(number, on_error="zero").scores(rows, replies)
    assert [type(s).__name__ for s in got] == ["float", "ValueError", "ValueError", "float"]
    assert {type(s) for s in TRLFunction(number).scores(rows, replies)} == {ValueError}
    for function, says in (
        (lambda **_: 0.5, "expected 2 rewards, got 0.5"),
        (lambda **_: [1.0], "expected 2 rewards, got 1"),
        (lambda completions, truth, **_: [1.0], "needs truth"),
    ):
        task = Rewarded(SortDigits(), {"odd": TRLFunction(function, on_error="zero")})
        with pytest.raises(ValueError, match=rf"env\.rewards\.odd: .*{says}"):
            task.rewards([SortDigits().row("12")] * 2, [chat("12")] * 2)


def test_none_is_left_out_of_the_sum_and_a_reply_that_nobody_judges_is_dropped():
    class Asked(Task):
        def rows(self, split):
            return [row("a", kind="sum")]

    def sums(completions, kind, **kwargs):
        return [2.0 if k == "sum" else None for k in kind]

    rows, replies = [row("a", kind="sum"), row("b", kind="word")], [chat("1")] * 2
    alone = Rewarded(Asked(), {"sums": TRLFunction(sums, weight=0.5)})
    first, second = alone.rewards(rows, replies)
    assert (first.total, first.dropped, first.success, first.parts) == (1, False, True, {"sums": 2})
    assert (second.total, second.dropped, second.errors) == (0, True, 0)
    assert math.isnan(second.parts["sums"])
    both = Rewarded(Asked(), {"sums": TRLFunction(sums), "one": Function(lambda *_: 1)})
    assert [(r.total, r.dropped) for r in both.rewards(rows, replies)] == [(3, False), (1, False)]
