"""The scorer: sequences in, aligned per-token log-probabilities out.

Entry t of everything it returns is about token t given the tokens before it; entries outside `keep`
are 0. This module is what `accelerator.prepare` wraps, so gradients only flow through its forward.
Logits exist at kept tokens only, never for whole sequences.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies import layout
from policies.packing import pack_rows
from policies.padding import predicted

if TYPE_CHECKING:
    from policies.value_head import Critic

SLICE = 2**26  # logits held at a time, over the kept tokens: 256 MB of float32


@dataclass(frozen=True)
class Scores:
    """Per-token results, each [B, T] and 0 outside the kept tokens."""

    log_probs: Tensor
    entropy: Tensor | None = None  # nats, of the tempered distribution
    full_kl: Tensor | None = None  # nats, KL(policy || reference) over the whole vocabulary
    values: Tensor | None = None  # reward, V(tokens < t) of the critic


class Scorer(nn.Module):
    """Score sequences with a causal language model.

    `share_prompts` lets a forward hold the prompt of a group once (see policies/layout.py);
    `autocast` is the dtype of the matrix products, None for that of the weights. A `critic`
    (policies/value_head.py) that is set gives values from the same forward.
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
        self.critic: Critic | None = None
        self.share_prompts = share_prompts and layout.takes_masks(model.config)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor,
        keep: Tensor | None = None,
        *,
        temperature: Tensor | float = 1.0,
        group_id: Tensor | None = None,
        entropy: bool = False,
        learn_entropy: bool = False,
        reference: "Scorer | None" = None,
        pack: bool = False,
    ) -> Scores:
        """Return log p(token t | tokens < t) at temperature-scaled logits.

        tokens [B, T] int64 padded on any side, attention_mask [B, T] bool, keep [B, T] bool
        (default: every attended token), temperature a number or [B], group_id [B] marks rows of
        one prompt. The first attended token has no prediction and reads 0. `entropy` has a gradient
        with `learn_entropy` only. With `reference`, also the exact KL to it. `pack` lays the rows
        out after each other, without padding.
        """
        keep = predicted(attention_mask, keep)
        if not keep.any():
            return self._nothing(tokens, entropy, reference is not None)
        lay = self._lay(tokens, attention_mask, keep, group_id, pack)
        states, heads = [self.hidden(lay)], [self.head()]  # [K, H]
        value = self.critic(lay, states[0]) if self.critic is not None else None  # [K]
        if reference is not None:
            with torch.no_grad():
                if reference.share_prompts != self.share_prompts:
                    lay = reference._lay(tokens, attention_mask, keep, group_id)
                states.append(reference.hidden(lay))
                heads.append(reference.head())
        score = partial(_score, heads, entropy=entropy, learn=learn_entropy)
        target, scale = tokens[keep], _per_kept(temperature, keep)
        slices = list(_slices(len(target), heads[0].width))
        if len(slices) > 1 and torch.is_grad_enabled():
            # One slice's logits at a time in the backward too, for one more product with the head.
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        parts = [score([x[at] for x in states], target[at], scale[at]) for at in slices]
        columns = [torch.cat(c) if c[0] is not None else None for c in zip(*parts, strict=True)]
        return Scores(*(None if c is None else _spread(c, keep) for c in [*columns, value]))

    def values(self, tokens: Tensor, attention: Tensor, keep: Tensor, group_id=None) -> Tensor:
        """Return the values alone, [B, T], as `forward` does: without logits."""
        assert self.critic is not None
        keep = predicted(attention, keep)
        lay = self._lay(tokens, attention, keep, group_id)
        states = self.hidden(lay) if self.critic.body is None else None
        return _spread(self.critic(lay, states), keep)

    def logits(self, tokens: Tensor, attention_mask: Tensor, *, pack: bool = False) -> Tensor:
        """Return aligned logits [B, T, V]: entry t predicts token t; unpredicted entries are 0."""
        keep = predicted(attention_mask)
        lay = self._lay(tokens, attention_mask, keep, None, pack)
        out = self.head()(self.hidden(lay))  # [K, V]
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

    def head(self) -> "Head":
        """Return the function from hidden states to logits, its weights cast once for all calls."""
        out = self.model.get_output_embeddings()
        dtype = self.autocast or out.weight.dtype
        bias = getattr(out, "bias", None)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return Head(out.weight.to(dtype), None if bias is None else bias.to(dtype), cap)

    def precision(self) -> AbstractContextManager:
        """Return the autocast context that sampling and scoring share."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)

    def _lay(self, tokens, attention, keep, group_id, pack: bool = False) -> layout.Layout:
        most = max_positions(self.model)
        if most is not None and tokens.shape[1] > most:  # the width first: it costs no transfer
            longest = int(attention.sum(-1).max())
            if longest > most:
                raise ValueError(
                    f"a row has {longest} tokens, the model's max_position_embeddings is {most}; "
                    "drop the row or lower policy.max_prompt_tokens and policy.max_new_tokens"
                )
        if not pack:
            return layout.choose(tokens, attention, keep, group_id if self.share_prompts else None)
        self.check_packing()
        from policies.packed_layout import packed

        return packed(tokens, attention, keep)

    def check_packing(self) -> None:
        """Raise where packed sequences could not be kept apart."""
        if not layout.takes_masks(self.model.config):
            raise ValueError(
                f"expected a model of {sorted(layout.SHARES_PROMPTS)} without sliding windows to "
                f"score packed sequences, got {type(self.model).__name__}; use pad_model_input=True"
            )

    def _nothing(self, tokens: Tensor, entropy: bool, full: bool) -> Scores:
        """Return zeros that touch every parameter, so that ranks without rows keep in step."""
        anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters() if p.requires_grad)
        zeros = torch.zeros(tokens.shape, device=tokens.device) + anchor
        return Scores(
            zeros,
            zeros.detach() if entropy else None,
            zeros if full else None,
            zeros if self.critic is not None else None,
        )


@dataclass(frozen=True)
class Head:
    """The output embeddings: hidden [k, H] -> logits [k, V] in float32, of float64 in float64."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    cap: float | None  # of the logits, as Gemma 2 has it

    @property
    def width(self) -> int:
        """Return V."""
        return len(self.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def max_positions(model: nn.Module) -> int | None:
    """Return the most tokens a sequence may have, or None where the model does not say."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None)


def _score(heads: list[Head], states: list[Tensor], target, scale, *, entropy=False, learn=False):
    """Return (log-prob, entropy or None, full KL or None), each [k], of target [k]; scale [k, 1].

    `heads` and `states` [k, H] are those of the policy and, for the KL, of the reference.
    """
    mine = (heads[0](states[0]) / scale).log_softmax(-1)  # [k, V]
    log_prob = mine.gather(-1, target[:, None]).squeeze(-1)
    spread, full = None, None
    if learn:
        spread = -(mine.exp() * mine).sum(-1)
    elif entropy:
        with torch.no_grad():
            spread = -mine.exp().mul_(mine).sum(-1)
    if len(heads) > 1:
        with torch.no_grad():
            theirs = (heads[1](states[1]) / scale).log_softmax(-1)
        full = full_kl(mine, theirs)
    return log_prob, spread, full


def full_kl(curr: Tensor, ref: Tensor) -> Tensor:
    """Return the exact KL(curr || ref) over the vocabulary; log-probs [*, V] in and [*] out.

    Tokens ruled out under curr (-inf) contribute nothing, nor do those that only one of the two
    has: rows that pad an embedding.

    >>> round(full_kl(*torch.tensor([[0.0, 0.0], [1.0, 0.0]]).log_softmax(-1)).item(), 4)
    0.1201
    """
    size = min(curr.shape[-1], ref.shape[-1])
    curr, ref = curr[..., :size], ref[..., :size]
    log_ratio = (curr - ref).masked_fill(curr == -torch.inf, 0)
    return (curr.exp() * log_ratio).sum(-1)


def score_in_parts(
    scorer: Callable[..., Scores],
    tokens: Tensor,
    attention: Tensor,
    keep: Tensor | None = None,
    *,
    limit: int | None,
    temperature: Tensor | float = 1.0,
    group_id: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the log-probs [B, T] of forwards of at most `limit` padded tokens; None = one.

    `options` go to the scorer.
    """
    parts = [list(range(len(tokens)))]
    if limit is not None:
        parts = pack_rows(attention, limit, group_id=group_id)
    given = (tokens, attention, keep, group_id, temperature)
    done = []
    for rows in parts:
        index = torch.tensor(rows, device=tokens.device)
        ids, mask, kept, group, scale = (
            x[index] if isinstance(x, Tensor) and x.ndim else x for x in given
        )
        part = scorer(ids, mask, kept, temperature=scale, group_id=group, **options)
        done.append(part.log_probs)
    order = torch.tensor([row for rows in parts for row in rows], device=tokens.device)
    return torch.cat(done)[order.argsort()]


def _slices(size: int, width: int) -> Iterator[slice]:
    """Return slices of `size` tokens whose logits of `width` fit SLICE."""
    step = max(SLICE // width, 1)
    return (slice(i, i + step) for i in range(0, size, step))


def _per_kept(temperature: Tensor | float, keep: Tensor) -> Tensor:
    """Return the temperature of each kept token, [K, 1]."""
    value = torch.as_tensor(temperature, dtype=torch.float32, device=keep.device)
    value = value.reshape(-1, 1).expand(keep.shape[0], keep.shape[1])
    return value[keep].unsqueeze(-1)


def _spread(values: Tensor, keep: Tensor) -> Tensor:
    """Put values [K] at the kept places of a zero [B, T]."""
    return values.new_zeros(keep.shape).masked_scatter(keep, values)
