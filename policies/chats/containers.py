"""Containers of one chat: text, tokens with masks and log-probs, history.

Rows of different lengths are lazy stacks of one container per row: read them with
`get(key, as_list=True)`, `get(key, as_padded_tensor=True, padding_side=, padding_value=)` or
`get(key, as_nested_tensor=True, layout=)`; `rows` of policies/padding.py also reads dense data and
stacks of stacks. `padded` is one bool, False for lazy stacks. Fields named full and all masks have
the shape of `tokens.full`. `to_text`, `to_tokens` and `to_history` return lazy stacks of rows. The
ids of a rendered history may differ from the sampled ids: score ids.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import MetaData, TensorClass, lazy_stack
from torch import Tensor

from policies.chats.history import History
from policies.chats.messages import PADDING_ROLE, records_of
from policies.chats.parsing import Format, find_reader
from policies.chats.renderer import Renderer

FIELDS = ("prompt", "response", "full")


def _spec_of(of: Any) -> Any:
    """Return the `default_spec` of a container of Histories, texts (str) or values of a dtype."""

    def default_spec(
        cls: Any, shape: tuple[int, ...] = (-1,), keys: Sequence[str] | None = None
    ) -> Any:
        """Return the spec of a batch of `shape` with `keys`, by default the fields to `padded`."""
        from policies.torchrl.specs import container_spec  # no run needs a spec

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
        """Return the decoded tokens. Padded ones need the mask of `full` (ValueError without)."""
        if self.ndim:
            masks = [None] * len(self) if attention_mask is None else attention_mask
            pairs = zip(self.unbind(0), masks, strict=True)
            return lazy_stack(
                [r.to_text(tokenizer, skip_special_tokens, attention_mask=m) for r, m in pairs]
            )
        fields = _fields(self)
        if attention_mask is None and self.padded and fields:
            raise ValueError("expected attention_mask=masks.all_attention_mask for padded tokens")
        if attention_mask is not None:
            fields = _unpadded(fields, attention_mask.bool())
        options = {"skip_special_tokens": skip_special_tokens}
        return Text(**{k: tokenizer.decode(v.tolist(), **options) for k, v in fields.items()})

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
        is closed. Raises ValueError if full does not start with the prompt.
        """
        renderer = _renderer(tokenizer, chat_template, chat_template_name)

        def tokens_of(row: Any) -> Tokens:
            ids = _written(row, lambda messages, **ends: renderer.render(messages, **ends).ids)
            if row.full is not None:
                rendered = renderer.render(row.full.messages())
                pairs = zip(rendered.ids, rendered.assistant, strict=True)
                ids["assistant"] = [i for i, marked in pairs if marked]
            return _tokens(ids)

        return _by_row(self, tokens_of)

    def to_text(
        self,
        tokenizer: Any,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> "Text":
        """Return the rendered chats as texts; see `to_tokens`."""
        renderer = _renderer(tokenizer, chat_template, chat_template_name)
        return _by_row(self, lambda row: Text(**_written(row, renderer.text)))


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

        def tokens_of(row: Any) -> Tokens:
            options = {"add_special_tokens": False}
            return _tokens({k: tokenizer(v, **options).input_ids for k, v in _fields(row).items()})

        return _by_row(self, tokens_of)

    def to_history(
        self, tokenizer: Any = None, chat_template_name: str | None = None
    ) -> ChatHistory:
        """Return the messages of each text, read as by `History.from_text`.

        A generation prompt at the end of a prompt is no message. The response is the part of
        `full` after the prompt; if either is missing, it is read as if after a generation prompt.
        """
        read = find_reader(tokenizer, None, chat_template_name)
        exact = isinstance(read, Format)

        def chat_of(row: Any) -> ChatHistory:
            texts, done = _fields(row), {}
            prompt, full = texts.get("prompt"), texts.get("full")
            if exact and prompt is not None:
                if full is not None and full.startswith(prompt):
                    texts["response"] = full[len(prompt) :]
                texts["prompt"] = prompt.removesuffix(read.prompt)
            for name, text in texts.items():
                after_prompt = exact and name == "response"
                done[name] = _history(read.read_response(text) if after_prompt else read(text))
            return ChatHistory(**done)

        return _by_row(self, chat_of)


def _by_row(container: Any, make: Callable[[Any], Any]) -> Any:
    """Apply `make` to each row of a container; return a lazy stack."""
    if container.ndim:
        return lazy_stack([_by_row(row, make) for row in container.unbind(0)])
    fields = _fields(container)
    first = next(iter(fields.values()), None)
    if not isinstance(first, History) or first.ndim < 2:
        return make(container)
    # a ChatHistory without a batch size may hold many chats
    rows = [{name: history[i] for name, history in fields.items()} for i in range(len(first))]
    return lazy_stack([_by_row(ChatHistory(**row), make) for row in rows])


def _fields(container: Any) -> dict[str, Any]:
    """Return prompt, response and full, without missing ones."""
    fields = {name: container.get(name, None) for name in FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _tokens(ids: dict[str, list[int]]) -> Tokens:
    tensors = {name: torch.tensor(row, dtype=torch.int64) for name, row in ids.items()}
    return Tokens(**tensors, padded=False)


def _renderer(tokenizer: Any, template: str | None, name: str | None) -> Renderer:
    return tokenizer if isinstance(tokenizer, Renderer) else Renderer(tokenizer, template, name)


def _written(chat: Any, render: Callable[..., Any]) -> dict[str, Any]:
    """Render the histories of one chat as strings or lists of ids.

    The response is the part of `full` after the prompt; ValueError if `full` starts otherwise.
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
    `History.from_text`. Raises RuntimeError if a text holds fewer messages than its prompt.
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
