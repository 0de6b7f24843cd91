"""The seven contracts of the design as functions that raise AssertionError when one is broken.

tests/house/test_mutants.py runs them on the code as it is, breaks the code in known ways and
expects them to fail. Expected values come from a plain transformers forward.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.tasks.task import Response, Reward, Task
from envs.transforms.kl import RetrieveKL
from policies.load import load_policy, load_reference
from policies.padding import pad, pad_mask
from policies.random import fold
from policies.torchrl.transformers_wrapper import TransformersWrapper
from policies.transformers_policy import TransformersPolicy
from trainer.advantage import GroupAdvantage
from trainer.collect import collect
from trainer.demonstrations import Demonstrations
from trainer.kl.controllers import ConstantKLController
from trainer.kl.leash import Leash
from trainer.objectives import GRPOObjective
from trainer.runtime import Runtime
from trainer.sources import Rollouts
from trainer.update import Update

G = 4  # samples of a prompt


class Words(Task):
    """Prompts of different lengths; a response earns the share of even ids in its text length."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    def rows(self, split: str) -> list[dict]:
        texts = ["Sort 3", "Sort the digits 4 4 2 8 7", "Write", "the house with the other people"]
        return [{"messages": [{"role": "user", "content": t}], "answer": t} for t in texts]

    def demonstrations(self) -> list[dict]:
        return [
            {"messages": [*r["messages"], {"role": "assistant", "content": r["answer"][::-1]}]}
            for r in self.rows("train")
        ]

    def reward(self, row: dict, response: Response) -> Reward:
        value = (len(response.text) % 3) / 2
        return Reward(total=value, parts={"length": value}, success=value == 1)

    def respond(self, row: dict, response: Response) -> list[dict]:
        said = sum(m["role"] == "assistant" for m in response.messages)
        return [] if said >= self.turns else [{"role": "user", "content": "again"}]


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
    return wrapped(make_policy.__wrapped__(temperature, max_new_tokens))


def wrapped(policy: TransformersPolicy) -> TransformersWrapper:
    """Return TorchRL's wrapper of a policy, over the same weights."""
    kwargs = {"temperature": policy.temperature, "max_new_tokens": policy.max_new_tokens}
    wrapper = TransformersWrapper(
        policy.scorer, tokenizer=policy.tokenizer, generate_kwargs=kwargs, pad_output=True
    )
    wrapper.copy_attributes(policy, same_weights=True)
    return wrapper


def leash(coeff: float = 0.1, where: str = "loss", estimator: str | None = None) -> Leash:
    """Return a leash; by default k3 in the loss, k1 in the reward."""
    kind = estimator or {"loss": "k3", "reward": "k1"}[where]
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


def alignment() -> None:
    """Contract 1: stored log-probs are those of a plain forward, first and end token included."""
    policy = make_policy()
    batch = rollout(policy)
    scored = load_reference(policy).get_new_version(score_mask_key=None)(batch)
    ended = 0
    for i, (ids, response, log_probs, padding) in enumerate(attended(batch)):
        want = plain_log_probs(policy, ids, 1.0)
        close(log_probs, want * response, 1e-5, "generated")
        close(scored["ref_log_probs", "full"][i][: len(ids)], want, 1e-5, "scored")
        assert not padding.any(), "padding is not 0"
        assert (log_probs[response] < 0).all(), "a 0 inside"
        stopped = int(ids[-1]) in policy.stop_ids
        assert stopped != bool(batch["truncated"][i]), "a response holds the token that ended it"
        ended += stopped
    assert 0 < ended < batch.batch_size[0], "the rollout should hold ended and cut responses"


def token_in_token_out() -> None:
    """Contract 2: later turns keep the exact sampled ids; only new text is tokenised."""
    policy = make_policy()
    end, changed = policy.tokenizer.eos_token_id, 0
    for ids, response, log_probs, _ in attended(rollout(policy, turns=3)):
        want = plain_log_probs(policy, ids, 1.0) * response
        close(log_probs, want, 1e-5, "ids scored are ids sampled")
        edges = (response[1:] & ~response[:-1]).sum() + response[0]
        assert int(edges) == 3, f"expected 3 sampled runs, got {int(edges)}"
        # Every response but the last is closed exactly once before the next message.
        assert int((ids == end).sum()) >= 5, "each of 3 user turns and 2 responses is closed"
        text = policy.tokenizer.decode(ids[response])
        again = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        changed += again != ids[response].tolist()
    assert changed > 0, "the test needs responses on which decode -> encode is not the identity"


def one_temperature() -> None:
    """Contract 3: policy and reference divide by the sampling temperature; the KL starts at 0."""
    policy = make_policy(temperature=0.6)
    batch = RetrieveKL(load_reference(policy))(rollout(policy))
    for ids, response, log_probs, _ in attended(batch):
        close(log_probs, plain_log_probs(policy, ids, 0.6) * response, 1e-5, "tempered")
    close(batch["kl_penalty"], torch.zeros_like(batch["kl_penalty"]), 1e-5, "KL at the start")


class Record(torch.optim.SGD):
    """SGD that keeps the gradient and learning rate of each step; it does step."""

    def __init__(self, params, lr=0.0):
        super().__init__(params, lr=lr)
        self.grads: list[Tensor] = []
        self.rates: list[float] = []

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        self.grads.append(torch.cat([g.flatten().clone() for g in whole]))
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def gradient(batch: TensorDict, **options) -> Tensor:
    """Return the gradient of one optimiser step on a batch, flattened."""
    policy = make_policy()
    for p in policy.model.parameters():
        p.requires_grad_(True)
    optimizer = Record(policy.model.parameters())
    rest = {"lr": lambda step: 0.0, "max_grad_norm": 0.0, "max_tokens": 6, **options}
    own = leash()
    objective = GRPOObjective(leash=own)
    Update(policy.scorer, optimizer, objective, one_process(), leash=own, **rest)(batch.clone())
    return torch.cat(optimizer.grads)


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


def global_normalisation() -> None:
    """Contract 4: micro-batches, padding side, order and layout do not change the gradient."""
    policy = make_policy()
    batch = RetrieveKL(scaled(policy, 0.9))(rollout(policy))
    batch = GroupAdvantage(group_size=G, leash=leash())(batch)
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        whole = gradient(batch, aggregation=aggregation)
        scale = whole.norm()
        assert float(scale) > 1e-6, "the gradient should not vanish"
        turned = batch[torch.arange(batch.batch_size[0] - 1, -1, -1)]
        others = {
            "micro-batches": gradient(batch, aggregation=aggregation, micro_batch_tokens=40),
            "left padding": gradient(padded_left(batch), aggregation=aggregation),
            "order": gradient(turned, aggregation=aggregation),
        }
        for name, other in others.items():
            gap = float((other - whole).norm() / scale)
            assert gap < 1e-5, f"{aggregation}: {name} changes the gradient by {gap}"


def demonstrations(policy: TransformersPolicy, mask: str = "assistant") -> TensorDict:
    """Return a batch of the demonstrations of Words."""
    parts = {"task": Words(), "env": ChatEnv(Words()), "policy": policy, "runtime": one_process()}
    return Demonstrations(**parts, prompts_per_iteration=4, mask=mask)(0)


def masks_are_exact() -> None:
    """Contract 5: SFT learns exactly the assistant's tokens and the token that ends its turn."""
    policy = make_policy()
    batch = demonstrations(policy)
    wanted = {r["messages"][-1]["content"] + "<|im_end|>" for r in Words().demonstrations()}
    pairs = zip(batch["tokens", "full"], batch["loss_mask"], strict=True)
    learnt = {policy.tokenizer.decode(ids[mask]) for ids, mask in pairs}
    assert learnt == wanted, f"learnt {learnt}, wanted {wanted}"


def one_leash() -> None:
    """Contract 6: a 3-turn trajectory's KL is that of one scoring and is charged once."""
    policy = make_policy()
    reference = scaled(policy, 0.9)
    batch = RetrieveKL(reference)(rollout(policy, turns=3))
    batch = GroupAdvantage(group_size=G, leash=leash(0.25, "reward"))(batch)
    for i, (ids, response, _, _) in enumerate(attended(batch)):
        mine = plain_log_probs(policy, ids, 1.0)[response].sum()
        theirs = plain_log_probs(reference, ids, 1.0)[response].sum()
        close(batch["kl_penalty"][i].sum(), mine - theirs, 1e-4, "kl_penalty")
        total = batch["reward_raw"][i].sum() - 0.25 * (mine - theirs)
        close(batch["reward"][i].sum(), total, 1e-4, "reward")


def same_seed() -> None:
    """Contract 7: a row's response is a function of its stream, not of the rest of the batch."""
    policy = make_policy()
    whole = rollout(policy, count=4)
    torch.rand(7)  # another state of the global generator
    part = rollout(policy, count=2)
    for (a, *_), (b, *_) in zip(attended(whole), attended(part), strict=False):
        assert torch.equal(a, b), "a row differs with the batch"
    parts = {
        "task": Words(),
        "generator": policy,
        "runtime": one_process(),
        "prompts_per_iteration": 2,
    }
    source = Rollouts(**parts, env=ChatEnv(Words(), group_size=G))
    first = [r["answer"] for i in (0, 1) for r in source.prompts(i).get("row").tolist()]
    assert len(set(first)) == 4, "an epoch holds each row once"


CONTRACTS = (
    alignment,
    token_in_token_out,
    one_temperature,
    global_normalisation,
    masks_are_exact,
    one_leash,
    same_seed,
)
