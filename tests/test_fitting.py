"""Rows that do not fit: found by their bytes or tokens before a run, dropped, cut or refused."""

import json
import random
from types import SimpleNamespace

import pytest
from runs import metrics, train, train_here

from policies.chats.chat_template import Renderer
from policies.models import find_model, load_tokenizer
from trainer.fitting import Fit

SIZES = (1, 5, 40, 200, 3000)


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def plain(renderer, messages):
    """Return the tokens of a prompt as transformers itself counts them."""
    ids = renderer.tokenizer.apply_chat_template(
        messages, chat_template=renderer.template, add_generation_prompt=True, return_dict=False
    )
    return len(ids)


def fit(room, name="chatml"):
    renderer = Renderer(load_tokenizer(find_model("tiny")), name)
    return Fit(renderer, room, SimpleNamespace(messages=lambda row: row["messages"]), True)


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama"])
def test_the_bound_by_bytes_is_never_below_the_tokens(name):
    fits = fit(10, name)
    rng = random.Random(0)
    letters = "abz 019\n\t.<|>é漢🙂\u0344\ufb2c\U0001d160"
    for size in SIZES:
        texts = ["".join(rng.choices(letters, k=size)) for _ in range(3)]
        for messages in (chat(texts[0]), chat(*texts)):
            tokens = len(fits.renderer.render(messages, add_generation_prompt=True).ids)
            assert fits.renderer.most_tokens(messages, prompt=True) >= tokens


def test_too_long_rows_are_those_that_transformers_counts_so():
    fits = fit(60)
    rng = random.Random(1)
    rows = [{"messages": chat("12 " * rng.randint(1, 60))} for _ in range(50)]
    want = {i: n for i, r in enumerate(rows) if (n := plain(fits.renderer, r["messages"])) > 60}
    assert 5 < len(want) < 45
    assert fits.too_long(rows) == want


def write(path, long_train=(7, 33), long_eval=()):
    rows = [{"question": f"{i} + 1 is?", "answer": f"{i + 1}"} for i in range(40)]
    for i in long_train:
        rows[i]["question"] = "12 " * 3000 + f"{i}?"
    path.write_text("\n".join(map(json.dumps, rows)))
    held = [{"question": f"{i} + 2 is?", "answer": f"{i + 2}"} for i in range(6)]
    for i in long_eval:
        held[i]["question"] = "12 " * 200
    (path.parent / "eval.jsonl").write_text("\n".join(map(json.dumps, held)))


def words(folder, *more):
    data = [
        "env=gsm8k",
        f"env.dataset={folder / 'd.jsonl'}",
        f"env.eval_dataset={folder}/eval.jsonl",
    ]
    small = ["policy.model=tiny", "policy.max_new_tokens=3", "policy.max_prompt_tokens=100"]
    small += ["trainer.prompts_per_iteration=4", "algorithm.group_size=2", "eval.num_samples=1"]
    return ["experiment=grpo_tiny", *data, *small, "trainer.num_iterations=2", *more]


def test_a_run_says_once_what_it_leaves_out_and_is_the_run_without_those_rows(tmp_path):
    write(tmp_path / "d.jsonl", long_eval=[2])
    run = train(*words(tmp_path, f"output_dir={tmp_path / 'run'}"))
    assert run.code == 0, run.text
    assert run.text.count("2 of 40 train rows exceed 100 tokens: row 7 (") == 1
    assert run.text.count("1 of 6 eval rows exceed 100 tokens: row 2 (") == 1
    for name, gone in (("d.jsonl", (7, 33)), ("eval.jsonl", (2,))):
        rows = (tmp_path / name).read_text().splitlines()
        kept = [row for i, row in enumerate(rows) if i not in gone]
        (tmp_path / name).write_text("\n".join(kept))
    again = train(*words(tmp_path, f"output_dir={tmp_path / 'again'}"))
    assert again.code == 0, again.text
    assert metrics(tmp_path / "run") == metrics(tmp_path / "again")


def test_rows_of_which_none_fits_are_refused(tmp_path):
    write(tmp_path / "d.jsonl", long_train=range(40))
    with pytest.raises(ValueError, match="which leaves none"):
        train_here(tmp_path / "none", *words(tmp_path))


def test_demonstrations_that_exceed_the_model_do_not_end_a_run(tmp_path):
    write(tmp_path / "d.jsonl")
    data = [f"env.dataset={tmp_path / 'd.jsonl'}", f"env.eval_dataset={tmp_path}/eval.jsonl"]
    some = ["policy.model=tiny", "trainer.prompts_per_iteration=20", "eval.max_rows=2"]
    more = ["trainer.num_iterations=2", "trainer.micro_batch_tokens=600"]
    train_here(tmp_path / "run", "experiment=sft_tiny", "env=chats", *data, *some, *more)
    assert len(metrics(tmp_path / "run")) == 3
