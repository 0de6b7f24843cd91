"""Containers of one chat: text, tokens with masks and log-probs, history.

Rows of different lengths are lazy stacks of one container per row: read them with
`get(key, as_list=True)`, `get(key, as_padded_tensor=True, padding_side=, padding_value=)` or
`get(key, as_nested_tensor=True, layout=)`; `rows` of policies/padding.py also reads dense data and
stacks of stacks. `padded` is one bool, False for lazy stacks. Fields named full and all masks have
the shape of `tokens.full`. No run needs `default_spec`, `to_text`, `to_tokens` and `to_history`;
their code is in policies/torchrl/. The last three return lazy stacks of rows; the ids of a rendered
history may differ from the sampled ids: score ids.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import MetaData, TensorClass
from torch import Tensor

from policies.chats.history import History


def _spec_of(of: Any) -> Any:
    """Return the method `default_spec` for a container of Histories, texts or values of a dtype."""

    def default_spec(
        cls: Any, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Any:
        """Return the spec of a batch of `shape` with `keys`, by default the fields to `padded`."""
        from policies.torchrl.specs import container_spec

        return container_spec(cls, of, shape=shape, keys=keys)

    return classmethod(default_spec)


def _share_padded(self: Any) -> None:
    """Make `padded` one bool for a stack of rows too."""
    if isinstance(self.padded, bool):
        self.padded = MetaData(self.padded)


class Tokens(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold token ids, int64.

    `prompt` [B, T_prompt], padded left; `response` [B, T_response], padded right; `full` [B, T],
    their concatenation; `assistant` [B, T_assistant], the ids inside the assistant mask.

    >>> import torch
    >>> Tokens(full=torch.zeros(2, 3, dtype=torch.int64), padded=True, batch_size=[2]).full.shape
    torch.Size([2, 3])
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None
    assistant: Tensor | None = None

    __post_init__ = _share_padded
    default_spec = _spec_of(torch.int64)

    def to_text(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = False,
        *,
        attention_mask: Tensor | None = None,
    ) -> "Text":
        """Return the decoded tokens; raise ValueError if they are padded and have no mask."""
        from policies.torchrl import conversions

        options = {"skip_special_tokens": skip_special_tokens, "attention_mask": attention_mask}
        return conversions.text_of_tokens(self, tokenizer, into=Text, **options)

    def to_history(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        skip_special_tokens: bool = False,
        *,
        attention_mask: Tensor | None = None,
    ) -> "ChatHistory":
        """Return the messages of the decoded tokens; see `to_text` and `Text.to_history`."""
        text = self.to_text(tokenizer, skip_special_tokens, attention_mask=attention_mask)
        return text.to_history(tokenizer, chat_template_name)


class LogProbs(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold log-probabilities in nats, float32, one per entry of `Tokens`.

    In `full` and `prompt` the first attended token and padding are 0.

    >>> import torch
    >>> LogProbs(response=torch.tensor([[-0.5]]), padded=True, batch_size=[1]).response.item()
    -0.5
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None
    assistant: Tensor | None = None

    __post_init__ = _share_padded
    default_spec = _spec_of(torch.float32)


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
    padded: bool | None = None
    all_response_mask: Tensor | None = None

    __post_init__ = _share_padded
    default_spec = _spec_of(torch.bool)


class ChatHistory(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold chats as messages: prompt, response, and both. Each history has a time dimension.

    >>> chat = [{"role": "user", "content": "Hello"}]
    >>> ChatHistory(prompt=History.from_chats([chat]), batch_size=[1]).prompt.chats()
    [[{'role': 'user', 'content': 'Hello'}]]
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    default_spec = _spec_of(History)

    def to_tokens(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Tokens:
        """Return the ids of the rendered chats, ragged rows; `tokenizer` may be a `Renderer`.

        The prompt ends in a generation prompt, the response is the rest of `full`. A cut response
        is closed. Raise ValueError if full does not start with the prompt.
        """
        from policies.torchrl import conversions

        chosen = (chat_template, chat_template_name)
        return conversions.tokens_of_chats(self, tokenizer, *chosen, into=Tokens)

    def to_text(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> "Text":
        """Return the rendered chats as texts; see `to_tokens`."""
        from policies.torchrl import conversions

        chosen = (chat_template, chat_template_name)
        return conversions.text_of_chats(self, tokenizer, *chosen, into=Text)


class Text(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold text: one str per row in `prompt`, `response` and `full`.

    >>> Text(prompt=["Hi", "Hello"], batch_size=[2])[1].prompt
    'Hello'
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    default_spec = _spec_of(str)

    def to_tokens(self, tokenizer: Any) -> Tokens:
        """Return the ids of each text, ragged, without added special tokens."""
        from policies.torchrl import conversions

        return conversions.tokens_of_text(self, tokenizer, into=Tokens)

    def to_history(
        self, tokenizer: Any = None, chat_template_name: str | None = None
    ) -> ChatHistory:
        """Return the messages of each text, read as by `History.from_text`.

        A generation prompt at the end of a prompt is not a message. The response is the part of
        `full` after the prompt; if one of them is missing, it follows a generation prompt.
        """
        from policies.torchrl import conversions

        return conversions.chats_of_text(self, tokenizer, chat_template_name, into=ChatHistory)
