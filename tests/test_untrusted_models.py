"""Model folders of strangers: templates, weights and tokens that would do harm."""

import json
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from letters import letters
from tokenizers import AddedToken

from policies.chats.chat_template import Renderer
from policies.models import find_model, load_model

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
BAD = {  # Jinja programs that raise
    "more memory than any machine has": "{{ 'x' * 10**15 }}",
    "no number": "{{ 1 / 0 }}",
    "no end of calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
WORDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + 'END' }}"
    "{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", BAD)
def test_what_a_template_fails_with_names_the_key_to_change(kind):
    with pytest.raises(ValueError, match=r"policy\.chat_template"):
        Renderer(letters(["<|im_start|>", "<|im_end|>"]), BAD[kind]).text(CHAT)


def renderer_of_whole_words() -> Renderer:
    """Return one whose end of a turn is a control token of a whole word."""
    tokenizer = letters(["<|x|>", "<|im_start|>"], eos_token="<|im_start|>")
    tokenizer.add_tokens([AddedToken("END", single_word=True, special=True, normalized=False)])
    return Renderer(tokenizer, WORDS)


RENDERER = renderer_of_whole_words()
CONTENT = st.lists(st.sampled_from(["END", " ", "a", "<|x|>", "<|im_start|>", " END ", "."]))


@given(CONTENT, CONTENT)
def test_control_tokens_come_from_the_template_alone(ours, theirs):
    """Ids between the template's own control tokens hold none of a content's."""
    texts = [f"b{''.join(parts)}b" for parts in (ours, theirs)]
    turns = zip(("user", "assistant"), texts, strict=True)
    ids = RENDERER.render([{"role": role, "content": text} for role, text in turns]).ids
    first, end = RENDERER.tokenizer.convert_tokens_to_ids(["<|im_start|>", "END"])
    assert [i for i in ids if i >= 256] == [first, end] * 2
    one, two = (place for place, i in enumerate(ids) if i == end)
    between = (ids[1:one], [i for i in ids[one + 1 : two] if i != first])
    said = [RENDERER.tokenizer.decode(part).strip() for part in between]
    assert said == [f"user {texts[0]}", f"assistant {texts[1]}"]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_not_read(tmp_path):
    folder = make_checkpoint(tmp_path / "evil", "qwen2")
    (folder / "model.safetensors").unlink()
    torch.save({"x": Evil(tmp_path / "MARK")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickles are not read"):
        load_model(find_model(str(folder)))
    assert not (tmp_path / "MARK").exists()


def test_quantised_weights_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "fp8", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised"):
        load_model(find_model(str(folder)))
