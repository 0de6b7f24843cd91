"""Chats as TensorDict data: a `History` holds messages along its last batch dimension.

Shapes: [] one message, [T] a chat, [B, T] a batch of chats (a lazy stack if their lengths differ).
A message of role "<none>" is padding: it is never rendered, counted or parsed.

Left out on purpose: images, and message fields beyond those below.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase, lazy_stack

from policies.chats.messages import checked, columns, records_of, visible
from policies.chats.parsing import find_reader
from policies.chats.renderer import Rendered, Renderer
from policies.padding import pad, pad_mask
from policies.specs import Composite, NonTensor


class History(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold the messages of one or many chats.

    `is_complete` is False for a response cut before its end-of-turn token; `tools`, on the first
    message, are the schemas of the chat's tools, and `chat_template_kwargs` has a dict with the
    variables of its template.

    >>> history = History.from_chats([[{"role": "user", "content": "Hi"}]])
    >>> history.append(History(role="assistant", content="Yo", batch_size=[1])).shape
    torch.Size([1, 2])
    >>> history.chats()[0][1]
    {'role': 'assistant', 'content': 'Yo'}
    """

    role: str
    content: str
    is_complete: bool = True
    tool_calls: list[dict] | None = None
    tool_responses: list[str] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    tools: list[dict] | None = None
    chat_template_kwargs: list[dict] | None = None

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> "History":
        """Return one chat (a list of messages) as [T], or a list of chats as [B, T].

        Raises ValueError if it is empty or a message is malformed.
        """
        if isinstance(chats, str) or not isinstance(chats, Sequence) or not chats:
            raise ValueError(f"expected a chat (a list of dicts) or a list of chats, got {chats!r}")
        if not isinstance(chats[0], dict):
            return lazy_stack([cls.from_chats(chat) for chat in chats])
        return _build([checked(message, i) for i, message in enumerate(chats)])

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Any = None,
    ) -> "History":
        r"""Parse a text into a chat [T], or a list of texts into chats [B, T].

        The template is chosen as in `apply_chat_template`, else "chatml_format". A message that is
        not closed has `is_complete` False; a generation prompt is an empty assistant message. Tool
        calls stay in the content. Use it for trusted texts only: markup of turns inside a content
        is read as turns. Raises ValueError if a text does not fit the template.

        >>> history = History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nY")
        >>> history.messages()[1], list(history.is_complete)
        ({'role': 'assistant', 'content': 'Y'}, [True, False])
        """
        read = find_reader(tokenizer, chat_template, chat_template_name)
        if isinstance(text, str):
            chat = read(text)
            return chat if isinstance(chat, cls) else cls.from_chats(chat)
        options = (chat_template_name, chat_template, tokenizer)
        return lazy_stack([cls.from_text(one, *options) for one in text])

    @classmethod
    def from_records(cls, chats: Sequence[Sequence[dict[str, Any]]]) -> "History":
        """Return chats [B, T] of checked messages with their flags."""
        return lazy_stack([_build(chat) for chat in chats])

    @classmethod
    def default_spec(cls, shape: tuple[int, ...] = (-1,)) -> Composite:
        """Return the spec of a history of `shape`, the messages along the last dimension."""
        fields = {"role": "user", "content": "a string", "is_complete": True}
        leaves = {name: NonTensor(shape, example_data=value) for name, value in fields.items()}
        return Composite(leaves, shape=shape, data_cls=cls)

    def messages(self) -> list[dict[str, Any]]:
        """Return a [T] history as a list of messages without padding; see `chats`."""
        if self.ndim != 1:
            raise ValueError(f"expected a history [T], got {list(self.shape)}; use chats()")
        return visible(records_of(self))

    def chats(self) -> list[list[dict[str, Any]]]:
        """Return the messages of every chat in this history, in row-major order."""
        if self.ndim < 2:
            return [self.messages()]
        return [chat for row in self.unbind(0) for chat in row.chats()]

    def append(self, history: "History", *, inplace: bool = True, dim: int = -1) -> "History":
        """Add one entry along `dim`: a message [B] to each chat of [B, T].

        Raises RuntimeError unless `history` has one dimension less. Changes and returns this
        history unless `inplace=False`.
        """
        return self._grow(_grown(self, history, dim, one=True), inplace)

    def extend(self, history: "History", *, inplace: bool = True, dim: int = 0) -> "History":
        """Add the entries of `history` along `dim`: of shape [B, T], 0 adds chats, 1 messages.

        Raises RuntimeError unless `history` has as many dimensions. Changes and returns this
        history unless `inplace=False`.
        """
        return self._grow(_grown(self, history, dim, one=False), inplace)

    def _grow(self, done: "History", inplace: bool) -> "History":
        if not inplace:
            return done
        self.__dict__["_tensordict"] = done.__dict__["_tensordict"]
        return self

    def apply_chat_template(
        self,
        *,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        tokenize: bool | None = None,
        padding: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
    ) -> Any:
        """Render the chats as text, or as token ids and masks.

        `tokenizer` may be a `Renderer`. `chat_template` (a Jinja text or a file) comes before
        `chat_template_name` ("chatml_format", "qwen", ...), that before the tokenizer's own.
        Returns text by default: str for [T], a list for [B, T]; with `tokenize=True` lists of ids.
        With `return_tensors="pt"`, `return_dict`, the assistant mask or `padding` (on the
        tokenizer's side): a TensorDict of input_ids, attention_mask and assistant_masks (the
        end-of-turn token included), lazily stacked, or dense with `padding`.
        Raises ValueError on a chat that the template refuses and on an assistant mask of a single
        value for a chat with responses.
        """
        if not isinstance(tokenizer, Renderer):
            tokenizer = Renderer(tokenizer, chat_template, chat_template_name)
        if return_tensors not in (None, "pt") or padding not in (False, True, "longest"):
            raise ValueError(f"expected None or 'pt', got {return_tensors=} and {padding=}")
        as_dict = bool(return_dict or return_tensors or return_assistant_tokens_mask or padding)
        ends = {"add_generation_prompt": add_generation_prompt}

        def render(chat: list[dict[str, Any]]) -> Rendered:
            # an empty mask is correct for a chat without responses
            answered = any(message["role"] == "assistant" for message in chat)
            need = return_assistant_tokens_mask and answered
            return tokenizer.render(chat, **ends, require_assistant=need)

        if padding:
            td = _padded([render(chat) for chat in self.chats()], tokenizer.tokenizer)
            return td if self.ndim == 2 else td[0]
        if as_dict:
            return _map(
                self, lambda chat: _padded([render(chat)], tokenizer.tokenizer)[0], lazy_stack
            )
        if tokenize:
            return _map(self, lambda chat: render(chat).ids)
        return _map(self, lambda chat: tokenizer.text(chat, **ends))


def _map(history: History, render: Callable[[Any], Any], stack: Callable = list) -> Any:
    """Render the chat of a history, or its rows as a stack."""
    if history.ndim < 2:
        return render(history.messages())
    return stack([_map(row, render, stack) for row in history.unbind(0)])


def _padded(rows: list[Rendered], tokenizer: Any) -> TensorDictBase:
    """Return rendered chats as dense tensors [B, T]."""
    side, filler = tokenizer.padding_side, tokenizer.pad_token_id
    return TensorDict(
        input_ids=pad([torch.tensor(row.ids) for row in rows], filler or 0, side=side),
        attention_mask=pad_mask([len(row.ids) for row in rows], side=side),
        assistant_masks=pad([torch.tensor(row.assistant) for row in rows], False, side=side),
        batch_size=[len(rows)],
    )


def _grown(history: History, new: History, dim: int, *, one: bool) -> History:
    """Return the history with `new` added along `dim`, as one entry or as its entries."""
    if not -history.ndim <= dim < history.ndim or new.ndim != history.ndim - one:
        raise RuntimeError(f"expected dim={dim} to fit {list(history.shape)} and {list(new.shape)}")
    dim %= history.ndim
    if history.ndim == 1:
        return _build([*records_of(history), *records_of(new)])
    if dim == 0:
        return lazy_stack([*history.unbind(0), *([new] if one else new.unbind(0))])
    pairs = zip(history.unbind(0), new.unbind(0), strict=True)
    return lazy_stack([_grown(a, b, dim - 1, one=one) for a, b in pairs])


def _build(records: Sequence[dict[str, Any]]) -> History:
    """Return a [T] history of records."""
    return History.from_tensordict(columns(records))
