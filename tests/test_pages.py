"""The examples of the documented pages, offline, under both settings of tensordict.

Here are those that no other file runs, on a tiny model in the format of facebook/opt-125m, the
page's (its tokenizer puts </s> before every text and ends with it too). What had to change in them
is in docs/coming_from_torchrl.md. The others, by page and line:

LLMMaskedCategorical 1, 2  test_distributions.py::test_documented_position_level_example,
                           test_documented_token_level_example
MaskedOneHotCategorical    specification_rows/distributions.py::one_hot_examples
policies/common.py 100-116 specification_rows/containers.py::chat_history
kl.py 63-75                test_ray.py::test_another_process_uses_the_actor_and_leaves_it_alive
kl.py 169, option 1        test_ray.py::test_environments_share_one_actor_whose_models_a_...
kl.py 169, option 2        test_ray.py::test_models_cross_with_every_option_and_stay_...
kl.py 179                  test_kl.py::test_the_documented_kl_example_runs_on_dense_data
RolloutFromModel 36-81     test_rollout_from_model.py::test_the_documented_example_gives_the_...
"""

import inspect
import math
import re

import pytest
import torch
from checkpoints import TEXT
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

import envs.transforms
import policies
import trainer
from envs.transforms import KLRewardTransform, RetrieveKL, RetrieveLogProb
from policies import ChatHistory, History, TransformersWrapper

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


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in the format of OPT: </s>, id 2, is BOS and EOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", 2)]
    )
    named = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


@pytest.fixture(scope="module")
def model(tokenizer) -> OPTForCausalLM:
    """Return a tiny OPT of random weights."""
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        init_std=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OPTForCausalLM(config).eval()


def wrapper(model, tokenizer, key: str = "log_probs", **more) -> TransformersWrapper:
    """Wrap as the page does, and name a template: OPT has none."""
    settings = {"input_mode": "history", "generate": False, "return_log_probs": True}
    settings |= {"pad_output": True, "chat_template_name": "chatml_format", "log_probs_key": key}
    return TransformersWrapper(model, tokenizer=tokenizer, **{**settings, **more})


def replies_alone(model, tokenizer) -> list[list[float]]:
    """Return the log-probs of each reply and its end, by one forward of each chat as a text."""
    found = []
    for chat in CHATS:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}</s>\n" for m in chat)
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start = text.index(chat[-1]["content"])
        ids = torch.tensor([made.input_ids])
        with torch.no_grad():
            table = model(ids).logits[0].double().log_softmax(-1)
        places = [t for t, (a, b) in enumerate(made.offset_mapping) if start <= a and b < len(text)]
        found.append([float(table[t - 1, ids[0, t]]) for t in places])
    return found


def kept(values: torch.Tensor) -> list[list[float]]:
    """Return what is not 0 of each row."""
    return [row[row != 0].tolist() for row in values]


@pytest.mark.usefixtures("list_setting")
def test_retrieve_log_prob_as_on_its_page(tokenizer, model):
    """kl.py 165; the page prints [2, 3] and [2, 26]."""
    history = History.from_chats(CHATS)
    assert history.shape == (2, 3)
    tokenizer.pad_token = tokenizer.eos_token
    ref_model = wrapper(model, tokenizer)
    transform = RetrieveLogProb(ref_model, assistant_only=True, tokenizer=tokenizer)
    data = TensorDict(history=ChatHistory(full=history), batch_size=(2,))
    result = transform(data)
    found = result.get((ref_model.log_probs_key, "full"))
    assert found.shape == ref_model(data)["tokens"].full.shape
    assert not found.requires_grad
    want = replies_alone(model, tokenizer)
    for row, values in zip(kept(found), want, strict=True):
        assert row == pytest.approx(values, abs=1e-4)
    # The note below it: a list of rows by default, one tensor when asked.
    ragged = RetrieveLogProb(wrapper(model, tokenizer, pad_output=False), tokenizer=tokenizer)
    out = ragged(TensorDict(history=ChatHistory(full=history), batch_size=(2,)))
    key = ("log_probs", "full")
    assert [len(row) for row in out.get(key, as_list=True)] == [
        len(tokenizer(text, add_special_tokens=False).input_ids)
        for text in history.apply_chat_template(
            tokenizer=tokenizer, chat_template_name="chatml_format", add_generation_prompt=False
        )
    ]
    padded = out.get(key, as_padded_tensor=True, padding_side="left")
    torch.testing.assert_close(padded, found, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("list_setting")
def test_retrieve_kl_as_on_its_page(tokenizer, model):
    """kl.py 170, and the recommended line of 162; the page prints [2, 26]."""
    tokenizer.pad_token = tokenizer.eos_token
    history = History.from_chats(CHATS)
    gen_model = wrapper(model, tokenizer, "gen_log_probs")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = OPTForCausalLM(model.config).eval()
    # The page scores one model twice; another reference has a KL that can be wrong.
    for ref, same in ((model, True), (other, False)):
        ref_model = wrapper(ref, tokenizer, "ref_log_probs")
        transform = RetrieveKL(
            gen_model=gen_model, ref_model=ref_model, assistant_only=True, tokenizer=tokenizer
        )
        chat_history = ChatHistory(full=history)
        next_td = TensorDict(history=chat_history, batch_size=(2,))
        data = TensorDict(history=chat_history, next=next_td, batch_size=(2,))
        kl = transform(data)["next"].get("kl_penalty")
        assert kl.shape == gen_model(data)["tokens"].full.shape
        if same:
            assert not kl.any()
            continue
        pairs = zip(replies_alone(model, tokenizer), replies_alone(ref, tokenizer), strict=True)
        want = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        for row, values in zip(kept(kl), want, strict=True):
            assert row == pytest.approx(values, abs=1e-4)
        with pytest.raises(ValueError, match="different `log_probs_key`"):
            RetrieveKL(gen_model=wrapper(model, tokenizer), ref_model=wrapper(ref, tokenizer))


@pytest.mark.usefixtures("list_setting")
def test_the_older_reward_as_on_its_page(tokenizer, model):
    """kl.py 162, with one model: its reward is that of the recommended way."""
    tokenizer.pad_token = tokenizer.eos_token
    policy = wrapper(model, tokenizer, generate=True, generate_kwargs={"max_new_tokens": 4})
    prompt = ChatHistory(prompt=History.from_chats([chat[:2] for chat in CHATS]))
    torch.manual_seed(0)
    data = policy(TensorDict(history=prompt, batch_size=(2,)))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = OPTForCausalLM(model.config).eval()
    rewards = []
    with pytest.warns(DeprecationWarning, match="RetrieveKL"):
        older = KLRewardTransform(wrapper(other, tokenizer, input_mode="tokens"), coef=0.3)
    for transform in (
        older,
        RetrieveKL(ref_model=wrapper(other, tokenizer, "ref_log_probs"), coeff=0.3),
    ):
        td = data.copy().set("next", TensorDict({"reward": torch.ones(2, 1)}, [2]))
        out = transform(td)["next"]
        rewards.append(out["reward"])
        kl = out["kl_penalty"].reshape(2, -1).sum(-1)
        torch.testing.assert_close(out["reward"].sum((1, 2)), 1 - 0.3 * kl)
        assert (kl.abs() > 0.01).all()
    torch.testing.assert_close(*rewards)


def test_padding_is_the_pad_token_of_a_tokenizer_that_adds_a_bos(tokenizer, model):
    # Not as in TorchRL, which takes the first id of tokenizer("<pad>"), the BOS.
    assert tokenizer("<pad>").input_ids == [2, 1]
    tokenizer.pad_token = "<pad>"
    policy = wrapper(model, tokenizer)
    out = policy(TensorDict(history=ChatHistory(full=History.from_chats(CHATS)), batch_size=(2,)))
    padding = out["tokens"].full[~out["masks"].all_attention_mask]
    assert set(padding.tolist()) == {1}


# The arguments of the pages, in their order, with their defaults. ... stands for any.
KEYS = {"history": "history", "text": "text", "tokens": "tokens", "masks": "masks"}
FULL, REF = ("log_probs", "full"), ("ref_log_probs", "full")
MODELS = {"gen_model": "from_collector", "ref_model": None}
FACTORIES = {"gen_model_factory": None, "ref_model_factory": None}
RAY = {"num_cpus": None, "num_gpus": ..., "device": None, "actor_name": None}
PAD = {"padding_side": "left"}
CHARGE = {"kl_key": "kl_penalty", "add_to_reward": True, "coeff": 1.0}
OWN = inspect.Parameter.empty
PAGES = {
    policies.LLMMaskedCategorical: {"logits": OWN, "mask": OWN, "ignore_index": -100},
    policies.MaskedOneHotCategorical: {
        **dict.fromkeys(("logits", "probs", "mask", "indices")),
        "neg_inf": -math.inf,
        "padding_value": None,
        "grad_method": policies.ReparamGradientStrategy.PassThrough,
    },
    policies.LogProbDistribution: {"log_probs": OWN, "mask": None},
    policies.LLMWrapperBase: {
        "model": OWN,
        "tokenizer": None,
        "input_mode": "history",
        "input_key": None,
        "attention_mask_key": "attention_mask",
        "generate": True,
        **dict.fromkeys(("generate_kwargs", "tokenizer_kwargs")),
        "pad_output": False,
        **dict.fromkeys(("inplace", "device", "layout", "num_samples", "chat_template_name")),
        **dict.fromkeys(("chat_template", "return_log_probs")),
        **{f"{key}_key": default for key, default in KEYS.items()},
        "log_probs_key": "log_probs",
    },
    policies.LLMWrapperBase.get_dist: {
        "tensordict": OWN,
        "tensordict_out": None,
        "logits_key": "logits",
        **dict.fromkeys(("mask_key", "as_padded_tensor", "as_nested_tensor", "padding_value")),
        **PAD,
        "layout": None,
    },
    policies._extract_responses_from_full_histories: {
        "text_full": OWN,
        "prompt_histories": OWN,
        "chat_template_name": None,
        "tokenizer": None,
    },
    envs.transforms.KLComputation: {
        "gen_log_probs_full_key": FULL,
        "ref_log_probs_full_key": REF,
        **CHARGE,
        **PAD,
    },
    envs.transforms.RetrieveLogProb: {
        "model": OWN,
        "log_probs_full_key": None,
        "assistant_only": True,
        "tokenizer_kwargs": None,
        "detach": True,
        "device": None,
        "tokenizer": None,
        **PAD,
    },
    envs.transforms.RetrieveKL: {
        **MODELS,
        **FACTORIES,
        "assistant_only": True,
        "history_key": "history",
        "tokenizer_kwargs": None,
        "detach": True,
        "device": None,
        "tokenizer": None,
        **PAD,
        "gen_log_probs_full_key": FULL,
        "ref_log_probs_full_key": REF,
        **CHARGE,
        "use_ray_service": False,
        "actor_name": None,
    },
    envs.transforms.KLRewardTransform: {
        "ref_model": None,
        "ref_model_factory": None,
        "coef": 1.0,
        "in_keys": None,
        "out_keys": None,
        "log_prob_key": FULL,
        "device": None,
        "add_to_reward": True,
        "tokenizer": None,
        "assistant_only": True,
        "detach": True,
        **PAD,
        "use_ray_service": False,
        "actor_name": None,
    },
    envs.transforms.RayRetrieveKL: {**MODELS, **FACTORIES, **RAY},
    envs.transforms.RayKLRewardTransform: {"ref_model": None, "ref_model_factory": None, **RAY},
    trainer.RolloutFromModel: {
        **dict.fromkeys(("model", "ref_model", "reward_model"), OWN),
        "kl_coef": 0.1,
        "max_new_tokens": 50,
        "score_clip": 10.0,
        "kl_scheduler": None,
        "num_steps": None,
    },
}


@pytest.mark.parametrize("what", PAGES, ids=lambda what: what.__name__)
def test_documented_arguments_are_those_of_the_code(what):
    has = inspect.signature(what).parameters
    for name, default in PAGES[what].items():
        assert name in has
        assert default is ... or has[name].default == default, name
    order = [name for name in has if name in PAGES[what]]
    assert order == list(PAGES[what])
    # Not as in TorchRL, whose own words and examples name others: coef, gen_log_probs_key, ...
    if "kwargs" not in has:
        assert set(re.findall(r"`(\w+)=", inspect.getdoc(what))) <= set(has)
