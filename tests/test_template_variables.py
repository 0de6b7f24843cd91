"""policy.chat_template_kwargs: variables of the template, in a run and in its saved model."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from policies.chats.templates import with_variables
from policies.load import load_policy

THINKS = (
    "{%- macro head(role) %}{{- '<|im_start|>' + role + '\n' }}{%- endmacro %}"
    "{%- for m in messages %}{{- head(m.role) + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- head('assistant') }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
CHAT = [{"role": "user", "content": "Sort 3"}]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def rendered(tokenizer, template=None, **variables):
    return tokenizer.apply_chat_template(
        CHAT, chat_template=template, add_generation_prompt=True, return_dict=False, **variables
    )


@pytest.mark.parametrize("value", [True, False])
def test_a_policy_renders_as_transformers_does_with_these_variables(tmp_path, value):
    (tmp_path / "thinks.jinja").write_text(THINKS)
    variables = {"enable_thinking": value}
    path = str(tmp_path / "thinks.jinja")
    policy = load_policy("tiny", chat_template=path, chat_template_kwargs=variables)
    want = rendered(policy.tokenizer, THINKS, **variables)
    assert policy.renderer.render(CHAT, add_generation_prompt=True).ids == want
    assert rendered(policy.tokenizer) == want, "the saved template has them"


def test_every_plain_value_arrives_as_it_is_and_the_later_one_holds():
    tokenizer = load_policy("tiny").tokenizer
    text = "\n  {% for m in messages %}{{ m.content }}{% endfor %}\n {{ value }}"

    @given(PLAIN | st.lists(PLAIN) | st.dictionaries(st.text(), PLAIN))
    def check(value):
        before = with_variables(text, {"value": "before"})
        changed = with_variables(before, {"value": value})
        assert rendered(tokenizer, changed) == rendered(tokenizer, text, value=value)

    check()


@pytest.mark.parametrize("name", ["enable_thinkng", "messages"])
def test_a_variable_that_the_template_does_not_read_is_refused(name):
    with pytest.raises(ValueError, match=rf"chat_template_kwargs\.{name}"):
        with_variables(THINKS, {name: False})
