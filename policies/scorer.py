"""The scorer: sequences in, aligned per-token log-probabilities out.

Entry t of everything it returns is about token t given the tokens before it; entries outside `keep`
are 0. This module is what `accelerator.prepare` wraps, so gradients only flow through its forward.
Its forward makes a TokenDistribution of the kept tokens, whose logits never exist all at once.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from policies import layout
from policies.padding import predicted
from policies.token_distribution import Head, Scores, TokenDistribution, placed


class Placement:
    """Every rank holds every weight."""

    gathered = True  # whether the weights are whole now
    device: torch.device | None = None  # of forwards, where it is not that of the weights

    def copy(self, module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
        """Return a copy of a module; it shares the weights in `shared` (by id)."""
        return copy.deepcopy(module, shared or {})

    def gather(self) -> AbstractContextManager[None]:
        """Hold whole weights inside, for forwards that this rank takes on its own."""
        return nullcontext()

    def plain(self, *, fill: bool = True, keep: bool = False) -> AbstractContextManager[None]:
        """Have plain weights inside, on all ranks: to save where `fill`, or load and `keep`."""
        return nullcontext()

    def forwards(self, count: int) -> AbstractContextManager[int]:
        """Return how many forwards are to be taken inside by a rank that needs `count`."""
        return nullcontext(count)

    def scatter(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor that belongs to a weight."""
        return tensor.to(like.device)

    def master(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return {"master": ...} of a weight that is saved rounder than it is trained."""
        return {}


LOCAL = Placement()


def placement_of(part: Any) -> Placement:
    """Return where the weights of a policy are; an engine has its own, all of them."""
    return getattr(getattr(part, "scorer", None), "placement", LOCAL)


class Scorer(nn.Module):
    """Score sequences with a causal language model.

    `share_prompts` lets a forward hold the prompt of a group once (see policies/layout.py);
    `autocast` is the dtype of the matrix products, None for that of the weights.
    """

    placement: Placement = LOCAL

    def __init__(
        self, model: nn.Module, *, share_prompts: bool = True, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast
        self.critic: Critic | None = None  # gives values from the same forward
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
        one prompt. The first attended token reads 0. `entropy` has a gradient with `learn_entropy`
        only. With `reference`, also the exact KL to it. `pack` lays out rows without padding.
        """
        keep = predicted(attention_mask, keep)
        if not keep.any():
            return self._nothing(tokens, entropy, reference is not None)
        lay = self._lay(tokens, attention_mask, keep, group_id, pack)
        mine, theirs = self._dist(lay, keep, temperature), None
        value = self.critic(lay, mine.states) if self.critic is not None else None  # [K]
        if reference is not None:
            with torch.no_grad():
                if reference.share_prompts != self.share_prompts:
                    lay = reference._lay(tokens, attention_mask, keep, group_id)
                theirs = reference._dist(lay, keep, temperature)
        scores = mine.scores(tokens, entropy=entropy, learn=learn_entropy, reference=theirs)
        return scores if value is None else replace(scores, values=placed(value, keep))

    def _dist(self, lay: layout.Layout, keep: Tensor, temperature: Tensor | float):
        return TokenDistribution(self.head(), self.hidden(lay), keep, temperature=temperature)

    def values(self, tokens: Tensor, attention: Tensor, keep: Tensor, *, group_id=None) -> Tensor:
        """Return the values alone, [B, T], as `forward` does: without logits."""
        assert self.critic is not None
        keep = predicted(attention, keep)
        if not keep.any():
            return torch.zeros(keep.shape, device=keep.device)
        lay = self._lay(tokens, attention, keep, group_id)
        states = self.hidden(lay) if self.critic.body is None else None
        return placed(self.critic(lay, states), keep)

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

    def head(self) -> Head:
        """Return the function from hidden states to logits."""
        out = self.model.get_output_embeddings()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return Head(out.weight, getattr(out, "bias", None), cap, self.autocast)

    def precision(self) -> AbstractContextManager:
        """Return the autocast context that sampling and scoring share."""
        device = self.placement.device or next(self.model.parameters()).device
        on = self.autocast is not None
        cached = self.placement.gathered  # else copies outlive their layer
        return torch.autocast(device.type, self.autocast, enabled=on, cache_enabled=cached)

    def _lay(self, tokens, attention, keep, group_id, pack: bool = False) -> layout.Layout:
        most = max_positions(self.model)
        if most is not None and tokens.shape[1] > most:  # the width first: it costs no transfer
            longest = int(attention.sum(-1).max())
            if longest > most:
                raise ValueError(
                    f"a row has {longest} tokens, the model's max_position_embeddings is {most}; "
                    "drop the row or lower policy.max_new_tokens"
                )
        if not pack:
            return layout.choose(tokens, attention, keep, group_id if self.share_prompts else None)
        self.check_packing()
        return layout.packed(tokens, attention, keep)

    def check_packing(self) -> None:
        """Raise where packed sequences could not be kept apart."""
        if not layout.takes_masks(self.model.config):
            kind = getattr(self.model.config, "_attn_implementation", None)
            fault = (
                f"{type(self.model).__name__} with {kind} attention cannot score packed sequences"
            )
            raise ValueError(f"{fault}; use pad_model_input=True or algorithm.packing=false")

    def _nothing(self, tokens: Tensor, entropy: bool, full: bool) -> Scores:
        """Return zeros that touch every parameter, so that ranks without rows keep in step."""
        anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters() if p.requires_grad)
        zeros = torch.zeros(tokens.shape, device=tokens.device) + anchor
        spread, values = zeros.detach() if entropy else None, zeros if self.critic else None
        return Scores(zeros, spread, zeros if full else None, values)


def max_positions(model: nn.Module) -> int | None:
    """Return the most tokens a sequence may have, or None where the model does not say."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None)


def score_in_parts(
    score: Callable[..., Scores | Tensor],
    tokens: Tensor,
    attention: Tensor,
    keep: Tensor | None = None,
    *,
    limit: int | None,
    group_id: Tensor | None = None,
    temperature: Tensor | float | None = None,
    **options: Any,
) -> Tensor:
    """Return the log-probs [B, T] of forwards of at most `limit` padded tokens; None = one.

    `score` is a scorer, or its `values`, which are then returned; `options` go to it.
    """
    parts = [list(range(len(tokens)))]
    if limit is not None:
        parts = layout.pack_rows(attention, limit, group_id=group_id)
    inputs: tuple[Any, ...] = (tokens, attention, keep, group_id, temperature)
    done = []
    placement: Placement = getattr(getattr(score, "__self__", score), "placement", LOCAL)
    with placement.forwards(len(parts)) as count:
        for rows in parts + [[]] * (count - len(parts)):
            index = torch.tensor(rows, dtype=torch.int64, device=tokens.device)
            ids, mask, part_keep, group, scale = (
                x[index] if getattr(x, "ndim", 0) else x for x in inputs
            )
            options |= {} if scale is None else {"temperature": scale}
            part = score(ids, mask, part_keep, group_id=group, **options)
            done.append(part if isinstance(part, Tensor) else part.log_probs)
    order = torch.tensor([row for rows in parts for row in rows], device=tokens.device)
    return torch.cat(done)[order.argsort()]


class Critic(nn.Module):
    """A linear layer on hidden states; it starts at 0.

    kind="head": on those of the policy, in the same forward; `detach` keeps its gradient out of
    them. kind="separate": on those of a copy of the policy's body, which is trained too.
    `lr_scale` multiplies its learning rate; for the first `warmup` iterations it trains alone.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        kind: Literal["head", "separate"] = "head",
        detach: bool = False,
        lr_scale: float = 1.0,
        warmup: int = 0,
    ) -> None:
        super().__init__()
        if kind == "separate" and detach:
            raise ValueError("a separate critic has a body to train: expected detach=False")
        body: Any = scorer.model.base_model
        self.body = None
        if kind == "separate":
            # Weights that LoRA has frozen are not trained here either: no second copy of them.
            frozen = {id(p): p for p in body.parameters() if not p.requires_grad}
            self.body = Scorer(scorer.placement.copy(body, frozen), autocast=scorer.autocast)
        self.detach, self.lr_scale, self.warmup = detach, lr_scale, warmup
        weight = next(body.parameters())
        dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
        width = scorer.model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=weight.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, lay: layout.Layout, states: Tensor | None) -> Tensor:
        """Return the values [K] of the kept tokens; states [K, H] are the policy's."""
        if self.body is not None:
            states = self.body.hidden(lay)
        assert states is not None
        states = states.detach() if self.detach else states
        return self.head(states.to(self.head.weight.dtype)).squeeze(-1).float()


class ValueNetwork(nn.Module):
    """Write "state_value" [B, T], what a policy's critic expects before each token.

    `critic`: arguments of `Critic`, for a policy that has none yet. It reads tokens.full and
    masks.all_attention_mask, and of the tokens those in "loss_mask" (default: every one).

    >>> from tensordict import TensorDict
    >>> from policies.load import load_policy
    >>> td = TensorDict({("tokens", "full"): torch.tensor([[5, 6, 7]])}, [1])
    >>> td["masks", "all_attention_mask"] = torch.ones(1, 3, dtype=torch.bool)
    >>> ValueNetwork(load_policy("tiny"), kind="separate")(td)["state_value"].tolist()
    [[0.0, 0.0, 0.0]]
    """

    def __init__(self, policy: Any, **critic: Any) -> None:
        super().__init__()
        self.scorer: Scorer = policy.scorer
        if self.scorer.critic is None:
            self.scorer.critic = Critic(self.scorer, **critic)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the tensordict with its values."""
        attention = tensordict.get(("masks", "all_attention_mask"))
        keep = tensordict.get("loss_mask", attention)
        ids, group = tensordict.get(("tokens", "full")), tensordict.get("group_id", None)
        value = self.scorer.values(ids, attention, keep, group_id=group)
        return tensordict.set("state_value", value)
