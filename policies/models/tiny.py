"""Build `tiny`, a Qwen2 of 0.13 M random parameters that trains in seconds on one core.

It has a byte-level BPE of about 400 tokens, trained on the text below, and ChatML with generation
tags. `build_tiny` writes a standard checkpoint, always the same bytes.
"""

from pathlib import Path

from policies.cache import save_on_any_rank

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 400
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = """system
user
assistant
Sort the digits in ascending order: 44287
Sort the digits in descending order: 90315
You are a helpful assistant.
What is the capital of France? The capital of France is Paris.
What is 7 + 5? The answer is 12.
Write a short story about the sea. Tell me how many apples are left.
Once upon a time a little fish wanted to know what was behind the last wave of the morning.
There are three of them and they are in the house with the other people.
"""


def build_tiny(folder: Path) -> dict[str, str]:
    """Write the tiny checkpoint (model, tokenizer, template, EOS ids) into a folder.

    Return the entry for the cache's manifest. The global random state is unchanged.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    pad, _, end = range(len(SPECIAL))  # the BPE trainer numbers the special tokens first
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # head size 32, the smallest for which vLLM has CPU kernels
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    save_on_any_rank(model, folder)
    tokenizer.save_pretrained(folder)
    return {"model": "tiny", "source": "policies/models/tiny.py"}


def _tokenizer():
    """Train the byte-level BPE; digits and frequent words of the corpus are one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Repeat the words of the built-in task, so that each becomes one token.
    backend.train_from_iterator([CORPUS, *CORPUS.splitlines()[:5] * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
