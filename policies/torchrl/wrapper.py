"""TorchRL's options for a policy: the base of all engines.

policies/chat_policy.py has what a run needs. LLMWrapperBase adds input as text or ids, ragged rows,
several samples per prompt, other keys and targets, batches over several threads, packed scoring,
and the distributions for losses. inputs.py reads, outputs.py writes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import ref

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torch.distributions import Categorical

from policies.chat_policy import (
    ChatPolicy,
    NestedKey,
    Prompts,
    Records,
    Sequences,
    update_in_place,
)
from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.chats.renderer import Renderer
from policies.models.find import find_model, load_model, load_tokenizer
from policies.padding import predicted, unpad
from policies.random import fold
from policies.sampler import Sampled
from policies.scorer import Scorer
from policies.torchrl.batching import BatchedCalls, BatchQueue
from policies.torchrl.generate_kwargs import GenerateKwargs
from policies.torchrl.inputs import InputReader, flat
from policies.torchrl.outputs import OutputFormat, input_device
from policies.torchrl.sequences import LLMMaskedCategorical
from policies.torchrl.token_dists import TokenDists, show_rows

InputMode = Literal["history", "text", "tokens"]


class LLMWrapperBase(ChatPolicy):
    """Generate with or score by a language model; input and output are one TensorDict.

    A subclass implements `_draw` to generate and `_logits` to score, and may replace `_log_probs`.

    model, tokenizer: objects, folders or names; the default tokenizer is the named model's.
    input_mode: the kind of input at `input_key`: "history", "text" or "tokens".
    attention_mask_key: the mask of input ids without (masks_key, "all_attention_mask").
    generate_kwargs: see GenerateKwargs. tokenizer_kwargs: for texts.
    pad_output: dense [B, T] outputs; otherwise lazy stacks, or nested tensors of `layout`.
    pad_model_input=False: score packed sequences, without padding.
    inplace: True writes into the input, False into a new td, "empty" into an empty copy of the
    input; None is True unless there are several samples.
    device: the model's device (a named model is loaded there); inputs move there, outputs back.
    num_samples: responses per prompt, in an additional batch dimension.
    chat_template_name, chat_template: a known template, or its Jinja text or file.
    *_key: the key of each output; None leaves it out.
    batching: run rows of several threads in one batch, see BatchQueue; setting sizes enables it.
    prefer_tokens: ids have priority over the history or text; False renders even if ids exist.

    score_mask_key, micro_batch_tokens, seeds of rows and log-probs: see ChatPolicy.
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
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        log_probs = return_log_probs is not False and log_probs_key is not None
        limits = GenerateKwargs.read(generate_kwargs or {}, log_probs=generate and log_probs)
        _check_settings(settings, limits)
        options = _tokenizer_options(tokenizer_kwargs or {}, input_mode)
        queue = None
        if batching or (batching is None and (min_batch_size or max_batch_size)):
            least = 1 if min_batch_size is None else min_batch_size
            queue = BatchQueue(min_size=least, max_size=max_batch_size, timeout=batching_timeout)
        model, tokenizer = _loaded(model, tokenizer, device)
        if tokenizer is None and input_mode != "tokens":
            raise ValueError(f"expected a tokenizer for input_mode={input_mode!r}, got none")
        renderer = None
        template = chat_template or chat_template_name or getattr(tokenizer, "chat_template", None)
        if input_mode == "history" or (template and tokenizer is not None):
            renderer = Renderer(tokenizer, chat_template, chat_template_name)
        samples = num_samples or limits.num_samples
        super().__init__(
            model,
            tokenizer=tokenizer,
            renderer=renderer,
            limits=limits,
            generate=generate,
            inplace=(samples is None) if inplace is None else inplace,
            text_key=text_key,
            log_probs_key=log_probs_key,
            score_mask_key=score_mask_key,
            micro_batch_tokens=micro_batch_tokens,
        )
        self._field = "prompt" if generate else "full"
        self.history_key, self.tokens_key, self.masks_key = history_key, tokens_key, masks_key
        self.input_mode, self.input_key = input_mode, input_key
        self.attention_mask_key, self.prefer_tokens = attention_mask_key, prefer_tokens
        self.generate_kwargs, self.tokenizer_kwargs = dict(generate_kwargs or {}), options
        self.pad_output, self.layout = pad_output, layout
        self.num_samples, self.return_log_probs = samples, log_probs
        self.chat_template, self.chat_template_name = chat_template, chat_template_name
        self.batching, self.batching_timeout = batching, batching_timeout
        self.min_batch_size, self.max_batch_size = min_batch_size, max_batch_size
        self._batched = None if queue is None else BatchedCalls(self, queue)
        self.default_device = torch.device(device or "cpu")
        self.pad_model_input = pad_model_input
        self.scoring_options = {} if pad_model_input is not False else {"pack": True}
        if self.scoring_options and isinstance(self.scorer, Scorer):
            self.scorer.check_packing()
        self._settings = settings | {
            # Every version shares the scorer, autocast included.
            "model": self.model if self.scorer is None else self.scorer,
            "tokenizer": tokenizer,
            "generate_kwargs": self.generate_kwargs,
            "tokenizer_kwargs": dict(tokenizer_kwargs or {}),
        }
        wanted, actual = torch.device(device or self.device), self.device
        if wanted.type != actual.type or wanted.index not in (None, actual.index):
            raise ValueError(f"expected the model on {wanted}, it is on {actual}; move it there")
        self._set_keys()

    def _set_keys(self) -> None:
        """Derive in_keys and out_keys from the input mode."""
        self.in_keys = [self.input_key or self.key_of(self.input_mode, self._field)]
        keys = [None if self.input_mode == "tokens" else self.text_key]
        keys += [self.masks_key, self.tokens_key]
        keys += [self.log_probs_key if self.return_log_probs else None]
        keys += [self.history_key if self.input_mode == "history" else None]
        keys += ["policy_version", "temperature"] if self.generate else []
        self.out_keys = [key for key in keys if key is not None]

    def get_new_version(self, **changes: Any) -> "LLMWrapperBase":
        """Return a wrapper over the same weights with some constructor arguments changed.

        A change of `generate` or `input_mode` resets `input_key` unless it is an argument.
        """
        if unknown := sorted(set(changes) - set(self._settings)):
            raise ValueError(f"expected arguments among {sorted(self._settings)}, got {unknown}")
        settings = {**self._settings, **changes}
        moved = [k for k in ("generate", "input_mode") if settings[k] != self._settings[k]]
        reset = {"input_key": None} if moved else {}
        reset |= {"pad_model_input": None} if "generate" in moved else {}
        new = type(self)(**{**settings, **reset, **changes})
        new.copy_attributes(self, same_weights=new.model is self.model)
        return new

    def for_rollouts(self) -> "LLMWrapperBase":
        """Return this wrapper as `trainer.collect` calls it: dense, in place, without texts."""
        options = {"pad_output": True, "return_log_probs": True, "text_key": None}
        return as_generator(self, **options)

    def at_temperature(self, temperature: float) -> "LLMWrapperBase":
        """Return this wrapper at another sampling temperature."""
        kwargs = {**self.generate_kwargs, "temperature": temperature}
        return self.get_new_version(generate_kwargs=kwargs)

    def key_of(self, container: str, field: str | None = None) -> NestedKey:
        """Return the key of a container or its field; a container without a key has its name."""
        name = getattr(self, f"{container}_key") or container
        return name if field is None else unravel_key((name, field))

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        temperature_key: NestedKey | None = None,
    ) -> TensorDictBase:
        """Generate or score a batch of any number of dimensions.

        Outputs go to `tensordict_out`, else to the target of `inplace`. Scores are at the
        temperatures [B] at `temperature_key`, else at the wrapper's temperature.
        """
        out = self.outputs(flat(tensordict), temperature_key)
        if tensordict.ndim != 1:
            shape = (*tensordict.batch_size, *out.batch_size[1:])
            out = out.reshape(shape) if tensordict.ndim else out[0]
        if self._settings["device"] is not None:
            out = out.to(input_device(tensordict)).clear_device_()
        if tensordict_out is None and self.inplace is False:
            return out
        target = tensordict if self.inplace is True else tensordict.empty()
        target = target if tensordict_out is None else tensordict_out
        if not self.generate and self.history_key in out and self.history_key in target:
            del out[self.history_key]  # the target keeps its input history
        return update_in_place(out, target)

    # Methods of ChatPolicy, with TorchRL's options.

    def records(self, td: TensorDictBase) -> Records | None:
        """Return the messages of each chat; None without a history."""
        return self.reader(td).records(td)

    def prompt_ids(self, td: TensorDictBase, records: Records | None = None) -> Sequences:
        """Return the ids of the prompts, padded left; `records` are td's messages."""
        reader = self.reader(td)
        return reader.prompts(td, reader.records(td) if records is None else records)

    def sequences(self, td: TensorDictBase) -> Sequences:
        """Return the full sequences of td: its ids, else its rendered chats or its texts."""
        return self.reader(td).sequences(td)

    def mask_at(self, td: TensorDictBase, key: NestedKey) -> Tensor | None:
        """Return the bool mask [B, T] at a key; None without one."""
        return self.reader(td).mask_at(td, key)

    def reader(self, td: TensorDictBase) -> InputReader:
        """Return the reader of a td; the value at `input_key` may be a container."""
        key = self.in_keys[0]
        if self.input_key is not None and isinstance(
            td.get(key, None), Text | Tokens | ChatHistory
        ):
            key = unravel_key((key, self._field))
        return InputReader(self, key)

    def _prompts(self, td: TensorDictBase) -> Prompts:
        """Return each prompt of td [B] n times in a row, [B * n]."""
        prompts = super()._prompts(td)
        if prompts.records is not None:
            prompts = replace(prompts, chats=td.get(self.reader(td).key))
        times = self.num_samples or 1
        if times == 1:
            return prompts
        streams = fold(prompts.streams[:, None], torch.arange(times)).flatten()  # [B * n]
        records = chats = None
        if prompts.records is not None:
            records = [row for row in prompts.records for _ in range(times)]
            chats = History.from_records(records)
        known = {name: mask for name, mask in vars(prompts.ids).items() if mask is not None}
        ids = Sequences(**{name: mask.repeat_interleave(times, 0) for name, mask in known.items()})
        return Prompts(ids, streams, chats, records)

    def _generate(self, prompts: Prompts) -> TensorDictBase:
        """Return n responses to each prompt, [B, n]."""
        ids, streams = prompts.ids, prompts.streams.cpu()  # [B * n, P], [B * n]
        sampled = self._calls._draw(ids.tokens, ids.attention, streams)
        out = self._responses(prompts, sampled)
        times = self.num_samples
        return out if times is None else out.reshape(len(out) // times, times)

    def _containers(self, prompts: Sequences, sampled: Sampled) -> TensorDict:
        """Return tokens, masks and log-probs at their keys, dense or ragged."""
        real = {"prompt": prompts.attention, "response": sampled.mask}  # [B, P], [B, R]
        real["full"] = torch.cat([*real.values()], -1)  # [B, T]
        done = self._output_format().generated(self._dense(prompts, sampled), real)
        return self._placed(done, len(sampled.ids))

    def container_keys(self) -> dict[type, NestedKey | None]:
        """Return the keys of tokens, masks and log-probs."""
        log_probs = self.log_probs_key if self.return_log_probs else None
        return {Tokens: self.tokens_key, Masks: self.masks_key, LogProbs: log_probs}

    def _add_chats(self, out: TensorDictBase, prompts: Prompts, sampled: Sampled) -> None:
        """Write texts and histories unless the input is ids."""
        if self.input_mode == "tokens":
            return
        super()._add_chats(out, prompts, sampled)
        if self.history_key != "history" and prompts.records is not None:
            chats = out.pop("history")
            if self.history_key is not None:
                out.set(self.history_key, chats)

    def _score(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None
    ) -> TensorDictBase:
        """Return masks, tokens, log-probs, texts and histories of the full sequences of td."""
        reader = self.reader(td)
        parts = reader.parts(td, seq)
        scores = self._scored(td, seq, temperature_key)  # [B, T]
        out = self._placed(self._output_format().scored(seq, scores, parts=parts), len(td))
        if self.text_key is not None and self.input_mode != "tokens":
            out.set(self.text_key, self._scored_texts(td, seq, parts=parts))
        if self.history_key is not None and reader.records(td) is not None:
            chats = ChatHistory(full=td.get(reader.key), batch_size=td.batch_size)
            out.set(self.history_key, chats)
        return out

    def _scored(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None = None
    ) -> Tensor:
        """Return the log-probs [B, T] of a td's sequences."""
        return self._calls._log_probs(*self._to_score(td, seq, temperature_key))

    @property
    def _calls(self) -> Any:
        """Return the object that has `_draw` and `_log_probs`: with batching the queue."""
        return self if self._batched is None else self._batched

    def _scored_texts(
        self, td: TensorDictBase, seq: Sequences, *, parts: dict[str, Tensor]
    ) -> Text:
        """Return the texts of full sequences; the response leaves out its end-of-turn token."""
        reader, decode = self.reader(td), self._decode
        texts = {"full": decode(seq.tokens, seq.attention)}
        if self.input_mode == "text" and td.get(reader.key, None) is not None:
            texts["full"] = reader.texts(td)
        if "prompt" in parts:
            after = parts["response"]
            last = after & (after.flip(-1).cumsum(-1).flip(-1) == 1)
            ends = last & torch.isin(seq.tokens, seq.tokens.new_tensor(sorted(self.stop_ids)))
            texts["prompt"] = decode(seq.tokens, parts["prompt"])
            texts["response"] = decode(seq.tokens, after & ~ends)
        return Text(**texts, batch_size=td.batch_size)

    # Methods of engines, on token ids.

    def _logits(self, tokens: Tensor, attention: Tensor) -> Tensor:
        """Return logits [B, T, V] at temperature 1; entry t predicts token t."""
        raise NotImplementedError(f"{type(self).__name__} does not score: it has no _logits")

    def _log_probs(
        self,
        tokens: Tensor,
        attention: Tensor,
        keep: Tensor | None,
        temperature: Tensor | float,
        group_id: Tensor | None,
    ) -> Tensor:
        """Return the log-probs [B, T] of the scorer, or without one of the logits."""
        if self.scorer is not None:
            args = (tokens, attention, keep, temperature, group_id)
            return super()._log_probs(*args, **self.scoring_options)
        scale = torch.as_tensor(temperature, device=tokens.device).reshape(-1, 1, 1)  # [B, 1, 1]
        logits = self._logits(tokens, attention).float() / scale  # [B, T, V]
        table = logits.log_softmax(-1)  # [B, T, V]
        values = table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # [B, T]
        return values.masked_fill(~predicted(attention, keep), 0)

    def _output_format(self) -> OutputFormat:
        layout = None if self.pad_output else self.layout
        return OutputFormat(self.pad_output, layout, self.pad_token_id)

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Tensor | list[Tensor]:
        """Return the log-probs of the response, padded right (or ragged if outputs are).

        get_kwargs: as_list, as_padded_tensor, as_nested_tensor, layout, padding_value and _side.
        """
        if self.generate:
            raise RuntimeError("log_prob scores; expected generate=False, got generate=True")
        td = flat(data)
        reader = self.reader(td)
        seq = reader.sequences(td)
        part = reader.parts(td, seq).get("response")
        if part is None:
            raise ValueError(
                "expected prompt tokens or an assistant mask, found neither; use "
                f"input_mode='history' or give {self.key_of('tokens', 'prompt')}"
            )
        get_kwargs = get_kwargs or {"as_padded_tensor": self.pad_output}
        return show_rows(unpad(self._scored(td, seq), part), data.batch_size, **get_kwargs)

    # Distributions for losses; a generating wrapper refuses.

    def get_dist(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        logits_key: NestedKey = "logits",
        mask_key: NestedKey | None = None,
        as_padded_tensor: bool | None = None,
        as_nested_tensor: bool | None = None,
        padding_value: float | None = None,
        padding_side: str = "left",
        layout: torch.layout | None = None,
        **_: Any,
    ) -> LLMMaskedCategorical | Categorical:
        """Return the distribution of each token given those before it, over [B, T, V] logits.

        By default it is an LLMMaskedCategorical on padded logits, masked by the attention mask or
        by the mask at `mask_key`; padding has `padding_value` (0). Ragged sequences are padded on
        `padding_side`; padded sequences stay unchanged. With `as_nested_tensor` it is a Categorical
        over nested logits of `layout` (strided), with as_padded_tensor=False a Categorical over
        rows of equal lengths; neither has a mask. The logits are written to `tensordict_out` at
        `logits_key`.
        """
        unpadded = as_nested_tensor or as_padded_tensor is False
        if unpadded and (mask_key is not None or as_padded_tensor):
            raise ValueError("expected padded logits for a mask; drop mask_key or as_padded_tensor")
        where = {"tensordict_out": tensordict_out, "logits_key": logits_key}
        dists = TokenDists(self, tensordict, padding_side=padding_side, **where)
        if as_nested_tensor:
            return dists.nested(layout or torch.strided)
        if as_padded_tensor is False:
            return dists.stacked()
        return dists.masked(dists.mask_at(mask_key or "all_attention_mask"), padding_value)

    def _get_dist_with_prompt_mask(
        self,
        tensordict: TensorDictBase,
        tokens_key: NestedKey | None = None,
        *,
        assistant_mask_key: NestedKey | None = None,
        attention_mask_key: NestedKey | None = None,
        **options: Any,
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to tokens after the prompt, else by the assistant mask."""
        dists = TokenDists(self, tensordict, **options)
        after = dists.after_prompt(tokens_key)
        if after is None:
            return dists.masked(dists.mask_at(assistant_mask_key or "all_assistant_mask"))
        return dists.masked(dists.mask_at(attention_mask_key or "all_attention_mask") & after)

    def _get_dist_with_assistant_mask(
        self,
        tensordict: TensorDictBase,
        assistant_mask_key: NestedKey = "all_assistant_mask",
        **options: Any,
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to assistant tokens; write new ids to tokens.full."""
        dists = TokenDists(self, tensordict, **options)
        mask = dists.mask_at(assistant_mask_key)
        dists.keep_ids(self.key_of("tokens", "full"))
        return dists.masked(mask)

    def _get_dist_with_attention_mask(
        self,
        tensordict: TensorDictBase,
        attention_mask_key: NestedKey = "all_attention_mask",
        **options: Any,
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to real tokens."""
        dists = TokenDists(self, tensordict, **options)
        return dists.masked(dists.mask_at(attention_mask_key))

    def _get_dist_with_custom_mask(
        self, tensordict: TensorDictBase, mask: Tensor, **options: Any
    ) -> LLMMaskedCategorical:
        """Return the distribution under a bool mask, one entry per token."""
        return TokenDists(self, tensordict, **options).masked(mask)

    _get_sft_dist = _get_dist_with_prompt_mask
    _get_rlhf_dist = _get_dist_with_assistant_mask
    _get_generic_dist = _get_dist_with_attention_mask

    # The collector, for transforms that need the policy of an env.

    def register_collector(self, collector: Any) -> None:
        """Store the collector as a weak reference."""
        self._collector: Callable[[], Any] = ref(collector)

    @property
    def collector(self) -> Any:
        """Return the registered collector, or None."""
        return self._collector() if hasattr(self, "_collector") else None

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Return the keys that log-probs are written to."""
        written = [self.key_of("log_probs", "full")] if self.return_log_probs else []
        return getattr(self, "_log_prob_keys", written)

    @log_prob_keys.setter
    def log_prob_keys(self, value: list[NestedKey]) -> None:
        self._log_prob_keys = value

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """Return the keys that get_dist writes to `tensordict_out`; [] if it generates."""
        return [] if self.generate else ["logits"]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Return the key of the sampled or scored tokens."""
        field = "response" if self.generate else "full"
        return [] if self.tokens_key is None else [self.key_of("tokens", field)]


def as_generator(policy: Any, *, input_mode: str = "history", **options: Any) -> Any:
    """Return the wrapper with these options and inplace=True, a copy if its options differ.

    Raise ValueError unless it generates one response per prompt in this mode.
    """
    options["inplace"] = True
    if policy.num_samples is not None or policy.input_mode != input_mode or not policy.generate:
        raise ValueError(
            f"collect expects a policy with generate=True, {input_mode=} and num_samples=None, got "
            f"{policy.generate}, {policy.input_mode!r}, {policy.num_samples}"
        )
    if all(getattr(policy, name) == value for name, value in options.items()):
        return policy
    return policy.get_new_version(**options)


def _check_settings(settings: dict[str, Any], limits: GenerateKwargs) -> None:
    """Raise ValueError for incompatible arguments of a wrapper."""
    mode, modes = settings["input_mode"], get_args(InputMode)
    if mode not in modes:
        raise ValueError(f"input_mode must be one of {modes}, got {mode!r}")
    silent = settings["return_log_probs"] is False or settings["log_probs_key"] is None
    if not settings["generate"] and silent:
        raise ValueError("return_log_probs must be True when generate=False, with a log_probs_key")
    if settings["generate"] and settings["pad_model_input"] is not None:
        raise ValueError("pad_model_input is not supported when generate=True")
    wanted, named = settings["num_samples"], limits.num_samples
    if wanted is not None and (wanted < 1 or named not in (None, wanted)):
        raise ValueError(f"expected num_samples >= 1, got num_samples={wanted} and n={named}")
    if settings["generate"] and (wanted or named) and settings["inplace"] in (True, "empty"):
        raise ValueError("num_samples changes the batch shape; expected inplace=False (or None)")


def _loaded(model: Any, tokenizer: Any, device: torch.device | str | None) -> tuple[Any, Any]:
    """Return the model and the tokenizer, loaded if they are names."""
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(find_model(str(tokenizer)))
    if isinstance(model, str | Path):
        files = find_model(str(model))
        tokenizer = load_tokenizer(files) if tokenizer is None else tokenizer
        model = load_model(files, device=device)
    return model, tokenizer


def _tokenizer_options(kwargs: dict[str, Any], input_mode: str) -> dict[str, Any]:
    """Return the tokenizer_kwargs that change the ids of a text; padding is the wrapper's."""
    reserved = ("return_attention_mask", "return_tensors", "padding_side", "padding")
    options = {k: v for k, v in kwargs.items() if k not in reserved}
    if options and input_mode != "text":
        raise ValueError(f"tokenizer_kwargs {sorted(options)} are for input_mode='text' only")
    return options
