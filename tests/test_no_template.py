"""A tokenizer without a chat template: ChatML and one warning in the library, a refusal in runs."""

import json
import warnings

import pytest
import torch
from checkpoints import make_checkpoint
from letters import letters
from tensordict import TensorDict
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from envs.transforms import RetrieveKL, RetrieveLogProb
from policies import (
    ChatHistory,
    History,
    Renderer,
    TransformersWrapper,
)
from policies.load import load_policy
from policies.reward_model import ChatRewards, GPT2RewardModel

CHATS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello, how are you?"},
        {"role": "assistant", "content": "I'm doing well, thank you!"},
    ],
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What's the weather like?"},
        {"role": "assistant", "content": "I can't check the weather for you."},
    ],
]


@pytest.fixture
def opt(tmp_path):
    """Write a tiny OPT checkpoint; like the real one it has no chat template."""
    folder = tmp_path / "opt-tiny"
    names = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = letters(["<s>", "<pad>", "</s>", "<unk>"], **names)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    config = OPTConfig(
        vocab_size=len(tokenizer), num_attention_heads=4, max_position_embeddings=512, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        OPTForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_library_takes_chatml_and_says_so(opt):
    tokenizer = AutoTokenizer.from_pretrained(opt)
    assert tokenizer.chat_template is None
    with pytest.warns(UserWarning, match=r"opt-tiny' has no chat template.*'chatml'") as seen:
        renderer = Renderer(tokenizer)
    assert len(seen) == 1
    text = renderer.text(CHATS[0][1:], add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nHello, how are you?</s>\n"
        "<|im_start|>assistant\nI'm doing well, thank you!</s>\n<|im_start|>assistant\n"
    )
    with pytest.warns(UserWarning, match="no chat template"):
        history = History.from_text(text, tokenizer=tokenizer)
    assert history.messages()[:2] == CHATS[0][1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Renderer(letters(["</s>"], "{{ messages[0]['content'] }}"))  # one that has a template


def test_what_is_asked_for_comes_before_it_without_a_word(opt):
    tokenizer = AutoTokenizer.from_pretrained(opt)
    assert Renderer(tokenizer, chat_template_name="falcon").text(CHATS[0][1:2]).startswith("User:")
    assert (
        Renderer(tokenizer, "{{ messages[0]['content'] }}").text(CHATS[0][1:2])
        == "Hello, how are you?"
    )


def strip(folder):
    """Take the chat template out of a saved tokenizer."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))


def test_a_training_run_does_not_guess(opt, tmp_path):
    with pytest.raises(ValueError, match=r"opt-tiny' has none; set policy\.chat_template=chatml"):
        load_policy(str(opt))
    policy = load_policy(str(opt), chat_template="chatml")
    assert policy.renderer.stop_ids == {policy.tokenizer.eos_token_id}
    folder = make_checkpoint(tmp_path / "gpt2", "gpt2")
    GPT2RewardModel(folder).save_pretrained(folder)
    ChatRewards(folder)
    strip(folder)
    with pytest.raises(ValueError, match="expected a chat template"):
        ChatRewards(folder)


@pytest.mark.filterwarnings("ignore:the tokenizer .* has no chat template")
@pytest.mark.usefixtures("list_setting")
def test_the_opt_examples_of_the_page_run_as_printed(opt):
    history = History.from_chats(CHATS)
    assert history.shape == (2, 3)
    tokenizer = AutoTokenizer.from_pretrained(opt)
    tokenizer.pad_token = tokenizer.eos_token
    model = OPTForCausalLM.from_pretrained(opt).eval()
    options = {"input_mode": "history", "generate": False, "return_log_probs": True}
    ref_model = TransformersWrapper(model, tokenizer=tokenizer, **options, pad_output=True)
    transform = RetrieveLogProb(ref_model, assistant_only=True, tokenizer=tokenizer)
    chat_history = ChatHistory(full=history)
    result = transform(TensorDict(history=chat_history, batch_size=(2,)))
    ref_log_probs = result.get((ref_model.log_probs_key, "full"))
    written = [Renderer(tokenizer, "chatml").render(chat) for chat in CHATS]
    width = max(len(row.ids) for row in written)
    assert ref_log_probs.shape == (2, width)
    assert (ref_log_probs != 0).sum(-1).tolist() == [sum(row.assistant) for row in written]

    gen_model, ref_model = (
        TransformersWrapper(
            model, tokenizer=tokenizer, **options, pad_output=True, log_probs_key=key
        )
        for key in ("gen_log_probs", "ref_log_probs")
    )
    transform = RetrieveKL(
        gen_model=gen_model, ref_model=ref_model, assistant_only=True, tokenizer=tokenizer
    )
    next_td = TensorDict(history=chat_history, batch_size=(2,))
    data = TensorDict(history=chat_history, next=next_td, batch_size=(2,))
    kl = transform(data)["next"].get("kl_penalty")
    assert kl.shape == (2, width)
    assert not kl.any()
