"""Convert the containers of a chat into each other: texts, ids and messages.

The containers (policies/chats/containers.py) call these functions and pass the class of the result,
`into`. The result for a batch is a lazy stack of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import lazy_stack
from torch import Tensor

from policies.chats.history import History
from policies.chats.messages import PADDING_ROLE, records_of
from policies.chats.renderer import Renderer
from policies.torchrl.parsing import Format, find_reader

FIELDS = ("prompt", "response", "full")


def text_of_tokens(
    tokens: Any,
    tokenizer: Any,
    *,
    into: type,
    skip_special_tokens: bool = False,
    attention_mask: Tensor | None = None,
) -> Any:
    """Return the decoded tokens; see `Tokens.to_text`."""
    options = {"into": into, "skip_special_tokens": skip_special_tokens}
    if tokens.ndim:
        masks = [None] * len(tokens) if attention_mask is None else attention_mask
        pairs = zip(tokens.unbind(0), masks, strict=True)
        return lazy_stack(
            [text_of_tokens(r, tokenizer, attention_mask=m, **options) for r, m in pairs]
        )
    fields = _fields(tokens)
    if attention_mask is None and tokens.padded and fields:
        raise ValueError("expected attention_mask=masks.all_attention_mask for padded tokens")
    if attention_mask is not None:
        fields = _unpadded(fields, attention_mask.bool())
    texts = {
        name: tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)
        for name, ids in fields.items()
    }
    return into(**texts)


def tokens_of_chats(
    chats: Any, tokenizer: Any, template: str | None, name: str | None, *, into: type
) -> Any:
    """Return the ids of the rendered chats; see `ChatHistory.to_tokens`."""
    renderer = _renderer(tokenizer, template, name)

    def tokens_of(row: Any) -> Any:
        ids = _written(row, lambda messages, **ends: renderer.render(messages, **ends).ids)
        if row.full is not None:
            rendered = renderer.render(row.full.messages())
            pairs = zip(rendered.ids, rendered.assistant, strict=True)
            ids["assistant"] = [i for i, marked in pairs if marked]
        return _tokens(ids, into)

    return _by_row(chats, tokens_of)


def text_of_chats(
    chats: Any, tokenizer: Any, template: str | None, name: str | None, *, into: type
) -> Any:
    """Return the rendered chats as texts; see `ChatHistory.to_text`."""
    renderer = _renderer(tokenizer, template, name)
    return _by_row(chats, lambda row: into(**_written(row, renderer.text)))


def tokens_of_text(text: Any, tokenizer: Any, *, into: type) -> Any:
    """Return the ids of each text; see `Text.to_tokens`."""

    def tokens_of(row: Any) -> Any:
        options = {"add_special_tokens": False}
        ids = {k: tokenizer(v, **options).input_ids for k, v in _fields(row).items()}
        return _tokens(ids, into)

    return _by_row(text, tokens_of)


def chats_of_text(text: Any, tokenizer: Any, name: str | None, *, into: type) -> Any:
    """Return the messages of each text; see `Text.to_history`."""
    read = find_reader(tokenizer, None, name)
    exact = isinstance(read, Format)

    def chat_of(row: Any) -> Any:
        texts, done = _fields(row), {}
        prompt, full = texts.get("prompt"), texts.get("full")
        if exact and prompt is not None:
            if full is not None and full.startswith(prompt):
                texts["response"] = full[len(prompt) :]
            texts["prompt"] = prompt.removesuffix(read.prompt)
        for field, value in texts.items():
            after_prompt = exact and field == "response"
            done[field] = _history(read.read_response(value) if after_prompt else read(value))
        return into(**done)

    return _by_row(text, chat_of)


def _by_row(container: Any, make: Callable[[Any], Any]) -> Any:
    """Apply `make` to each row of a container; return a lazy stack."""
    if container.ndim:
        return lazy_stack([_by_row(row, make) for row in container.unbind(0)])
    fields = _fields(container)
    first = next(iter(fields.values()), None)
    if not isinstance(first, History) or first.ndim < 2:
        return make(container)
    # A ChatHistory without a batch size may contain many chats.
    rows = [{name: history[i] for name, history in fields.items()} for i in range(len(first))]
    return lazy_stack([_by_row(type(container)(**row), make) for row in rows])


def _tokens(ids: dict[str, list[int]], into: type) -> Any:
    tensors = {name: torch.tensor(row, dtype=torch.int64) for name, row in ids.items()}
    return into(**tensors, padded=False)


def _fields(container: Any) -> dict[str, Any]:
    """Return prompt, response and full, without missing ones."""
    fields = {name: container.get(name, None) for name in FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _renderer(tokenizer: Any, template: str | None, name: str | None) -> Renderer:
    return tokenizer if isinstance(tokenizer, Renderer) else Renderer(tokenizer, template, name)


def _written(chat: Any, render: Callable[..., Any]) -> dict[str, Any]:
    """Render the histories of one chat as strings or lists of ids.

    The response is the part of `full` after the prompt. Raise ValueError if `full` does not start
    with the prompt.
    """
    chats = {name: history.messages() for name, history in _fields(chat).items()}
    done = {}
    if "prompt" in chats:
        done["prompt"] = render(chats["prompt"], add_generation_prompt=True)
    if "full" in chats:
        done["full"] = render(chats["full"])
    if "prompt" in chats and "full" in chats:
        done["response"] = _after(done["prompt"], done["full"])
    elif "response" in chats:
        before = chats.get("prompt") or [{"role": "user", "content": "?"}]
        start = render(before, add_generation_prompt=True)
        done["response"] = _after(start, render([*before, *chats["response"]]))
    return done


def _after(prompt: Any, full: Any) -> Any:
    if full[: len(prompt)] != prompt:
        raise ValueError(f"expected full to start with the prompt {prompt!r:.60}, got {full!r:.60}")
    return full[len(prompt) :]


def _unpadded(fields: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return a row's ids without padding, by the mask of `full` or of prompt and response [T]."""
    sizes = {name: len(ids) for name, ids in fields.items()}
    masks = {"full": mask}
    if sizes.get("prompt", 0) + sizes.get("response", 0) == len(mask):
        cut = sizes.get("prompt", 0)
        masks |= {"prompt": mask[:cut], "response": mask[cut:]}
    return {name: ids[masks[name]] for name, ids in fields.items()}


def _history(value: Any) -> History:
    return value if isinstance(value, History) else History.from_chats(value)


def _extract_responses_from_full_histories(
    text_full: Sequence[str],
    prompt_histories: History,
    chat_template_name: str | None = None,
    tokenizer: Any = None,
) -> History:
    """Return the messages that follow each prompt in the texts, [B, N], padded with role "<none>".

    A missing response becomes an assistant message without content. The template is chosen as in
    `History.from_text`. Raise RuntimeError if a text has fewer messages than its prompt.
    """
    read = find_reader(tokenizer, None, chat_template_name)
    pairs = zip(text_full, prompt_histories.chats(), strict=True)
    responses = [_responses(read, text, prompt) for text, prompt in pairs]
    size = max(map(len, responses))
    filler = {"role": PADDING_ROLE, "content": "", "is_complete": True}
    return History.from_records([row + [filler] * (size - len(row)) for row in responses])


def _responses(read: Any, text: str, prompt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages after the prompt in a text, as records."""
    if isinstance(read, Format):  # exact for any contents of the prompt
        begin = read.write(prompt, add_generation_prompt=True)
        if text.startswith(begin):
            return read.read_response(text[len(begin) :])
    records = records_of(_history(read(text)))
    if records[0]["role"] == "system" != prompt[0]["role"]:
        records = records[1:]  # the template's default system message
    if len(records) < len(prompt):
        raise RuntimeError(
            f"expected {len(prompt)} messages or more, got {len(records)}: {text!r:.40}"
        )
    silent = {"role": "assistant", "content": "", "is_complete": False}
    return records[len(prompt) :] or [silent]
