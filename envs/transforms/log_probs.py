"""Score a td inside an environment, with the reference or any other model.

Values are dense [B, T] or ragged (one [t] per row); what comes in ragged goes out ragged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from envs.transforms.transform import NestedKey, Transform, Values, each, read, write
from policies.padding import pad
from policies.specs import Composite, Unbounded
from policies.wrappers.outputs import home

if TYPE_CHECKING:
    from policies.wrappers.wrapper import LLMWrapperBase

RESPONSE = ("masks", "all_response_mask")
ASSISTANT = ("masks", "all_assistant_mask")
ATTENTION = ("masks", "all_attention_mask")
TEMPLATE_KWARGS = {
    "return_assistant_tokens_mask": True,
    "tokenize": True,
    "return_dict": True,
    "padding": False,
    "add_generation_prompt": False,
}


class RetrieveLogProb(Transform):
    """Score a td with `model` and write the log-probs of the kept tokens, 0 elsewhere.

    Kept are the tokens of `masks.all_response_mask` where the input has it, else the assistant's
    with `assistant_only` (the model must then read histories), else all real tokens. Token ids in
    the td are scored as they are. The key is `log_probs_full_key`, by default
    (model.log_probs_key, "full"). `device` is where the model is: inputs move there, results back.
    `tokenizer` (default: the model's) and `tokenizer_kwargs` render the history for its assistant
    mask where neither the td nor the model gives one. `padding_side` says how rows are padded
    when a model with pad_output=True returns them ragged.
    """

    def __init__(
        self,
        model: LLMWrapperBase,
        *,
        log_probs_full_key: NestedKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: dict[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
    ) -> None:
        check_model(model, "model", "RetrieveLogProb")
        if assistant_only and model.input_mode != "history":
            raise ValueError(
                "The model must have `input_mode='history'` when `assistant_only=True`, got "
                f"{model.input_mode!r}; set `assistant_only=False` to keep all real tokens"
            )
        key = full_key(model.log_probs_key) if log_probs_full_key is None else log_probs_full_key
        if not isinstance(key, tuple) or key[-1] != "full":
            warnings.warn(f"expected a log_probs_full_key (..., 'full'), got {key!r}", stacklevel=2)
        super().__init__(model.in_keys, [key])
        self.log_probs_full_key = key
        self.model, self.assistant_only, self.detach = model, assistant_only, detach
        self.device = None if device is None else torch.device(device)
        self.tokenizer, self.padding_side = tokenizer, check_side(padding_side)
        self.tokenizer_kwargs = {**TEMPLATE_KWARGS, **(tokenizer_kwargs or {})}

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        td = tensordict if self.device is None else tensordict.to(self.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            scored = self.model(td.copy())  # a copy: wrappers may write in place
            log_probs = read(scored, full_key(self.model.log_probs_key))
            values = each(keep_only, log_probs, self._mask(td, scored))
        if self.model.pad_output and isinstance(values, list):
            values = pad(values, side=self.padding_side)
        if self.device is not None:
            values = each(lambda v: v.to(home(tensordict)), values)
        write(next_td, self.log_probs_full_key, values)
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset  # nothing has been said yet

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the key that is written."""
        return add_per_token(observation_spec, self.log_probs_full_key)

    def _mask(self, td: TensorDictBase, scored: TensorDictBase) -> Values:
        mask = read(td, RESPONSE)
        if mask is None:
            mask = read(scored, ASSISTANT if self.assistant_only else ATTENTION)
        if mask is None and self.assistant_only and td.get(self.in_keys[0], None) is not None:
            mask = self._rendered_mask(td)
        if mask is None:
            raise ValueError(
                f"found neither {RESPONSE} nor {ASSISTANT if self.assistant_only else ATTENTION}: "
                "give a history or masks with the tokens, or set assistant_only=False"
            )
        return mask

    def _rendered_mask(self, td: TensorDictBase) -> Values | None:
        tokenizer = self.model.tokenizer if self.tokenizer is None else self.tokenizer
        history = td.get(self.in_keys[0])
        out = history.apply_chat_template(tokenizer=tokenizer, **self.tokenizer_kwargs)
        return each(Tensor.bool, read(out, "assistant_masks"))


def add_per_token(spec: Composite, key: NestedKey, *tail: int) -> Composite:
    """Add floats for each token at a key, [B, T, *tail]; returns the spec."""
    spec[key] = Unbounded((*spec.shape, -1, *tail), device=spec.device)
    return spec


def check_model(model: Any, what: str, user: str) -> None:
    """Raise unless the model scores."""
    if not getattr(model, "return_log_probs", True):
        raise ValueError(f"The {what} must have `return_log_probs=True` to use `{user}`.")
    if getattr(model, "generate", True):
        raise ValueError(
            f"The {what} must have `generate=False` to use `{user}`: "
            "pass model.get_new_version(generate=False)"
        )


def one_of(name: str, model: Any, factory: Callable[[], Any] | None) -> Any:
    """Return the model or what the factory makes; both or neither is a ValueError."""
    check_one(name, model, factory)
    return model if factory is None else factory()


def check_one(name: str, model: Any, factory: Callable[[], Any] | None) -> None:
    """Raise unless exactly one of the two is given; "from_collector" is the only name for one."""
    if isinstance(model, str) and (name, model) != ("gen", "from_collector"):
        allowed = "a wrapper or 'from_collector'" if name == "gen" else "a wrapper"
        raise ValueError(f"expected {name}_model to be {allowed}, got {model!r}")
    if model is not None and factory is not None:
        raise ValueError(
            f"Cannot provide both '{name}_model' and '{name}_model_factory'. Choose one."
        )
    if model is None and factory is None:
        raise ValueError(f"Must provide exactly one of '{name}_model' or '{name}_model_factory'.")


def keep_only(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values with 0 outside the mask."""
    if mask is None:
        return values
    if mask.shape != values.shape:
        raise ValueError(
            f"expected a mask of shape {tuple(values.shape)} as the log-probs have, got "
            f"{tuple(mask.shape)}; was one of them padded (pad_output)?"
        )
    return values.masked_fill(~mask, 0)


def check_shapes(gen: Values, ref: Values) -> None:
    """Raise where a row of gen and of ref differ in shape."""
    if len(gen) != len(ref):
        raise ValueError(
            f"Batch size mismatch: gen_log_probs has {len(gen)} samples, "
            f"ref_log_probs has {len(ref)} samples"
        )
    for i, (g, r) in enumerate(zip(gen, ref, strict=True)):
        if g.shape != r.shape:
            raise ValueError(
                f"Sample {i} has different shapes: gen_log_probs[{i}].shape={tuple(g.shape)}, "
                f"ref_log_probs[{i}].shape={tuple(r.shape)}; was one of them padded (pad_output)?"
            )


def kept_tokens(gen: Tensor, ref: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask; without one, the tokens with a log-prob (scoring leaves the others 0)."""
    known = (gen != 0) | (ref != 0)
    return known if mask is None else keep_only(torch.ones_like(known), mask)


def full_key(log_probs_key: Any) -> tuple[str, ...]:
    """Return (log_probs_key, "full") as one flat key."""
    return (log_probs_key, "full") if isinstance(log_probs_key, str) else (*log_probs_key, "full")


def check_side(padding_side: str) -> str:
    """Return the side, or raise unless it is left or right."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"expected padding_side 'left' or 'right', got {padding_side!r}")
    return padding_side
