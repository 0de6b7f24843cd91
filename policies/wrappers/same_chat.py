"""Whether ids are those of the history or text beside them, and what that then tells of them.

Sampled ids are often others than the tokenizer's for the same words, and go on winning. So what is
compared are words: the contents of a chat to the letter (but for blanks around them, which
templates strip), what a template writes around them but for blanks and special tokens, for a reply
may be cut or end in another end token than the template's. A content that the template leaves out
(earlier thoughts) tells nothing.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from policies.chats.messages import visible
from policies.padding import unpad

if TYPE_CHECKING:
    from policies.wrappers.inputs import InputReader, Records, Sequences


def is_same(
    reader: "InputReader",
    seq: "Sequences",
    fresh: "Sequences",
    field: str,
    records: "Records | None",
) -> bool:
    """Return whether ids read as those made anew from what stands beside them.

    `records` are the messages of each chat, None for texts. False for a prompt that the chat has
    gone on from. Other ids are a ValueError.
    """
    ids, anew = (unpad(x.tokens, x.attention) for x in (seq, fresh))
    if all(map(torch.equal, ids, anew)):
        return True
    chats = [[]] * len(ids) if records is None else [visible(chat) for chat in records]
    tokens = _special(reader)
    said = [[_words(reader.tokenizer.decode(row), tokens) for row in x] for x in (ids, anew)]
    texts = [[_words(t, tokens).strip() for m in c if isinstance(t := m.get("content"), str)]
             for c in chats]  # fmt: skip
    found = [_compared(*row) for row in zip(*said, texts, strict=True)]
    if all(word == "same" for word in found):
        return True
    if field == "prompt" and "other" not in found:
        return False
    row = next(i for i, word in enumerate(found) if word != "same")
    raise ValueError(
        f"expected the ids of {reader.key} at {reader.ids_key(field)}, row {row} has other ones: "
        "was one of the two changed? Take the ids out of the input to have it tokenised anew (or "
        "say prefer_tokens=False), or go by the ids alone: prefer_tokens='always'"
    )


def recognised(reader: "InputReader", seq: "Sequences", fresh: "Sequences") -> "Sequences":
    """Return ids with the assistant mask of the history beside them, if they are its very ids.

    Padding that no attention mask tells is recognised by it too.
    """
    if seq.assistant is not None or fresh.assistant is None:
        return seq
    sizes, masks = fresh.attention.sum(-1), [seq.attention]
    if seq.attention.all() and fresh.tokens.shape == seq.tokens.shape:
        # No mask: its padding may count as real, on either side.
        masks += [fresh.attention, fresh.attention.flip(-1)]
    want, assistant = fresh.tokens[fresh.attention], fresh.assistant[fresh.attention]
    for mask in masks:
        same = torch.equal(mask.sum(-1), sizes) and torch.equal(seq.tokens[mask], want)
        if same and (mask is seq.attention or (seq.tokens[~mask] == reader.pad_token_id).all()):
            marks = torch.zeros_like(mask).masked_scatter(mask, assistant)
            return replace(seq, attention=mask, assistant=marks)
    return seq


def _compared(mine: str, theirs: str, texts: list[str]) -> str:
    """Return same, longer (what stands beside the ids goes on after them) or other.

    `mine` is what the ids say, `theirs` what those made anew do, `texts` are the chat's contents.
    """
    contents = [text for text in texts if text]
    around, shown = _split(theirs, contents)
    if not shown:
        mine, theirs = mine.rstrip(), theirs.rstrip()
        return "same" if mine == theirs else "longer" if theirs.startswith(mine) else "other"
    own, held = _split(mine, contents)
    whole = held == contents
    if not whole:  # what the template leaves out, the ids may lack too
        own, held = _split(mine, shown)
    size = len(held)
    end = min(size, len(shown))
    if not held or held != (contents if whole else shown)[:size]:
        return "other"
    own, around = ([re.sub(r"\s+", "", piece) for piece in part] for part in (own, around))
    alike = own[:size] == around[:size] or shown != contents
    if not alike or not around[end].startswith(own[size]):
        return "other"
    return "same" if whole or size == len(shown) else "longer"


def _split(text: str, contents: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before, between and after the contents found in turn, and those."""
    pieces, found = [], []
    for content in contents:
        before, held, after = text.partition(content)
        if held:
            pieces.append(before)
            found.append(content)
            text = after
    return [*pieces, text], found


def _special(reader: "InputReader") -> list[str]:
    """Return the texts of special tokens and of those that end a turn, and of half a character."""
    tokenizer = reader.tokenizer
    ends = tokenizer.convert_ids_to_tokens([reader.pad_token_id, *reader.stop_ids])
    known = {*tokenizer.all_special_tokens, *({*ends} & {*tokenizer.get_added_vocab()})}
    return ["\N{REPLACEMENT CHARACTER}", *sorted(known, key=len, reverse=True)]


def _words(text: str, tokens: list[str]) -> str:
    """Return a text without these tokens."""
    for token in tokens:
        text = text.replace(token, "")
    return text
