"""Compute the KL to the reference inside an environment: log-probs, KL per token, reward.

kl_penalty = gen - ref (k1, nats, never multiplied by the coefficient), 0 at tokens that are not
kept. Values are dense [B, T] or ragged (one [t] per row); ragged input gives ragged output, the
computation is dense. Transforms write only their own keys into the td.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from envs.torchrl.hooks import Shareable, SpecHooks
from envs.torchrl.log_probs import (
    RetrieveLogProb,
    add_per_token,
    is_padded,
    mode_of,
    one_of,
)
from envs.torchrl.ragged import (
    ASSISTANT,
    ATTENTION,
    RESPONSE,
    Border,
    Values,
    get_values,
    set_values,
)
from envs.transforms import kl as dense
from envs.transforms.transform import Compose, Transform
from policies.torchrl.specs import Composite

if TYPE_CHECKING:
    from policies.torchrl.wrapper import LLMWrapperBase


class KLComputation(SpecHooks, dense.KLComputation):
    """Write kl_key = gen - ref per token, and subtract coeff * kl_penalty from the reward.

    Reads log-probs from "next", else from the root. A row is 0 outside `masks.all_response_mask`
    and `masks.all_assistant_mask` if either model has no log-prob there. The penalty is subtracted
    from each token of a reward [B, T, 1]; in later turns of an env only from the response, because
    earlier tokens already have it. A reward per row, [B, 1] or [B, 1, 1], first moves to the last
    token of the response (else of the assistant, else of the row); a missing reward is skipped.
    `padding_side`: side on which a dense reward is padded if log-probs are ragged. Raise ValueError
    for missing log-probs and different shapes.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({("log_probs", "full"): torch.tensor([[-1.0, -2.0]]),
    ...     ("ref_log_probs", "full"): torch.tensor([[-1.5, -1.0]]),
    ...     "reward": torch.tensor([[1.0]])}, batch_size=[1])
    >>> td = KLComputation(coeff=0.1)(td)
    >>> td["kl_penalty"].tolist(), [round(r, 2) for r in td["reward"].flatten().tolist()]
    ([[0.5, -1.0]], [-0.05, 1.1])
    """

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        padding_side: str = "left",
    ) -> None:
        reward = ["reward"] if add_to_reward else []
        in_keys = [gen_log_probs_full_key, ref_log_probs_full_key, *reward]
        Transform.__init__(self, in_keys, [kl_key, *reward])
        self.gen_log_probs_full_key = gen_log_probs_full_key
        self.ref_log_probs_full_key = ref_log_probs_full_key
        self.kl_key, self.add_to_reward, self.coeff = kl_key, add_to_reward, coeff
        self.padding_side = padding_side

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        keys = (self.gen_log_probs_full_key, self.ref_log_probs_full_key)
        gen, ref = (get_values(key, next_td, tensordict) for key in keys)
        if gen is None or ref is None:
            raise ValueError(
                f"Log-probs not found. Expected keys: {keys[0]}, {keys[1]} in next or at the root"
            )
        _check_shapes(gen, ref, "of the reference")
        reward = get_values("reward", next_td) if self.add_to_reward else None
        keys = (RESPONSE, ASSISTANT, *([] if reward is None else [ATTENTION]))
        masks = [m for key in keys if (m := get_values(key, tensordict, next_td)) is not None]
        edge = Border(gen, ref, *masks, side=self.padding_side)
        gen, ref = edge.dense(gen), edge.dense(ref)  # [B, T]
        masks = [edge.dense(mask, "a mask").bool() for mask in masks]
        kl = gen - ref  # [B, T]
        for mask in masks:
            _check_shapes(gen, mask, "mask")
            # [B, 1] each: whether a model has log-probs of the row outside the mask
            beyond = [((values != 0) & ~mask).any(-1, keepdim=True) for values in (gen, ref)]
            kl = kl.masked_fill(~(mask | (beyond[0] & beyond[1])), 0)
        set_values(next_td, self.kl_key, edge.ragged(kl))
        if reward is not None:
            known = (gen != 0) | (ref != 0)  # [B, T]; unscored tokens are 0
            keep = masks[0] if masks else known
            turn = tensordict.get("turn", None)
            if turn is not None and get_values(RESPONSE, tensordict, next_td) is not None:
                first = turn.reshape(-1, 1).to(kl.device) == 0  # [B, 1]
                kl = kl.where(keep | first, 0.0)  # earlier turns already have the penalty
            set_values(next_td, "reward", charge(reward, kl, keep, edge, coeff=self.coeff))
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL, one float per token."""
        return add_per_token(observation_spec, self.kl_key)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Make an existing reward one per token: [..., T, 1]."""
        if self.add_to_reward and "reward" in reward_spec:
            add_per_token(reward_spec, "reward", 1)
        return reward_spec


class RetrieveKL(Shareable, SpecHooks, dense.RetrieveKL):
    """Score the reference, and the generator if needed, and write their KL per token.

    A `gen_model` (or its factory) scores the generator. "from_collector" uses the generation
    log-probs in the td (next, else root); without them a scoring version of the collector's policy
    scores, which reads at `history_key`. Writes the two log-prob keys, `kl_key` and, with
    `add_to_reward`, "reward" into next. Both models need generate=False, equal pad_output and
    different log_probs_key. Other arguments: see `RetrieveLogProb` and `KLComputation`.
    `use_ray_service=True`, with `actor_name`, `num_cpus` and `num_gpus`, returns a `RayRetrieveKL`.
    """

    def __init__(
        self,
        gen_model: LLMWrapperBase | Literal["from_collector"] | None = "from_collector",
        ref_model: LLMWrapperBase | None = None,
        *,
        gen_model_factory: Callable[[], LLMWrapperBase] | None = None,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        assistant_only: bool = True,
        history_key: str = "history",
        tokenizer_kwargs: dict[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        use_ray_service: bool = False,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        gen = one_of("gen", gen_model, gen_model_factory)
        ref = one_of("ref", ref_model, ref_model_factory)
        keys = (gen_log_probs_full_key, ref_log_probs_full_key)
        for key in keys:
            if not isinstance(key, tuple) or len(key) < 2 or key[-1] != "full":
                raise ValueError(f"expected a log-probs key (..., 'full'), got {key!r}")
        if keys[0] == keys[1]:
            raise ValueError(f"gen and ref log-probs need different keys, got {keys[0]} for both")
        settings = {
            "assistant_only": assistant_only,
            "tokenizer_kwargs": tokenizer_kwargs,
            "detach": detach,
            "device": device,
            "tokenizer": tokenizer,
            "padding_side": padding_side,
            **kwargs,
        }
        charging = {"kl_key": kl_key, "add_to_reward": add_to_reward, "coeff": coeff}
        Compose.__init__(
            self,
            RetrieveLogProb(ref, log_probs_full_key=keys[1], **settings),
            KLComputation(*keys, **charging, padding_side=padding_side),
        )
        self.history_key, self.gen_log_probs_full_key = history_key, gen_log_probs_full_key
        self._settings = settings
        self.always_score = gen != "from_collector"
        self.generator: RetrieveLogProb | None = None
        if self.always_score:
            if is_padded(gen) != is_padded(ref):
                raise ValueError("pad_output mismatch: gen_model and ref_model need the same one")
            if gen.log_probs_key == ref.log_probs_key:
                raise ValueError("gen_model and ref_model need different `log_probs_key` values")
            self.generator = self._scorer_of(gen)

    ref_model = property(lambda self: self[0].model)

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict, self.with_generation(tensordict, next_td))

    def _through(self, hook: str, spec: Composite) -> Composite:
        if not self.always_score:
            self._collector_policy()  # fails early: specs are read before the environment is used
        spec = super()._through(hook, spec)
        if hook in ("transform_observation_spec", "transform_output_spec"):
            add_per_token(spec.get("full_observation_spec", spec), self.gen_log_probs_full_key)
        return spec

    def with_generation(
        self, tensordict: TensorDictBase, next_td: TensorDictBase
    ) -> TensorDictBase:
        """Return next_td with existing generation log-probs, else scored ones."""
        key = self.gen_log_probs_full_key
        log_probs = None if self.always_score else get_values(key, next_td, tensordict)
        if log_probs is None:
            if self.generator is None:
                self.generator = self._scorer_of_collector()
            next_td = self.generator._step(tensordict, next_td)
        elif get_values(key, next_td) is None:
            set_values(next_td, key, log_probs)
        return next_td

    def _scorer_of(self, model: Any) -> RetrieveLogProb:
        """Return a scorer of a generation model with the settings of the reference."""
        key = self.gen_log_probs_full_key
        return RetrieveLogProb(model, log_probs_full_key=key, **self._settings)

    def _scorer_of_collector(self) -> RetrieveLogProb:
        """Return a scorer of the policy of the environment's collector."""
        ref, path = self.ref_model, self.gen_log_probs_full_key[:-1]
        mode = mode_of(ref)
        policy = self._collector_policy().get_new_version(
            generate=False,
            return_log_probs=True,
            log_probs_key=path[0] if len(path) == 1 else path,
            input_mode=mode,
            input_key=(self.history_key if mode == "history" else mode, "full"),
            pad_output=is_padded(ref),
        )
        return self._scorer_of(policy)

    def _collector_policy(self) -> Any:
        """Return the policy of the environment's collector; raise ValueError without one."""
        for name in ("container", "collector"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"The {name} is not set: mount this on a TransformedEnv of a collector, pass "
                    f"gen_model, or give generation log-probs at {self.gen_log_probs_full_key}"
                )
        return self.collector.policy


def _check_shapes(gen: Values, other: Values, label: str) -> None:
    """Raise ValueError unless the rows of two values have equal shapes."""
    if len(gen) != len(other):
        raise ValueError(f"Batch size mismatch: {len(gen)} rows of log-probs, {len(other)} {label}")
    for i, (one, two) in enumerate(zip(gen, other, strict=True)):
        if one.shape != two.shape:
            raise ValueError(
                f"Sample {i} has different shapes: log-probs {tuple(one.shape)}, {label} "
                f"{tuple(two.shape)}; was one of them padded (pad_output)?"
            )


def charge(
    reward: Values, kl: Tensor, keep: Tensor, edge: Border, *, coeff: float | Tensor
) -> Values:
    """Return reward - coeff * kl, [B, T, 1], ragged if the KL is; kl, keep [B, T].

    A dense reward, one number per token, stays dense.
    """
    padded = isinstance(reward, Tensor) and reward.shape[1:-1].numel() > 1
    if isinstance(reward, list):
        each = all(row.numel() == 1 for row in reward)  # one number per row
        reward = torch.stack(reward) if each else edge.dense(reward, "rewards")
    if reward.shape == (*kl.shape[:-1], 1, 1):
        reward = reward.squeeze(-1)
    if reward.shape == (*kl.shape[:-1], 1):
        real = torch.ones_like(keep) if edge.real is None else edge.real
        reward = _at_last(reward, torch.where(keep.any(-1, keepdim=True), keep, real))
    if reward.shape != (*kl.shape, 1):
        raise ValueError(
            f"The rewards have shape {tuple(reward.shape)} but the kl has shape "
            f"{tuple(kl.shape)}: expected one reward per token, {(*kl.shape, 1)}, or one "
            f"number per row, {(*kl.shape[:-1], 1)}"
        )
    if isinstance(coeff, Tensor):
        coeff = coeff.to(kl.device)
    charged = reward - coeff * kl.unsqueeze(-1)
    return charged if padded else edge.ragged(charged)


def _at_last(reward: Tensor, keep: Tensor) -> Tensor:
    """Return reward [B, 1] at the last kept token, 0 elsewhere, [B, T, 1]."""
    last = (keep * torch.arange(keep.shape[-1], device=keep.device)).argmax(-1, keepdim=True)
    return reward.new_zeros(keep.shape).scatter(-1, last, reward).unsqueeze(-1)
