"""Transforms of what an environment gives, and their composition.

`_step(td, next_td)` reads the step's td and writes next_td; `_reset(td, td_reset)` does the same
for a first state; `_call` is for transforms that need one td only. Called on a plain td, a
transform writes under "next", or into the td itself when it has no "next".
`transform_*_spec` tell what a transform adds to, or changes in, what the environment declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDictBase
from torch import nn

if TYPE_CHECKING:
    from envs.env import EnvBase
    from envs.transformed_env import TransformedEnv
    from policies.specs import Composite


class Transform(nn.Module):
    """Map `in_keys` to `out_keys` by `_apply_transform`; override a hook to do anything else.

    A missing in_key is a KeyError in a step, and skipped at reset or with `missing_tolerance`.
    """

    _container: TransformedEnv | Compose | None
    stays_last = False  # True: what is appended later goes before it

    def __init__(
        self, in_keys: Sequence[NestedKey] = (), out_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        self.in_keys = list(in_keys)
        self.out_keys = list(in_keys if out_keys is None else out_keys)
        self.missing_tolerance = False
        self._hold(None)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform the td's "next", or the td itself when it has none; writes in place."""
        next_td = tensordict.get("next", None)
        if next_td is None:
            return self._step(tensordict, tensordict)
        return tensordict.set("next", self._step(tensordict, next_td))

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what the environment below is given; the caller's td stays as it is."""
        return self._inv_call(tensordict.copy())

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._call(next_td)

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        tolerance, self.missing_tolerance = self.missing_tolerance, True
        try:
            return self._call(td_reset)
        finally:
            self.missing_tolerance = tolerance

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = next_td.get(in_key, None)
            if value is not None:
                next_td.set(out_key, self._apply_transform(value))
            elif not self.missing_tolerance:
                raise KeyError(
                    f"{type(self).__name__} expected {in_key!r}, got keys "
                    f"{sorted(map(str, next_td.keys()))}"
                )
        return next_td

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict

    def _apply_transform(self, value: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} needs _apply_transform(value), _call(td) or _step(td, next_td)"
        )

    # Specs: each hook may change the spec that it is given, and returns it.

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the specs of what comes out, one hook for each of the three."""
        for name, hook in (
            ("full_observation_spec", self.transform_observation_spec),
            ("full_reward_spec", self.transform_reward_spec),
            ("full_done_spec", self.transform_done_spec),
        ):
            output_spec[name] = hook(output_spec[name])
        return output_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the specs of what is read, one hook for each of the two."""
        input_spec["full_action_spec"] = self.transform_action_spec(input_spec["full_action_spec"])
        input_spec["full_state_spec"] = self.transform_state_spec(input_spec["full_state_spec"])
        return input_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec of the observations behind this transform."""
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Return the spec of the rewards behind this transform."""
        return reward_spec

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Return the spec of the done flags behind this transform."""
        return done_spec

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Return the spec of the actions before this transform's inverse."""
        return action_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Return the spec of what a reset reads."""
        return state_spec

    # Where it is mounted.

    def set_container(self, container: TransformedEnv | Compose) -> None:
        """Remember the environment or Compose that this transform is part of; only one may be."""
        if self._container is not None:
            raise ValueError(
                f"this {type(self).__name__} already belongs to a "
                f"{type(self._container).__name__}; use one transform per environment"
            )
        self._hold(container)

    def _hold(self, container: TransformedEnv | Compose | None) -> None:
        # Past nn.Module, which would register a Compose as a child of its own child.
        object.__setattr__(self, "_container", container)

    @property
    def container(self) -> TransformedEnv | None:
        """Return the environment that this transform is mounted on, or None."""
        holder = self._container
        return holder.container if isinstance(holder, Transform) else holder

    @property
    def collector(self) -> Any:
        """Return the collector registered with that environment, or None."""
        return None if self.container is None else self.container.collector

    @property
    def parent(self) -> EnvBase | None:
        """Return the environment as this transform sees it: with the transforms before it."""
        from envs.transformed_env import TransformedEnv

        holder = self._container
        if not isinstance(holder, Compose):
            return None if holder is None else holder.env
        env = holder.parent
        for other in list(holder)[: list(holder).index(self)]:
            env = None if env is None else TransformedEnv(env, other.unmounted())
        return env

    def unmounted(self) -> Transform:
        """Return this transform, its modules and its state, to be mounted elsewhere."""
        shared = copy(self)
        shared._hold(None)
        return shared


def _hook(name: str) -> Any:
    """Return a spec hook that asks the transform's `_through(name, spec)`."""
    return lambda self, spec: self._through(name, spec)


class PassesSpecs(Transform):
    """A transform that has others make its specs: a subclass fills `_through(hook, spec)`."""

    transform_output_spec = _hook("transform_output_spec")
    transform_input_spec = _hook("transform_input_spec")
    transform_observation_spec = _hook("transform_observation_spec")
    transform_reward_spec = _hook("transform_reward_spec")
    transform_done_spec = _hook("transform_done_spec")
    transform_action_spec = _hook("transform_action_spec")
    transform_state_spec = _hook("transform_state_spec")


class Compose(PassesSpecs):
    """Run transforms one after the other (their inverses in the opposite order).

    `missing_tolerance`, once set, is that of all its parts, later ones too.
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        self.transforms = nn.ModuleList()
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform) -> None:
        """Add a transform at the end, before one that stays last."""
        transform.set_container(self)
        if self.missing_tolerance:
            transform.missing_tolerance = True
        last = len(self) > 0 and self[-1].stays_last
        self.transforms.insert(len(self) - last, transform)

    def pop(self, index: int = -1) -> Transform:
        """Take a transform out and return it; it may be mounted elsewhere."""
        transform: Any = self.transforms.pop(index)
        transform._hold(None)
        return transform

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_td = transform._step(tensordict, next_td)
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        for transform in self:
            td_reset = transform._reset(tensordict, td_reset)
        return td_reset

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_td = transform._call(next_td)
        return next_td

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for transform in reversed(list(self)):
            tensordict = transform._inv_call(tensordict)
        return tensordict

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the tolerance reaches the parts."""
        super().__setattr__(name, value)
        if name == "missing_tolerance" and "transforms" in self._modules:
            for transform in self:
                transform.missing_tolerance = value

    def _through(self, hook: str, spec: Composite) -> Composite:
        """Return what the spec hooks of all transforms make of a spec."""
        for transform in self:
            spec = getattr(transform, hook)(spec)
        return spec

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)  # type: ignore[return-value]

    def __getitem__(self, index: int) -> Transform:
        return self.transforms[index]  # type: ignore[return-value]
