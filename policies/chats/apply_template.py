"""Render a history, or nested histories, as text, as ids, or as tensors with masks.

Left out on purpose: tools and documents for the template; images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from policies.chats.chat_template import Rendered, Renderer
from policies.padding import pad, pad_mask

_PADDING = {False: "", "do_not_pad": "", True: "longest", "longest": "longest"}
_TRUNCATION = {False: False, "do_not_truncate": False, True: True, "longest_first": True}


@dataclass(frozen=True)
class Options:
    """What `History.apply_chat_template` was asked for; a contradiction is a ValueError."""

    add_generation_prompt: bool
    continue_final_message: bool
    tokenize: bool | None
    padding: bool | str
    truncation: bool | str
    max_length: int | None
    return_tensors: str | None
    return_dict: bool | None
    return_assistant_tokens_mask: bool

    def __post_init__(self) -> None:
        if self.return_tensors not in (None, "pt"):
            raise ValueError(f"expected return_tensors None or 'pt', got {self.return_tensors!r}")
        known = {**_PADDING, "max_length": "max_length"}
        for name, allowed in (("padding", known), ("truncation", _TRUNCATION)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"expected {name} in {list(allowed)}, got {value!r}")
        if (self.pads and not self.as_dict) or (
            self.as_dict and False in (self.tokenize, self.return_dict)
        ):
            raise ValueError(
                "masks, tensors and padding come as a TensorDict of tokens; set return_dict=True "
                "and leave tokenize alone"
            )
        if self.cuts and not (self.as_dict or self.tokenize):
            raise ValueError("truncation cuts tokens; set tokenize=True or return_dict=True")
        wide = self.padding == "max_length"
        if (wide and self.max_length is None) or (self.max_length and not (wide or self.cuts)):
            raise ValueError(
                "max_length goes with truncation=True or padding='max_length', got "
                f"{self.max_length}, {self.truncation!r} and {self.padding!r}"
            )

    @property
    def as_dict(self) -> bool:
        """Whether the result is a TensorDict."""
        asked = (self.return_dict, self.return_tensors, self.return_assistant_tokens_mask)
        return any(map(bool, asked))

    @property
    def pads(self) -> bool:
        """Whether rows get one length."""
        return self.padding == "max_length" or bool(_PADDING[self.padding])

    @property
    def cuts(self) -> bool:
        """Whether rows that are too long lose tokens."""
        return _TRUNCATION[self.truncation]


def apply(history: Any, renderer: Renderer, options: Options) -> Any:
    """Return the rendered history; see `History.apply_chat_template`."""
    ends = {
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    if not options.as_dict and not options.tokenize:
        return _map(history, lambda chat: renderer.text(chat, **ends))

    def render(chat: list[dict[str, Any]]) -> Rendered:
        # a mask without a token is right where nobody has answered
        answered = any(message["role"] == "assistant" for message in chat)
        need = options.return_assistant_tokens_mask and answered
        return _cut(renderer.render(chat, **ends, require_assistant=need), renderer, options)

    done = _map(history, render)
    if not options.as_dict:
        return _map(done, lambda rendered: rendered.ids)
    return _padded(done, renderer.tokenizer, options) if options.pads else _as_tensordict(done)


def _cut(done: Rendered, renderer: Renderer, options: Options) -> Rendered:
    """Return a rendered chat without what is too long, cut on the tokenizer's truncation side."""
    size = options.max_length or renderer.tokenizer.model_max_length
    if not options.cuts or len(done.ids) <= size:
        return done
    kept = slice(-size, None) if renderer.tokenizer.truncation_side == "left" else slice(size)
    return Rendered(done.ids[kept], done.assistant[kept])


def _map(rows: Any, render: Callable[[Any], Any]) -> Any:
    """Apply `render` to each chat of a history, or to each leaf of nested lists."""
    if hasattr(rows, "messages"):  # a History
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


def _padded(done: Any, tokenizer: Any, options: Options) -> TensorDictBase:
    """Return rendered chats [B] as dense tensors [B, T]."""
    rows = done if isinstance(done, list) else [done]
    if rows and isinstance(rows[0], list):
        raise ValueError("expected a history of shape [T] or [B, T] for padding; flatten it")
    side = tokenizer.padding_side
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    size = options.max_length if options.padding == "max_length" else None
    size = max(size or 0, *(len(row.ids) for row in rows))
    # a row of the full size, dropped again, makes the others as long
    ids = [*(torch.tensor(row.ids) for row in rows), torch.zeros(size, dtype=torch.int64)]
    marks = [*(torch.tensor(row.assistant) for row in rows), torch.zeros(size, dtype=torch.bool)]
    td = TensorDict(
        input_ids=pad(ids, filler, side=side)[:-1],
        attention_mask=pad_mask([*(len(row.ids) for row in rows), size], side=side)[:-1],
        assistant_masks=pad(marks, False, side=side)[:-1],
        batch_size=[len(rows)],
    )
    return td if isinstance(done, list) else td[0]
