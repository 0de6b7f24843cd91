"""Render a history, or nested histories, as text, as ids, or as tensors with masks.

Left out on purpose: tools and documents for the template; images.
"""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from policies.chats.chat_template import Rendered, Renderer
from policies.chats.rendering import Message, Outlines, Piece, fill
from policies.padding import pad, pad_mask

_PADDING = {False: False, "do_not_pad": False, True: True, "longest": True, "max_length": True}
_TRUNCATION = {False: False, "do_not_truncate": False, True: True, "longest_first": True}


def apply(
    history: Any,
    renderer: Renderer,
    *,
    tokenize: bool | None,
    padding: bool | str,
    truncation: bool | str,
    max_length: int | None,
    return_tensors: str | None,
    return_dict: bool | None,
    return_assistant_tokens_mask: bool,
    **ends: bool,
) -> Any:
    """Return the rendered history; see `History.apply_chat_template`."""
    if return_tensors not in (None, "pt"):
        raise ValueError(f"expected return_tensors None or 'pt', got {return_tensors!r}")
    if padding not in _PADDING or truncation not in _TRUNCATION:
        raise ValueError(
            f"expected padding in {list(_PADDING)} and truncation in {list(_TRUNCATION)}, got "
            f"{padding!r} and {truncation!r}"
        )
    pads, cuts, wide = _PADDING[padding], _TRUNCATION[truncation], padding == "max_length"
    as_dict = bool(return_dict or return_tensors or return_assistant_tokens_mask)
    if (pads and not as_dict) or (as_dict and False in (tokenize, return_dict)):
        raise ValueError(
            "masks, tensors and padding come as a TensorDict of tokens; set return_dict=True "
            "and leave tokenize alone"
        )
    if cuts and not (as_dict or tokenize):
        raise ValueError("truncation cuts tokens; set tokenize=True or return_dict=True")
    if (wide and max_length is None) or (max_length and not (wide or cuts)):
        raise ValueError(
            "max_length goes with truncation=True or padding='max_length', got "
            f"{max_length}, {truncation!r} and {padding!r}"
        )
    if not as_dict and not tokenize:
        return _map(history, lambda chat: renderer.text(chat, **ends))
    size = max_length or renderer.tokenizer.model_max_length
    kept = slice(-size, None) if renderer.tokenizer.truncation_side == "left" else slice(size)

    def render(chat: list[dict[str, Any]]) -> Rendered:
        # a mask without a token is right where nobody has answered
        answered = any(message["role"] == "assistant" for message in chat)
        need = return_assistant_tokens_mask and answered
        done = renderer.render(chat, **ends, require_assistant=need)
        too_long = cuts and len(done.ids) > size
        return Rendered(done.ids[kept], done.assistant[kept]) if too_long else done

    done = _map(history, render)
    if not as_dict:
        return _map(done, lambda rendered: rendered.ids)
    if pads:
        return _padded(done, renderer.tokenizer, max_length if wide else None)
    return _as_tensordict(done)


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


def _padded(done: Any, tokenizer: Any, size: int | None) -> TensorDictBase:
    """Return rendered chats [B] as dense tensors [B, T]."""
    rows = done if isinstance(done, list) else [done]
    if rows and isinstance(rows[0], list):
        raise ValueError("expected a history of shape [T] or [B, T] for padding; flatten it")
    side = tokenizer.padding_side
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
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


def open_end(
    outlines: Outlines, messages: list[Message], *, prompt: bool
) -> tuple[list[Piece], list[str]]:
    """Return the pieces of a chat up to its last content, and their texts.

    A last message without content continues the generation prompt before it.
    """
    if prompt:
        raise ValueError(
            "continue_final_message leaves the last message open, add_generation_prompt begins "
            "another; set one of them to False"
        )
    last = len(messages) - 1
    empty = last > 0 and messages[last]["role"] == "assistant" and not messages[last]["content"]
    chat = messages[:last] if empty else messages
    outline = outlines.of(chat, empty)
    texts = fill(outline.pieces, chat, outlines.text(chat, empty)[0])
    if texts is None:
        raise ValueError(
            f"{outlines.label} rewrites contents, so that a message cannot be left open; "
            "set policy.chat_template=chatml"
        )
    if empty:
        return outline.pieces, texts
    stop = next(k for k, p in enumerate(outline.pieces) if p.message == last) + 1
    return outline.pieces[:stop], texts[:stop]
