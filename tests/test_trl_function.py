"""Reward functions written for TRL: its keywords, its columns, None, async, errors of one reply."""

import asyncio
import functools
import math

import pytest

from envs.rewards import Function, Rewarded, TRLFunction
from envs.rewards.functions import Refused
from envs.tasks import Reply, SortDigits, Task

ASKED = {"role": "user", "content": "Half of 8?"}
FIRST = {"role": "system", "content": "Be brief."}


def chat(text: str, *before: dict) -> Reply:
    said = {"role": "assistant", "content": text}
    return Reply(text, True, [*(before or (ASKED,)), said])


def row(question, **cells) -> dict:
    """Return a row as `load_chats` reads it from a column `prompt`."""
    messages = [ASKED] if isinstance(question, str) else question
    return {"messages": messages, "question": question, "columns": {"prompt": question, **cells}}


def seen(**kwargs) -> list[float]:
    seen.kwargs = kwargs
    return [0.0] * len(kwargs["completions"])


def test_text_prompts_come_as_texts_and_chats_as_lists_of_messages():
    TRLFunction(seen).scores([row("Half of 8?", answer="4", level=2)], [chat("4", FIRST, ASKED)])
    assert seen.kwargs == {
        "prompts": ["Half of 8?"], "completions": ["4"], "answer": ["4"], "level": [2]
    }  # fmt: skip
    chats = row([ASKED], answer="4", completion="4")
    TRLFunction(seen).scores([chats, chats], [chat("4", FIRST, ASKED), chat("5")])
    assert seen.kwargs == {
        "prompts": [[FIRST, ASKED], [ASKED]],
        "completions": [[{"role": "assistant", "content": t}] for t in "45"],
        "answer": ["4", "4"],
    }


def test_kind_of_completions_can_be_said():
    TRLFunction(seen, conversational=True).scores([row("Half of 8?")], [chat("4")])
    assert seen.kwargs["completions"] == [[{"role": "assistant", "content": "4"}]]
    TRLFunction(seen, conversational=False).scores([row([ASKED])], [chat("4")])
    assert seen.kwargs == {"prompts": ["Half of 8?"], "completions": ["4"]}


def test_rows_without_a_data_set_give_their_own_entries_as_columns():
    made = SortDigits().row("312")
    TRLFunction(seen).scores([made], [Reply("123", True, [])])
    assert seen.kwargs["prompts"] == [made["messages"]]
    assert seen.kwargs["answer"] == ["123"]
    assert "messages" not in seen.kwargs
    assert TRLFunction(seen).scores([], []) == []


def test_async_function_and_one_with_arguments_of_its_own():
    async def waiting(completions, answer, *, scale, **kwargs):
        await asyncio.sleep(0)
        return [scale * (c == a) for c, a in zip(completions, answer, strict=True)]

    function = TRLFunction(functools.partial(waiting, scale=3))
    rows = [row("a", answer="4"), row("b", answer="5")]
    assert function.scores(rows, [chat("4"), chat("4")]) == [3.0, 0.0]


def test_function_that_hides_what_it_is_may_return_what_is_to_be_awaited():
    async def waiting(completions, **kwargs):
        await asyncio.sleep(0)
        return [float(text) for text in completions]

    @functools.wraps(waiting)
    def decorated(*args, **kwargs):
        return waiting(*args, **kwargs)

    assert TRLFunction(decorated).scores([row("a")] * 2, [chat("1"), chat("2")]) == [1.0, 2.0]
    (error,) = TRLFunction(max).scores([row("a")], [chat("1")])  # of C: without a signature
    assert type(error) is TypeError


def test_error_costs_its_own_reply_alone_unless_it_ends_the_run():
    def number(completions, **kwargs):
        return [float(text) for text in completions]

    rows, replies = [row("a")] * 3, [chat("1"), chat("x"), chat("3")]
    got = TRLFunction(number, on_error="zero").scores(rows, replies)
    assert [type(s).__name__ for s in got] == ["float", "ValueError", "float"]
    assert {type(s) for s in TRLFunction(number).scores(rows, replies)} == {ValueError}
    (odd,) = TRLFunction(lambda **_: [math.nan]).scores([row("a")], [chat("1")])
    assert "finite number" in str(odd)


@pytest.mark.parametrize(("returned", "got"), [(None, "None"), (0.5, "0.5"), ([1.0], "1")])
def test_anything_but_a_reward_for_each_reply_ends_the_run(returned, got):
    task = Rewarded(SortDigits(), {"few": TRLFunction(lambda **_: returned, on_error="zero")})
    with pytest.raises(ValueError, match=f"^env.rewards.few: expected 2 rewards, got {got}$"):
        task.rewards([SortDigits().row("12")] * 2, [chat("12")] * 2)


def test_what_a_function_needs_and_nobody_gives_is_told():
    function = TRLFunction(lambda completions, truth, **kwargs: [1.0], on_error="zero")
    (refused,) = function.scores([row("a", answer="4")], [chat("4")])
    assert isinstance(refused, Refused)
    assert "needs truth, got the columns answer" in str(refused)


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
