"""The chat templates that TRL ships, on a stand-in tokenizer with their control tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import byte_tokenizer
from tokenizers import AddedToken

from envs.tasks.task import assistant, user
from envs.tools.reading import CallReader, formats
from policies.chats.renderer import Renderer

pytestmark = pytest.mark.peers
FOLDER = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
CONTROL = (
    r"<\|[A-Za-z_0-9]+\|?>|<[A-Za-z_]+\|>|<\uff5c[^\uff5c]+\uff5c>|<\w+_of_\w+>"
    r"|\[/?[A-Z]{3,}\]|<sop>"
)
TAG = r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>"
EOS = {  # by the start of a template's name, the longest first
    "diffusion_gemma": "<turn|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "nemotron": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
    "idefics": "<end_of_utterance>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "gemma4": "<turn|>",
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "gemma": "<eos>",
    "llava": "</s>",
    "qwen": "<|im_end|>",
    "lfm2": "<|im_end|>",
    "muse": "<|eot|>",
    "phi3": "<|endoftext|>",
    "glm": "<|endoftext|>",
}
# Templates of models with images: they read contents as parts.
PARTS = re.compile("idefics3|smolvlm|llava_next")
# The generation prompt opens a thought that the template does not write for a response without one.
OPENED = re.compile("(deepseek_r1_distill|deepseekv3|nemotron_3_(nano|super|ultra|5_lightning))$")
NO_END = {"glm4moe"}  # a run says that no end of turn is learnt
# Formats of calls by the start of a template's name, and whether it writes one call at most.
CALLS = {
    "qwen3_5": ("qwen_xml", False),
    "qwen3_6": ("qwen_xml", False),
    "qwen3_8": ("qwen_xml", False),
    "nemotron_3": ("qwen_xml", False),
    "qwen2_5": ("hermes", False),
    "qwen3": ("hermes", False),
    "glm4moe": ("glm", False),
    "gptoss": ("gpt_oss", True),
    "llama3_1": ("llama", True),
    "llama3_2": ("llama", True),
}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [user("What is 3 + 4?"), assistant("It is 7."), user("And 5?"), assistant("It is 12.")]
THOUGHT = "<think>\nI add.\n</think>\n\nIt is 7."


def renderer_of(path: Path) -> Renderer:
    text = path.read_text()
    eos = next(token for name, token in EOS.items() if path.stem.startswith(name))
    special = sorted({*re.findall(CONTROL, text), eos, "<s>"})
    tokenizer = byte_tokenizer(special, text, eos_token=eos, bos_token="<s>")
    tags = sorted({*re.findall(TAG, text)})
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return Renderer(tokenizer)


def ids_of(renderer: Renderer, chat: list, **options: Any) -> list[int] | None:
    """Return the ids of plain transformers; None where the template refuses the chat."""
    try:
        return renderer.tokenizer.apply_chat_template(chat, return_dict=False, **options)
    except Exception:
        return None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_prompts_masks_and_two_turns_of_a_template(path: Path) -> None:
    if PARTS.match(path.stem):
        with pytest.raises(ValueError, match=r"refuses a chat|does not write the content"):
            renderer_of(path).render(CHAT[:1], add_generation_prompt=True)
        return
    renderer = renderer_of(path)
    for chat in (CHAT[:1], [SYSTEM, *CHAT[:1]], CHAT[:3]):
        want = ids_of(renderer, chat, add_generation_prompt=True)
        if want is not None:
            assert renderer.render(chat, add_generation_prompt=True).ids == want
    _check_masks(path.stem, renderer)
    prompt = renderer.render(CHAT[:1], add_generation_prompt=True).ids
    ids = [*prompt, *renderer.tokenizer.encode(THOUGHT), max(renderer.stop_ids)]
    after = renderer.extend(ids, [CHAT[0], assistant(THOUGHT)], [CHAT[2]])
    assert after[: len(ids)] == ids
    added = renderer.tokenizer.decode(after[len(ids) :])
    opening = renderer.tokenizer.decode(prompt).rpartition(CHAT[0]["content"])[2]
    assert added.count(CHAT[2]["content"]) == 1
    assert added.endswith(opening)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_calls_of_a_template_are_read_or_refused(path: Path) -> None:
    if PARTS.match(path.stem):
        return
    renderer = renderer_of(path)
    found = next((what for name, what in CALLS.items() if path.stem.startswith(name)), None)
    if found is None or "qwen2_5_vl" in path.stem:
        with pytest.raises(ValueError, match=r"writes no (tools|calls)|cannot read the calls"):
            CallReader(renderer)
        return
    reader = CallReader(renderer)
    assert reader.template is formats()[found[0]]
    assert reader.single == found[1]


def _check_masks(name: str, renderer: Renderer) -> None:
    """Check that each turn is learnt to its end, in a row of its own if need be."""
    for size in (2, 4) if renderer.rewrites_turns else (4,):
        if OPENED.match(name):
            with pytest.raises(ValueError, match="its own generation prompt"):
                renderer.render(CHAT[:size], require_assistant=True, last_turn=True)
            continue
        alone = renderer.rewrites_turns
        done = renderer.render(CHAT[:size], require_assistant=True, last_turn=alone)
        assert done.ids == ids_of(renderer, CHAT[:size])
        learnt = [i for i, inside in zip(done.ids, done.assistant, strict=True) if inside]
        text = renderer.tokenizer.decode(learnt)
        for message in CHAT[size - 1 : size] if alone else CHAT[1::2]:
            assert message["content"] in text
        assert all(message["content"] not in text for message in CHAT[::2])
        assert (learnt[-1] in renderer.stop_ids) == (name not in NO_END)
