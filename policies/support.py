"""Which tokens a draw was from, where top-k, top-p or min-p left out others: stored beside it.

Whoever scores the token later, the policy after some steps or the reference, does so over exactly
these tokens, renormalised: the ratio of the weights that sampled is 1, nothing is -inf, and a KL is
that of two distributions over one set. Imported only where a filter is on.

Letters: B rows, T tokens, K tokens of a forward, V vocabulary, S words of a row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import MetaData, TensorClass, TensorDictBase
from torch import Tensor

from policies.padding import pad, rows, unpad, widen

if TYPE_CHECKING:
    from policies.wrappers.inputs import InputReader, Sequences
    from policies.wrappers.outputs import Form

BITS = 32  # of a word


class Support(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold the tokens that each token [B, T] could have been.

    `sizes` [B, T] says how many of the row's `words` [B, S] are a token's, in order: the ids that
    were kept or, with a minus, a bit for each of the vocabulary where that is shorter (V / 8
    bytes); 0: all are kept, nothing is stored. Both int32; words are padded right.

    >>> kept = torch.tensor([[True] * 65 + [False] * 31, [False] * 95 + [True], [True] * 96])
    >>> sizes, words = encode(kept)
    >>> sizes.tolist(), words.tolist()
    ([-3, 1, 0], [-1, -1, 1, 95])
    >>> torch.equal(decode(sizes, words, 96), kept)
    True
    """

    sizes: Tensor | None = None
    words: Tensor | None = None
    padded: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.padded, bool):
            container: Any = self
            container.padded = MetaData(self.padded)  # one bool in a stack of rows too

    @classmethod
    def of_rows(cls, sizes: Tensor, words: list[Tensor]) -> "Support":
        """Return the support of sizes [B, T] and of each row's words."""
        return cls(sizes=sizes, words=pad(words), padded=True, batch_size=[len(sizes)])

    def row_words(self) -> list[Tensor]:
        """Return the words of each row."""
        sizes, words = self._dense()
        filled = sizes.abs().sum(-1, keepdim=True)
        return unpad(words, torch.arange(words.shape[1], device=words.device) < filled)

    def at(self, mask: Tensor) -> "Cut":
        """Return what a distribution over the tokens of a mask [B, T] is cut to."""
        sizes, words = (values.to(mask.device) for values in self._dense())
        first = torch.arange(len(words), device=mask.device)[:, None] * words.shape[1]  # [B, 1]
        lengths = sizes.abs().long()
        starts = lengths.cumsum(-1) - lengths + first  # [B, T]
        return Cut(sizes[mask], starts[mask], words.flatten())

    def cut(self, logits: Tensor) -> Tensor:
        """Return logits [B, T, V] with -inf at the tokens that were left out."""
        every = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        kept = self.at(every).kept(logits.shape[-1]).view(logits.shape)
        return logits.masked_fill(~kept, -torch.inf)

    def _dense(self) -> tuple[Tensor, Tensor]:
        assert self.sizes is not None
        assert self.words is not None
        return self.sizes, self.words


@dataclass(frozen=True)
class Cut:
    """The support of K tokens: where the words of each start, and how many they are."""

    sizes: Tensor  # [K]
    starts: Tensor  # [K]
    words: Tensor  # [B * S]

    def __getitem__(self, at: slice) -> "Cut":
        return Cut(self.sizes[at], self.starts[at], self.words)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits [K, V] without the others; finite, so 0 * log 0 is 0 in an entropy."""
        kept = self.kept(logits.shape[-1])
        return logits.masked_fill(~kept, torch.finfo(logits.dtype).min)

    def kept(self, vocabulary: int) -> Tensor:
        """Return which tokens are kept, [K, V]."""
        lengths = self.sizes.abs().long()
        before = lengths.cumsum(0) - lengths
        place = (self.starts - before).repeat_interleave(lengths)
        index = place + torch.arange(len(place), device=place.device)
        return decode(self.sizes, self.words[index], vocabulary)


def encode(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sizes [n] and the words of all of n tokens; `kept` [n, V] bool."""
    count, width = kept.sum(-1), -(-kept.shape[-1] // BITS)
    whole = count == kept.shape[-1]
    wide = (count > width) & ~whole
    sizes = torch.where(wide, -width, count).masked_fill(whole, 0)
    words = torch.empty(int(sizes.abs().sum()), dtype=torch.int32, device=kept.device)
    bits = wide.repeat_interleave(sizes.abs())
    words[~bits] = kept[~wide & ~whole].nonzero()[:, 1].int()
    table = widen(kept[wide], width * BITS).view(-1, width, BITS)
    words[bits] = (table.long() << _places(kept)).sum(-1).to(torch.int32).flatten()
    return sizes.int(), words


def decode(sizes: Tensor, words: Tensor, vocabulary: int) -> Tensor:
    """Return which tokens are kept [n, V]; ids that this vocabulary lacks are left out."""
    lengths, wide = sizes.abs(), sizes < 0
    kept = (sizes == 0)[:, None].repeat(1, vocabulary)  # [n, V]
    bits = wide.repeat_interleave(lengths)
    row = torch.arange(len(sizes), device=sizes.device).repeat_interleave(lengths)
    known = ~bits & (words < vocabulary)
    kept[row[known], words[known].long()] = True
    if bits.any():
        table = words[bits].view(int(wide.sum()), -1, 1) >> _places(words)
        table = (table & 1).bool().flatten(1)[:, :vocabulary]  # [m, V]
        kept[wide] = widen(table, vocabulary)
    return kept


def _places(like: Tensor) -> Tensor:
    return torch.arange(BITS, device=like.device, dtype=torch.int32)


class Recorder:
    """Take down the support of B replies while they are drawn, of `steps` tokens at most."""

    def __init__(self, streams: Tensor, steps: int) -> None:
        self.sizes = torch.zeros(
            len(streams), steps, dtype=torch.int32, device=streams.device
        )  # [B, n]
        self.words: list[Tensor] = []
        self.owners: list[Tensor] = []

    def add(self, alive: Tensor, step: int, logits: Tensor) -> None:
        """Add a step of the rows `alive` [n]; logits [n, V] are -inf at what was left out."""
        sizes, words = encode(logits > -torch.inf)
        self.sizes[alive, step] = sizes
        self.words.append(words)
        self.owners.append(alive.repeat_interleave(sizes.abs()))

    def support(self, steps: int) -> Support:
        """Return the support of the first `steps` tokens, [B, n]."""
        owner, words = torch.cat(self.owners), torch.cat(self.words)
        counts = owner.bincount(minlength=len(self.sizes)).tolist()
        parts = words[owner.argsort(stable=True)].split(counts)
        return Support.of_rows(self.sizes[:, :steps], list(parts))


def joined(sizes: Tensor, turns: list[tuple[list[int], Support]]) -> Support:
    """Return the support of chats of these sizes [B, T]: each turn is of some rows, in order."""
    parts: list[list[Tensor]] = [[] for _ in sizes]
    for numbers, support in turns:
        for row, words in zip(numbers, support.row_words(), strict=True):
            parts[row].append(words.to(sizes.device))
    return Support.of_rows(sizes, [torch.cat(words) for words in parts])


def placed(support: Support, prompt: int) -> Support:
    """Return the support of replies behind prompts of so many columns, of which it says nothing."""
    sizes, _ = support._dense()
    whole = widen(sizes, prompt + sizes.shape[1], side="left")
    return Support.of_rows(whole, support.row_words())


def written(support: Support, form: "Form", prompts: "Sequences", real: Tensor) -> Any:
    """Return the support of prompts and replies in an output's form; `real` [B, n] are replies."""
    sizes, words = placed(support, prompts.attention.shape[1])._dense()
    attention = torch.cat([prompts.attention, real], -1)  # [B, T]
    filled = torch.arange(words.shape[1], device=words.device) < sizes.abs().sum(-1, keepdim=True)
    return form.store(Support, {"sizes": (sizes, attention), "words": (words, filled)})


def read(td: TensorDictBase, reader: "InputReader", tokens: Tensor, side: str) -> Support | None:
    """Return the support that a td [B] has of tokens [B, T], ragged rows padded on `side`.

    None where it has none, and for ids that were not read from it but rendered anew.
    """
    sizes, words = rows(td, ("support", "sizes")), rows(td, ("support", "words"))
    if sizes is None or words is None or rows(td, reader.ids_key("full")) is None:
        return None
    dense = pad(sizes, side=side)
    if dense.shape != tokens.shape:
        raise ValueError(
            f"expected support.sizes of shape {tuple(tokens.shape)} as the tokens have, got "
            f"{tuple(dense.shape)}; leave `support` out if the tokens are others than those sampled"
        )
    return Support.of_rows(dense.to(tokens.device), [row.to(tokens.device) for row in words])
