"""Rewards, splits and demonstrations of the built-in tasks."""

import json
from collections import Counter
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from envs.tasks import Chats, Facts, MathProblems, MathWords, Prompts, Reply, SortDigits, Task
from envs.tasks.facts import plain_text
from envs.tasks.sort_digits import is_held_out
from tests.checkpoints import write_easy_jsonl


def reply(text: str, *, complete: bool = True) -> Reply:
    return Reply(text=text, complete=complete, messages=[])


# Facts


CAPITALS = {
    "France": ["Paris"],
    "Germany": ["Berlin"],
    "Italy": ["Rome"],
    "Colombia": ["Bogota"],
    "India": ["New Delhi"],
    "Cambodia": ["Phnom Penh"],
    "Yemen": ["Sanaa", "Sana'a"],
    "Ukraine": ["Kyiv", "Kiev"],
}


def test_facts_hold_out_whole_subjects_and_answers():
    train, held_out = (Facts().rows(split) for split in ("train", "eval"))
    assert len(train) >= 30
    assert len(held_out) >= 40
    assert not {r["subject"] for r in train} & {r["subject"] for r in held_out}
    assert not {a for r in train for a in r["answers"]} & {
        a for r in held_out for a in r["answers"]
    }
    texts = [r["messages"][0]["content"] for r in [*train, *held_out]]
    assert len(set(texts)) == len(texts)


def test_no_answer_stands_in_its_question():
    for row in [*Facts().rows("train"), *Facts().rows("eval")]:
        question = row["messages"][-1]["content"].lower()
        assert not any(
            word in question.split() for a in row["answers"] for word in a.lower().split()
        )


@pytest.mark.parametrize(
    ("subject", "text", "parts"),
    [
        ("France", "Paris", (1, 1, 1)),
        ("France", "It's Paris's.", (1, 1, 1)),
        ("France", "Parisian", (0, 1, 1)),
        ("France", "", (0, 1, 1)),
        ("France", "Paris, Berlin or Rome?", (1, 1, 0)),
        ("France", "Berlin", (0, 1, 0)),
        ("Colombia", "Bogot\u00e1", (1, 1, 1)),
        ("Colombia", "Bogota\u0301", (1, 1, 1)),
        ("India", "It is NEW  DELHI.", (1, 1, 1)),
        ("Cambodia", "Phnom-Penh", (1, 1, 1)),
        ("Yemen", "Sana'a", (1, 1, 1)),
    ],
)
def test_facts_reward_needs_the_answer_alone_and_an_end(tmp_path, subject, text, parts):
    task = Facts(dataset=write_facts(tmp_path / "f.json", CAPITALS, {}))
    row = next(row for row in task.rows("train") if row["subject"] == subject)
    named, ended, single = parts
    done = task.reward(row, reply(text))
    assert done.parts == {"named": named, "ended": ended, "single": single}
    assert done.total == float(named and single)
    assert done.success == (done.total == 1)
    cut = task.reward(row, reply(text, complete=False))
    assert (cut.total, cut.parts["ended"], cut.success) == (0, 0, False)


def write_facts(path: Path, train: dict, held_out: dict, question: str = "Where is {subject}?"):
    data = {"place": {"question": question, "reply": "{answer}", "train": train, "eval": held_out}}
    path.write_text(json.dumps(data))
    return str(path)


def test_longer_name_is_not_read_as_the_shorter_one(tmp_path):
    path = write_facts(tmp_path / "f.json", {"the Bronx": ["New York"]}, {"the Minster": ["York"]})
    task = Facts(dataset=path)
    bronx, minster = task.rows("train")[0], task.rows("eval")[0]
    assert task.reward(bronx, reply("In New York.")).total == 1
    assert task.reward(minster, reply("In New York.")).total == 0
    assert task.reward(minster, reply("In York.")).total == 1
    assert task.reward(bronx, reply("York, New York")).parts["single"] == 0


def test_word_of_the_question_is_no_second_answer(tmp_path):
    path = write_facts(tmp_path / "f.json", {"Rome": ["Italy"]}, {"Italy's boot": ["Rome"]})
    task = Facts(dataset=path)
    assert task.reward(task.rows("train")[0], reply("Rome is in Italy.")).total == 1


def test_facts_that_are_trained_on_and_held_out_are_refused(tmp_path):
    path = write_facts(tmp_path / "b.json", {"Bonn": ["Germany"]}, {"Bonn": ["Germany"]})
    with pytest.raises(ValueError, match="apart"):
        Facts(dataset=path)


def test_demonstrated_facts_earn_the_full_reward():
    task = Facts()
    for row in task.demonstrations():
        assert task.reward(row | {"messages": row["messages"][:-1]},
                           reply(row["messages"][-1]["content"])).total == 1  # fmt: skip


def test_fold_keeps_the_letters_of_any_alphabet():
    assert plain_text("\u0141\u00f3d\u017a, STRA\u00dfE; \u041c\u043e\u0441\u043a\u0432\u0430") == (
        "lodz strasse \u043c\u043e\u0441\u043a\u0432\u0430"
    )


# Sorting digits


def test_sorted_digits_are_as_the_question_says():
    for row in [*SortDigits(num_rows=300).rows("train"), *SortDigits().rows("eval")]:
        digits = row["messages"][0]["content"].removeprefix("Sort the digits in ascending order: ")
        counts = Counter(digits)
        assert row["answer"] == "".join(d * counts[d] for d in "0123456789")
        assert 3 <= len(digits) <= 5


def test_multisets_of_eval_never_appear_in_train():
    task = SortDigits()
    train, held_out = ({r["answer"] for r in task.rows(s)} for s in ("train", "eval"))
    assert len(task.rows("train")) == 20_000
    assert len(task.rows("eval")) == 200
    assert not train & held_out
    every = ["".join(c) for k in (3, 4, 5) for c in combinations_with_replacement("0123456789", k)]
    assert sum(map(is_held_out, every)) / len(every) == pytest.approx(1 / 8, abs=0.02)


def test_rows_are_a_function_of_the_seed_and_eval_rows_are_fixed():
    one, same, other = SortDigits(seed=1), SortDigits(seed=1), SortDigits(seed=2)
    assert one.rows("train") == same.rows("train") != other.rows("train")
    assert one.demonstrations() == same.demonstrations()
    assert one.rows("eval") == other.rows("eval")


@pytest.mark.parametrize(
    ("text", "complete", "total", "success"),
    [
        ("24478", True, 1.0, True),
        ("24478", False, 0.9, False),
        ("87442", True, 0.1, False),
        ("2447", True, 0.0, False),
        ("2 4 4 7 8", True, 0.0, False),
        ("\u0662\u0664\u0664\u0667\u0668", True, 0.0, False),
    ],
)
def test_sort_reward_is_nine_tenths_exact_one_tenth_form(text, complete, total, success):
    task = SortDigits(num_rows=1)
    done = task.reward(task.row("44287"), reply(text, complete=complete))
    assert (done.total, done.success) == (total, success)
    assert done.total == pytest.approx(0.9 * done.parts["exact"] + 0.1 * done.parts["format"])


def test_demonstrations_are_mostly_wrong_in_the_stated_shares():
    shares = Counter()
    for row in SortDigits().demonstrations():
        said, digits = row["messages"][-1]["content"], row["digits"]
        if len({digits, row["answer"], row["answer"][::-1]}) == 3:  # else two kinds look the same
            kinds = {digits: "unchanged", row["answer"]: "right", row["answer"][::-1]: "descending"}
            shares[kinds[said]] += 1
    total = shares.total()
    assert total > 15_000
    assert shares["right"] / total == pytest.approx(0.25, abs=0.02)
    assert shares["descending"] / total == pytest.approx(0.45, abs=0.02)
    assert shares["unchanged"] / total == pytest.approx(0.30, abs=0.02)


# Chats and the base


def test_chats_train_on_whole_conversations(tmp_path):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    task = Chats(str(path), eval_dataset=str(path))
    assert task.demonstrations()[0]["messages"] == turns
    row = task.rows("eval")[0]
    assert row["messages"] == turns[:-1]
    assert task.reward(row, reply("So  long")).success
    assert not task.reward(row, reply("So long!")).success


def test_prompts_alone_need_no_answer_and_keep_their_system_message(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": turns, "solution": 4}))
    task = Prompts(str(path), eval_dataset=str(path), columns={"question": "prompt"})
    assert task.rows("eval")[0]["messages"] == turns
    with pytest.raises(NotImplementedError, match="env=chats"):
        task.demonstrations()


def test_right_answers_without_a_number_are_refused_from_half_of_the_rows_on(tmp_path):
    def rows(*answers: str) -> str:
        cells = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, cells)))
        return str(tmp_path / "a.jsonl")

    for answers, count in (
        (["cold", "dry", "low"], "3 of 3"),
        (["4", "5 km", "dry", "x"], "2 of 4"),
    ):
        with pytest.raises(ValueError, match=f"{count} right answers hold no number.*env=answers"):
            MathWords(rows(*answers))
        MathProblems(rows(*answers), symbolic=False)
    with pytest.warns(UserWarning, match="1 of 3 right answers hold no number, as 'dry'"):
        MathWords(rows("4", "dry", "6"))
    MathWords(rows("It is #### dry", "<answer>cold</answer>", "6 apples"))


def test_every_task_ends_after_one_reply_and_refuses_unknown_splits(tmp_path):
    data = str(write_easy_jsonl(tmp_path / "e.jsonl", 5))
    for task in (Facts(), SortDigits(num_rows=3), MathWords(data), Chats(data)):
        assert task.respond(task.make_example(), reply("x")) == []
        assert task.make_example() == task.rows("train")[0]
        with pytest.raises(ValueError, match="train or eval"):
            task.rows("test")


def test_base_task_says_what_to_override():
    for call in (lambda t: t.rows("train"), lambda t: t.reward({}, reply("")),
                 lambda t: t.demonstrations()):  # fmt: skip
        with pytest.raises(NotImplementedError, match="override"):
            call(Task())
