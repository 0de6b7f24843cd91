"""Score a td inside an environment, with the reference or any other model.

Values come dense [B, T] or ragged (one [t] per row); what comes ragged goes out ragged. Inside
all is dense.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from envs.transforms.ragged import Border, Values, get_values, set_values
from envs.transforms.transform import Transform
from policies.wrappers.outputs import home

if TYPE_CHECKING:
    from policies.specs import Composite
    from policies.wrappers.wrapper import LLMWrapperBase

RESPONSE = ("masks", "all_response_mask")
ASSISTANT = ("masks", "all_assistant_mask")
ATTENTION = ("masks", "all_attention_mask")
MASKS = (RESPONSE, ASSISTANT, ATTENTION)  # the first that is there says which tokens are kept
RESOURCES = ("actor_name", "num_cpus", "num_gpus")
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
            # At the temperature of the sampling; a copy, for wrappers may write in place.
            asked = {"temperature_key": "temperature"} if hasattr(self.model, "limits") else {}
            scored = self.model(td.copy(), **asked)
            log_probs = get_values(full_key(self.model.log_probs_key), scored)
            mask = self._mask(td, scored)
            border = Border(log_probs, mask, side=self.padding_side)
            values = keep_only(border.dense(log_probs), border.dense(mask, "a mask"))  # [B, T]
        if self.device is not None:
            values = values.to(home(tensordict))
        padded = self.model.pad_output
        set_values(next_td, self.log_probs_full_key, values if padded else border.ragged(values))
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset  # nothing has been said yet

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the key that is written."""
        return add_per_token(observation_spec, self.log_probs_full_key)

    def _mask(self, td: TensorDictBase, scored: TensorDictBase) -> Values:
        mask = get_values(RESPONSE, td)
        if mask is None:
            mask = get_values(ASSISTANT if self.assistant_only else ATTENTION, scored)
        if mask is None and self.assistant_only and td.get(self.in_keys[0], None) is not None:
            tokenizer = self.model.tokenizer if self.tokenizer is None else self.tokenizer
            mask = rendered_mask(td.get(self.in_keys[0]), tokenizer, **self.tokenizer_kwargs)
        if mask is None:
            raise ValueError(
                f"found neither {RESPONSE} nor {ASSISTANT if self.assistant_only else ATTENTION}: "
                "give a history or masks with the tokens, or set assistant_only=False"
            )
        return mask


def rendered_mask(history: Any, tokenizer: Any, **kwargs: Any) -> Values | None:
    """Return the assistant mask of histories, as rendered with `kwargs` (TEMPLATE_KWARGS)."""
    out = history.apply_chat_template(tokenizer=tokenizer, **kwargs)
    return get_values("assistant_masks", out)


def add_per_token(spec: Composite, key: NestedKey, *tail: int) -> Composite:
    """Add floats for each token at a key, [B, T, *tail]; returns the spec."""
    from policies.specs import Unbounded

    spec[key] = Unbounded((*spec.shape, -1, *tail), device=spec.device)
    return spec


class Shareable:
    """A class that gives its Ray version, Ray<name>, when asked with use_ray_service=True.

    Ray, and our files for it, are imported only then.
    """

    def __new__(cls, *args: Any, use_ray_service: bool = False, **kwargs: Any) -> Any:
        """Return an object of the class, or the Ray version; resources need Ray."""
        from envs import transforms

        if not use_ray_service:
            given = [name for name in RESOURCES if kwargs.get(name) is not None]
            if given:
                raise ValueError(f"{', '.join(given)}: expected use_ray_service=True with them")
            return super().__new__(cls)
        if getattr(transforms, cls.__name__, None) is not cls:
            raise TypeError(f"{cls.__name__} has no Ray version; use RayTransform({cls.__name__})")
        return getattr(transforms, f"Ray{cls.__name__}")(*args, **kwargs)


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


def keep_only(values: Tensor, mask: Tensor) -> Tensor:
    """Return values with 0 outside the mask, [B, T]."""
    if mask.shape != values.shape:
        raise ValueError(
            f"expected a mask of shape {tuple(values.shape)} as the log-probs have, got "
            f"{tuple(mask.shape)}; was one of them padded (pad_output)?"
        )
    return values.masked_fill(~mask.bool(), 0)


def full_key(log_probs_key: Any) -> tuple[str, ...]:
    """Return (log_probs_key, "full") as one flat key."""
    return (log_probs_key, "full") if isinstance(log_probs_key, str) else (*log_probs_key, "full")


def check_side(padding_side: str) -> str:
    """Return the side, or raise unless it is left or right."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"expected padding_side 'left' or 'right', got {padding_side!r}")
    return padding_side
