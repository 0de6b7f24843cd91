"""Render chats to token ids, and replies to the next prompt, by the model's chat template.

A chat is a list of messages {"role", "content"}. For clean chats the ids are those of
`tokenizer.apply_chat_template`. Control tokens in contents ("<|im_end|>", ...) are encoded as
ordinary text, so that only the template can open or close a turn; other added tokens in contents
("<think>" where it is not special) are encoded as the tokenizer does.

The assistant mask covers contents and end-of-turn tokens of assistant messages. It comes from the
template's `{% generation %}` tags, else from rendering the chat up to each assistant message.

Left out on purpose: tools and documents as template arguments, images, and searching the rendered
text for headers, which a message could fake.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

from policies.chats.rendering import (
    Encoder,
    Message,
    Outline,
    Outlines,
    Piece,
    check_messages,
    close_turn,
    fill,
    mark,
)
from policies.chats.templates import find_template

_REMEDY = "set policy.chat_template=chatml, or to a template with {% generation %} tags"


@dataclass(frozen=True)
class Rendered:
    """The ids of a chat and the assistant mask, one bool per id."""

    ids: list[int]
    assistant: list[bool]


class Renderer:
    r"""Render chats with one tokenizer and one template, that of `find_template`.

    `stop_ids` end a turn: the tokenizer's EOS and the token that the template writes after a
    reply. Raises ValueError if the template cannot render a plain exchange.

    >>> from policies.models import find_model, load_tokenizer
    >>> tokenizer = load_tokenizer(find_model("tiny"))
    >>> renderer = Renderer(tokenizer, "chatml")
    >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    >>> renderer.text(chat[:1], add_generation_prompt=True)
    '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    >>> done = renderer.render(chat, require_assistant=True)
    >>> tokenizer.decode([i for i, a in zip(done.ids, done.assistant) if a])
    'Yo<|im_end|>'
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        template = find_template(tokenizer, chat_template, chat_template_name)
        self.name, self.template = template.label, template.text
        self._outlines = Outlines(template, tokenizer.special_tokens_map, self._encoder)
        self._end = self._outlines.find_end_of_turn()
        self.stop_ids = frozenset({tokenizer.eos_token_id, self._end} - {None})
        self._outlines.ends = [tokenizer.convert_ids_to_tokens(i) for i in self.stop_ids]
        normalizer = type(tokenizer.backend_tokenizer.normalizer).__name__
        self._growth = {"NoneType": 1, "NFC": 3}.get(normalizer, inf)  # bytes per byte, at most

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the rendered chat as text. Raises ValueError if the template refuses it."""
        return self._outlines.text(messages, add_generation_prompt)[0]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        require_assistant: bool = False,
    ) -> Rendered:
        """Return ids and assistant mask of a chat.

        With `require_assistant` (training data) a constant mask, or a template that changes a turn
        when the chat continues, is a ValueError.
        """
        messages = check_messages(messages)
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        outline = self._outlines.of(messages, add_generation_prompt)
        if require_assistant and outline.fault:
            raise ValueError(f"{self.name} {outline.fault}; {_REMEDY}")
        texts = fill(outline.pieces, messages, text)
        if texts is None:
            done = self._encode_rewritten(messages, add_generation_prompt, outline)
        else:
            done = self._encode(outline.pieces, texts, outline.control)
        if require_assistant and (all(done.assistant) or not any(done.assistant)):
            coverage = "every token" if any(done.assistant) else "no token"
            raise ValueError(
                f"expected some tokens of the assistant, got {coverage} in the assistant mask of "
                f"{self.name} for roles {[m['role'] for m in messages]}; {_REMEDY}"
            )
        return done

    def most_tokens(self, messages: Sequence[Message], *, prompt: bool) -> float:
        """Return an upper bound of a chat's tokens from its bytes, without encoding it.

        Returns inf if the tokenizer may lengthen texts.
        """
        if self._growth == inf or any(len(message) > 2 for message in messages):
            return inf
        pieces = self._outlines.of(check_messages(messages), prompt).pieces
        size = sum(len(p.text.encode()) for p in pieces if p.message is None) + len(pieces)
        contents = [p.message for p in pieces if p.message is not None]
        return size + self._growth * sum(len(messages[i]["content"].encode()) for i in contents)

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        """Return the ids of the next prompt, which start with `ids` unchanged.

        `ids` are the last prompt and the sampled reply, `messages` the same as a chat. A reply
        without the template's end of turn is closed first. Raises ValueError if the template would
        change earlier turns.
        """
        messages = check_messages(messages)
        new_messages = check_messages(new_messages) if new_messages else []
        chat, last = [*messages, *new_messages], len(messages) - 1
        outline = self._outlines.of(chat, True)
        where = next((k for k, p in enumerate(outline.pieces) if p.message == last), 0)
        before = "".join(p.text for p in outline.pieces[:where])
        prompt = self._outlines.text(self._outlines.blank(messages[:-1]), True)[0]
        text = self.text(chat, add_generation_prompt=True)
        texts = fill(outline.pieces, chat, text)
        if texts is None or before != prompt:
            raise ValueError(
                f"{self.name} rewrites earlier turns: what it writes for turn {len(messages)} "
                "changes when the chat goes on, so the sampled ids would not match the next "
                "prompt; set policy.chat_template=chatml, or env.max_turns=1"
            )
        pieces, texts = outline.pieces[where + 1 :], texts[where + 1 :]
        if ids and ids[-1] == self._end:  # the reply is closed: skip the template's end
            skip = next((k for k, p in enumerate(pieces) if not p.assistant), 0)
            pieces, texts = pieces[skip:], texts[skip:]
        return [*ids, *self._encode(pieces, texts, self._outlines.control_of(pieces)).ids]

    def _encode(self, pieces: Sequence[Piece], texts: list[str], control: list[int]) -> Rendered:
        """Encode pieces filled with `texts`; `control` lists the allowed control tokens.

        Encodes them as one text, like the model's training data, if every control token starts in
        the template's text; else piece by piece, with control tokens of contents as plain text.
        """
        text, ends = "".join(texts), list(accumulate(map(len, texts)))
        ids, offsets = self._encoder.encode(text)
        markers = [span for i, span in zip(ids, offsets, strict=True) if i in self._encoder.control]
        starts = [end - len(text[start:end].lstrip()) for start, end in markers]
        placed = all(pieces[bisect_right(ends, at)].message is None for at in starts)
        if placed and self._encoder.find_control(ids) == control:
            spans = [
                (e - len(t), e) for p, t, e in zip(pieces, texts, ends, strict=True) if p.assistant
            ]
            return Rendered(ids, mark(offsets, spans, len(text)))
        ids, assistant = [], []
        for piece, text in zip(pieces, texts, strict=True):
            from_template = piece.message is None
            part = self._encoder.encode(text)[0] if from_template else self._encoder.spell(text)
            ids += part
            assistant += [piece.assistant] * len(part)
        return Rendered(ids, assistant)

    def _encode_rewritten(
        self, messages: Sequence[Message], prompt: bool, outline: Outline
    ) -> Rendered:
        """Encode a chat whose contents the template changes; they must not hold control tokens."""
        text, spans = self._outlines.text(messages, prompt)
        ids, offsets = self._encoder.encode(text)
        fault = "" if self._outlines.tagged else outline.fault
        if not self._outlines.tagged and not fault:
            spans, fault = self._outlines.find_turns(messages, text)
        if self._encoder.find_control(ids) != outline.control:
            fault = "rewrites contents, and this chat's contents hold the text of control tokens"
        if fault:
            raise ValueError(f"{self.name} {fault}; {_REMEDY}")
        spans = [close_turn(text, span, self._outlines.ends) for span in spans]
        return Rendered(ids, mark(offsets, spans, len(text)))
