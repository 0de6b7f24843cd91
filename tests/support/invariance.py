"""One optimiser step of every algorithm, in float64, on the same rows laid out in several ways.

On two ranks, rank 0 writes the gradients of all cases into a folder (tests/support/sharded.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from conf.compose import compose_checked, set_up
from conf.plan import Plan, plan
from envs.chat_env import ChatEnv
from envs.transforms.kl import RetrieveKL
from policies.critic import Critic
from policies.layout import groups
from policies.load import load_policy, load_reference
from policies.models.reward_model import load_reward_model
from policies.torchrl.transformers_wrapper import TransformersWrapper
from support.policies import DENSE, G, one_process
from support.runs import ROOT
from support.tasks import Words
from support.updates import Record
from trainer.runtime import Runtime
from trainer.scale import shards
from trainer.update import Update

ALGORITHMS = sorted(path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml"))
WORDS = {name: (f"experiment={name}_tiny",) for name in ALGORITHMS} | {
    "grpo": ("experiment=grpo_tiny", "algorithm=grpo"),
    "grpo_full": ("experiment=grpo_tiny",),
    "reward": ("experiment=rm_tiny",),
}
# Beside one case for each algorithm: what changes the forward itself.
MORE = {
    "grpo, KL in the reward": ("grpo", "kl.where=reward", "kl.estimator=k1"),
    "ppo, head": ("ppo", "algorithm.critic.kind=head"),
    "grpo, full KL": ("grpo", "kl.estimator=full"),
    "grpo, KL of the sequence": ("grpo", "kl=sequence"),
    "sft, packed": ("sft", "algorithm.packing=true"),
}
CASES = {name: (name,) for name in ALGORITHMS} | MORE
SMALL = ("algorithm.epochs=1", "algorithm.minibatches=1", "policy.max_new_tokens=6")


class Pairs(Words):
    """The words, with pairs of responses too."""

    def preferences(self) -> list[dict]:
        return [{**row, "chosen": "12", "rejected": row["answer"]} for row in self.rows("train")]


class Alone(Runtime):
    """Every rank makes the whole batch; `mine` shares it out."""

    ranks, rank = 1, 0


@dataclass(frozen=True)
class Step:
    """What an optimiser step needs, before the advantages: they see the rows as they lie."""

    cfg: DictConfig
    policy: TransformersWrapper
    reference: TransformersWrapper
    batch: TensorDict


@cache
def step(name: str) -> Step:
    """Return the first batch of a case, from a policy that has moved since."""
    set_up()
    algorithm, *words = CASES[name]
    silent = algorithm in ("sft", "minor_sft", "reward")
    learns = () if silent else ("kl.coeff=0.1", f"algorithm.group_size={G}")
    cfg = OmegaConf.create(compose_checked([*WORDS[algorithm], *SMALL, *learns, *words]))
    make = load_reward_model if algorithm == "reward" else load_policy
    policy = make("tiny", max_new_tokens=6)
    policy.scorer.double()
    randomise(policy)
    reference = scaled(load_reference(policy), 0.9)
    task = Pairs()
    parts = {"task": task, "policy": policy, "generator": policy, "runtime": Alone("/tmp")}
    env = ChatEnv(task, group_size=cfg.algorithm.group_size)
    batch = planned(cfg).source(prompts_per_iteration=4, env=env, **parts)(0)
    if cfg.kl.measure:
        batch = RetrieveKL(reference)(batch)
    for key in DENSE:
        if key in batch and batch.get(key).is_floating_point():
            batch.set(key, batch.get(key).double())
    return Step(cfg, scaled(policy, 1.02), reference, batch)


def planned(cfg: DictConfig) -> Plan:
    """Return the parts of a composed run."""
    return plan(OmegaConf.to_container(cfg, resolve=True))


@torch.no_grad()
def randomise(policy: TransformersWrapper) -> None:
    """Draw the weights, so that tokens differ and responses end by themselves now and then."""
    generator = torch.Generator().manual_seed(0)
    for name, p in policy.scorer.named_parameters():
        p.requires_grad_(True)
        p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.2)
        if name.endswith("embed_tokens.weight"):
            p[policy.tokenizer.eos_token_id] *= 2.0


@torch.no_grad()
def scaled(policy: TransformersWrapper, factor: float) -> TransformersWrapper:
    """Return the policy after its weights were scaled."""
    for p in policy.scorer.parameters():
        p.mul_(factor)
    return policy


def gradient(
    step: Step,
    change: Callable[[TensorDict], TensorDict] = lambda batch: batch,
    *,
    runtime: Runtime | None = None,
    micro_batch_tokens: int = 10**6,
    spread: bool = False,
) -> Tensor:
    """Return what one step hands to its optimiser, flattened; every rank has its rows.

    With `spread` each rank has a part of every weight too: the step's policy is no other's then.
    """
    runtime, policy, algorithm = runtime or one_process(), step.policy, step.cfg.algorithm
    parts = planned(step.cfg)
    if critic := algorithm.get("critic"):
        policy.scorer.critic = Critic(policy.scorer, **critic).double()
        torch.nn.init.constant_(policy.scorer.critic.head.weight, 0.01)
    advantage = parts.advantage(leash=parts.leash, policy=policy, runtime=runtime)
    made = shards.ShardedRuntime("/tmp") if spread else runtime
    scorer, optimizer = made.prepare(
        policy, lambda scorer: Record(scorer.parameters()), step.reference, advantage
    )
    update = Update(
        scorer,
        optimizer,
        parts.objective(leash=parts.leash),
        runtime,
        leash=parts.leash,
        lr=lambda number: 0.0,
        aggregation=algorithm.aggregation,
        packing=algorithm.get("packing", False),
        max_tokens=6,
        micro_batch_tokens=micro_batch_tokens,
        max_grad_norm=0.0,
        reference=step.reference.scorer if step.cfg.kl.measure else None,
    )
    update(advantage(mine(change(step.batch.clone()), runtime)))
    policy.scorer.critic = None
    return torch.cat(getattr(optimizer, "optimizer", optimizer).grads)  # not Accelerate's


def rows_of(batch: TensorDict) -> list[list[int]]:
    """Return the rows of each group."""
    return groups(batch.get("group_id", torch.arange(batch.batch_size[0])))


def mine(batch: TensorDict, runtime: Runtime) -> TensorDict:
    """Return this rank's groups of rows."""
    rows = rows_of(batch)
    return batch[list(chain(*rows[runtime.local_slice(len(rows))]))]


def turned(batch: TensorDict) -> TensorDict:
    """Return the groups in the opposite order."""
    return batch[list(chain(*reversed(rows_of(batch))))]


def interleaved(batch: TensorDict) -> TensorDict:
    """Return the first row of each group, then the second of each, and so on."""
    return batch[list(chain(*zip(*rows_of(batch), strict=True)))]


def write(folder: Path, runtime: Runtime) -> None:
    """Write the gradients of several ranks, without shards and with them."""
    found = {name: gradient(step(name), runtime=runtime) for name in CASES}
    few = {"runtime": runtime, "micro_batch_tokens": 120, "spread": True}
    found |= {f"{name}, shards": gradient(step(name), **few) for name in CASES}
    if runtime.is_main:
        save_file(found, folder / "gradients.safetensors")
