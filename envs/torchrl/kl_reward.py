"""TorchRL's older KL reward, for existing code; `RetrieveKL` replaces it.

`RetrieveLogProb` scores and `KLComputation` computes the KL; this file adds the older names, masks
and shapes: kl_penalty and ref_log_prob are [B, T, 1] like the reward. The reference reads only
token ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from envs.torchrl.hooks import Shareable, SpecHooks
from envs.torchrl.kl import KLComputation
from envs.torchrl.log_probs import RetrieveLogProb, add_per_token, one_of
from envs.torchrl.ragged import (
    ASSISTANT,
    ATTENTION,
    Rows,
    Values,
    get_values,
    layout_of,
    map_rows,
    set_values,
)
from policies.torchrl.specs import Composite

if TYPE_CHECKING:
    from policies.torchrl.wrapper import LLMWrapperBase

PROMPT = ("tokens", "prompt")
REF = ("ref_log_probs", "full")  # key in the working copy of the td


class _TokenScorer(RetrieveLogProb):
    """Score token ids that come with an assistant mask."""

    modes = ("tokens",)


class KLRewardTransform(Shareable, SpecHooks):
    """Subtract coef * (generation log-prob - reference log-prob) of each token from the reward.

    Deprecated: use `RetrieveKL`, or `RetrieveLogProb` and `KLComputation`.

    Reads generation log-probs at `log_prob_key`; the reference scores the token ids, so it needs
    input_mode "tokens". `out_keys` are the reward, the KL and the reference log-probs (`reward`,
    `kl_penalty`, `ref_log_prob`), each [B, T, 1], ragged rows [t, 1]; the last two are optional.
    `assistant_only` keeps the tokens of `masks.all_assistant_mask` or, without this mask, the
    tokens after `tokens.prompt`; assistant_only=False keeps all real tokens. `detach` cuts the
    graph, `device` is the reference's (`to` moves it). `coef` is a buffer and the only entry of
    state_dict. At reset a separate reward key is 0, [B, 1]. Everything else as in `KLComputation`.
    `use_ray_service=True`, with `actor_name`, `num_cpus` and `num_gpus`, returns a
    `RayKLRewardTransform`. Raise RuntimeError without token ids, ValueError without log-probs.
    """

    DEFAULT_IN_KEYS: ClassVar = ["reward"]
    coef: Tensor
    reference: RetrieveLogProb

    def __init__(
        self,
        ref_model: LLMWrapperBase | None = None,
        *more: Any,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        coef: float | Tensor = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Any = None,
        assistant_only: bool = True,
        detach: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
        actor_name: str | None = None,
    ) -> None:
        if more:
            raise TypeError(
                f"KLRewardTransform takes one model, ref_model, got {1 + len(more)}; "
                "RetrieveKL(gen_model, ref_model) scores both"
            )
        warnings.warn(
            "KLRewardTransform is deprecated; use RetrieveKL", DeprecationWarning, stacklevel=2
        )
        model = one_of("ref", ref_model, ref_model_factory)
        if model.input_mode != "tokens":
            raise ValueError(
                f"The ref_model must have `input_mode='tokens'`, got {model.input_mode!r}: "
                "pass ref_model.get_new_version(input_mode='tokens'), or use RetrieveKL"
            )
        reference = _TokenScorer(
            model,
            log_probs_full_key=REF,
            assistant_only=assistant_only,
            detach=detach,
            device=device,
            padding_side=padding_side,
        )
        in_keys = list(in_keys or self.DEFAULT_IN_KEYS)
        keys = list(in_keys if out_keys is None else out_keys)
        if len(keys) == 1:
            keys += ["kl_penalty", "ref_log_prob"]
        if len(in_keys) != 1 or len(keys) != 3:
            raise ValueError(
                "expected one in_key (the reward) and one out_key, or three (reward, KL, reference "
                f"log-probs), got in_keys={in_keys}, out_keys={keys}"
            )
        super().__init__([*in_keys, *reference.in_keys], keys)
        self.__dict__["reference"] = reference  # bypasses nn.Module, to keep it out of the state
        self.kl = KLComputation(
            log_prob_key, REF, add_to_reward=add_to_reward, padding_side=padding_side
        )
        self.register_buffer("coef", torch.as_tensor(coef))
        self.assistant_only, self.add_to_reward, self.detach = assistant_only, add_to_reward, detach
        self.log_prob_full_key, self._tokenizer = log_prob_key, tokenizer

    ref_model = property(lambda self: self.reference.model)
    pad_output = property(lambda self: self.ref_model.pad_output)
    padding_side = property(lambda self: self.kl.padding_side)
    device = property(lambda self: self.reference.device)
    action_key = property(lambda self: self.reference.in_keys[0])

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the constructor, else the reference's."""
        return self.ref_model.tokenizer if self._tokenizer is None else self._tokenizer

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        if get_values(self.action_key, tensordict) is None:
            if self.missing_tolerance:
                return next_td
            raise RuntimeError(f"expected token ids at {self.action_key}, got none")
        reward = get_values(self.in_keys[0], next_td) if self.add_to_reward else None
        td, work = tensordict.copy(), next_td.copy().exclude("reward")
        if self.assistant_only:
            set_values(td, ASSISTANT, self._mask(td))
        if reward is not None:
            set_values(work, "reward", reward)
        self.kl.coeff = self.coef
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            work = self.kl._step(td, self.reference._step(td, work))
        if reward is not None:
            set_values(next_td, self.out_keys[0], get_values("reward", work))
        for out_key, key in zip(self.out_keys[1:], ("kl_penalty", REF), strict=True):
            column = map_rows(lambda values: values.unsqueeze(-1), get_values(key, work))
            set_values(next_td, out_key, column)  # [B, T, 1]
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        if self.add_to_reward and self.out_keys[0] != self.in_keys[0]:
            zero = torch.zeros(*td_reset.batch_size, 1, device=td_reset.device)
            td_reset.set(self.out_keys[0], zero)
        return td_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL and the reference log-probs, [..., T, 1]."""
        for key in self.out_keys[1:]:
            add_per_token(observation_spec, key, 1)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the reward with the penalty, [..., T, 1], if there is a reward."""
        if self.add_to_reward and self.in_keys[0] in reward_spec:
            add_per_token(reward_spec, self.out_keys[0], 1)
        return reward_spec

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KLRewardTransform:
        self.reference._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _mask(self, td: TensorDictBase) -> Values:
        """Return the mask of the assistant's tokens, else of the tokens after the prompt."""
        mask, attention, prompt = (get_values(key, td) for key in (ASSISTANT, ATTENTION, PROMPT))
        if mask is not None:
            return mask
        rows = [  # a padded prompt takes its full width
            keep.bool() & (torch.arange(len(keep), device=keep.device) >= len(before))
            for before, keep in zip(prompt, attention, strict=True)
        ]
        return torch.stack(rows) if isinstance(attention, Tensor) else Rows(rows, layout_of(prompt))
