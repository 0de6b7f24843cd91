"""One row of a container in another view: messages to text or ids, ids to text, text to messages.

Batches are done row by row (`by_row`) and come out as lazy stacks of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import lazy_stack
from torch import Tensor

from policies.chats.chat_template import Renderer
from policies.chats.history import History
from policies.chats.messages import PADDING_ROLE, records_of
from policies.chats.parsing import Format, find_reader
from policies.padding import pad, pad_around, rows

Written = dict[str, Any]  # by the fields prompt, response, full


def by_row(container: Any, make: Callable[[Any], Any]) -> Any:
    """Return what `make` makes of each row of a container, as a lazy stack."""
    if container.ndim == 0:
        return make(container)
    return lazy_stack([by_row(row, make) for row in container.unbind(0)])


def renderer_of(tokenizer: Any, name: str | None, chat_template: str | None) -> Renderer:
    """Return a renderer; a tokenizer may be one itself."""
    if isinstance(tokenizer, Renderer):
        return tokenizer
    return Renderer(tokenizer, chat_template, name)


def written(chat: Any, say: Callable[..., Any]) -> Written:
    """Return what `say` makes of the histories of one chat, strings or lists of ids.

    The response is what follows the prompt in both together; ValueError if it does not.
    """
    done: Written = {}
    prompt, response, full = (
        None if history is None else history.messages()
        for history in (chat.prompt, chat.response, chat.full)
    )
    if prompt is not None:
        done["prompt"] = say(prompt, add_generation_prompt=True)
    if full is not None:
        done["full"] = say(full)
    if prompt is not None and full is not None:
        done["response"] = _after(done["prompt"], done["full"])
    elif response is not None:
        before = prompt or [{"role": "user", "content": "?"}]
        start = say(before, add_generation_prompt=True)
        done["response"] = _after(start, say([*before, *response]))
    return done


def _after(prompt: Any, full: Any) -> Any:
    if full[: len(prompt)] != prompt:
        raise ValueError(
            f"expected the full chat to start with its prompt, got {prompt[-40:]!r} and at that "
            f"place {full[: len(prompt)][-40:]!r}; the full history has to begin with the messages "
            "of the prompt, and the template has to write them the same way when the chat goes on"
        )
    return full[len(prompt) :]


def tokens_of(chat: Any, renderer: Renderer) -> dict[str, Tensor]:
    """Return the ids of one chat, those inside the assistant mask of `full` too."""
    done = written(chat, lambda messages, **ends: renderer.render(messages, **ends).ids)
    if chat.full is not None:
        whole = renderer.render(chat.full.messages())
        pairs = zip(whole.ids, whole.assistant, strict=True)
        done["assistant"] = [i for i, said in pairs if said]
    return {name: torch.tensor(ids, dtype=torch.int64) for name, ids in done.items()}


def decoded(tokens: Any, tokenizer: Any, mask: Tensor | None, *, skip: bool) -> Written:
    """Return the texts of one row of tokens.

    `mask` [T] tells the tokens of `full` from padding, and those of prompt and response where these
    stand side by side in it. Raises ValueError if the tokens are padded and there is none.
    """
    found = {name: tokens.get(name, None) for name in ("prompt", "response", "full")}
    done = {}
    for name, ids in found.items():
        if ids is not None:
            kept = ids if mask is None else ids[_columns(found, name, mask).bool()]
            if mask is None and tokens.padded:
                raise ValueError(
                    "expected attention_mask=masks.all_attention_mask for padded tokens: padding "
                    "cannot be told from the ids, where pad and end token may be the same"
                )
            done[name] = tokenizer.decode(kept.tolist(), skip_special_tokens=skip)
    return done


def _columns(found: dict[str, Tensor | None], name: str, mask: Tensor) -> Tensor:
    """Return the part of the mask that belongs to a field."""
    sizes = {key: len(ids) for key, ids in found.items() if ids is not None}
    if sizes[name] == len(mask) and (name == "full" or "full" not in sizes):
        return mask
    if sizes.get("prompt", 0) + sizes.get("response", 0) != len(mask):
        raise ValueError(
            f"expected an attention mask of the width of full, or of prompt and response together, "
            f"got {len(mask)} for {sizes}"
        )
    return mask[: sizes[name]] if name == "prompt" else mask[-sizes[name] :]


def encoded(text: Any, tokenizer: Any, limit: dict[str, Any]) -> dict[str, Tensor]:
    """Return the ids of one row of texts, each as it stands: no special tokens are added."""
    done = {}
    for name in ("prompt", "response", "full"):
        if (value := text.get(name, None)) is not None:
            ids = tokenizer(value, add_special_tokens=False, **limit)["input_ids"]
            done[name] = torch.tensor(ids, dtype=torch.int64)
    return done


def dense(tokens: Any, filler: int | None) -> dict[str, Tensor]:
    """Return the fields of ragged tokens [B] padded: prompts left, responses right, full around."""
    if tokens.ndim != 1 or filler is None:
        raise ValueError(
            "padding needs a batch [B] and a tokenizer with a pad token, got batch size "
            f"{list(tokens.batch_size)} and pad_token_id {filler}; leave padding alone and read "
            "rows with get(key, as_padded_tensor=True, padding_value=...)"
        )
    prompt, response, full = (rows(tokens, name) for name in ("prompt", "response", "full"))
    done = {}
    if prompt is not None:
        done["prompt"] = pad(prompt, filler, side="left")
    if response is not None:
        done["response"] = pad(response, filler)
    if full is not None:
        cuts = [len(row) for row in prompt or full]  # without a prompt all padding is left
        done["full"] = pad_around(full, cuts, filler)
    return done


def read_chat(text: Any, tokenizer: Any, name: str | None) -> dict[str, History]:
    """Return the histories of one row of texts.

    A generation prompt at the end of the prompt is no message. A response alone is read as what
    follows one.
    """
    read = find_reader(tokenizer, None, name)
    prompt, response, full = (text.get(key, None) for key in ("prompt", "response", "full"))
    exact = isinstance(read, Format)
    done = {}
    if prompt is not None:
        done["prompt"] = _history(read, prompt.removesuffix(read.prompt) if exact else prompt)
    if full is not None:
        done["full"] = _history(read, full)
    if exact and prompt is not None and full is not None and full.startswith(prompt):
        response = full[len(prompt) :]
    if response is not None:
        done["response"] = History.from_chats(read.reply(response) if exact else read(response))
    return done


def _history(read: Callable[[str], Any], text: str) -> History:
    found = read(text)
    return found if isinstance(found, History) else History.from_chats(found)


def _extract_responses_from_full_histories(
    text_full: Sequence[str],
    prompt_histories: History,
    chat_template_name: str | None = None,
    tokenizer: Any = None,
) -> History:
    """Return the messages that follow each prompt in the texts, [B, N].

    No reply is an assistant message without content. Rows with fewer messages than the longest are
    padded with role "<none>". The template is chosen as in `History.from_text`.
    Raises RuntimeError if a text holds fewer messages than its prompt.
    """
    read = find_reader(tokenizer, None, chat_template_name)
    pairs = zip(text_full, prompt_histories.chats(), strict=True)
    found = [_replies(read, text, prompt) for text, prompt in pairs]
    size = max(map(len, found))
    filler = {"role": PADDING_ROLE, "content": "", "is_complete": True}
    return History.from_records([row + [filler] * (size - len(row)) for row in found])


def _replies(read: Any, text: str, prompt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what follows the prompt in a text, as records."""
    if isinstance(read, Format):  # exact, whatever the prompt's contents
        begin = read.write(prompt, add_generation_prompt=True)
        if text.startswith(begin):
            return read.reply(text[len(begin) :])
    found = read(text)
    found = records_of(found if isinstance(found, History) else History.from_chats(found))
    if found[0]["role"] == "system" != prompt[0]["role"]:
        found = found[1:]  # the template's own
    if len(found) < len(prompt):
        raise RuntimeError(
            f"parsing lost messages: expected at least the {len(prompt)} of the prompt, got "
            f"{len(found)} from {text[:80]!r}; name the template that wrote the text"
        )
    silent = {"role": "assistant", "content": "", "is_complete": False}
    return found[len(prompt) :] or [silent]
