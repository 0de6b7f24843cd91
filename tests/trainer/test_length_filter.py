"""Rows that do not fit: found by their bytes or tokens before a run, dropped, cut or refused."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.runs import metrics, train_here

from policies.chats.renderer import Renderer
from policies.models.find import find_model, load_tokenizer
from trainer.length_filter import LengthFilter


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def fit(room, name="chatml"):
    renderer = Renderer(load_tokenizer(find_model("tiny")), name)
    env = SimpleNamespace(messages=lambda row: row["messages"])
    return LengthFilter(renderer, room, env, True, "a limit", "raise it")


@pytest.mark.parametrize("name", ["chatml", "hermes", "qwen", "llama"])
def test_the_bound_by_bytes_is_never_below_the_tokens(name):
    renderer = fit(10, name).renderer

    @given(st.lists(st.text(max_size=200), min_size=1, max_size=3))
    def check(texts):
        messages = chat(*texts)
        tokens = renderer.render(messages, add_generation_prompt=True).ids
        assert renderer.most_tokens(messages, prompt=True) >= len(tokens)

    check()


def test_too_long_rows_are_those_that_transformers_counts_so():
    fits, draw = fit(60), random.Random(1)
    rows = [{"messages": chat("12 " * draw.randint(1, 60))} for _ in range(50)]
    count = fits.renderer.tokenizer.apply_chat_template
    options = {"chat_template": fits.renderer.template, "add_generation_prompt": True}
    sizes = [len(count(row["messages"], return_dict=False, **options)) for row in rows]
    want = {i: size for i, size in enumerate(sizes) if size > 60}
    assert 5 < len(want) < 45
    assert fits.too_long(rows, print) == want


def test_a_demonstration_whose_turn_cannot_be_found_ends_the_run_before_it_starts():
    opens = "{% if add_generation_prompt %}{{ 'another start' }}{% endif %}"
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}" + opens
    rows = [{"index": i, "messages": chat("a", "b " * length)} for i, length in enumerate((1, 99))]
    with pytest.raises(ValueError, match="row 1"):
        replace(fit(60, template), prompt=False).too_long(rows, print)


def words(folder, *more, long=(), gone=()):
    """Write 70 rows, some too long and some left out, and 6 held-out ones; return their words."""
    for name, count in (("d", 70), ("eval", 6)):
        rows = [{"question": f"{i} + 1 is?", "answer": f"{i + 1}"} for i in range(count)]
        for i in (i for i in long if i < count):
            rows[i]["question"] = "12 " * 3000 + f"{i}?"
        text = "\n".join(json.dumps(row) for i, row in enumerate(rows) if i not in gone)
        (folder / f"{name}.jsonl").write_text(text)
    data = [f"env.dataset={folder / 'd.jsonl'}", f"env.eval_dataset={folder}/eval.jsonl"]
    small = ["policy.model=tiny", "policy.max_new_tokens=3", "policy.max_prompt_tokens=100"]
    small += ["trainer.prompts_per_iteration=4", "algorithm.group_size=2", "eval.num_samples=1"]
    return ["experiment=grpo_tiny", "env=gsm8k", *data, *small, *more]


@pytest.mark.runs
def test_a_run_says_what_it_leaves_out_and_is_the_run_without_those_rows(tmp_path, capsys):
    two = "trainer.num_iterations=2", "eval.train_rows=70"
    train_here(tmp_path / "run", *words(tmp_path, *two, long=(2, 7, 33)))
    printed = capsys.readouterr().out
    assert printed.count("3 of 70 train rows exceed 100 tokens") == 1
    assert printed.count("3 of 70 eval_train rows exceed 100 tokens") == 1
    assert printed.count("1 of 6 eval rows exceed 100 tokens") == 1
    train_here(tmp_path / "again", *words(tmp_path, *two, gone=(2, 7, 33)))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "again")


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ([], "policy.max_prompt_tokens"),
        (["policy.max_prompt_tokens=null", f"policy.system_prompt={'Sort it. ' * 99}"], "max_pos"),
    ],
)
def test_rows_of_which_none_fits_are_refused_at_a_sample(tmp_path, more, limit):
    with pytest.raises(ValueError, match=rf"64 of 64 train rows .*{limit}.*which leaves none"):
        train_here(tmp_path / "none", *words(tmp_path, *more, long=() if more else range(70)))
