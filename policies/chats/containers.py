"""What one chat looks like: as text, as tokens with masks and log-probs, as a history.

Rows of different lengths are lazy stacks of one container per row: read them with
`get(key, as_list=True)`, `get(key, as_padded_tensor=True, padding_side=, padding_value=)` or
`get(key, as_nested_tensor=True, layout=)`. Dense [B, T] data knows none of these, and a stack of
stacks no nested tensor: `rows` and `nested` of policies/padding.py read them all. `padded` is one
bool, False for lazy stacks. Anything called full, and every mask, has the shape of `tokens.full`.

A view is made from another by `to_text`, `to_tokens` and `to_history`, row by row: rendering is the
Renderer's, reading parsing.py's. A wrapper's own ids are exact, a rendered history's need
not be them: score ids.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import MetaData, TensorClass
from torch import Tensor

from policies.chats.history import History

if TYPE_CHECKING:
    from policies.specs import Composite


def _default_spec(of: Any) -> Any:
    """Return the `default_spec` of a container of Histories, texts (str) or values of a dtype."""

    def default_spec(
        cls: Any, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> "Composite":
        """Return the spec of a batch of `shape` with the `keys` named.

        Without `keys`: the fields up to `padded`, none of which has to be there.
        """
        from policies.specs import container_spec

        return container_spec(cls, of, shape, keys)

    return classmethod(default_spec)


def _share_padded(container: Any) -> None:
    """Make `padded` read as one bool in a stack of rows too."""
    padded = container.padded
    if isinstance(padded, bool):
        container.padded = MetaData(padded)


def _conversions() -> Any:
    """Return what makes one view of another: a parser of texts comes with it, so only if asked."""
    from policies.chats import conversions

    return conversions


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
    full: Tensor | None = None
    padded: bool | None = None
    assistant: Tensor | None = None

    def __post_init__(self) -> None:
        _share_padded(self)

    default_spec = _default_spec(torch.int64)

    def to_text(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = False,
        *,
        attention_mask: Tensor | None = None,
    ) -> "Text":
        """Return the decoded tokens. Padded ones need the mask of `full` (ValueError without)."""
        options = {"skip": skip_special_tokens}
        return _conversions().tokens_to_text(self, tokenizer, attention_mask, **options)

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
    """Hold log-probabilities in nats, float32, entry by entry those of `Tokens`.

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

    def __post_init__(self) -> None:
        _share_padded(self)

    default_spec = _default_spec(torch.float32)


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

    def __post_init__(self) -> None:
        _share_padded(self)

    default_spec = _default_spec(torch.bool)


class ChatHistory(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold chats as messages: the prompt, the reply, and both. Each history has a time dimension.

    >>> chat = [{"role": "user", "content": "Hello"}]
    >>> ChatHistory(prompt=History.from_chats([chat]), batch_size=[1]).prompt.chats()
    [[{'role': 'user', 'content': 'Hello'}]]
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    default_spec = _default_spec(History)

    def to_tokens(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Tokens:
        """Return the ids of the rendered chats, ragged rows.

        The prompt ends in a generation prompt, the response is what follows it in `full`. A reply
        that was cut is closed by the template. Raises ValueError if full does not start with the
        prompt. `tokenizer` may be a `Renderer`.
        """
        return _conversions().chat_to_tokens(self, tokenizer, chat_template, chat_template_name)

    def to_text(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> "Text":
        """Return the rendered chats as texts; see `to_tokens`."""
        return _conversions().chat_to_text(self, tokenizer, chat_template, chat_template_name)


class Text(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold text: one str per row in `prompt`, `response` and `full`.

    >>> Text(prompt=["Hi", "Hello"], batch_size=[2])[1].prompt
    'Hello'
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    default_spec = _default_spec(str)

    def to_tokens(
        self,
        tokenizer: Any,
        padding: bool = False,
        truncation: bool = False,
        return_tensors: str = "pt",
        *,
        max_length: int | None = None,
    ) -> Tokens:
        """Return the ids of each text as it stands: no special tokens are added to it.

        Ragged rows, or with `padding` (of a batch [B]) the tokenizer's pad token: left of prompts,
        right of responses, around full. `truncation` cuts each to `max_length`, the tokenizer's
        own by default.
        """
        if return_tensors != "pt":
            raise ValueError(f"expected return_tensors='pt', got {return_tensors!r}")
        limit = {"truncation": truncation, "max_length": max_length}
        return _conversions().text_to_tokens(self, tokenizer, limit, padding=padding)

    def to_history(
        self, tokenizer: Any = None, chat_template_name: str | None = None
    ) -> ChatHistory:
        """Return the messages of each text.

        A generation prompt at the end of a prompt is no message; the response is what follows the
        prompt in `full`, or if they are not both there, what follows a generation prompt.
        Raises ValueError where a text does not fit the template (see `History.from_text`).
        """
        return _conversions().text_to_history(self, tokenizer, chat_template_name)
