"""Whether ids say what the history or text beside them says, where they are not its very ids.

Sampled ids are often others than the tokenizer's for the same words, and go on winning. So what
counts is how both read, but for blanks, padding and the tokens that end a turn: templates strip
contents, and a reply may be cut or end in another end token than the template's.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from policies.wrappers.inputs import InputReader


def same_words(ids: list[Tensor], fresh: list[Tensor], reader: "InputReader", field: str) -> bool:
    """Return whether rows of ids read as those made anew from what stands beside them.

    False for a prompt that the chat has gone on from. Other ids are a ValueError.
    """
    ends = [reader.pad_token_id, *reader.stop_ids]
    mine, theirs = ([_words(row, reader.tokenizer, ends) for row in x] for x in (ids, fresh))
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


def _words(ids: Tensor, tokenizer: Any, ends: list[int]) -> str:
    text = tokenizer.decode(ids).replace("\N{REPLACEMENT CHARACTER}", "")
    blank = {*tokenizer.convert_ids_to_tokens(ends)}
    for token in {*tokenizer.all_special_tokens, *blank}:
        text = text.replace(token, " " if token in blank else f" {token} ")
    return " ".join(text.split())
