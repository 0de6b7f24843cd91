"""A tokenizer without a chat template: ChatML and one warning in the library, a refusal in runs."""

import pytest
from checkpoints import make_checkpoint
from letters import letters
from transformers import AutoTokenizer

from policies import History, Renderer
from policies.load import load_policy
from policies.reward_model import ChatRewards, GPT2RewardModel

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I'm well!"}]
TEXT = "<|im_start|>user\nHello</s>\n<|im_start|>assistant\nI'm well!</s>\n"


def test_the_library_takes_chatml_and_says_so():
    tokenizer = letters(["</s>"], eos_token="</s>")
    with pytest.warns(UserWarning, match=r"chat_template='chatml'") as seen:
        renderer = Renderer(tokenizer)
    assert len(seen) == 1
    assert renderer.text(CHAT) == TEXT
    with pytest.warns(UserWarning, match="chat_template"):
        history = History.from_text(TEXT, tokenizer=tokenizer)
    assert history.messages() == CHAT


def test_what_is_asked_for_comes_before_it_without_a_warning():
    tokenizer = letters(["</s>"], eos_token="</s>")
    assert Renderer(tokenizer, chat_template_name="falcon").text(CHAT[:1]).startswith("User:")
    assert Renderer(tokenizer, "{{ messages[0]['content'] }}").text(CHAT[:1]) == "Hello"


def test_a_training_run_does_not_guess(tmp_path):
    folder = make_checkpoint(tmp_path / "gpt2", "gpt2")
    GPT2RewardModel(folder).save_pretrained(folder)
    ChatRewards(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    for load in (load_policy, ChatRewards):
        with pytest.raises(ValueError, match=r"policy\.chat_template=chatml"):
            load(str(folder))
    policy = load_policy(str(folder), chat_template="chatml")
    assert policy.renderer.stop_ids == {policy.tokenizer.eos_token_id}
