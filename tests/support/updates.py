"""Steps of the real update and what they hand to the optimiser, on the tiny model."""

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from envs.transforms.kl import RetrieveKL
from policies.torchrl.transformers_wrapper import TransformersWrapper
from support.policies import G, leash, make_policy, one_process, rollout, scaled
from trainer.advantage import GroupAdvantage
from trainer.update import Update


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


COEFF, LOW, HIGH = 0.3, 0.1, 0.3


def double_policy() -> TransformersWrapper:
    """Return a policy of one test alone, in float64; it does not sample at temperature 1."""
    policy = make_policy.__wrapped__(temperature=0.7)
    policy.model.double()
    return policy


def prepared(policy, where: str = "loss") -> tuple[TensorDict, TransformersWrapper]:
    """Return a batch with advantages; the policy has moved since it generated."""
    batch = rollout(policy, turns=2, count=2)
    reference = scaled(policy, 0.95)
    batch = RetrieveKL(reference)(batch)
    batch = GroupAdvantage(group_size=G, leash=leash(COEFF, where))(batch)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.02)
    return batch, reference


def make_update(policy, objective, optimizer, *, runtime=None, lr=0.0, **options) -> Update:
    own = getattr(objective, "leash", None) or leash(0.0)
    options = {"max_grad_norm": 0.0, "max_tokens": 12, "leash": own, **options}
    rate = lr if callable(lr) else lambda step: lr
    return Update(policy.scorer, optimizer, objective, runtime or one_process(), lr=rate, **options)


def gradient(policy, objective, batch, **options) -> tuple[Tensor, dict]:
    optimizer = Record(policy.model.parameters())
    metrics = make_update(policy, objective, optimizer, **options)(batch.clone())
    return torch.cat(optimizer.grads), metrics


def tables(model, ids: Tensor, temperature: Tensor) -> Tensor:
    """Return log p(. | tokens < t) for each t from 1 on, [t - 1, V], by one plain forward."""
    return (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)


def each_token(model, batch, factor: float = 1.0) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield row i, place t, id and log p(. | tokens < t) [V] of each kept token, by plain forwards.

    The rows are padded on the right. `factor`: of the batch's temperature.
    """
    for i, row in enumerate(batch["tokens", "full"]):
        ids = row[batch["masks", "all_attention_mask"][i]]
        table = tables(model, ids, factor * batch["temperature"][i])
        for t in batch["loss_mask"][i].nonzero().squeeze(-1).tolist():
            yield i, t, int(ids[t]), table[t - 1]


@torch.no_grad()
def kept_log_probs(policy, batch) -> Tensor:
    """Return the log-prob of each kept token by plain forwards, 0 elsewhere, [B, T]."""
    out = torch.zeros_like(batch["log_probs", "full"])
    for i, t, token, p in each_token(policy.model, batch):
        out[i, t] = p[token]
    return out


def grad_of(policy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])
