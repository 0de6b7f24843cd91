"""What one chat looks like: as text, as tokens with masks and log-probs, as a history.

Rows of different lengths are lazy stacks of one container per row: read them with
`get(key, as_list=True)` or `get(key, as_padded_tensor=True)`. `padded` is False there and True on
dense [B, T] data. Anything called full, and every mask, has the shape of `tokens.full`.

Left out on purpose: conversion between the views. The wrapper and the renderer do that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorClass
from torch import Tensor

from policies.history import History
from policies.specs import Composite, NonTensor, Spec, Unbounded


def _spec(cls: type, leaves: dict[str, Spec], shape: tuple[int, ...], keys: Any) -> Composite:
    """Return the spec of a container with the leaves asked for, and `padded` where it has it."""
    found: dict[str, Spec] = {key: leaves[key] for key in _known(leaves, keys)}
    if "padded" in cls.__annotations__:
        found["padded"] = NonTensor(shape[:-1], example_data=False)
    return Composite(found, shape=shape[:-1], data_cls=cls, step_mdp_static=True)


def _known(names: Any, keys: Sequence[str] | None) -> list[str]:
    """Return the keys asked for, or all; an unknown one is a ValueError."""
    unknown = set(keys or ()) - set(names)
    if unknown:
        raise ValueError(f"expected keys among {sorted(names)}, got {sorted(unknown)}")
    return list(names if keys is None else keys)


class Tokens(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold token ids, int64.

    `prompt` [B, T_prompt], padded left; `response` [B, T_response], padded right; `full` [B, T],
    both after each other; `assistant` [B, T_assistant], the ids inside the assistant mask.

    >>> import torch
    >>> Tokens(full=torch.zeros(2, 3, dtype=torch.int64), padded=True, batch_size=[2]).full.shape
    torch.Size([2, 3])
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    assistant: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None

    @classmethod
    def default_spec(
        cls, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Composite:
        """Return the spec of a batch of `shape`, with all fields or the `keys` named."""
        names = ("prompt", "response", "assistant", "full")
        leaves = {name: Unbounded((*shape, -1), dtype=torch.int64) for name in names}
        return _spec(cls, leaves, shape, keys)


class LogProbs(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold log-probabilities in nats, float32, entry by entry those of `Tokens`.

    In `full` and `prompt` the first attended token and padding are 0.

    >>> import torch
    >>> LogProbs(response=torch.tensor([[-0.5]]), padded=True, batch_size=[1]).response.item()
    -0.5
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    assistant: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None

    @classmethod
    def default_spec(
        cls, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Composite:
        """Return the spec of a batch of `shape`, with all fields or the `keys` named."""
        names = ("prompt", "response", "assistant", "full")
        leaves = {name: Unbounded((*shape, -1), dtype=torch.float32) for name in names}
        return _spec(cls, leaves, shape, keys)


class Masks(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold bool masks [B, T], True = keep.

    `all_attention_mask`: real tokens. `all_assistant_mask`: tokens of assistant messages, the
    end-of-turn token included. `all_response_mask`: tokens sampled by this policy in this episode.

    >>> import torch
    >>> mask = torch.tensor([[False, True]])
    >>> Masks(all_response_mask=mask, padded=True, batch_size=[1]).all_response_mask.tolist()
    [[False, True]]
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None
    all_response_mask: Tensor | None = None
    padded: bool | None = None

    @classmethod
    def default_spec(
        cls, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Composite:
        """Return the spec of a batch of `shape`, with all fields or the `keys` named."""
        names = ("all_attention_mask", "all_assistant_mask", "all_response_mask")
        leaves = {name: Unbounded((*shape, -1), dtype=torch.bool) for name in names}
        return _spec(cls, leaves, shape, keys)


class ChatHistory(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold chats as messages: the prompt, the reply, and both. Each history has a time dimension.

    >>> chat = [{"role": "user", "content": "Hello"}]
    >>> ChatHistory(prompt=History.from_chats([chat]), batch_size=[1]).prompt.chats()
    [[{'role': 'user', 'content': 'Hello'}]]
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    @classmethod
    def default_spec(
        cls, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Composite:
        """Return the spec of a batch of `shape`, with all fields or the `keys` named."""
        names = ("prompt", "response", "full")
        leaves = {name: History.default_spec((*shape, -1)) for name in names}
        return _spec(cls, leaves, shape, keys)


class Text(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold text: one str per row in `prompt`, `response` and `full`.

    >>> Text(prompt=["Hi", "Hello"], batch_size=[2])[1].prompt
    'Hello'
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    @classmethod
    def default_spec(
        cls, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Composite:
        """Return the spec of a batch of `shape`, with all fields or the `keys` named."""
        names = ("prompt", "response", "full")
        leaves = {name: NonTensor(shape, example_data="a string") for name in names}
        return _spec(cls, leaves, shape, keys)
