"""Count the steps of an episode and truncate it after a maximum."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envs.torchrl.hooks import SpecHooks
from policies.torchrl.specs import Composite, Unbounded


class StepCounter(SpecHooks):
    """Write `step_count` [B, 1]; with `max_steps`, truncate the episode there.

    >>> from tensordict import TensorDict
    >>> td = StepCounter(2)._reset(None, TensorDict(batch_size=[1]))
    >>> td["step_count"].tolist()
    [[0]]
    """

    def __init__(self, max_steps: int | None = None) -> None:
        super().__init__([], ["step_count"])
        self.max_steps = max_steps

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        zero = torch.zeros(*td_reset.batch_size, 1, dtype=torch.int64, device=td_reset.device)
        return td_reset.set("step_count", zero)

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        count = tensordict.get("step_count") + 1
        next_td.set("step_count", count)
        if self.max_steps is not None:
            for key in ("truncated", "done"):
                over = count >= self.max_steps
                next_td.set(key, next_td.get(key, torch.zeros_like(over)) | over)
        return next_td

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the count, [B, 1]."""
        shape = (*observation_spec.shape, 1)
        observation_spec["step_count"] = Unbounded(shape, dtype=torch.int64)
        return observation_spec
