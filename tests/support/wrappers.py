"""TorchRL's wrappers of small models, what they write, and its values by plain forwards."""

import copy
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor
from transformers import (
    AutoTokenizer,
    OPTConfig,
    OPTForCausalLM,
)

from envs import ChatEnv
from envs.transforms import (
    Transform,
)
from policies import (
    LogProbs,
    Masks,
    Text,
    Tokens,
    TransformersWrapper,
)
from policies.padding import rows
from policies.random import fold
from support.chats import prompts, scoring, spoken, start
from support.checkpoints import make_checkpoint
from support.policies import make_wrapper, plain_log_probs
from support.runs import PATH, ROOT
from support.specification import close
from support.tasks import Uneven
from trainer import LLMCollector


@cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="specification-")


@cache
def checkpoint(kind: str) -> Path:
    """Return a folder with a tiny random model of a family."""
    return make_checkpoint(Path(folder().name) / kind, kind)


@cache
def opt(seed: int = 0) -> OPTForCausalLM:
    """Return a tiny OPT of random weights, as many tokens as the tokenizer of `no_template`."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "init_std": 0.2}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    config = OPTConfig(vocab_size=len(no_template(-1)[1]), **sizes, **layers)
    return OPTForCausalLM(config).eval()


def no_template(seed: int = 0) -> tuple[Any, Any]:
    """Return a model and a tokenizer without a chat template that puts a BOS before every text."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    return (opt(seed) if seed >= 0 else None), tokenizer


def plain(wrapper: Any, td: TensorDict, key: Any, temperature: float = 1.0) -> Tensor:
    """Return log-probs [B, T] of dense rows by a plain forward each, 0 outside a mask."""
    full, attended = td["tokens"].full, td["masks"].all_attention_mask
    out = torch.zeros(full.shape, dtype=torch.float64)
    for ids, real, row in zip(full, attended, out, strict=True):
        row[real] = plain_log_probs(wrapper, ids[real], temperature)
    return out * td[key]


ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


RESPONSE = ("masks", "all_response_mask")


PARTS = ("prompt", "response", "full")


KINDS = {"text": Text, "tokens": Tokens, "masks": Masks, "log_probs": LogProbs}


@cache
def generated(padded: bool = True) -> TensorDict:
    """Return three responses of different lengths, as the policy writes them."""
    td = prompts().set("stream", fold(10, torch.arange(3)))
    return make_wrapper().get_new_version(pad_output=padded, inplace=False)(td)


@cache
def scored(padded: bool = True) -> TensorDict:
    """Return three scored chats."""
    with torch.no_grad():
        return scoring(pad_output=padded, inplace=False)(spoken())


def fresh(**changes) -> TransformersWrapper:
    """Return a version of the policy that leaves its input alone."""
    return make_wrapper().get_new_version(**{"inplace": False, **changes})


def score(**changes) -> TransformersWrapper:
    return scoring(**{"inplace": False, **changes})


FULL, REF, GEN = ("log_probs", "full"), ("ref_log_probs", "full"), ("gen_log_probs", "full")


class Collector:
    def __init__(self, policy):
        self.policy = policy


@cache
def other_model() -> torch.nn.Module:
    """Return the policy's model with other weights."""
    model = copy.deepcopy(make_wrapper().model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    return model


def gen(**changes) -> TransformersWrapper:
    """Return the policy, scoring."""
    settings = {"generate": False, "inplace": False, "log_probs_key": "gen_log_probs"}
    return make_wrapper().get_new_version(**{**settings, **changes})


def ref(**changes) -> TransformersWrapper:
    """Return a reference with other weights, scoring."""
    return gen(**{"model": other_model(), "log_probs_key": "ref_log_probs", **changes})


def plain_kl(td: TensorDict, key: Any) -> Tensor:
    return plain(make_wrapper(), td, key) - plain(ref(), td, key)


def same_rows(td: TensorDict, key: Any, want: Tensor, atol: float = 1e-4) -> None:
    """Check values, dense or ragged, of the chats of `scored` against dense ones."""
    for got, row, real in zip(rows(td, key), want, scored()[ATTENTION], strict=True):
        close(got, row if len(got) == len(row) else row[real], atol)


def charged(*transforms: Transform, both: bool = False, **policy: Any) -> None:
    """Check each turn of a collector: its KL is that of plain forwards and charged there, once.

    `both`: the generator is scored too, so that the KL is at all of the assistant's tokens.
    """
    env, made = ChatEnv(Uneven(), max_turns=3), make_wrapper().get_new_version(**policy)
    for transform in transforms:
        env = env.append_transform(transform)
    data = {"dataloader": [start(Uneven())], "dialog_turns_per_batch": 9}
    for turn in next(iter(LLMCollector(env, policy=made, **data))).reshape(-1).unbind(0):
        ids, sampled = turn["tokens", "full"], turn[RESPONSE]
        mine, theirs = (plain_log_probs(model, ids, 1.0) for model in (make_wrapper(), ref()))
        kl = (mine - theirs) * (turn[ASSISTANT] if both else sampled)
        close(turn["next", "kl_penalty"].flatten(), kl, 1e-4)
        task = torch.zeros_like(kl)
        task[-1] = float(turn["next", "reward_part", "turn"])
        kl = kl * sampled if turn["turn"] else kl  # what was said before was charged there
        close(turn["next", "reward"].squeeze(-1), task - 0.1 * kl, 1e-4)


tokens_ref = partial(ref, input_mode="tokens")


def rewarded(*without: Any) -> TensorDict:
    """Return a rollout with a reward [B, T, 1] in next, without some masks."""
    td = generated().copy().exclude(*without)
    reward = torch.randn(*td["tokens"].full.shape, 1)
    return td.set("next", TensorDict({"reward": reward}, [3]))


def ragged(*without: Any) -> TensorDict:
    """Return the same as rows without padding, rewards of 0."""
    td = generated(False).copy().exclude(*without)
    sizes = [len(ids) for ids in rows(td, ("tokens", "full"))]
    return td.set("next", lazy_stack([TensorDict(reward=torch.zeros(n, 1)) for n in sizes]))


@contextmanager
def own_ray() -> Iterator[None]:
    """Start Ray so that its actors find these files, and end it."""
    before = dict(os.environ)
    folders = [str(ROOT / "tests" / name) for name in ("specification", "envs")]
    paths = [PATH, *folders, before.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths)}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        sys.modules["ray"].shutdown()
        os.environ.clear()
        os.environ.update(before)
