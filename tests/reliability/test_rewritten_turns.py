"""A template that writes earlier turns otherwise ends a run of several turns with the remedy."""

import pytest
from runs import train
from templates_by_family import QWEN3

pytestmark = pytest.mark.reliability


def test_qwen3_without_thinking_plays_one_turn_and_says_what_to_set_for_two(tmp_path):
    (path := tmp_path / "qwen3.jinja").write_text(QWEN3.text)
    words = [
        "experiment=grpo_calculator_tiny",
        "policy.model=tiny",
        f"policy.chat_template={path}",
        "policy.chat_template_kwargs.enable_thinking=false",
        "policy.stop=[e,a,o,' ','1','2']",  # so that a turn of the untrained model ends
        "trainer.num_iterations=1",
        "eval.max_rows=8",
    ]
    two = train(*words, f"output_dir={tmp_path / 'two'}")
    assert two.code == 1
    last = two.text.strip().splitlines()[-1]
    assert last.startswith("error: the given chat template rewrites earlier turns: ")
    assert last.endswith("set policy.chat_template=chatml, or env.max_turns=1")
    one = train(*words, "env.max_turns=1", f"output_dir={tmp_path / 'one'}")
    assert one.code == 0, one.text
