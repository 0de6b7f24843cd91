"""Policies on the tiny model, what they sample and score, and plain forwards of them."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from envs.chat_env import ChatEnv
from policies.load import load_policy, load_reference
from policies.models import lora
from policies.padding import pad, pad_mask
from policies.random import fold
from policies.torchrl.transformers_wrapper import TransformersWrapper
from policies.transformers_policy import TransformersPolicy
from support.tasks import Words
from trainer.collect import collect
from trainer.demonstrations import Demonstrations
from trainer.kl.controllers import ConstantKLController
from trainer.kl.leash import Leash
from trainer.runtime import Runtime
from trainer.sources import DynamicRollouts

G = 4  # samples of a prompt


@cache
def make_policy(temperature: float = 1.0, max_new_tokens: int = 6) -> TransformersPolicy:
    """Return a policy on the tiny model, its weights scaled so that tokens differ."""
    policy = load_policy("tiny", temperature=temperature, max_new_tokens=max_new_tokens)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
        # End-of-turn often enough that responses end by themselves and by the limit.
        end = policy.tokenizer.eos_token_id
        policy.model.get_input_embeddings().weight[end] *= 2.0
    return policy


@cache
def make_wrapper(temperature: float = 1.0, max_new_tokens: int = 6) -> TransformersWrapper:
    """Return TorchRL's wrapper of such a policy, with dense outputs."""
    return wrapper_of(make_policy.__wrapped__(temperature, max_new_tokens))


def wrapper_of(policy: TransformersPolicy) -> TransformersWrapper:
    """Return TorchRL's wrapper of a policy, over the same weights."""
    kwargs = {"temperature": policy.temperature, "max_new_tokens": policy.max_new_tokens}
    wrapper = TransformersWrapper(
        policy.scorer, tokenizer=policy.tokenizer, generate_kwargs=kwargs, pad_output=True
    )
    wrapper.copy_attributes(policy, same_weights=True)
    return wrapper


def leash(coeff: float = 0.1, where: str = "loss", estimator: str | None = None) -> Leash:
    """Return a leash; by default k3 in the loss, k1 in the reward, full in the sequence."""
    kind = estimator or {"loss": "k3", "reward": "k1", "sequence": "full"}[where]
    return Leash(ConstantKLController(kl_coef=coeff), kind, where, allow_biased=True)


def prompts(count: int = 4, seed: int = 0, turns: int = 1) -> TensorDict:
    """Return a batch of prompts with their streams."""
    rows = Words(turns).rows("train")[:count]
    td = TensorDict(batch_size=[count])
    td.set("group_id", torch.arange(count))
    td.set("stream", fold(seed, torch.arange(count)))
    return td.set("row", NonTensorStack(*[NonTensorData(row) for row in rows]))


def rollout(policy: Any, *, turns: int = 1, count: int = 4) -> TensorDict:
    """Return a batch of trajectories."""
    env = ChatEnv(Words(turns), group_size=G, max_turns=turns)
    return collect(prompts(count, turns=turns), env, policy)


@torch.no_grad()
def plain_log_probs(policy: TransformersPolicy, ids: Tensor, temperature: float) -> Tensor:
    """Return log p(token t | tokens < t) of one sequence by one plain forward; entry 0 is 0."""
    logits = policy.model(input_ids=ids[None]).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    out = torch.zeros(len(ids), dtype=torch.float64)
    for t in range(1, len(ids)):
        out[t] = table[t - 1, ids[t]]
    return out


def close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    gap = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
    assert a.shape == b.shape, what
    assert gap <= tolerance, f"{what}: {gap} > {tolerance}"


def attended(batch: TensorDict) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield ids, response mask and log-probs of each row without padding, and of padding."""
    for i, real in enumerate(batch["masks", "all_attention_mask"]):
        log_probs, response = batch["log_probs", "full"][i], batch["masks", "all_response_mask"][i]
        yield batch["tokens", "full"][i][real], response[real], log_probs[real], log_probs[~real]


@cache
def one_process() -> Runtime:
    return Runtime("/tmp")


def scaled(policy: Any, factor: float) -> Any:
    """Return a reference with other weights."""
    reference = load_reference(policy)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(factor)
    return reference


DENSE = (  # [B, T]
    ("tokens", "full"),
    ("log_probs", "full"),
    ("ref_log_probs", "full"),
    ("masks", "all_response_mask"),
    ("masks", "all_assistant_mask"),
    "loss_mask",
    "kl_penalty",
    "reward_raw",
    "advantage",
)


def padded_left(batch: TensorDict) -> TensorDict:
    """Return the same rows padded on the left."""
    out, widths = batch.clone(), batch["masks", "all_attention_mask"].sum(-1).tolist()
    for key in DENSE:
        if key in batch:
            rows = zip(batch.get(key), widths, strict=True)
            out.set(key, pad([row[:n] for row, n in rows], side="left"))
    return out.set(("masks", "all_attention_mask"), pad_mask(widths, side="left"))


def demonstrations(policy: TransformersPolicy, mask: str = "assistant") -> TensorDict:
    """Return a batch of the demonstrations of Words."""
    parts = {"task": Words(), "env": ChatEnv(Words()), "policy": policy, "runtime": one_process()}
    return Demonstrations(**parts, prompts_per_iteration=4, mask=mask)(0)


def make_lora_policy(*, adapter: bool = True, double: bool = False, **options):
    """Return a policy on the tiny model with random weights, the same ones every time."""
    options = {"max_new_tokens": 6, **options}
    policy = load_policy("tiny", lora={"r": 4, "alpha": 8} if adapter else None, **options)
    generator = torch.Generator().manual_seed(0)
    for name, p in policy.model.named_parameters():
        if p.ndim > 1 and ".lora_" not in name:
            p.data = (torch.randn(p.shape, generator=generator) * 0.2).to(p.dtype)
    if double:
        policy.model.double()
    return policy


def move_adapter(policy, seed: int = 0, scale: float = 0.2) -> None:
    """Move the adapter away from its start."""
    generator = torch.Generator().manual_seed(seed)
    for p in lora.trained_weights(policy.model).values():
        p.data += (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def dynamic_rollouts(runtime, task: Words, rounds: int = 3) -> DynamicRollouts:
    env, policy = ChatEnv(task, group_size=3), make_policy()
    return DynamicRollouts(
        task=task,
        env=env,
        generator=policy,
        runtime=runtime,
        prompts_per_iteration=4,
        rounds=rounds,
    )
