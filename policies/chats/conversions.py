"""The other views of a container: messages as text or ids, ids as text, text as messages or ids.

Batches are done row by row (`_by_row`) and come out as lazy stacks of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import lazy_stack
from torch import Tensor

from policies.chats.chat_template import Renderer
from policies.chats.containers import ChatHistory, Text, Tokens
from policies.chats.history import History
from policies.chats.messages import PADDING_ROLE, records_of
from policies.chats.parsing import Format, find_reader
from policies.padding import pad, rows

FIELDS = ("prompt", "response", "full")
Written = dict[str, Any]  # by these fields


def _by_row(container: Any, make: Callable[[Any], Any]) -> Any:
    """Return what `make` makes of each row of a container, as a lazy stack."""
    if container.ndim == 0:
        return make(container)
    return lazy_stack([_by_row(row, make) for row in container.unbind(0)])


def chat_to_text(chat: Any, tokenizer: Any, template: str | None, name: str | None) -> Text:
    """Return rendered chats as texts; see `ChatHistory.to_text`."""
    renderer = _renderer(tokenizer, template, name)
    return _by_chat(chat, lambda row: Text(**_written(row, renderer.text)))


def chat_to_tokens(chat: Any, tokenizer: Any, template: str | None, name: str | None) -> Tokens:
    """Return the ids of rendered chats, those inside the assistant mask of `full` too."""
    renderer = _renderer(tokenizer, template, name)

    def tokens_of(row: Any) -> Tokens:
        done = _written(row, lambda messages, **ends: renderer.render(messages, **ends).ids)
        if row.full is not None:
            whole = renderer.render(row.full.messages())
            pairs = zip(whole.ids, whole.assistant, strict=True)
            done["assistant"] = [i for i, said in pairs if said]
        found = {name: torch.tensor(ids, dtype=torch.int64) for name, ids in done.items()}
        return Tokens(**found, padded=False)

    return _by_chat(chat, tokens_of)


def _renderer(tokenizer: Any, template: str | None, name: str | None) -> Renderer:
    return tokenizer if isinstance(tokenizer, Renderer) else Renderer(tokenizer, template, name)


def _by_chat(chat: Any, make: Callable[[Any], Any]) -> Any:
    """Return what `make` makes of each chat; one made without a batch size may hold many."""
    if chat.ndim:
        return lazy_stack([_by_chat(row, make) for row in chat.unbind(0)])
    histories = [chat.get(name, None) for name in FIELDS]
    known = next((history for history in histories if history is not None), None)
    if known is None or known.ndim < 2:
        return make(chat)
    each = [[None] * len(known) if h is None else h.unbind(0) for h in histories]
    return lazy_stack([_by_chat(ChatHistory(*row), make) for row in zip(*each, strict=True)])


def _written(chat: Any, say: Callable[..., Any]) -> Written:
    """Return what `say` makes of the histories of one chat, strings or lists of ids.

    The response is what follows the prompt in both together; ValueError if it does not.
    """
    found = [chat.get(name, None) for name in FIELDS]
    prompt, response, full = [None if h is None else h.messages() for h in found]
    done: Written = {}
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


def tokens_to_text(tokens: Any, tokenizer: Any, masks: Any, *, skip: bool) -> Text:
    """Return decoded tokens; see `Tokens.to_text`.

    The mask of a row tells the tokens of `full` from padding, and those of prompt and response
    where these stand side by side in it.
    """
    if tokens.ndim:
        masks = [None] * len(tokens) if masks is None else masks
        pairs = zip(tokens.unbind(0), masks, strict=True)
        return lazy_stack([tokens_to_text(row, tokenizer, mask, skip=skip) for row, mask in pairs])
    found = {name: tokens.get(name, None) for name in FIELDS}
    found = {name: ids for name, ids in found.items() if ids is not None}
    if masks is None and tokens.padded and found:
        raise ValueError(
            "expected attention_mask=masks.all_attention_mask for padded tokens: padding "
            "cannot be told from the ids, where pad and end token may be the same"
        )
    if masks is not None:
        found = {name: ids[_columns(found, name, masks).bool()] for name, ids in found.items()}
    return Text(
        **{k: tokenizer.decode(v.tolist(), skip_special_tokens=skip) for k, v in found.items()}
    )


def _columns(found: dict[str, Tensor], name: str, mask: Tensor) -> Tensor:
    """Return the part of the mask that belongs to a field."""
    sizes = {key: len(ids) for key, ids in found.items()}
    if sizes[name] == len(mask) and (name == "full" or "full" not in sizes):
        return mask
    if sizes.get("prompt", 0) + sizes.get("response", 0) != len(mask):
        raise ValueError(
            f"expected an attention mask of the width of full, or of prompt and response together, "
            f"got {len(mask)} for {sizes}"
        )
    return mask[: sizes[name]] if name == "prompt" else mask[-sizes[name] :]


def text_to_tokens(text: Any, tokenizer: Any, limit: dict[str, Any], *, padding: bool) -> Tokens:
    """Return the ids of each text as it stands: no special tokens are added."""

    def encoded(row: Any) -> Tokens:
        texts = {name: row.get(name, None) for name in FIELDS}
        found = {
            name: tokenizer(value, add_special_tokens=False, **limit)["input_ids"]
            for name, value in texts.items()
            if value is not None
        }
        return Tokens(
            **{name: torch.tensor(ids, dtype=torch.int64) for name, ids in found.items()},
            padded=False,
        )

    ragged = _by_row(text, encoded)
    return _dense(ragged, tokenizer.pad_token_id) if padding else ragged


def _dense(tokens: Any, filler: int | None) -> Tokens:
    """Return ragged tokens [B] padded: prompts left, responses right, full around both."""
    if tokens.ndim != 1 or filler is None:
        raise ValueError(
            "padding needs a batch [B] and a tokenizer with a pad token, got batch size "
            f"{list(tokens.batch_size)} and pad_token_id {filler}; leave padding alone and read "
            "rows with get(key, as_padded_tensor=True, padding_value=...)"
        )
    prompt, response, full = (rows(tokens, name) for name in FIELDS)
    done: dict[str, Tensor] = {}
    if prompt is not None:
        done["prompt"] = pad(prompt, filler, side="left")
    if response is not None:
        done["response"] = pad(response, filler)
    if full is not None:
        cuts = [len(row) for row in prompt or full]  # without a prompt all padding is left
        heads = [row[:cut] for row, cut in zip(full, cuts, strict=True)]
        tails = [row[cut:] for row, cut in zip(full, cuts, strict=True)]
        done["full"] = torch.cat([pad(heads, filler, side="left"), pad(tails, filler)], -1)
    return Tokens(**done, padded=True, batch_size=tokens.batch_size)


def text_to_history(text: Any, tokenizer: Any, name: str | None) -> ChatHistory:
    """Return the histories of texts; see `Text.to_history`."""
    read = find_reader(tokenizer, None, name)
    exact = isinstance(read, Format)

    def chat_of(row: Any) -> ChatHistory:
        prompt, response, full = (row.get(key, None) for key in FIELDS)
        done = {}
        if prompt is not None:
            said = prompt.removesuffix(read.prompt) if exact else prompt
            done["prompt"] = _history(read(said))
        if full is not None:
            done["full"] = _history(read(full))
        if exact and prompt is not None and full is not None and full.startswith(prompt):
            response = full[len(prompt) :]
        if response is not None:
            done["response"] = _history(read.reply(response) if exact else read(response))
        return ChatHistory(**done)

    return _by_row(text, chat_of)


def _history(found: Any) -> History:
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
    found = records_of(_history(read(text)))
    if found[0]["role"] == "system" != prompt[0]["role"]:
        found = found[1:]  # the template's own
    if len(found) < len(prompt):
        raise RuntimeError(
            f"parsing lost messages: expected at least the {len(prompt)} of the prompt, got "
            f"{len(found)} from {text[:80]!r}; name the template that wrote the text"
        )
    silent = {"role": "assistant", "content": "", "is_complete": False}
    return found[len(prompt) :] or [silent]
