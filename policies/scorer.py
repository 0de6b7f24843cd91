"""The scorer: sequences in, aligned per-token log-probabilities out.

Entry t of each result belongs to token t, given the tokens before it; entries outside `keep` are 0.
A forward with gradients must be the scorer's `forward`, because DDP and FSDP2 act only in the
forward of the module that `accelerator.prepare` wrapped.
It uses a TokenDistribution of the kept tokens, which never holds logits [B, T, V].

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden, E experts.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from policies import layout as layouts
from policies.host import OnHost, bare, kept, placed, send
from policies.models.fast.attention import NAME as ATTENTION
from policies.padding import predicted
from policies.token_distribution import Head, Scores, TokenDistribution


class Placement:
    """Placement of weights over ranks; this base class: every rank holds every weight."""

    gathered = True  # whether this rank holds full weights now
    device: torch.device | None = None  # device of forwards; None: the device of the weights
    half: torch.dtype | None = None  # dtype of weights that this rank holds in float32

    def copy(self, module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
        """Return a copy of a module, which shares the weights in `shared` (id -> weight)."""
        return copy.deepcopy(module, shared or {})

    def gather(self) -> AbstractContextManager[None]:
        """Hold full weights inside the block, so that each rank may run its own forwards."""
        return nullcontext()

    def full_tensors(self, *, fill: bool = True) -> AbstractContextManager[None]:
        """Hold full tensors inside the block, with values if `fill`; changes are lost."""
        return nullcontext()

    def forwards(self, count: int) -> AbstractContextManager[int]:
        """Return the number of forwards to run inside the block, for a rank that needs `count`."""
        return nullcontext(count)

    def master(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return {"master": weight} if a checkpoint stores the weight in a lower precision."""
        return {}


LOCAL = Placement()

# Config names of the logits' soft cap and factors; a model with other ones is refused at load.
CAPS = ("final_logit_softcapping", "logits_soft_cap")
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon-H1
DIVISORS = ("logits_scaling",)  # Granite
CHOSEN = ("num_experts_per_tok", "top_k_experts")  # experts per token; the second is Gemma 4's
# Name of `max_positions` in a config. With longrope a longer row would change the rotary embeddings
# of all rows in the forward, which depend on the longest row.
POSITIONS = "max_position_embeddings, with longrope original_max_position_embeddings"


class Scorer(nn.Module):
    """Score sequences with a causal language model.

    With `share_prompts` a forward computes the prompt of a group once (see policies/layout.py).
    `autocast`: dtype of matrix multiplications; None: the dtype of the weights.
    """

    placement: Placement = LOCAL

    def __init__(
        self, model: nn.Module, *, share_prompts: bool = True, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast
        self.critic: Any = None  # a policies.critic.Critic, for values in the same forward
        self.temperature_factor = 1.0  # also divides the logits, for a teacher
        self.compiled = False  # whether torch.compile fuses the slices of the head
        self.share_prompts = share_prompts and layouts.takes_masks(model.config)

    def train(self, mode: bool = True) -> "Scorer":
        """Keep the model in eval mode, so that updates have no router noise, like sampling.

        Exception: layers with gradient checkpointing, which checkpoint only in training mode.
        """
        super().train(False)
        for module in self.modules():
            module.training = mode and bool(getattr(module, "gradient_checkpointing", False))
        self.training = mode
        return self

    @property
    def device(self) -> torch.device:
        """Return the device of forwards: the device of the weights unless they are sharded."""
        return self.placement.device or next(self.model.parameters()).device

    def forward(
        self,
        tokens: Tensor | OnHost,
        attention_mask: Tensor | OnHost,
        keep: Tensor | OnHost | None = None,
        *,
        temperature: Tensor | OnHost | float = 1.0,
        group_id: Tensor | OnHost | None = None,
        entropy: bool = False,
        learn_entropy: bool = False,
        reference: "Scorer | None" = None,
        ref_states: Tensor | None = None,
        mixture: float = 1.0,
        pack: bool = False,
        balance: bool = False,
    ) -> Scores:
        """Return log p(token t | tokens < t) at temperature-scaled logits.

        tokens [B, T] int64 padded on any side, attention_mask [B, T] bool, keep [B, T] bool
        (default: every attended token), temperature a number or [B], group_id [B] equal for rows
        of one prompt. The first attended token has 0. `entropy` has a gradient only with
        `learn_entropy`. `reference`: add the exact KL to this scorer, which runs here unless
        `ref_states` are given, its `states`. `mixture` selects another divergence
        (`TokenDistribution.scores`). Inputs on the CPU (as `OnHost` through DDP and FSDP2) spare
        the layout a GPU synchronisation. `pack`: concatenate rows to avoid padding. `balance`: add
        the load-balancing loss of experts; raise ValueError if the model has no routers.
        """
        tokens, attention_mask = bare(tokens), bare(attention_mask)
        temperature, group_id = bare(temperature), bare(group_id)
        keep = predicted(attention_mask, bare(keep))
        if not keep.any():
            return self._zeros(tokens, entropy, reference is not None, balance)
        layout = self._layout(tokens, attention_mask, keep, group_id, pack)
        hidden, routers = self._run(layout, routers=balance)  # [K, H], [K, E] of each router
        dist = self.distribution(hidden, keep, temperature)
        value = self.critic(layout, hidden) if self.critic is not None else None  # [K]
        ref_dist = None
        if reference is not None:
            with torch.no_grad():
                if ref_states is None and reference.share_prompts != self.share_prompts:
                    layout = reference._layout(tokens, attention_mask, keep, group_id)
                states = reference.hidden(layout) if ref_states is None else kept(ref_states, keep)
                ref_dist = reference.distribution(states, keep, temperature)
        options = {"entropy": entropy, "learn": learn_entropy, "mixture": mixture}
        scores = dist.scores(tokens, reference=ref_dist, **options)
        if value is not None:
            scores = replace(scores, values=placed(value, keep))
        if balance:
            scores = replace(scores, imbalance=placed(self._imbalance(routers, keep), keep))
        return scores

    def divergence(self, *inputs: Any, **options: Any) -> Any:
        """Return the exact divergence [B, T] of `forward`, which takes a reference."""
        return self(*inputs, **options).divergence

    def distribution(
        self, states: Tensor, keep: Tensor, temperature: Tensor | float
    ) -> TokenDistribution:
        """Return the distribution of the kept tokens from the states [K, H] that predict them."""
        temperature = temperature * self.temperature_factor
        return TokenDistribution(self.head(), states, keep, temperature=temperature)

    def states(self, tokens: Tensor, attention: Tensor, keep=None, *, group_id=None) -> Tensor:
        """Return the states that predict the kept tokens, [B, T, H]; other entries are 0."""
        tokens, attention, group_id = bare(tokens), bare(attention), bare(group_id)
        keep = predicted(attention, bare(keep))
        return placed(self.hidden(self._layout(tokens, attention, keep, group_id)), keep)

    def values(self, tokens: Tensor, attention: Tensor, keep: Tensor, *, group_id=None) -> Tensor:
        """Return the same values [B, T] as `forward`, without computing logits."""
        assert self.critic is not None
        tokens, attention, group_id = bare(tokens), bare(attention), bare(group_id)
        keep = predicted(attention, bare(keep))
        if not keep.any():
            return torch.zeros(keep.shape, device=self.device)
        layout = self._layout(tokens, attention, keep, group_id)
        states = self.hidden(layout) if self.critic.body is None else None
        return placed(self.critic(layout, states), keep)

    def logits(self, tokens: Tensor, attention_mask: Tensor, *, pack: bool = False) -> Tensor:
        """Return aligned logits [B, T, V]: entry t predicts token t; other entries are 0."""
        keep = predicted(attention_mask)
        layout = self._layout(tokens, attention_mask, keep, None, pack)
        return placed(self.head()(self.hidden(layout)), keep)

    def hidden(self, layout: layouts.Layout) -> Tensor:
        """Return the states that predict the kept tokens, [K, H]."""
        return self._run(layout)[0]

    def _run(self, layout: layouts.Layout, *, routers: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Return the states that predict the kept tokens, [K, H].

        With `routers` also the outputs of each router for these tokens, [K, E].
        """
        takes_trees = getattr(self.model.config, "_attn_implementation", None) == ATTENTION
        if takes_trees and layout.input_ids.device.type == "cpu":
            layout = layout.unpadded()
        with self.precision():
            out: Any = body_of(self.model)(
                input_ids=layout.input_ids,
                attention_mask=layout.attention_mask,
                position_ids=layout.position_ids,
                use_cache=False,
                **({"trees": layout.trees, "grid": layout.grid} if takes_trees else {}),
                **({"output_router_logits": True} if routers else {}),
            )
        each = getattr(out, "router_logits", None) if routers else None  # [R * L, E] or [R, L, E]
        states = out.last_hidden_state.flatten(0, 1)[layout.source]  # [K, H]
        return states, [x.flatten(0, -2)[layout.source] for x in each or ()]

    def _imbalance(self, routers: list[Tensor], keep: Tensor) -> Tensor:
        chosen = _first(text_config(self.model), CHOSEN)
        if not routers or chosen is None:
            name = type(self.model).__name__
            text = "algorithm.router_coeff is for mixtures of experts that return router logits"
            raise ValueError(f"{text}, got {name}; set it to 0")
        return imbalance(routers, keep, chosen=int(chosen))

    def head(self) -> Head:
        """Return the function from hidden states to logits."""
        out, config = self.model.get_output_embeddings(), text_config(self.model)
        factor = (_first(config, FACTORS) or 1.0) / (_first(config, DIVISORS) or 1.0)
        bias, cap = getattr(out, "bias", None), _first(config, CAPS)
        return Head(out.weight, bias, cap, self.autocast, factor, self.compiled)

    def precision(self) -> AbstractContextManager:
        """Return the autocast context that sampling and scoring share."""
        on = self.autocast is not None
        cached = self.placement.gathered  # autocast would cache a copy of every shard
        return torch.autocast(self.device.type, self.autocast, enabled=on, cache_enabled=cached)

    def _layout(self, tokens, attention, keep, group_id, pack: bool = False) -> layouts.Layout:
        limit = max_positions(self.model)
        if limit is not None and tokens.shape[1] > limit:  # no GPU synchronisation
            longest = int(attention.sum(-1).max())
            if longest > limit:
                raise ValueError(
                    f"a row has {longest} tokens, the model takes {limit} ({POSITIONS}); "
                    "drop the row or lower policy.max_new_tokens"
                )
        if not pack:
            group_id = group_id if self.share_prompts else None
            return layouts.choose(tokens, attention, keep, group_id, self.device).to(self.device)
        self.check_packing()
        return layouts.packed(tokens, attention, keep, self.device).to(self.device)

    def check_packing(self) -> None:
        """Raise ValueError if packed sequences would attend to each other."""
        if not layouts.takes_masks(self.model.config):
            kind = getattr(self.model.config, "_attn_implementation", None)
            name = f"{type(self.model).__name__} with {kind} attention"
            remedy = "use pad_model_input=True or algorithm.packing=false"
            raise ValueError(f"{name} cannot score packed sequences; {remedy}")

    def _zeros(self, tokens: Tensor, entropy: bool, exact: bool, balance: bool) -> Scores:
        """Return zeros that give each parameter a gradient of 0: DDP needs one on every rank."""
        anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters() if p.requires_grad)
        zeros = torch.zeros(tokens.shape, device=self.device) + anchor
        entropies, values = zeros.detach() if entropy else None, zeros if self.critic else None
        divergence, term = zeros if exact else None, zeros if balance else None
        return Scores(zeros, entropies, divergence, values, term)


def text_config(model: nn.Module) -> Any:
    """Return the config of a model's text decoder; most models have only one config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first(config: Any, names: Sequence[str]) -> float | None:
    """Return the first of these numbers that a config has."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int | float)), None)


def imbalance(routers: Sequence[Tensor], keep: Tensor, *, chosen: int) -> Tensor:
    """Return the load-balancing loss of each kept token, [K]; it is 1 for balanced experts.

    routers: outputs [K, E] of each router for the states that predict the kept tokens. The loss of
    a token is the mean over routers of sum_e f[e] p[e]. p is the softmax. f[e] is E / chosen times
    the share of the row's tokens that have e among their `chosen` experts; it has no gradient.
    Source: DeepSeek-V3, arXiv 2412.19437 eq. 17 to 20, with p of Switch, arXiv 2101.03961 eq. 6.
    """
    row, tokens = keep.nonzero()[:, 0], keep.sum(-1, keepdim=True).clamp(min=1)  # [K], [B, 1]
    row, tokens = (send(x, routers[0].device) for x in (row, tokens))
    terms = []
    for outputs in routers:
        probs = _probabilities(outputs)  # [K, E]
        best = outputs.topk(chosen, -1).indices  # [K, chosen]
        picked = torch.zeros_like(probs).scatter_(1, best, 1.0)  # [K, E]
        count = probs.new_zeros(len(keep), probs.shape[-1]).index_add_(0, row, picked)  # [B, E]
        load = count * probs.shape[-1] / (chosen * tokens)
        terms.append((load[row] * probs).sum(-1))  # [K]
    return torch.stack(terms).mean(0)


def _probabilities(outputs: Tensor) -> Tensor:
    """Return the probabilities of experts, [K, E], from the logits of a router.

    Gemma 4's routers, and all routers in transformers 5.0, return probabilities under that name.
    """
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    done = ((wide >= 0) & ((wide.sum(-1, keepdim=True) - 1).abs() < 1e-3)).all()
    return torch.where(done, wide, wide.softmax(-1))  # `if` would synchronise the GPU


def body_of(model: Any) -> nn.Module:
    """Return the module that computes the hidden states."""
    body = model.base_model
    return getattr(model, "model", body) if body is model else body  # Llama 4 has no such attribute


def max_positions(model: nn.Module) -> int | None:
    """Return the maximal length of a sequence, or None if the model has no such limit."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    switches = rope.get("rope_type") == "longrope"
    name = "original_max_position_embeddings"
    return rope[name] if switches else getattr(config, "max_position_embeddings", None)


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
    """Return what `score` computes for each token, [B, T] or [B, T, H], in parts of the rows.

    A part has at most `limit` padded tokens; None: no limit.

    `score`: a scorer, or its method `values`, `states` or `divergence`, for these; `options`: more
    arguments.
    """
    given = (tokens, attention, keep, group_id, temperature)
    inputs: list[Any] = [x.cpu() if isinstance(x, Tensor) else x for x in given]
    parts = [list(range(len(tokens)))]
    if limit is not None:
        parts = layouts.pack_rows(inputs[1], limit, group_id=inputs[3])
    owner, done = getattr(score, "__self__", score), []
    hold = OnHost if isinstance(owner, Scorer) else lambda tensor: tensor  # FSDP2 would move them
    placement: Placement = getattr(owner, "placement", LOCAL)
    with placement.forwards(len(parts)) as count:
        for rows in parts + [[]] * (count - len(parts)):
            index = torch.tensor(rows, dtype=torch.int64)
            ids, mask, part_keep, group, part_temperature = (
                hold(x[index]) if getattr(x, "ndim", 0) else x for x in inputs
            )
            options |= {} if part_temperature is None else {"temperature": part_temperature}
            part = score(ids, mask, part_keep, group_id=group, **options)
            done.append(part if isinstance(part, Tensor) else part.log_probs)
    order = torch.tensor([row for rows in parts for row in rows]).argsort()
    return torch.cat(done)[send(order, done[0].device)]


def score_batch(
    score: Callable[..., Scores | Tensor], batch: TensorDictBase, keep: Tensor, **options: Any
) -> Tensor:
    """Return `score_in_parts` of the sequences of a batch, at their temperatures."""
    tokens, attention = batch.get(("tokens", "full")), batch.get(("masks", "all_attention_mask"))
    options |= {"group_id": batch.get("group_id", None), "temperature": batch.get("temperature")}
    return score_in_parts(score, tokens, attention, keep, **options)
