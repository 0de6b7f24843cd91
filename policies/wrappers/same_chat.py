"""Whether ids are those of the history or text beside them, and what that then tells of them.

Sampled ids are often others than the tokenizer's for the same words, and go on winning. So what
counts is how both read, but for blanks, padding and the tokens that end a turn: templates strip
contents, and a reply may be cut or end in another end token than the template's.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from policies.padding import unpad

if TYPE_CHECKING:
    from policies.wrappers.inputs import InputReader, Sequences


def is_same(reader: "InputReader", seq: "Sequences", fresh: "Sequences", field: str) -> bool:
    """Return whether ids read as those made anew from what stands beside them.

    False for a prompt that the chat has gone on from. Other ids are a ValueError.
    """
    ids, anew = (unpad(x.tokens, x.attention) for x in (seq, fresh))
    if all(map(torch.equal, ids, anew)):
        return True
    ends = [reader.pad_token_id, *reader.stop_ids]
    mine, theirs = ([_words(row, reader.tokenizer, ends) for row in x] for x in (ids, anew))
    if mine == theirs:
        return True
    pairs = list(zip(mine, theirs, strict=True))
    if field == "prompt" and all(said.startswith(words) for words, said in pairs):
        return False
    row = next(i for i, (words, said) in enumerate(pairs) if words != said)
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


def _words(ids: Tensor, tokenizer: Any, ends: list[int]) -> str:
    text = tokenizer.decode(ids).replace("\N{REPLACEMENT CHARACTER}", "")
    blank = {*tokenizer.convert_ids_to_tokens(ends)}
    for token in {*tokenizer.all_special_tokens, *blank}:
        text = text.replace(token, " " if token in blank else f" {token} ")
    return " ".join(text.split())
