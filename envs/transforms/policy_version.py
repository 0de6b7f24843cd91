"""Which policy said this: its version beside every state."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from envs.transforms.transform import Transform
from policies.specs import Composite, NonTensor, Unbounded


@dataclass(frozen=True)
class VersionChange:
    """When a version followed another one."""

    timestamp: datetime
    old_version: int | str | None
    new_version: int | str


class PolicyVersion(Transform):
    """Write `policy_version` [B] at reset and step: int64 counts, or texts for "uuid".

    `increment_version()` starts the next version; `version_history` lists the changes.

    >>> from tensordict import TensorDict
    >>> versions = PolicyVersion("int")
    >>> versions.increment_version()
    >>> td = versions(TensorDict(batch_size=[2]))
    >>> td["policy_version"].tolist(), len(versions.version_history)
    ([1, 1], 2)
    """

    def __init__(self, version_type: type | str = int) -> None:
        super().__init__([], ["policy_version"])
        kinds = {int: "int", "int": "int", str: "uuid", "uuid": "uuid"}
        if version_type not in kinds:
            raise ValueError(f"expected version_type int or 'uuid', got {version_type!r}")
        self.version_type = kinds[version_type]
        self.version_history: list[VersionChange] = []
        self._version: int | str | None = None
        self.increment_version()

    @property
    def version(self) -> int | str:
        """Return the version of the policy that acts now."""
        assert self._version is not None
        return self._version

    @version.setter
    def version(self, value: int | str) -> None:
        if isinstance(value, int) != (self.version_type == "int"):
            raise ValueError(f"expected a version of type {self.version_type}, got {value!r}")
        change = VersionChange(datetime.now(UTC), self._version, value)
        self.version_history.append(change)
        self._version = value

    def increment_version(self) -> None:
        """Start the next version."""
        if self.version_type == "uuid":
            self.version = str(uuid.uuid4())
        else:
            self.version = 0 if self._version is None else int(self._version) + 1

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        if self.version_type == "int":
            shape, device = next_td.batch_size, next_td.device
            value = torch.full(shape, self.version, dtype=torch.int64, device=device)
            return next_td.set("policy_version", value)
        return next_td.set("policy_version", _texts(str(self.version), list(next_td.batch_size)))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the version, [B]."""
        shape = observation_spec.shape
        observation_spec["policy_version"] = (
            Unbounded(shape, dtype=torch.int64)
            if self.version_type == "int"
            else NonTensor(shape, example_data=str(self.version))
        )
        return observation_spec


def _texts(text: str, shape: list[int]) -> NonTensorStack | NonTensorData:
    if not shape:
        return NonTensorData(text)
    return NonTensorStack(*[_texts(text, shape[1:]) for _ in range(shape[0])])
