"""The policy as a TensorDict module: what every engine shares.

A wrapper either generates (prompt -> response) or scores (full -> log-probs). An engine says what a
model does with token ids (model_calls.py); reading, writing, keys, batch shapes, batching
and distributions are the same for all of them. B rows, T tokens, V vocabulary.
Token in, token out: whatever carries ids is generated from or scored by those ids, in any input
mode; a history or text is tokenised only where there are none.
Alignment everywhere: entry t of a `full` belongs to token t; unscored entries are 0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import nn

from policies.chats.chat_template import Renderer
from policies.models import find_model, load_model, load_tokenizer
from policies.sampler import Stop
from policies.scorer import max_positions
from policies.wrappers.generate_kwargs import GenerateKwargs
from policies.wrappers.generates import Generates
from policies.wrappers.generation_config import token_ids
from policies.wrappers.inputs import NestedKey, ReadsInputs
from policies.wrappers.model_calls import CallsModel
from policies.wrappers.outputs import Form, home, put
from policies.wrappers.scores import ScoresSequences
from policies.wrappers.settings import check_settings, queue_of, tokenizer_options
from policies.wrappers.token_dists import GivesDistributions, flat

# What load_policy hangs on a wrapper: where the model is from, how names are looked for, the system
# prompt of its chats.
KEPT = ("found", "source", "system_prompt")

InputMode = Literal["history", "text", "tokens"]


class LLMWrapperBase(
    ReadsInputs, CallsModel, Generates, ScoresSequences, GivesDistributions, TensorDictModuleBase
):
    """Generate with or score by a language model; in and out is one TensorDict.

    A subclass implements `_draw(ids, streams)` and `_logits(tokens, attention)`; see CallsModel.

    model, tokenizer: objects, folders or names; without a tokenizer that of the model named.
    input_mode: what is read: "history", "text" or "tokens"; `input_key` renames the field.
    attention_mask_key: the mask of given ids, where there is no (masks_key, "all_attention_mask").
    generate_kwargs: see GenerateKwargs. tokenizer_kwargs: for texts.
    pad_output: dense [B, T] instead of ragged outputs; those are lazy stacks, or nested tensors of
    `layout`. pad_model_input=False: score sequences laid out after each other, without padding.
    inplace: True writes into the input, False into a new td, "empty" into an empty copy of the
    input; None is True unless there are several samples.
    device: where the model is (a named one is loaded there): inputs move there and outputs back.
    num_samples: replies of a prompt, in a batch dimension of their own.
    chat_template_name, chat_template: a known template, or its Jinja text or file.
    *_key: where each output stands; None leaves it out.
    batching: rows of several threads run together (see BatchQueue for sizes and timeout, in
    seconds); sizes alone switch it on.
    prefer_tokens: False renders histories and texts even where there are ids.
    score_mask_key: a bool mask [B, T]; only its tokens are scored, the others read 0.
    micro_batch_tokens: the most padded tokens of one scoring forward.

    A `stream` [B] in the input fixes the draws of each row; otherwise torch's generator seeds them.
    A `temperature` [B] in the input is that of scoring.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: InputMode = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        inplace: bool | Literal["empty"] | None = None,
        device: torch.device | str | None = None,
        layout: torch.layout | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        history_key: NestedKey | None = "history",
        text_key: NestedKey | None = "text",
        tokens_key: NestedKey | None = "tokens",
        masks_key: NestedKey | None = "masks",
        log_probs_key: NestedKey | None = "log_probs",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = True,
        score_mask_key: NestedKey | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.limits = GenerateKwargs.read(generate_kwargs or {})
        check_settings(settings, self.limits)
        self.tokenizer_kwargs = tokenizer_options(tokenizer_kwargs, input_mode)
        self._queue = queue_of(batching, min_batch_size, max_batch_size, batching_timeout)
        for name, value in settings.items():
            if name not in ("model", "device", "tokenizer_kwargs"):
                setattr(self, name, value)
        self.generate_kwargs = dict(generate_kwargs or {})
        self._settings = settings | {
            "generate_kwargs": self.generate_kwargs,
            "tokenizer_kwargs": dict(tokenizer_kwargs or {}),
        }
        self.num_samples = num_samples or self.limits.num_samples
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        self.return_log_probs = return_log_probs is not False and log_probs_key is not None
        self.temperature, self.max_new_tokens = self.limits.temperature, self.limits.max_new_tokens
        self.version = 0  # counts the weight syncs
        self._take(model, tokenizer)
        self._set_keys()

    def _take(self, model: Any, tokenizer: Any) -> None:
        """Keep model and tokenizer, loaded where they are named, and what follows from them."""
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(find_model(str(tokenizer)))
        if isinstance(model, str | Path):
            found = find_model(str(model))
            tokenizer = load_tokenizer(found) if tokenizer is None else tokenizer
            model = load_model(found, device=self._settings["device"])
        self._settings |= {"model": model, "tokenizer": tokenizer}
        self.tokenizer = tokenizer
        self._set_model(model)
        self._check_device(self._settings["device"])
        if tokenizer is None and self.input_mode != "tokens":
            raise ValueError(f"expected a tokenizer for input_mode={self.input_mode!r}, got none")
        own = self.chat_template or self.chat_template_name
        own = own or getattr(tokenizer, "chat_template", None)
        self.renderer: Any = None
        if self.input_mode == "history" or (own and tokenizer is not None):
            self.renderer = Renderer(tokenizer, self.chat_template, self.chat_template_name)
        ends = token_ids(getattr(self.model, "generation_config", None), "eos_token_id")
        ends += token_ids(tokenizer, "eos_token_id")
        ends += self.renderer.stop_ids if self.renderer else ()
        asked = self.limits.eos_token_id
        self.stop_ids = frozenset(ends if asked is None else asked)
        self.stop = Stop(self.stop_ids, self.limits.found(tokenizer))
        pads = [self.limits.pad_token_id, *token_ids(tokenizer, "pad_token_id"), *ends, 0]
        self.pad_token_id = next(i for i in pads if i is not None)
        self.max_positions = max_positions(self.model)
        if self.generate:
            self.limits.check_positions(self.max_positions)

    def _set_model(self, model: Any) -> None:
        self.model = model

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        weights = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        return next((w.device for w in weights), torch.device(self._settings["device"] or "cpu"))

    def _check_device(self, asked: Any) -> None:
        has = self.device
        wanted = has if asked is None else torch.device(asked)
        if wanted.type != has.type or wanted.index not in (None, has.index):
            raise ValueError(
                f"expected the model on device={str(wanted)!r}, it is on {str(has)!r}; move it "
                "there (model.to), or give its name"
            )

    def _set_keys(self) -> None:
        """Derive in_keys and out_keys."""
        self.in_keys = [
            self.input_key or self._key(self.input_mode, "prompt" if self.generate else "full")
        ]
        # Words are only written where there is a reply to write.
        text = self.generate and self.input_mode != "tokens"
        history = self.generate and self.input_mode == "history"
        keys = [self.text_key if text else None, self.masks_key, self.tokens_key]
        keys += [self.log_probs_key if self.return_log_probs else None]
        keys += [self.history_key if history else None]
        self.out_keys = [key for key in keys if key is not None]

    def _key(self, container: str, field: str | None = None) -> NestedKey:
        """Return where a container or a field of it stands; one left out has its own name."""
        name = getattr(self, f"{container}_key") or container
        return name if field is None else unravel_key((name, field))

    def get_new_version(self, **changes: Any) -> "LLMWrapperBase":
        """Return a wrapper over the same weights with some arguments changed.

        Every constructor argument may be named; an unknown one is a ValueError. Another direction
        or mode reads its own field unless `input_key` says otherwise. Attributes in KEPT go along,
        `found` with the same model only.
        """
        unknown = set(changes) - set(self._settings)
        if unknown:
            raise ValueError(
                f"get_new_version got {sorted(unknown)}, expected names among "
                f"{sorted(self._settings)}"
            )
        settings = {**self._settings, **changes}
        moved = [k for k in ("generate", "input_mode") if settings[k] != self._settings[k]]
        reset = {"input_key": None} if moved else {}
        reset |= {"pad_model_input": None} if "generate" in moved else {}
        new = type(self)(**{**settings, **reset, **changes})
        for name in KEPT if new.model is self.model else KEPT[1:]:
            if hasattr(self, name):
                setattr(new, name, getattr(self, name))
        return new

    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Generate or score; batches of any number of dimensions, unbatched ones too.

        Outputs go to `tensordict_out` if it is given, else where `inplace` says.
        """
        if 0 in tensordict.batch_size:
            raise ValueError(f"expected at least one row, got batch_size {tensordict.batch_size}")
        out = self._generate(flat(tensordict)) if self.generate else self._score(flat(tensordict))
        out = self._shaped(out, tensordict)
        if self._settings["device"] is not None:
            out = out.to(home(tensordict)).clear_device_()
        if tensordict_out is None and self.inplace is False:
            return out
        target = tensordict if self.inplace is True else tensordict.empty()
        return put(out, target if tensordict_out is None else tensordict_out)

    def _shaped(self, out: TensorDictBase, like: TensorDictBase) -> TensorDictBase:
        """Return a td [B] or [B, n] in the batch shape of `like`, and n."""
        if like.ndim == 0:
            return out[0]
        if like.ndim == 1:
            return out
        if self.layout is not None and not self.pad_output:
            raise ValueError(
                f"nested outputs have one batch dimension, got batch_size {like.batch_size}; "
                "flatten it, or drop layout"
            )
        return out.reshape(*like.batch_size, *out.batch_size[1:])

    def _form(self) -> Form:
        return Form(self.pad_output, None if self.pad_output else self.layout, self.pad_token_id)

    # The queue.

    def cleanup_batching(self, flush: bool = False) -> None:
        """Empty the batch queue: with `flush` run what waits, else its callers get an error."""
        if self._queue is not None:
            self._queue.cleanup(flush=flush)

    def get_batching_state(self) -> dict[str, Any]:
        """Return the settings of the batch queue and what it holds."""
        return {"batching_enabled": False} if self._queue is None else self._queue.state()

    # The collector, for transforms that ask for the policy behind an env.

    def register_collector(self, collector: Any) -> None:
        """Remember the collector by a weak reference."""
        self._collector: Callable[[], Any] = ref(collector)

    @property
    def collector(self) -> Any:
        """Return the registered collector, or None."""
        return self._collector() if hasattr(self, "_collector") else None

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Return the keys that log-probs are written to."""
        written = [self._key("log_probs", "full")] if self.return_log_probs else []
        return getattr(self, "_log_prob_keys", written)

    @log_prob_keys.setter
    def log_prob_keys(self, value: list[NestedKey]) -> None:
        self._log_prob_keys = value

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """Return what get_dist writes to `tensordict_out` by default; nothing if it generates."""
        return [] if self.generate else ["logits"]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Return the key of the tokens: of those sampled, or of those scored."""
        field = "response" if self.generate else "full"
        return [] if self.tokens_key is None else [self._key("tokens", field)]
