"""Model folders of strangers: templates, weights and tokens that would do harm."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from letters import letters
from tokenizers import AddedToken

from policies.chats.chat_template import Renderer
from policies.models import find_model, load_model, no_model

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
BAD = {  # Jinja programs that raise
    "more memory than any machine has": "{{ 'x' * 10**15 }}",
    "more than a number of bytes": "{{ 'x' * 10**30 }}",
    "no number": "{{ 1 / 0 }}",
    "no key": "{{ '{a}'.format(b=1) }}",
    "no end of calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("kind", BAD)
def test_what_a_template_fails_with_is_told_as_the_templates(kind):
    with pytest.raises(ValueError, match="refuses a chat") as caught:
        Renderer(letters(["<|im_start|>", "<|im_end|>"]), BAD[kind]).text(CHAT)
    assert "set policy.chat_template=chatml" in str(caught.value)


def test_control_tokens_of_whole_words_come_from_the_template_alone():
    """1,500 chats; the ids between the template's own control tokens hold none of a content's."""
    words = ["END", "<|x|>", "<|im_start|>"]
    tokenizer = letters(words[1:], eos_token="<|im_start|>")
    tokenizer.add_tokens([AddedToken("END", single_word=True, special=True, normalized=False)])
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + 'END' }}"
        "{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}"
    )
    renderer, draw = Renderer(tokenizer, template), random.Random(0)
    end = tokenizer.convert_tokens_to_ids("END")
    parts = ["END", " ", "a", "<|x|>", "<|im_start|>", " END ", "."]
    for _ in range(1500):
        chat = [
            {"role": role, "content": "b" + "".join(draw.choices(parts, k=4)) + "b"}
            for role in ("user", "assistant")
        ]
        text, out = "", []
        for i in renderer.render(chat).ids:  # decode between the control tokens
            if i >= 256:
                out.append((text, i))
                text = ""
            else:
                text += tokenizer.decode([i])
        if any(i == end for _, i in out):
            control = [i for _, i in out]
            first = tokenizer.convert_tokens_to_ids("<|im_start|>")
            assert control == [first, end] * 2, chat
            assert out[1][0] == f"user {chat[0]['content']}"
            assert out[3][0] == f"assistant {chat[1]['content']}"


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


def test_a_run_folder_given_as_a_model_is_told_where_its_model_lies(tmp_path):
    make_checkpoint(tmp_path / "model", "qwen2")
    assert no_model(str(tmp_path / "model")) is None
    assert (no_model(str(tmp_path)) or "").endswith(f"; give {tmp_path / 'model'}")
    assert "hub id like" in (no_model(str(tmp_path / "none" / "there" / "is")) or "")
