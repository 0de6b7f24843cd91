"""Specs: the shapes, dtypes and containers of a TensorDict's entries.

A size of -1 differs from batch to batch or from row to row (the length of a chat). `zero` and
`rand` build an example (size 1 for -1), `explain` describes the first mismatch. There are no
bounded and categorical leaves, because no environment of leash needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor

from policies.padding import inner

NestedKey = str | tuple[str, ...]


class Spec:
    """Describe one entry: its shape with the batch dimensions."""

    def __init__(self, shape: Any = ()) -> None:
        self.shape = torch.Size([shape] if isinstance(shape, int) else shape)

    def zero(self, shape: Any = ()) -> Any:
        """Return an example of zeros; `shape` goes in front."""
        raise NotImplementedError

    def rand(self, shape: Any = ()) -> Any:
        """Return a random example; `shape` goes in front."""
        return self.zero(shape)

    def explain(self, value: Any) -> str:
        """Return why a value does not fit, or "" if it fits."""
        raise NotImplementedError

    def clone(self) -> Spec:
        """Return a deep copy."""
        return deepcopy(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # specs are mutable

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in self.__dict__.items() if v is not None)
        return f"{type(self).__name__}({fields})"

    def _size(self, shape: Any) -> torch.Size:
        """Return the shape of an example."""
        return torch.Size([*shape, *(1 if size < 0 else size for size in self.shape)])


class Unbounded(Spec):
    """Describe a tensor of any values, float32 by default.

    >>> Unbounded((2, -1), dtype=torch.int64).zero().shape
    torch.Size([2, 1])
    >>> Unbounded((2, -1)).explain(torch.zeros(3, 5))
    'expected shape [2, -1], got [3, 5]'
    """

    def __init__(self, shape: Any = (), *, dtype: Any = torch.float32) -> None:
        super().__init__(shape)
        self.dtype = dtype

    def zero(self, shape: Any = ()) -> Tensor:
        """Return zeros."""
        return torch.zeros(self._size(shape), dtype=self.dtype)

    def rand(self, shape: Any = ()) -> Tensor:
        """Return normal samples; 0 or 1 with equal probability for integers and bools."""
        size = self._size(shape)
        if self.dtype.is_floating_point:
            return torch.randn(size, dtype=self.dtype)
        return torch.randint(2, size).to(self.dtype)

    def explain(self, value: Any) -> str:
        """Return the mismatch of type, dtype or shape; ragged values may be a list."""
        if isinstance(value, Tensor) and value.is_nested:
            value = list(value.unbind())
        if isinstance(value, list):
            row = Unbounded(self.shape[1:], dtype=self.dtype)
            count = _unequal(self.shape[:1], [len(value)])
            return count or next((text for v in value if (text := row.explain(v))), "")
        if not isinstance(value, Tensor):
            return f"expected a tensor, got {type(value).__name__}"
        if value.dtype != self.dtype:
            return f"expected {self.dtype}, got {value.dtype}"
        return _unequal(self.shape, value.shape)


class NonTensor(Spec):
    """Describe values that are not tensors, such as texts; `example_data` is one of them.

    >>> NonTensor((2,), example_data="a text").zero().tolist()
    ['a text', 'a text']
    """

    def __init__(self, shape: Any = (), *, example_data: Any = None) -> None:
        super().__init__(shape)
        self.example_data = example_data

    def zero(self, shape: Any = ()) -> Any:
        """Return the example, repeated; a single value if the spec has no shape."""
        value: Any = NonTensorData(self.example_data, batch_size=() if self.shape else shape)
        for size in reversed(self._size(shape) if self.shape else ()):
            value = NonTensorStack(*[value.clone() for _ in range(size)])
        return value

    def explain(self, value: Any) -> str:
        """Return "" unless the value is missing or a tensor."""
        if value is None or isinstance(value, Tensor):
            return f"expected data that is no tensor, got {type(value).__name__}"
        return ""


class Composite(Spec, MutableMapping[NestedKey, Any]):
    """Describe a TensorDict, or the tensorclass `data_cls`, by the specs of its entries.

    `step_mdp_static`: it moves from "next" to the root as one entry. `optional`: entries may be
    missing.

    >>> spec = Composite({"obs": Unbounded((2, -1))}, shape=(2,))
    >>> spec["next", "reward"] = Unbounded((2, 1))
    >>> spec.zero()["next", "reward"].shape
    torch.Size([2, 1])
    >>> sorted(map(str, spec.keys(True, True)))
    ["('next', 'reward')", 'obs']
    """

    def __init__(
        self,
        specs: Mapping[str, Any] | None = None,
        *,
        shape: Any = (),
        data_cls: type | None = None,
        step_mdp_static: bool = False,
        optional: bool = False,
    ) -> None:
        super().__init__(shape)
        self.data_cls, self.step_mdp_static, self.optional = data_cls, step_mdp_static, optional
        self._specs: dict[str, Spec] = {}
        for key, spec in (specs or {}).items():
            self[key] = spec

    def __setitem__(self, key: NestedKey, spec: Any) -> None:
        name, *path = _path(key)
        if path:
            self._specs.setdefault(name, Composite(shape=self.shape))
            self._specs[name][tuple(path)] = spec  # type: ignore[index]
        else:
            self._specs[name] = self._fitted(spec)

    def _fitted(self, spec: Any) -> Spec:
        """Return the spec to store; a nested TensorDict gets at least this batch size."""
        if isinstance(spec, Composite) and len(spec.shape) < len(self.shape):
            spec = spec.clone()
            spec.shape = self.shape
        elif isinstance(spec, Mapping) and not isinstance(spec, Composite):
            spec = Composite(spec, shape=self.shape)
        return spec

    def __getitem__(self, key: NestedKey) -> Any:
        name, *path = _path(key)
        spec = self._specs.get(name)
        if spec is None or (path and not isinstance(spec, Composite)):
            raise KeyError(f"no spec for {key!r}; there are {sorted(self._specs)}")
        return spec[tuple(path)] if path else spec  # type: ignore[index]

    def __delitem__(self, key: NestedKey) -> None:
        *path, name = _path(key)
        owner = self[tuple(path)] if path else self
        del owner._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[NestedKey]:
        """Return the keys; keys of nested specs are tuples."""
        done: list[NestedKey] = []
        for name, spec in self._specs.items():
            nested = isinstance(spec, Composite)
            if not (leaves_only and nested):
                done.append(name)
            if nested and include_nested:
                done += [(name, *_path(key)) for key in spec.keys(True, leaves_only)]
        return done

    def update(self, other: Mapping[str, Any] | Composite) -> Composite:
        """Add the specs of `other`, entry by entry; return this spec."""
        for key, spec in other.items():
            known = self._specs.get(key)
            if isinstance(known, Composite) and isinstance(spec, Composite):
                known.update(spec)
            else:
                self[key] = spec
        return self

    def zero(self, shape: Any = ()) -> Any:
        """Return a TensorDict, or an instance of `data_cls`, of zeros."""
        return self._example("zero", shape)

    def rand(self, shape: Any = ()) -> Any:
        """Return a random TensorDict, or a random instance of `data_cls`."""
        return self._example("rand", shape)

    def _example(self, how: str, shape: Any) -> Any:
        values = {key: getattr(spec, how)(shape) for key, spec in self._specs.items()}
        td = TensorDict(values, batch_size=self._size(shape))
        return td if self.data_cls is None else self.data_cls.from_tensordict(td)  # type: ignore[attr-defined]

    def explain(self, value: Any) -> str:
        """Return the first entry that is missing or does not fit."""
        if self.data_cls is not None and not isinstance(value, self.data_cls):
            return f"expected {self.data_cls.__name__}, got {type(value).__name__}"
        if not isinstance(value, TensorDictBase) and not is_tensorclass(value):
            return f"expected a TensorDict, got {type(value).__name__}"
        lazy = isinstance(inner(value), LazyStackedTensorDict)
        for key, spec in self._specs.items():
            options = {"as_list": True} if lazy and isinstance(spec, Unbounded) else {}
            entry = value.get(key, None, **options)
            if entry is None and self.optional:
                continue
            if entry is None and not isinstance(spec, NonTensor):
                return f"{key}: missing"
            if text := spec.explain(entry):
                return f"{key}: {text}"
        return ""


def container_spec(
    cls: Any, of: Any, *, shape: tuple[int, ...], keys: Sequence[str] | None
) -> Composite:
    """Return the spec of a tensorclass of Histories, texts (str) or values of a dtype.

    It describes a batch of `shape` with `keys`, by default the fields up to `padded`.
    """
    known = [name for name in cls.__annotations__ if name != "padded"]
    common = takewhile(lambda name: name != "padded", cls.__annotations__)
    if unknown := set(keys or ()) - set(known):
        raise ValueError(f"expected keys among {known}, got {sorted(unknown)}")
    specs: dict[str, Spec] = {}
    for name in common if keys is None else keys:
        if isinstance(of, torch.dtype):
            specs[name] = Unbounded((*shape, -1), dtype=of)
        elif of is str:
            specs[name] = NonTensor(shape, example_data="a string")
        else:
            specs[name] = of.default_spec((*shape, -1))
    if "padded" in cls.__annotations__:
        specs["padded"] = NonTensor(shape[:-1], example_data=False)
    options = {"step_mdp_static": True, "optional": keys is None}
    return Composite(specs, shape=shape[:-1], data_cls=cls, **options)


def history_spec(cls: Any, shape: tuple[int, ...]) -> Composite:
    """Return the spec of a History of `shape`, the messages along the last dimension."""
    fields = {"role": "user", "content": "a string", "is_complete": True}
    leaves = {name: NonTensor(shape, example_data=value) for name, value in fields.items()}
    return Composite(leaves, shape=shape, data_cls=cls)


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _unequal(expected: Any, got: Any) -> str:
    """Return how two shapes differ; -1 equals any size."""
    fits = len(expected) == len(got) and all(
        want in (-1, have) for want, have in zip(expected, got, strict=True)
    )
    return "" if fits else f"expected shape {list(expected)}, got {list(got)}"
