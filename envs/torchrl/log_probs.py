"""Score a td inside an environment, with the reference or any other model.

Values are dense [B, T] or ragged (one [t] per row); the output has the layout of the td's ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from envs.torchrl.hooks import SpecHooks
from envs.torchrl.ragged import (
    ASSISTANT,
    ATTENTION,
    RESPONSE,
    Values,
    get_values,
    lay_out,
    map_rows,
    read_rows,
    set_values,
)
from envs.transforms import kl as dense
from envs.transforms.transform import Transform
from policies.torchrl.outputs import input_device
from policies.torchrl.specs import Composite, Unbounded

if TYPE_CHECKING:
    from policies.torchrl.wrapper import LLMWrapperBase

# tokenizer_kwargs with fixed values, and free ones; padding is done elsewhere.
FIXED = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
FIXED |= {"add_generation_prompt": False, "return_tensors": "pt"}
CHOSEN = ("chat_template", "chat_template_name")


class RetrieveLogProb(SpecHooks, dense.RetrieveLogProb):
    """Score a td with `model` and write the log-probs of the kept tokens, 0 elsewhere.

    `assistant_only` keeps the tokens of the assistant mask: of the td, else of the rendered history
    (the model must then read histories), else `masks.all_response_mask`. assistant_only=False keeps
    all real tokens. The log-probs have the layout of the td's token ids, padded or ragged. Without
    ids the model's `pad_output` decides, and ragged rows are padded on `padding_side`. They are
    written to `log_probs_full_key`, by default (model.log_probs_key, "full"). `device` is the
    model's: inputs move there, results back. `tokenizer` (default: the model's) and
    `tokenizer_kwargs` (chat_template or chat_template_name) render the history for its assistant
    mask if the td has none.
    """

    modes = ("history",)  # input modes with an assistant mask

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
        if not getattr(model, "return_log_probs", True) or getattr(model, "generate", True):
            raise ValueError(
                f"The model of {log_probs_full_key or 'log-probs'} must have `generate=False` and "
                "`return_log_probs=True`: pass model.get_new_version(generate=False)"
            )
        if assistant_only and mode_of(model) not in self.modes:
            raise ValueError(
                "The model must have `input_mode='history'` when `assistant_only=True`, got "
                f"{mode_of(model)!r}; set `assistant_only=False` to keep all real tokens"
            )
        if padding_side not in ("left", "right"):
            raise ValueError(f"expected padding_side 'left' or 'right', got {padding_side!r}")
        key = log_probs_full_key
        key = under(model.log_probs_key, "full") if key is None else key
        if not isinstance(key, tuple) or key[-1] != "full":
            warnings.warn(f"expected a log_probs_full_key (..., 'full'), got {key!r}", stacklevel=2)
        Transform.__init__(self, model.in_keys, [key])
        self.log_probs_full_key = key
        self.model, self.assistant_only, self.detach = model, assistant_only, detach
        self.device = None if device is None else torch.device(device)
        self.tokenizer, self.padding_side = tokenizer, padding_side
        self.tokenizer_kwargs = options = dict(tokenizer_kwargs or {})
        known = {*CHOSEN, "padding"}
        wrong = [k for k, v in options.items() if k not in known and (k, v) not in FIXED.items()]
        if wrong:
            raise ValueError(f"tokenizer_kwargs: expected {list(CHOSEN)} and {FIXED}, got {wrong}")
        # Whether another renderer than the model's makes the mask.
        other = tokenizer is not None and tokenizer is not getattr(model, "tokenizer", None)
        self._renders = other or any(name in options for name in CHOSEN)
        if self._renders and not assistant_only:
            raise ValueError("expected assistant_only=True with a tokenizer or tokenizer_kwargs")

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        td = tensordict if self.device is None else tensordict.to(self.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            values = self._scored(td)
        if self.device is not None:
            device = input_device(tensordict)
            values = map_rows(lambda row: row.to(device), values)
        set_values(next_td, self.log_probs_full_key, values)
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset  # there are no responses yet

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the log-probs."""
        return add_per_token(observation_spec, self.log_probs_full_key)

    def _scored(self, td: TensorDictBase) -> Values:
        """Return the log-probs of a td, 0 at tokens that are not kept."""
        model = self.model
        if getattr(model, "masks_key", True) is None:  # padding needs its masks
            model = model.get_new_version(masks_key="masks")
        # Score at the sampling temperature, on a copy, because wrappers may write in place.
        options = {"temperature_key": "temperature"} if hasattr(model, "limits") else {}
        scored = model(td.copy(), **options)
        log_probs = get_values(under(model.log_probs_key, "full"), scored)
        owner = getattr(model, "masks_key", None) or "masks"
        mask, real = self._mask(td, scored, owner), get_values(under(owner, ATTENTION[1]), scored)
        mask = log_probs if mask is None else mask
        ids = under(getattr(model, "tokens_key", None) or "tokens", "full")
        ids = model.in_keys[0] if mode_of(model) == "tokens" else ids
        seen, td_ids = get_values(ATTENTION, td), get_values(ids, td)
        td_ids = seen if td_ids is None else td_ids
        alike = isinstance(log_probs, Tensor) and isinstance(mask, Tensor)
        if alike and log_probs.shape == mask.shape and _lie_alike(real, seen, td_ids):
            return log_probs.masked_fill(~mask.bool(), 0)
        lies = {"side": self.padding_side, "padded": is_padded(model)}
        return lay_out(log_probs, mask, real, (td_ids, seen), **lies)

    def _mask(self, td: TensorDictBase, scored: TensorDictBase, owner: NestedKey) -> Values | None:
        """Return the mask of the kept tokens; None keeps all."""
        if not self.assistant_only:
            return get_values(under(owner, ATTENTION[1]), scored)
        history = td.get(self.in_keys[0], None) if mode_of(self.model) == "history" else None
        mask = None
        if not self._renders or history is None or get_values(ASSISTANT, td) is not None:
            masks = (get_values(under(owner, key[1]), scored) for key in (ASSISTANT, RESPONSE))
            mask = next((m for m in masks if m is not None), None)
        if mask is not None:
            return mask
        if history is None:
            raise ValueError(
                f"found neither {ASSISTANT} nor {RESPONSE}: give a history, or masks with the "
                "tokens, or set assistant_only=False"
            )
        tokenizer = self.model.tokenizer if self.tokenizer is None else self.tokenizer
        chosen = {k: v for k, v in self.tokenizer_kwargs.items() if k in CHOSEN}
        chats = history.apply_chat_template(tokenizer=tokenizer, padding=False, **FIXED, **chosen)
        return list(read_rows(chats, "assistant_masks"))


def _lie_alike(real: Values | None, seen: Values | None, td_ids: Values | None) -> bool:
    """Return whether scored tokens (mask `real`) and td_ids (mask `seen`) have one layout."""
    if isinstance(td_ids, list) or isinstance(real, list) or isinstance(seen, list):
        return False
    return real is None or seen is None or (real.shape == seen.shape and bool((real == seen).all()))


def add_per_token(spec: Composite, key: NestedKey, *tail: int) -> Composite:
    """Add floats for each token at a key, [B, T, *tail]; return the spec."""
    spec[key] = Unbounded((*spec.shape, -1, *tail))
    return spec


def mode_of(model: Any) -> str:
    """Return the input mode of a wrapper; a run's policy reads histories."""
    return getattr(model, "input_mode", "history")


def is_padded(model: Any) -> bool:
    """Return whether a wrapper's outputs are dense; True for a run's policy."""
    return getattr(model, "pad_output", True)


def one_of(name: str, model: Any, factory: Callable[[], Any] | None) -> Any:
    """Return the model or the factory's result; raise ValueError unless exactly one is given."""
    check_one(name, model, factory)
    return model if factory is None else factory()


def check_one(name: str, model: Any, factory: Callable[[], Any] | None) -> None:
    """Raise ValueError unless exactly one is set; a factory overrides "from_collector"."""
    if isinstance(model, str) and model == "from_collector":
        return
    if model is not None and factory is not None:
        raise ValueError(
            f"Cannot provide both '{name}_model' and '{name}_model_factory'. Choose one."
        )
    if model is None and factory is None:
        raise ValueError(f"Must provide exactly one of '{name}_model' or '{name}_model_factory'.")


def under(owner: NestedKey, name: str) -> tuple[str, ...]:
    """Return the flat key of a name in a container."""
    return (owner, name) if isinstance(owner, str) else (*owner, name)
