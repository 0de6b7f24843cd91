"""Rollouts, reward models and KL controllers of leash beside TorchRL's."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from benchmarks.cases import Case, both, gradient, pair
from policies import GPT2RewardModel
from trainer import AdaptiveKLController, ConstantKLController, PromptData, RolloutFromModel

END = 50256  # fixed in the original: EOS, padding and "not attended" in one
CONFIG = GPT2Config(n_layer=2, n_embd=64, n_head=4, initializer_range=0.1)


def _models(dtype: torch.dtype, count: int) -> list[GPT2LMHeadModel]:
    """Return tiny GPT-2s of different weights; what is the largest logit is not END."""
    models = [GPT2LMHeadModel(CONFIG).to(dtype).eval() for _ in range(count)]
    for model in models:
        model.transformer.wte.weight.data[END] *= 0.01
    return models


def _reward_models(torchrl: ModuleType, body: GPT2LMHeadModel) -> dict[type, Any]:
    """Return the reward model of each package, with the same body and head."""
    theirs = torchrl.modules.models.llm.GPT2RewardModel
    with TemporaryDirectory() as folder:
        body.save_pretrained(Path(folder))
        made = {GPT2RewardModel: GPT2RewardModel(body), theirs: theirs(folder, pad_token_id=END)}
    made[theirs].to(body.dtype).eval()
    made[theirs].lm_head.load_state_dict(made[GPT2RewardModel].lm_head.state_dict())
    return made


def rollout_from_model(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare greedy rollouts that nothing stops early, and log-probs of labels.

    Left out: replies that stop early (their score is paid twice there, their log-probs are NaN).
    The original drops the last token of a prompt, so ours is told a prompt one shorter.
    """
    batch, width, steps = 8, 48, 32
    model, ref, body = _models(dtype, 3)
    ids = torch.randint(0, END, (batch, width))
    length = torch.randint(20, width, (batch,))
    mask = torch.arange(width) < length[:, None]
    ids = ids.masked_fill(~mask, END)
    rindex = length // 2
    scores = _reward_models(torchrl, body)
    theirs = torchrl.data.llm
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=steps,
        pad_token_id=END,
        eos_token_id=END,
        return_dict_in_generate=True,
        output_scores=True,
    )
    kinds = {RolloutFromModel: (PromptData, 1), theirs.RolloutFromModel: (theirs.PromptData, 0)}
    rolls, data = {}, {}
    for (cls, (prompt, less)), score in zip(kinds.items(), scores.values(), strict=True):
        rolls[cls] = cls(model, ref, score, kl_coef=0.3, max_new_tokens=steps, score_clip=0.5)
        fields = {"input_ids": ids, "attention_mask": mask.long(), "prompt_rindex": rindex - less}
        data[cls] = prompt(**fields, batch_size=[batch])

    def generate(cls: type, which: int) -> Tensor:
        return rolls[cls].generate(data[cls], greedy)[which]

    def rollout(cls: type, key: Any) -> Tensor:
        made = rolls[cls].generate(data[cls], greedy)
        return rolls[cls].create_rollout_td(data[cls], *made)[key]

    names = ("generated", "log_probs", "log_ratio")
    works = {name: lambda cls, i=i: generate(cls, i) for i, name in enumerate(names)}
    for key in ("action", "input_ids", ("next", "attention_mask"), ("next", "done")):
        works[str(key)] = lambda cls, key=key: rollout(cls, key)
    for key in ("reward", "reward_raw", "reward_kl"):
        works[key] = lambda cls, key=key: rollout(cls, ("next", key))
    labels = torch.randint(0, 5_000, (batch, width))
    logits = torch.randn(batch, width, 5_000, dtype=dtype)
    works["logprobs_of_labels"] = lambda cls: cls.logprobs_of_labels(logits, labels)
    yield from both(works, *kinds, f"{batch} x {steps} tokens, greedy")


def reward_model(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare rewards at real tokens, end scores, and the loss of pairs for given rewards.

    The loss reads the rewards of a shorter row's padding too, in both; the states there differ.
    """
    batch, width = 16, 64
    scores = _reward_models(torchrl, _models(dtype, 1)[0])
    ids = torch.randint(0, END, (2, batch, width))
    ids[1, :, :20] = ids[0, :, :20]
    masks = torch.arange(width) < torch.randint(30, width, (2, batch, 1))
    ids = ids.masked_fill(~masks, END)

    def score(cls: type, which: int) -> Tensor:
        made = scores[cls](input_ids=ids[0], attention_mask=masks[0].long())[which]
        return (made[masks[0]] if which == 0 else made.reshape(-1)).detach()

    given = torch.randn(2, batch, width, dtype=dtype)

    def loss(cls: type, rewards: Tensor = given) -> Tensor:
        packs = [
            SimpleNamespace(input_ids=i, attention_mask=m, rewards=r)
            for i, m, r in zip(ids, masks, rewards, strict=True)
        ]
        return scores[cls].compute_reward_loss(*packs)

    works = {
        "rewards": lambda cls: score(cls, 0),
        "end_scores": lambda cls: score(cls, 1),
        "compute_reward_loss": loss,
        "compute_reward_loss, gradient": lambda cls: gradient(partial(loss, cls), given),
    }
    yield from both(works, *scores, f"{batch} x {width} tokens")


def controllers(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare the coefficients of 50 updates; the original's are float32."""
    rewards = (0.2 * torch.rand(50, 8) - 0.15).tolist()

    def follow(cls: type, settings: dict[str, Any]) -> Tensor:
        control = cls(**settings)
        return torch.tensor([float(control.update(values)) for values in rewards])

    settings = {
        AdaptiveKLController: {"init_kl_coef": 0.1, "target": 0.5, "horizon": 100},
        ConstantKLController: {"kl_coef": 0.1},
    }
    for kind, given in settings.items():
        yield from both(
            {"update": lambda cls, given=given: follow(cls, given)},
            *pair(kind, torchrl.data.llm),
            "50 x 8 values",
        )
