"""policy.chat_template_kwargs: variables of the template, in a run and in its saved model."""

import pytest
import torch
from runs import asked, do, train, train_here
from transformers import AutoTokenizer

from policies.chats.templates import with_variables
from policies.load import load_policy
from trainer.modes.chat import Talk

THINKS = (
    "{%- macro head(role) %}{{- '<|im_start|>' + role + '\n' }}{%- endmacro %}"
    "{%- for m in messages %}{{- head(m.role) + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- head('assistant') }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)


def given(config):
    """Return what a configuration says of the template."""
    return {k: v for k, v in config["policy"].items() if k.startswith("chat_template")}


CHAT = [{"role": "user", "content": "Sort 3"}]


def rendered(tokenizer, template=None, **variables):
    return tokenizer.apply_chat_template(
        CHAT, chat_template=template, add_generation_prompt=True, return_dict=False, **variables
    )


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "thinks.jinja"
    path.write_text(THINKS)
    return str(path)


def test_a_policy_renders_as_transformers_does_with_these_variables(template):
    for value in (True, False):
        policy = load_policy(
            "tiny", chat_template=template, chat_template_kwargs={"enable_thinking": value}
        )
        want = rendered(policy.tokenizer, THINKS, enable_thinking=value)
        assert policy.renderer.render(CHAT, add_generation_prompt=True).ids == want
        assert rendered(policy.tokenizer) == want, "the saved template has them"


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        None,
        3,
        2.5,
        "a",
        "",
        "q\"'\\n",
        "{{ 1 }} {% x %} #}",
        "é\n",
        [1, None],
        {"a": [True]},
    ],
    ids=repr,
)
def test_every_plain_value_arrives_as_it_is(value):
    tokenizer = load_policy("tiny").tokenizer
    text = "{% for m in messages %}{{ m.content }}{% endfor %}\n {{ value }}"
    want = rendered(tokenizer, text, value=value)
    assert rendered(tokenizer, with_variables(text, {"value": value})) == want
    changed = with_variables(with_variables(text, {"value": "before"}), {"value": value})
    assert rendered(tokenizer, changed) == want, "the later value holds"
    begins = "\n\n  " + text
    assert rendered(tokenizer, with_variables(begins, {"value": 1})) == rendered(
        tokenizer, begins, value=1
    )


def test_a_variable_that_the_template_does_not_read_is_refused():
    for name in ("enable_thinkng", "messages", "add_generation_prompt", "content"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs.{name}: .* no such variable"):
            with_variables(THINKS, {name: False})


def test_a_run_its_evaluation_and_its_export_have_them(tmp_path, template):
    key = "policy.chat_template_kwargs.enable_thinking=false"
    few = [
        "trainer.num_iterations=1",
        "eval.max_rows=2",
        "eval.num_samples=1",
        "checkpoint.every=1",
    ]
    few += ["trainer.prompts_per_iteration=4", "algorithm.group_size=2", "policy.max_new_tokens=3"]
    run = tmp_path / "run"
    run.mkdir()
    words = ["experiment=grpo_tiny", "policy.model=tiny", f"policy.chat_template={template}", key]
    done = train(*words, *few, f"output_dir={run}")
    assert done.code == 0, done.text
    saved = AutoTokenizer.from_pretrained(run / "model")
    assert rendered(saved) == rendered(saved, THINKS, enable_thinking=False)
    assert "</think>" in saved.decode(rendered(saved))
    do(tmp_path / "scratch", "mode=export", f"resume={run}", f"output_dir={tmp_path / 'mine'}")
    assert rendered(AutoTokenizer.from_pretrained(tmp_path / "mine")) == rendered(saved)
    assert '`{"enable_thinking": false}`' in (tmp_path / "mine" / "README.md").read_text()
    do(tmp_path / "scratch", "mode=evaluate", f"resume={run}", f"output_dir={tmp_path / 'eval'}")
    assert (tmp_path / "eval" / "eval.json").is_file()
    config = asked(["mode=chat", f"resume={run}"])
    assert config is not None
    assert config["policy"]["chat_template_kwargs"] == {"enable_thinking": False}
    talk = Talk(policy := load_policy("tiny", **given(config)), policy.scorer)
    talk.reset()
    talk.answer(CHAT[0]["content"], torch.tensor([1]))
    assert talk.ids[: len(rendered(saved))] == rendered(saved)
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ValueError, match="no such variable"):
        train_here(tmp_path / "wrong", *words, *few, "policy.chat_template_kwargs.thinking=1")
