"""Model folders of strangers: templates, weights and tokens that would do harm."""

import json
import os
import random
import resource
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import make_checkpoint
from letters import letters
from tokenizers import AddedToken

from policies.chats import bounds
from policies.chats.chat_template import Renderer
from policies.models import find_model, load_model, no_model

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLE = (
    "{% set n = namespace(s='x' * 999) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}{{ n.s }}"
)
LONG = "{{ 'x' * 40000000 }}"
BAD = {  # what each of these Jinja programs ends with, by what it is
    "more memory than any machine has": ("{{ 'x' * 10**15 }}", "more memory for one chat than"),
    "more than a number of bytes": ("{{ 'x' * 10**30 }}", "refuses a chat"),
    "no number": ("{{ 1 / 0 }}", "refuses a chat"),
    "no key": ("{{ '{a}'.format(b=1) }}", "refuses a chat"),
    "no end of calls": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses a chat"),
}


@pytest.mark.parametrize(
    ("template", "said"),
    [(LOOP, "no end within 0.5 s"), (DOUBLE, "more than 64 MiB"), (LONG, "writes 40000000")],
    ids=["loop", "memory", "long"],
)
def test_a_template_has_an_end(template, said, monkeypatch):
    if template == LOOP:
        monkeypatch.setattr(bounds, "SECONDS", 0.5)
    if template == DOUBLE:
        monkeypatch.setattr(bounds, "MEMORY", 64 << 20)
    tokenizer = letters(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    start = time.monotonic()
    with pytest.raises(ValueError, match=said) as caught:
        Renderer(tokenizer, template).text(CHAT)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 20
    assert Renderer(tokenizer, "chatml").text(CHAT).startswith("<|im_start|>user\nHi")


@pytest.mark.parametrize("kind", BAD)
def test_what_a_template_fails_with_is_told_as_the_templates(kind):
    template, said = BAD[kind]
    with pytest.raises(ValueError, match=said) as caught:
        Renderer(letters(["<|im_start|>", "<|im_end|>"]), template).text(CHAT)
    assert "set policy.chat_template=chatml" in str(caught.value)


def test_a_template_that_takes_all_memory_of_ulimit_v_is_told_as_such():
    """Before the bound of leash is reached: training is not to blame."""
    tokenizer = letters(["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        with pytest.raises(ValueError, match="takes more memory for one chat than there is"):
            Renderer(tokenizer, DOUBLE)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


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


def test_a_pickle_that_names_code_is_refused_in_one_line(tmp_path):
    folder = make_checkpoint(tmp_path / "evil", "qwen2")
    (folder / "model.safetensors").unlink()
    torch.save({"x": Evil(tmp_path / "MARK")}, folder / "pytorch_model.bin", pickle_protocol=4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="pickle that names code") as caught:
            load_model(find_model(str(folder)))
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not [w for w in warned if "pickle" in str(w.message)]
    assert not (tmp_path / "MARK").exists()


def test_quantised_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path / "fp8", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    assert no_model(str(folder)) is None
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    for look in (lambda: no_model(str(folder)), lambda: _refused(folder)):
        assert "quantised ones (fp8)" in look()
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "up_proj" in name)
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "F8_E4M3" in _refused(folder)


def test_a_run_folder_given_as_a_model_is_told_where_its_model_lies(tmp_path):
    make_checkpoint(tmp_path / "model", "qwen2")
    assert no_model(str(tmp_path / "model")) is None
    assert (no_model(str(tmp_path)) or "").endswith(f"; give {tmp_path / 'model'}")
    assert "hub id like" in (no_model(str(tmp_path / "none" / "there" / "is")) or "")


def _refused(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_model(find_model(str(folder)))
    return str(caught.value)
