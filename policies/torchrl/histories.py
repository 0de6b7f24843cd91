"""Methods of `History` that no run uses: histories that grow, chats as text or tensors."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from policies.chats.messages import columns, records_of
from policies.chats.renderer import Rendered, Renderer
from policies.padding import pad, pad_mask


def grow(history: Any, new: Any, dim: int, *, one: bool, inplace: bool) -> Any:
    """Return the history with `new` added along `dim`; see `History.append` and `extend`."""
    grown = _grown(history, new, dim, one=one)
    if not inplace:
        return grown
    history.__dict__["_tensordict"] = grown.__dict__["_tensordict"]
    return history


def _grown(history: Any, new: Any, dim: int, *, one: bool) -> Any:
    """Return the history with `new` added along `dim`, as one entry or as its entries."""
    if not -history.ndim <= dim < history.ndim or new.ndim != history.ndim - one:
        raise RuntimeError(f"expected dim={dim} to fit {list(history.shape)} and {list(new.shape)}")
    dim %= history.ndim
    if history.ndim == 1:
        return type(history).from_tensordict(columns([*records_of(history), *records_of(new)]))
    if dim == 0:
        return lazy_stack([*history.unbind(0), *([new] if one else new.unbind(0))])
    pairs = zip(history.unbind(0), new.unbind(0), strict=True)
    return lazy_stack([_grown(a, b, dim - 1, one=one) for a, b in pairs])


def render_history(
    history: Any,
    renderer: Renderer,
    *,
    add_generation_prompt: bool,
    tokenize: bool | None,
    padding: bool | str,
    return_tensors: str | None,
    return_dict: bool | None,
    return_assistant_tokens_mask: bool,
) -> Any:
    """Render the chats as text, or as token ids and masks; see `History.apply_chat_template`."""
    if return_tensors not in (None, "pt") or padding not in (False, True, "longest"):
        raise ValueError(f"expected None or 'pt', got {return_tensors=} and {padding=}")
    as_dict = bool(return_dict or return_tensors or return_assistant_tokens_mask or padding)
    ends = {"add_generation_prompt": add_generation_prompt}

    def render(chat: list[dict[str, Any]]) -> Rendered:
        # For a chat without responses an empty mask is correct.
        answered = any(message["role"] == "assistant" for message in chat)
        need = return_assistant_tokens_mask and answered
        return renderer.render(chat, **ends, require_assistant=need)

    if padding:
        td = _padded([render(chat) for chat in history.chats()], renderer.tokenizer)
        return td if history.ndim == 2 else td[0]
    if as_dict:
        return _map(
            history, lambda chat: _padded([render(chat)], renderer.tokenizer)[0], lazy_stack
        )
    if tokenize:
        return _map(history, lambda chat: render(chat).ids)
    return _map(history, lambda chat: renderer.text(chat, **ends))


def _map(history: Any, render: Callable[[Any], Any], stack: Callable = list) -> Any:
    """Render the chat of a history, or its rows as a stack."""
    if history.ndim < 2:
        return render(history.messages())
    return stack([_map(row, render, stack) for row in history.unbind(0)])


def _padded(rows: list[Rendered], tokenizer: Any) -> TensorDictBase:
    """Return rendered chats as dense tensors [B, T]."""
    side, filler = tokenizer.padding_side, tokenizer.pad_token_id
    return TensorDict(
        input_ids=pad([torch.tensor(row.ids) for row in rows], filler or 0, side=side),  # [B, T]
        attention_mask=pad_mask([len(row.ids) for row in rows], side=side),  # [B, T]
        assistant_masks=pad([torch.tensor(row.assistant) for row in rows], False, side=side),
        batch_size=[len(rows)],
    )
