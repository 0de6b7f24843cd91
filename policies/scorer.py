"""The scorer: sequences in, aligned per-token log-probabilities out.

Entry t of everything it returns is about token t given the tokens before it; entries outside `keep`
are 0. This module is what `accelerator.prepare` wraps, so gradients only flow through its forward.
Logits exist at kept tokens only, never for whole sequences.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies import layout
from policies.padding import positions

CHUNK = 1024  # kept tokens per slice of the head: 200 MB of float32 logits at V = 49,152


@dataclass(frozen=True)
class Scores:
    """Per-token results, each [B, T] and 0 outside the kept tokens."""

    log_probs: Tensor
    entropy: Tensor | None = None  # nats, of the tempered distribution
    full_kl: Tensor | None = None  # nats, KL(policy || reference) over the whole vocabulary


class Scorer(nn.Module):
    """Score sequences with a causal language model.

    `share_prompts` lets a forward hold the prompt of a group once (see policies/layout.py);
    `autocast` is the dtype of the matrix products, None for that of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        share_prompts: bool = True,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        family = getattr(model.config, "model_type", None)
        self.share_prompts = share_prompts and family in layout.SHARES_PROMPTS

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor,
        keep: Tensor | None = None,
        *,
        temperature: Tensor | float = 1.0,
        group_id: Tensor | None = None,
        entropy: bool = False,
        reference: "Scorer | None" = None,
    ) -> Scores:
        """Return log p(token t | tokens < t) at temperature-scaled logits.

        tokens [B, T] int64 padded on any side, attention_mask [B, T] bool, keep [B, T] bool
        (default: every attended token), temperature a number or [B], group_id [B] marks rows of
        one prompt. The first attended token has no prediction and reads 0. With `reference`, also
        the exact KL to it.
        """
        keep = attention_mask if keep is None else keep & attention_mask
        keep = keep & (positions(attention_mask) > 0)
        if not keep.any():
            return self._nothing(tokens, entropy, reference is not None)
        lay = self._lay(tokens, attention_mask, keep, group_id)
        scale = _per_kept(temperature, keep)
        hidden = self.hidden(lay)  # [K, H]
        other = reference.reference_hidden(lay) if reference is not None else None
        parts = []
        for at in _slices(len(hidden)):
            logits = self.head(hidden[at]) / scale[at]  # [k, V] float32
            against = reference.reference_head(other[at]) / scale[at] if reference else None
            parts.append(_score(logits, lay.target[at], entropy=entropy, against=against))
        columns = [torch.cat(c) if c[0] is not None else None for c in zip(*parts, strict=True)]
        return Scores(*(None if c is None else _spread(c, keep) for c in columns))

    def logits(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Return aligned logits [B, T, V]: entry t predicts token t; unpredicted entries are 0."""
        keep = attention_mask & (positions(attention_mask) > 0)
        out = self.hidden(layout.plain(tokens, attention_mask, keep))
        out = self.head(out)  # [K, V]
        index = keep.unsqueeze(-1).expand(*keep.shape, out.shape[-1])
        full = out.new_zeros(index.shape)
        return full.masked_scatter(index, out)

    def hidden(self, lay: layout.Layout) -> Tensor:
        """Return the states that predict the kept tokens, [K, H]."""
        with self.precision():
            out = self.model.base_model(
                input_ids=lay.input_ids,
                attention_mask=lay.attention_mask,
                position_ids=lay.position_ids,
                use_cache=False,
            ).last_hidden_state  # [R, L, H]
        return out.flatten(0, 1)[lay.source]

    def head(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [K, V] of hidden states [K, H]."""
        with self.precision():
            logits = self.model.get_output_embeddings()(hidden).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def precision(self) -> AbstractContextManager:
        """Return the autocast context that sampling and scoring share."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)

    @torch.no_grad()
    def reference_hidden(self, lay: layout.Layout) -> Tensor:
        """`hidden` without a gradient."""
        return self.hidden(lay)

    @torch.no_grad()
    def reference_head(self, hidden: Tensor) -> Tensor:
        """`head` without a gradient."""
        return self.head(hidden)

    def _lay(self, tokens, attention, keep, group_id) -> layout.Layout:
        return layout.choose(tokens, attention, keep, group_id if self.share_prompts else None)

    def _nothing(self, tokens: Tensor, entropy: bool, full: bool) -> Scores:
        """Return zeros that touch every parameter, so that ranks without rows keep in step."""
        anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters() if p.requires_grad)
        zeros = torch.zeros(tokens.shape, device=tokens.device) + anchor
        return Scores(zeros, zeros.detach() if entropy else None, zeros if full else None)


def _score(logits: Tensor, target: Tensor, *, entropy: bool, against: Tensor | None):
    """Return (log-prob, entropy, full KL) of each row of logits [k, V]."""
    log_prob = -F.cross_entropy(logits, target, reduction="none")  # [k]
    spread, full = None, None
    if entropy:
        with torch.no_grad():
            all_log_probs = logits.log_softmax(-1)
            spread = -(all_log_probs.exp() * all_log_probs).sum(-1)
    if against is not None:
        full = full_kl(logits, against)
    return log_prob, spread, full


def full_kl(curr_logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return the exact KL(curr || ref) over the vocabulary, [*, V] logits in and [*] out.

    Logits of -inf (tokens ruled out under curr) contribute nothing.

    >>> round(full_kl(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.1201
    """
    mine, theirs = curr_logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_ratio = (mine - theirs).masked_fill(mine == -torch.inf, 0)
    return (mine.exp() * log_ratio).sum(-1)


def _slices(size: int) -> Iterator[slice]:
    return (slice(i, i + CHUNK) for i in range(0, size, CHUNK))


def _per_kept(temperature: Tensor | float, keep: Tensor) -> Tensor:
    """Return the temperature of each kept token, [K, 1]."""
    value = torch.as_tensor(temperature, dtype=torch.float32, device=keep.device)
    value = value.reshape(-1, 1).expand(keep.shape[0], keep.shape[1])
    return value[keep].unsqueeze(-1)


def _spread(values: Tensor, keep: Tensor) -> Tensor:
    """Put values [K] at the kept places of a zero [B, T]."""
    return values.new_zeros(keep.shape).masked_scatter(keep, values)
