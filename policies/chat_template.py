"""Chats to token ids and back to the next prompt, through the model's own chat template.

A chat is a list of messages {"role", "content"}. For clean chats the ids are those of
`tokenizer.apply_chat_template`. If contents hold the text of control tokens ("<|im_end|>", ...),
these are spelled out as ordinary tokens: only the template can open or close a turn.

The assistant mask covers contents and end-of-turn tokens of assistant messages. It comes from the
template's `{% generation %}` tags, else from rendering the chat up to each assistant message.

Left out on purpose: tools and documents as template arguments, images, and searching the rendered
text for headers, which a message could fake.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from policies.rendering import (
    Encoder,
    Message,
    Piece,
    Shape,
    Span,
    check_messages,
    close_turn,
    cut,
    fill,
    find_template,
    mark,
)

_MAX_SHAPES = 512
_REMEDY = "set policy.chat_template=chatml, or to a template with {% generation %} tags"


@dataclass(frozen=True)
class Rendered:
    """The ids of a chat and, for each, whether it belongs to the assistant."""

    ids: list[int]
    assistant: list[bool]


class Renderer:
    r"""Render chats with one tokenizer and one template.

    `chat_template` is a Jinja text or "chatml"; None takes the tokenizer's own. `stop_ids` are the
    ids that end a turn: the tokenizer's EOS and what the template writes after a reply.
    Raises ValueError if there is no template or it cannot render a plain exchange.

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

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self.name, self.template = find_template(tokenizer, chat_template)
        self._variables = dict(tokenizer.special_tokens_map)
        self._tagged = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self._dated = "strftime_now" in self.template
        self._nonce = secrets.token_hex(16)
        self._shapes: dict[str, Shape] = {}
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset() if eos is None else frozenset([eos])
        self._end = self._find_end_of_turn()
        self.stop_ids |= frozenset() if self._end is None else frozenset([self._end])
        self._ends = [tokenizer.convert_ids_to_tokens(i) for i in self.stop_ids]

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the chat as the template writes it. Raises ValueError if it refuses the chat."""
        return self._write(messages, add_generation_prompt)[0]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        require_assistant: bool = False,
    ) -> Rendered:
        """Return ids and assistant mask of a chat.

        `require_assistant` is for training data: a mask of all zeros or all ones, or a template
        that writes a turn otherwise once the chat goes on, is a ValueError.
        """
        messages = check_messages(messages)
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        shape = self._shape(messages, add_generation_prompt)
        if require_assistant and shape.fault:
            raise ValueError(f"{self.name} {shape.fault}; {_REMEDY}")
        texts = fill(shape.pieces, _contents(messages), text)
        if texts is None:
            done = self._encode_rewritten(messages, add_generation_prompt, shape)
        else:
            done = self._encode(shape.pieces, texts, shape.control)
        if require_assistant and (all(done.assistant) or not any(done.assistant)):
            found = "every token" if any(done.assistant) else "no token"
            raise ValueError(
                f"expected some tokens of the assistant, got {found} in the assistant mask of "
                f"{self.name} for roles {[m['role'] for m in messages]}; {_REMEDY}"
            )
        return done

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        """Return the ids of the next prompt; `ids` themselves are kept as they are.

        `ids` are the last prompt and the sampled reply; `messages` the same as a chat that ends in
        that reply. A reply that the template's own end of turn does not end (it was cut, or ended
        by another EOS) is closed first. Raises ValueError if the template would write the turns so
        far otherwise.
        """
        messages, new_messages = check_messages(messages), check_messages(new_messages)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            roles = [m["role"] for m in messages]
            raise ValueError(f"expected a prompt and the assistant's reply, got roles {roles}")
        chat, last = [*messages, *new_messages], len(messages) - 1
        shape = self._shape(chat, True)
        where = next((k for k, p in enumerate(shape.pieces) if p.message == last), 0)
        before = "".join(p.text for p in shape.pieces[:where])
        prompt = self._write(self._blank(messages[:-1]), True)[0]
        text = self.text(chat, add_generation_prompt=True)
        texts = fill(shape.pieces, _contents(chat), text)
        if texts is None or before != prompt:
            raise ValueError(
                f"{self.name} rewrites earlier turns: what it writes for turn {len(messages)} "
                "changes when the chat goes on, so the sampled ids would not match the next "
                "prompt; set policy.chat_template=chatml, or env.max_turns=1"
            )
        pieces, texts = shape.pieces[where + 1 :], texts[where + 1 :]
        if ids and ids[-1] == self._end:  # closed by itself: skip the template's own end
            skip = next((k for k, p in enumerate(pieces) if not p.assistant), 0)
            pieces, texts = pieces[skip:], texts[skip:]
        return [*ids, *self._encode(pieces, texts, self._control_of(pieces)).ids]

    # Text: what the template writes, and where the assistant speaks in it.

    def _write(self, messages: Sequence[Message], prompt: bool) -> tuple[str, list[Span]]:
        """Return the rendered text and the spans of its generation tags."""
        chat = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            rendered: Any = render_jinja_template(
                conversations=[chat],
                chat_template=self.template,
                return_assistant_tokens_mask=self._tagged,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"{self.name} refuses a chat with roles {[m['role'] for m in messages]}: {error}; "
                "change the roles (env, policy.system_prompt) or set policy.chat_template=chatml"
            ) from error
        texts, spans = rendered
        return texts[0], spans[0] if self._tagged else []

    def _shape(self, messages: Sequence[Message], prompt: bool) -> Shape:
        """Return the shape of a chat; chats that differ in contents only share one."""
        blank = self._blank(messages)
        key = f"{prompt}{blank}"
        found = None if self._dated else self._shapes.get(key)
        if found is None:
            self._refuse_markup(messages)
            found = self._make_shape(blank, prompt)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = found
        return found

    def _blank(self, messages: Sequence[Message]) -> list[Message]:
        """Return the chat with a placeholder, which nobody can guess, for each content."""
        names = [f"x{self._nonce}x{i}x" for i in range(len(messages))]
        return [m | {"content": name} for m, name in zip(messages, names, strict=True)]

    def _make_shape(self, blank: Sequence[Message], prompt: bool) -> Shape:
        text, spans = self._write(blank, prompt)
        fault = ""
        if not self._tagged:
            spans, fault = self._find_turns(blank, text)
        names = {m["content"]: m["role"] == "assistant" for m in blank}
        places = [(m.span(), names[m[0]]) for m in re.finditer("|".join(names), text)]
        for (a, b), replied in places:
            covered = [(max(a, s), min(b, e)) for s, e in spans if s < b and a < e]
            if covered and (not replied or covered != [(a, b)]):
                fault = "puts other text than the assistant's into its turns"
        if fault:  # the mask by its definition: content and end of turn
            spans = [span for span, replied in places if replied]
        pieces = cut(text, list(names), [close_turn(text, span, self._ends) for span in spans])
        return Shape(pieces, self._control_of(pieces), fault)

    def _find_turns(self, messages: Sequence[Message], text: str) -> tuple[list[Span], str]:
        """Return the spans of assistant turns in `text`, or what forbids to find them.

        A turn is what rendering one more message adds to the generation prompt before it.
        """
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            after = self._write(messages[: i + 1], False)[0].rstrip()
            if i:
                before = self._write(messages[:i], True)[0]
            else:  # templates expect at least one message
                before = after.rpartition(message["content"])[0]
            start, stop = close_turn(after, (len(before), len(after)), self._ends)
            if not after.startswith(before):
                return [], f"writes turn {i + 1} otherwise than its own generation prompt begins it"
            if not text.startswith(after[:stop]):
                return [], f"rewrites earlier turns: turn {i + 1} changes when the chat goes on"
            spans.append((start, stop))
        return spans, ""

    def _find_end_of_turn(self) -> int | None:
        """Return the token that the template writes right after a reply, if it is a control one."""
        blank = self._blank([{"role": "user"}, {"role": "assistant"}])
        tail = self._write(blank, False)[0].rpartition(blank[-1]["content"])[2]
        ids, offsets = self._encoder.encode(tail)
        for token, (start, _) in zip(ids, offsets, strict=True):
            if token in self._encoder.control:
                return token if not tail[:start].strip() else None
        return None

    def _refuse_markup(self, messages: Sequence[Message]) -> None:
        """Raise if a field other than the content, which is not spelled out, has control tokens."""
        for i, message in enumerate(messages):
            other = str({k: v for k, v in message.items() if k != "content"})
            found = self._encoder.find_control(self._encoder.encode(other)[0])
            if found:
                raise ValueError(
                    f"expected no control tokens outside of contents, got "
                    f"{self.tokenizer.convert_ids_to_tokens(found[0])!r} in message {i}: "
                    f"{other[:100]}; remove that markup from the data"
                )

    # Ids.

    def _control_of(self, pieces: Sequence[Piece]) -> list[int]:
        own = [self._encoder.encode(p.text)[0] for p in pieces if p.message is None]
        return self._encoder.find_control([i for ids in own for i in ids])

    def _encode(self, pieces: Sequence[Piece], texts: list[str], control: list[int]) -> Rendered:
        """Encode pieces that were filled with `texts`; `control` is all that may come out.

        As one text if no content adds a control token, which gives the ids that the model was
        trained on; else piece by piece, with contents spelled out.
        """
        ends = list(accumulate(map(len, texts)))
        ids, offsets = self._encoder.encode("".join(texts))
        if self._encoder.find_control(ids) == control:
            size = ends[-1] if ends else 0
            spans = [
                (e - len(t), e) for p, t, e in zip(pieces, texts, ends, strict=True) if p.assistant
            ]
            return Rendered(ids, mark(offsets, spans, size))
        ids, assistant = [], []
        for piece, text in zip(pieces, texts, strict=True):
            own = piece.message is None
            part = self._encoder.encode(text)[0] if own else self._encoder.spell(text)
            ids += part
            assistant += [piece.assistant] * len(part)
        return Rendered(ids, assistant)

    def _encode_rewritten(
        self, messages: Sequence[Message], prompt: bool, shape: Shape
    ) -> Rendered:
        """Encode a chat whose contents the template changes (beyond white space at their ends).

        Safe only while no control token is where the template alone would not put it.
        """
        text, spans = self._write(messages, prompt)
        ids, offsets = self._encoder.encode(text)
        fault = "" if self._tagged else shape.fault
        if not self._tagged and not fault:
            spans, fault = self._find_turns(messages, text)
        if self._encoder.find_control(ids) != shape.control:
            fault = "rewrites contents, and this chat's contents hold the text of control tokens"
        if fault:
            raise ValueError(f"{self.name} {fault}; {_REMEDY}")
        spans = [close_turn(text, span, self._ends) for span in spans]
        return Rendered(ids, mark(offsets, spans, len(text)))


def _contents(messages: Sequence[Message]) -> list[str]:
    return [m["content"] for m in messages]
