"""Store the version of the policy with every state."""

from __future__ import annotations

import uuid

import torch
from tensordict import NonTensorData, TensorDictBase

from envs.torchrl.hooks import SpecHooks
from policies.torchrl.specs import Composite, NonTensor, Unbounded


class PolicyVersion(SpecHooks):
    """Write `policy_version` [B] at reset and step: int64 counts, or texts for "uuid".

    `increment_version()` starts the next version; `version` is assignable.

    >>> from tensordict import TensorDict
    >>> versions = PolicyVersion("int")
    >>> versions.increment_version()
    >>> versions(TensorDict(batch_size=[2]))["policy_version"].tolist()
    [1, 1]
    """

    version: int | str

    def __init__(self, version_type: type | str = int) -> None:
        super().__init__([], ["policy_version"])
        kinds = {int: "int", "int": "int", str: "uuid", "uuid": "uuid"}
        self.version_type = kinds[version_type]
        self.version = -1
        self.increment_version()

    def increment_version(self) -> None:
        """Start the next version."""
        self.version = str(uuid.uuid4()) if self.version_type == "uuid" else int(self.version) + 1

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        shape, device = next_td.batch_size, next_td.device
        if self.version_type == "int":
            value = torch.full(shape, int(self.version), dtype=torch.int64, device=device)
        else:
            value = NonTensorData(str(self.version), batch_size=shape).maybe_to_stack()
        return next_td.set("policy_version", value)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the version, [B]."""
        shape = observation_spec.shape
        observation_spec["policy_version"] = (
            Unbounded(shape, dtype=torch.int64)
            if self.version_type == "int"
            else NonTensor(shape, example_data=str(self.version))
        )
        return observation_spec
