"""Chats as TensorDict data: one `History` holds messages along its last batch dimension.

Shapes: [] one message, [T] a chat, [B, T] a batch of chats (a lazy stack if their lengths differ).
A message of role "<none>" is padding: it is never rendered.

Left out on purpose: parsing text back to messages, images, and message fields beyond those below.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

from policies.chat_template import Renderer
from policies.padding import pad, pad_mask
from policies.specs import Composite, NonTensor

PADDING_ROLE = "<none>"
_OPTIONAL = ("tool_calls", "tool_responses")
_FIELDS = ("role", "content", "is_complete", *_OPTIONAL)


class History(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold the messages of one chat or of many.

    `is_complete` is False for a reply that was cut before its end-of-turn token.

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

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> "History":
        """Return one chat (a list of messages) as [T], or a list of chats as [B, T].

        Raises ValueError if there is nothing in it or a message is malformed.
        """
        if not chats:
            raise ValueError("expected a chat or a list of chats, got an empty list")
        if not isinstance(chats[0], dict):
            return lazy_stack([cls.from_chats(chat) for chat in chats])
        return _build([_checked(message, i) for i, message in enumerate(chats)])

    @classmethod
    def from_replies(cls, texts: Sequence[str], complete: Sequence[bool]) -> "History":
        """Return one assistant message for each text, [B, 1]."""
        pairs = zip(texts, complete, strict=True)
        return lazy_stack(
            [_build([{"role": "assistant", "content": t, "is_complete": c}]) for t, c in pairs]
        )

    @classmethod
    def default_spec(cls, shape: tuple[int, ...] = (-1,)) -> Composite:
        """Return the spec of a history of `shape`, the messages along the last dimension."""
        fields = {"role": "user", "content": "a string", "is_complete": True}
        leaves = {name: NonTensor(shape, example_data=value) for name, value in fields.items()}
        return Composite(leaves, shape=shape, data_cls=cls)

    def messages(self) -> list[dict[str, Any]]:
        """Return a [T] history as a list of messages, without padding ones.

        Raises ValueError unless there is exactly one batch dimension; see `chats`.
        """
        if self.ndim != 1:
            raise ValueError(f"expected a history of shape [T], got {_shape(self)}; use chats()")
        return [
            {k: v for k, v in record.items() if k != "is_complete"}
            for record in _records(self)
            if record["role"] != PADDING_ROLE
        ]

    def chats(self) -> list[list[dict[str, Any]]]:
        """Return the messages of every chat in this history, in row-major order."""
        if self.ndim < 2:
            return [self.messages()]
        return [chat for row in self.unbind(0) for chat in row.chats()]

    def append(self, history: "History", *, inplace: bool = True, dim: int = -1) -> "History":
        """Add one entry along `dim`: a message [B] to each chat of [B, T].

        Raises RuntimeError if this is a single message or `history` does not have one dimension
        less. Changes and returns this history unless `inplace=False`.
        """
        dim = _checked_dim(self, dim)
        if history.ndim != self.ndim - 1:
            raise RuntimeError(
                f"The history to append must have one dimension less than self, {_shape(self)}; "
                f"got {_shape(history)}. Use extend for one with as many dimensions."
            )
        if self.ndim == 1:
            done = _build([*_records(self), *_records(history)])
        elif dim == 0:
            done = lazy_stack([*self.unbind(0), history])
        else:
            pairs = _pair_rows(self, history)
            done = lazy_stack([a.append(b, inplace=False, dim=dim - 1) for a, b in pairs])
        return _replace(self, done) if inplace else done

    def extend(self, history: "History", *, inplace: bool = True, dim: int = 0) -> "History":
        """Add the entries of `history` along `dim`: of shape [B, T], 0 adds chats, 1 messages.

        Raises RuntimeError if this is a single message or `history` has other dimensions.
        Changes and returns this history unless `inplace=False`.
        """
        dim = _checked_dim(self, dim)
        if history.ndim != self.ndim:
            raise RuntimeError(
                "The new history to extend must have as many dimensions as self, "
                f"{_shape(self)}; got {_shape(history)}. Use append for one entry."
            )
        if self.ndim == 1:
            done = _build([*_records(self), *_records(history)])
        elif dim == 0:
            done = lazy_stack([*self.unbind(0), *history.unbind(0)])
        else:
            pairs = _pair_rows(self, history)
            done = lazy_stack([a.extend(b, inplace=False, dim=dim - 1) for a, b in pairs])
        return _replace(self, done) if inplace else done

    def apply_chat_template(
        self,
        *,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tokenize: bool | None = None,
        padding: bool = False,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
    ) -> Any:
        """Render the chats as text, or as token ids and masks.

        `tokenizer` is a tokenizer or a `Renderer`, which saves the preparation when many histories
        are rendered. `chat_template` is a Jinja text or a known name, such as "chatml".
        Returns text by default: str for [T], a list for [B, T]. With `return_tensors="pt"`,
        `return_dict` or the assistant mask: a TensorDict of input_ids, attention_mask and
        assistant_masks (the end-of-turn token included), lazily stacked, or dense with `padding`
        (on the tokenizer's side). With `tokenize=True` alone: lists of ids.
        Raises ValueError on a chat that the template refuses, and on a mask of a single value.
        """
        renderer = tokenizer
        if not isinstance(tokenizer, Renderer):
            renderer = Renderer(tokenizer, chat_template)
        elif chat_template is not None:
            raise ValueError("expected chat_template=None with a Renderer, which has its own")
        as_dict = bool(return_dict or return_tensors or return_assistant_tokens_mask)
        if return_tensors not in (None, "pt"):
            raise ValueError(f"expected return_tensors None or 'pt', got {return_tensors!r}")
        if (padding and not as_dict) or (as_dict and False in (tokenize, return_dict)):
            raise ValueError(
                "masks, tensors and padding come as a TensorDict of tokens; set return_dict=True "
                "and leave tokenize alone"
            )
        if not as_dict and not tokenize:
            return _map(
                self, lambda m: renderer.text(m, add_generation_prompt=add_generation_prompt)
            )
        done = _map(
            self,
            lambda m: renderer.render(
                m,
                add_generation_prompt=add_generation_prompt,
                require_assistant=return_assistant_tokens_mask,
            ),
        )
        if not as_dict:
            return _map(done, lambda rendered: rendered.ids)
        if not padding:
            return _as_tensordict(done)
        return _as_padded_tensordict(done, renderer.tokenizer)


def _build(records: Sequence[dict[str, Any]]) -> History:
    """Return a [T] history of records with the fields of History."""
    columns: dict[str, Any] = {}
    for name in _FIELDS:
        values = [record.get(name) for record in records]
        if name not in _OPTIONAL or any(v is not None for v in values):
            # wrapped, so that a list stays the value of one message
            columns[name] = NonTensorStack(*[NonTensorData(v) for v in values])
    return History(**columns, batch_size=[len(records)])


def _records(history: History) -> list[dict[str, Any]]:
    """Return the fields of a history [] or [T], message by message, without those that are None."""
    rows = [history] if history.ndim == 0 else None
    size = 1 if rows else history.shape[0]
    records: list[dict[str, Any]] = [{} for _ in range(size)]
    for name in _FIELDS:
        values = history.get(name, None)
        if values is not None and name in _OPTIONAL:  # lists themselves: read each message
            values = [m.get(name, None) for m in rows or history.unbind(0)]
            values = [None if v is None else list(v) for v in values]
        elif not isinstance(values, list):
            values = [values] * size
        for record, value in zip(records, values, strict=True):
            if value is not None:
                record[name] = value
    return records


def _checked(message: Any, index: int) -> dict[str, Any]:
    """Return a message as a record; raise ValueError if it is not one."""
    if not isinstance(message, dict):
        raise ValueError(f"message {index}: expected a dict, got {type(message).__name__}")
    record = {k: v for k, v in message.items() if v is not None}
    if "tool_calls" in record:
        record.setdefault("content", "")
    for name in ("role", "content"):
        if not isinstance(record.get(name), str):
            got = type(message.get(name)).__name__
            raise ValueError(f"message {index}: expected {name!r} to be a str, got {got}")
    unknown = sorted(set(record) - set(_FIELDS))
    if unknown:
        raise ValueError(
            f"message {index}: got the fields {unknown}, a history keeps only {list(_FIELDS)}; "
            "remove them from the data"
        )
    return {"is_complete": True, **record}


def _checked_dim(history: History, dim: int) -> int:
    """Return `dim` as a non-negative number."""
    if history.ndim == 0:
        raise RuntimeError(
            "Cannot add to a single message without batch dimensions. Call unsqueeze(dim=0) first."
        )
    if not -history.ndim <= dim < history.ndim:
        raise RuntimeError(f"expected dim within the shape {_shape(history)}, got {dim}")
    return dim % history.ndim


def _pair_rows(left: History, right: History) -> list[tuple[History, History]]:
    if left.shape[0] != right.shape[0]:
        raise RuntimeError(
            f"expected as many rows as self has, {left.shape[0]}; got {right.shape[0]}"
        )
    return list(zip(left.unbind(0), right.unbind(0), strict=True))


def _replace(history: History, new: History) -> History:
    """Make `history` hold what `new` holds."""
    history.__dict__["_tensordict"] = new.__dict__["_tensordict"]
    return history


def _shape(history: History) -> list[int]:
    return list(history.shape)


def _map(rows: Any, render: Callable[[Any], Any]) -> Any:
    """Apply `render` to each chat of a history, or to each leaf of nested lists."""
    if isinstance(rows, History):
        if rows.ndim < 2:
            return render(rows.messages())
        rows = list(rows.unbind(0))
    return [_map(row, render) for row in rows] if isinstance(rows, list) else render(rows)


def _as_tensordict(done: Any) -> TensorDictBase:
    """Return rendered chats as tensors, lists of them as lazy stacks."""
    if isinstance(done, list):
        return lazy_stack([_as_tensordict(row) for row in done])
    return TensorDict(
        input_ids=torch.tensor(done.ids),  # [T]
        attention_mask=torch.ones(len(done.ids), dtype=torch.bool),
        assistant_masks=torch.tensor(done.assistant, dtype=torch.bool),
    )


def _as_padded_tensordict(done: Any, tokenizer: Any) -> TensorDictBase:
    """Return rendered chats [B] as dense tensors [B, T]."""
    rows = done if isinstance(done, list) else [done]
    if rows and isinstance(rows[0], list):
        raise ValueError("expected a history of shape [T] or [B, T] for padding=True; flatten it")
    side = tokenizer.padding_side
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    td = TensorDict(
        input_ids=pad([torch.tensor(row.ids) for row in rows], filler, side=side),
        attention_mask=pad_mask([len(row.ids) for row in rows], side=side),
        assistant_masks=pad([torch.tensor(row.assistant) for row in rows], False, side=side),
        batch_size=[len(rows)],
    )
    return td if isinstance(done, list) else td[0]
