"""TorchRL's GAE module, with its keys and shapes, on `trainer.gae.gae`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from trainer.baselines import standardise
from trainer.gae import gae
from trainer.torchrl.loss_inputs import LossModule, get_dense, per_token, require


@dataclass(frozen=True)
class GAEKeys:
    """Keys of GAE's input and output."""

    advantage: NestedKey = "advantage"
    value_target: NestedKey = "value_target"
    value: NestedKey = "state_value"
    reward: NestedKey = ("next", "reward")
    done: NestedKey = ("next", "done")
    mask: NestedKey = "loss_mask"


class GAE(LossModule):
    """Write `advantage` and `value_target` (= advantage + value), in the shape of `state_value`.

    Values are [B, T] or [B, T, 1], at the root or under "next". `value_network` (td -> td) writes
    `state_value`, without a gradient. Tokens outside "loss_mask" (if any) are skipped; a per-token
    `done` (if any) ends an episode inside a row. `average_gae` whitens over the mask. Unlike
    TorchRL, truncated episodes are not bootstrapped.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"state_value": [[0.5, 0.25]], "reward": [[0.0, 1.0]]}, [1])
    >>> GAE(gamma=1.0, lmbda=1.0)(td)["advantage"].tolist()
    [[0.5, 0.75]]
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lmbda: float = 0.95,
        value_network: Callable[[TensorDictBase], TensorDictBase] | None = None,
        average_gae: bool = False,
    ) -> None:
        super().__init__()
        self.gamma, self.lmbda = float(gamma), float(lmbda)
        self.value_network, self.average_gae = value_network, average_gae
        self.tensor_keys = GAEKeys()

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the tensordict with both entries."""
        keys = self.tensor_keys
        if self.value_network is not None:
            self.value_network(tensordict)
        stored = require(tensordict, keys.value)
        value = stored.squeeze(-1) if stored.ndim == 3 else stored  # [B, T]
        every = torch.ones_like(value, dtype=torch.bool)
        mask = get_dense(tensordict, keys.mask)
        mask = every if mask is None else per_token(mask, every)
        done = get_dense(tensordict, keys.done)
        done = per_token(done, every) if done is not None and done.numel() == mask.numel() else None
        reward = _reward_per_token(require(tensordict, keys.reward), mask)
        advantage = gae(reward, value, mask, gamma=self.gamma, lmbda=self.lmbda, done=done)
        target = (advantage + value) * mask
        if self.average_gae:
            advantage[mask] = standardise(advantage[mask])
        tensordict.set(keys.advantage, advantage.reshape(stored.shape))
        return tensordict.set(keys.value_target, target.reshape(stored.shape))


def _reward_per_token(reward: Tensor, mask: Tensor) -> Tensor:
    """Return the reward of each token; a reward per row goes to its last masked token."""
    if reward.numel() != len(mask):
        return per_token(reward, mask)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return reward.reshape(-1, 1) * last
