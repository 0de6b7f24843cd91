"""Render chats to token ids, and responses to the next prompt, by the model's chat template.

A chat is a list of messages {"role", "content"}. Without control tokens in its contents its ids
equal `tokenizer.apply_chat_template`. Control tokens in contents ("<|im_end|>", ...) are encoded as
ordinary text, so that only the template can open or close a turn; other added tokens in contents
("<think>" where it is not special) stay single tokens.

The assistant mask covers contents and end-of-turn tokens of assistant messages. It comes from the
template's `{% generation %}` tags. Without tags it is what each assistant message adds to the
rendered chat; for the last turn alone this comes first, and tags only if it fails. Headers are
never searched in the rendered text, because a message could contain them. Not supported: documents
and images, because no task has them.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from policies.chats.messages import Message, check_messages
from policies.chats.outlines import CACHE_SIZE, Outlines
from policies.chats.pieces import OUTSIDE, Piece, close_turn, fill, turns_of
from policies.chats.templates import find_template
from policies.chats.text_encoder import Encoder

if TYPE_CHECKING:
    from policies.chats.next_turn import Gap, StandIn

_REWRITTEN = "rewrites contents, and this chat's contents hold the text of control tokens"


@dataclass(frozen=True)
class Rendered:
    """Ids of a chat; `turns[i]` is the number of id i's assistant turn, from 0, or OUTSIDE."""

    ids: list[int]
    turns: list[int]

    @cached_property
    def assistant(self) -> list[bool]:
        """The assistant mask, one bool per id."""
        return [turn != OUTSIDE for turn in self.turns]


class Renderer:
    r"""Render chats with one tokenizer and the template that `find_template` returns.

    `stop_ids` end a turn: the tokenizer's EOS and the token that the template writes after a
    response. Raise ValueError if the template cannot render a plain exchange.

    >>> from policies.models.find import find_model, load_tokenizer
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
        self._gaps: dict[str, Gap] = {}
        # roles -> bytes of the template's text, indices of the messages whose contents it prints
        self._sizes: dict[tuple, tuple[int, list[int]]] = {}
        normalizer = type(tokenizer.backend_tokenizer.normalizer).__name__
        self._growth = {"NoneType": 1, "NFC": 3}.get(normalizer, inf)  # largest factor in bytes

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the rendered chat as text; raise ValueError if the template refuses it."""
        return self._outlines.text(messages, add_generation_prompt)[0]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        require_assistant: bool = False,
        last_turn: bool = False,
    ) -> Rendered:
        """Return ids and assistant mask of a chat; with `last_turn` the mask of its last turn.

        If `require_assistant` (training data), raise ValueError if the mask is all True or all
        False, or if the template changes a masked turn when the chat goes on.
        """
        messages = check_messages(messages)
        text = self._outlines.text(messages, add_generation_prompt, last_turn)[0]
        outline = self._outlines.of(messages, add_generation_prompt, last_turn)
        if require_assistant and outline.fault:
            raise ValueError(f"{self.name} {outline.fault}; {self._remedy}")
        texts = fill(outline.pieces, messages, text)
        if texts is None:
            done, fault = self._encode_rewritten(messages, add_generation_prompt, last_turn)
            if require_assistant and fault:
                raise ValueError(f"{self.name} {fault}; {self._remedy}")
        else:
            done = self._encode(outline.pieces, texts, outline.control)
        if require_assistant and (all(done.assistant) or not any(done.assistant)):
            coverage = "every token" if any(done.assistant) else "no token"
            raise ValueError(
                f"expected some tokens of the assistant, got {coverage} in the assistant mask of "
                f"{self.name} for roles {[m['role'] for m in messages]}; {self._remedy}"
            )
        return done

    def most_tokens(
        self, messages: Sequence[Message], *, prompt: bool, last_turn: bool = False
    ) -> float:
        """Return an upper bound of a chat's tokens from its bytes, without encoding it.

        Returns inf if the tokenizer may lengthen texts.
        """
        if self._growth == inf or any(len(message) > 2 for message in messages):
            return inf
        roles = (prompt, last_turn, *(message["role"] for message in messages))
        if roles not in self._sizes:
            pieces = self._outlines.of(check_messages(messages), prompt, last_turn).pieces
            size = sum(len(p.text.encode()) for p in pieces if p.message is None) + len(pieces)
            self._sizes[roles] = size, [p.message for p in pieces if p.message is not None]
        size, places = self._sizes[roles]
        sizes = [len(messages[i]["content"].encode(errors="replace")) for i in places]
        return size + self._growth * sum(sizes)

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        """Return the ids of the next prompt, which start with `ids` unchanged.

        `ids` are the last prompt and the sampled response, `messages` the same as a chat. A
        response without the template's end of turn is closed first. Raise ValueError if the
        template drops a turn or a new message.
        """
        from policies.chats.next_turn import LostTurn, StandIn  # chats of one turn have none

        messages = check_messages(messages)
        new_messages = check_messages(new_messages) if new_messages else []
        self._outlines.refuse_markup(new_messages)
        try:
            chat = [*messages, *new_messages]
            stand_in = StandIn.of(self._outlines, messages, new_messages)
            gap = self._gap(stand_in)
            start = gap.start_after(ids)
            pieces, texts, text = stand_in.fill(self._outlines, gap, chat, start)
        except LostTurn as error:
            remedy = f"set env.max_turns=1, or {self._outlines.remedy}"
            raise ValueError(f"{self.name} cannot go on: it {error}; {remedy}") from error
        control = self._outlines.control_of(pieces)
        if texts is not None:
            return [*ids, *self._encode(pieces, texts, control).ids]
        new_ids = self._encoder.encode(text)[0]
        if self._encoder.find_control(new_ids) != control:
            raise ValueError(f"{self.name} {_REWRITTEN}; {self._outlines.remedy}")
        return [*ids, *new_ids]

    def _gap(self, stand_in: "StandIn") -> "Gap":
        """Return the gap, shared by chats that differ in contents only."""
        key = f"{stand_in.size}{stand_in.chat}"
        gap = self._gaps.get(key)
        if gap is None:
            gap = stand_in.find_gap(self._outlines)
            if len(self._gaps) >= CACHE_SIZE:
                self._gaps.clear()
            self._gaps[key] = gap
        return gap

    @property
    def remedy_for_tools(self) -> str:
        """The remedy for a template that writes no tools."""
        return self._outlines.remedy_for_tools

    @cached_property
    def rewrites_turns(self) -> bool:
        """Whether the template changes earlier turns when a chat goes on (it drops thoughts)."""
        return self._outlines.rewrites_turns()

    @property
    def _remedy(self) -> str:
        """Return the remedies for a template that does not fit training data."""
        switch = re.search(r"(?<![\w.'\"])(enable_thinking|thinking)(?!\w)", self.template)
        switches = f"set policy.chat_template_kwargs.{switch[1]}, or " if switch else ""
        return f"{switches}{self._outlines.remedy}, or one with {{% generation %}} tags"

    def _encode(self, pieces: Sequence[Piece], texts: list[str], control: list[int]) -> Rendered:
        """Encode pieces filled with `texts`; `control` lists the allowed control tokens.

        If no content contains a control token, the pieces are encoded as one text, like the model's
        training data. Otherwise each piece is encoded separately, contents as plain text.
        """
        text, ends = "".join(texts), list(accumulate(map(len, texts)))
        ids, offsets = self._encoder.encode(text)
        markers = [span for i, span in zip(ids, offsets, strict=True) if i in self._encoder.control]
        starts = [end - len(text[start:end].lstrip()) for start, end in markers]
        placed = all(pieces[bisect_right(ends, at)].message is None for at in starts)
        if placed and self._encoder.find_control(ids) == control:
            parts = zip(pieces, texts, ends, strict=True)
            spans = {(e - len(t), e): p.turn for p, t, e in parts if t and p.turn != OUTSIDE}
            return Rendered(ids, turns_of(offsets, spans, len(text)))
        ids, turns = [], []
        for piece, text in zip(pieces, texts, strict=True):
            from_template = piece.message is None
            part = (
                self._encoder.encode(text)[0]
                if from_template
                else self._encoder.encode_content(text)
            )
            ids += part
            turns += [piece.turn] * len(part)
        return Rendered(ids, turns)

    def _encode_rewritten(
        self, messages: Sequence[Message], prompt: bool, last_turn: bool
    ) -> tuple[Rendered, str]:
        """Encode a chat whose contents the template edits; they must not contain control tokens.

        If its turns cannot be found, return a mask without tokens and the reason.
        """
        text, tags = self._outlines.text(messages, prompt, last_turn)
        ids, offsets = self._encoder.encode(text)
        outline = self._outlines.of(messages, prompt, last_turn)
        if self._encoder.find_control(ids) != outline.control:
            raise ValueError(f"{self.name} {_REWRITTEN}; {self._remedy}")
        spans, fault = self._outlines.find_spans(messages, text, tags, last_turn)
        turns = {close_turn(text, s, self._outlines.ends): i for i, s in enumerate(spans)}
        return Rendered(ids, turns_of(offsets, turns, len(text))), fault
