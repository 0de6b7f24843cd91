"""Chats as TensorDict data: a `History` holds messages along its last batch dimension.

Shapes: [] one message, [T] a chat, [B, T] a batch of chats (a lazy stack if their lengths differ).
A message of role "<none>" is padding: it is never rendered, counted or parsed. Images are not
supported, because models are trained on text only.
"""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorClass, lazy_stack

from policies.chats.messages import checked, columns, records_of, visible
from policies.chats.renderer import Renderer


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

        Raise ValueError if it is empty or a message is malformed.
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
        is read as turns. Raise ValueError if a text does not fit the template.

        >>> history = History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nY")
        >>> history.messages()[1], list(history.is_complete)
        ({'role': 'assistant', 'content': 'Y'}, [True, False])
        """
        from policies.torchrl.parsing import find_reader  # no run reads texts

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
    def default_spec(cls, shape: tuple[int, ...] = (-1,)) -> Any:
        """Return the spec of a history of `shape`, the messages along the last dimension."""
        from policies.torchrl.specs import history_spec  # no run needs a spec

        return history_spec(cls, shape)

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

        Raise RuntimeError unless `history` has one dimension less. Changes and returns this
        history unless `inplace=False`.
        """
        from policies.torchrl.histories import grow  # a run builds whole chats

        return grow(self, history, dim, one=True, inplace=inplace)

    def extend(self, history: "History", *, inplace: bool = True, dim: int = 0) -> "History":
        """Add the entries of `history` along `dim`: of shape [B, T], 0 adds chats, 1 messages.

        Raise RuntimeError unless `history` has as many dimensions. Changes and returns this
        history unless `inplace=False`.
        """
        from policies.torchrl.histories import grow

        return grow(self, history, dim, one=False, inplace=inplace)

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
        `chat_template_name` ("chatml_format", "qwen", ...), the name before the tokenizer's own.
        Returns text by default: str for [T], a list for [B, T]; with `tokenize=True` lists of ids.
        With `return_tensors="pt"`, `return_dict`, the assistant mask or `padding` (on the
        tokenizer's side): a TensorDict of input_ids, attention_mask and assistant_masks (the
        end-of-turn token included), lazily stacked, or dense with `padding`.
        Raise ValueError if the template refuses the chat, or if a chat with responses gets an
        assistant mask that is all True or all False.
        """
        from policies.torchrl.histories import render_history  # a run renders messages

        if not isinstance(tokenizer, Renderer):
            tokenizer = Renderer(tokenizer, chat_template, chat_template_name)
        return render_history(
            self,
            tokenizer,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            padding=padding,
            return_tensors=return_tensors,
            return_dict=return_dict,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
        )


def _build(records: Sequence[dict[str, Any]]) -> History:
    """Return a [T] history of records."""
    return History.from_tensordict(columns(records))
