"""env=answers: texts and numbers as right answers, compared in four ways."""

import json
import time

import pytest
from datasets import Dataset
from runs import metrics, train_here

from conf.build import make_task
from conf.compose import compose_checked
from envs.tasks import Answers, Reply

# right answer, what a reply says, and by which matches it is right
CASES = [
    ("yes", "yes", "exact words normalised fuzzy"),
    ("yes", "Yes.", "words normalised fuzzy"),
    ("yes", " **Yes** ", "words normalised fuzzy"),
    ("yes", "Yes, it is.", "words"),
    ("yes", "yesterday", ""),
    ("yes", "no", ""),
    ("yes", "", ""),
    ("yes", "<think>yes</think> no", ""),
    ("yes", "It may be no. #### yes", "exact words normalised fuzzy"),
    ("New York", "new   york", "words normalised fuzzy"),
    ("New York", "It is New York City", "words"),
    ("New York", "York, New", ""),
    ("Mississippi", "Missisippi", "fuzzy"),
    ("C++", "c++", "words normalised fuzzy"),
    ("1,000", "1000.0", "normalised fuzzy words"),
    ("42", "It is 42.", "words"),
    ("42", "421", ""),
]


def rows(path, pairs):
    path.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in pairs))
    return str(path)


@pytest.mark.parametrize("match", ["exact", "words", "normalised", "fuzzy"])
def test_what_is_right_by_each_match(tmp_path, match):
    path = rows(tmp_path / "d.jsonl", [(f"{i}?", right) for i, (right, _, _) in enumerate(CASES)])
    task = Answers(path, eval_dataset=path, match=match)
    for row, (_, said, matches) in zip(task.rows("train"), CASES, strict=True):
        reward = task.reward(row, Reply(said, True, []))
        assert reward.success is (match in matches.split()), (match, row["final"], said)
        assert reward.total == reward.parts["correct"] == float(reward.success)


def test_endless_replies_cost_little(tmp_path):
    path = rows(tmp_path / "d.jsonl", [("a?", "yes " * 50), ("b?", "no")])
    for match in ("exact", "words", "normalised", "fuzzy"):
        task, start = Answers(path, eval_dataset=path, match=match), time.perf_counter()
        assert not task.reward(
            task.rows("train")[0], Reply("yes " * 49 * 5000, True, [])
        ).total or (match == "words")
        assert time.perf_counter() - start < 5


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_kind_of_file_and_numbers_by_the_key_env_match(tmp_path, suffix):
    data = Dataset.from_list([{"frage": f"{i} + 1?", "antwort": i + 1} for i in range(20)])
    path = tmp_path / f"d{suffix}"
    {".jsonl": data.to_json, ".csv": data.to_csv, ".parquet": data.to_parquet}[suffix](str(path))
    words = ["env=answers", f"env.dataset={path}", "env.columns.question=frage"]
    env = compose_checked([*words, "env.columns.answer=antwort", "env.match=words"])["env"]
    task = make_task(env)
    assert task.match == "words"
    row = task.rows("eval")[0]
    assert task.reward(row, Reply(f"that is {row['index'] + 1}!", True, [])).total == 1
    with pytest.raises(ValueError, match="match to be one of"):
        compose_checked([*words, "env.columns.answer=antwort", "env.match=loose"])


def test_gsm8k_names_it_for_answers_that_are_texts(tmp_path):
    path = rows(tmp_path / "d.jsonl", [(f"{i}?", "yes") for i in range(4)])
    with pytest.raises(ValueError, match="env=answers"):
        compose_checked(["experiment=grpo_tiny", "env=gsm8k", f"env.dataset={path}"])


def test_a_run_on_yes_and_no_learns_to_say_one_of_them(tmp_path):
    path = rows(tmp_path / "d.jsonl", [(f"Is {i} less than 99?", "yes") for i in range(12)])
    few = ["trainer.num_iterations=2", "eval.num_samples=1", "policy.max_new_tokens=3"]
    few += ["trainer.prompts_per_iteration=4", "algorithm.group_size=2", "policy.model=tiny"]
    words = ["experiment=grpo_tiny", "env=answers", f"env.dataset={path}", "env.match=fuzzy"]
    train_here(tmp_path / "run", *words, "env.task.threshold=0.4", *few)
    done = metrics(tmp_path / "run")[-1]
    assert {"reward_part/correct", "reward_part/similarity"} <= set(done)


def test_a_number_that_is_missing_is_no_answer(tmp_path):
    """pandas writes NaN for it."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "a?", "answer": NaN}\n{"question": "b?", "answer": 2}\n')
    with pytest.raises(ValueError, match=r"row 0, answer: expected a text"):
        list(Answers(str(path), eval_dataset=str(path)).rows("train"))
