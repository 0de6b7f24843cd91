"""The policy as a TensorDict module: the base of all engines.

A wrapper either generates (prompt -> response) or scores (full -> log-probs). inputs.py reads and
outputs.py writes; an engine computes on token ids.
Token in, token out: in any input mode existing ids are used for generation and scores; a history or
text is tokenised only without ids.
Alignment: entry t of a `full` belongs to token t; unscored entries are 0.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import ref

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Categorical

from policies.chats.chat_template import Renderer
from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.distributions.sequences import LLMMaskedCategorical
from policies.models.find import find_model, load_model, load_tokenizer, token_ids
from policies.padding import predicted, unpad
from policies.random import fold
from policies.sampler import Sampled, Stop
from policies.scorer import max_positions, score_in_parts
from policies.wrappers.batching import BatchedCalls, BatchQueue
from policies.wrappers.generate_kwargs import GenerateKwargs
from policies.wrappers.inputs import InputReader, NestedKey, Records, Sequences, flat
from policies.wrappers.outputs import OutputFormat, input_device, update_in_place
from policies.wrappers.token_dists import TokenDists, show_rows

InputMode = Literal["history", "text", "tokens"]


class LLMWrapperBase(TensorDictModuleBase):
    """Generate with or score by a language model; input and output are one TensorDict.

    A subclass implements `_draw` to generate and `_logits` to score, and may replace `_log_probs`.

    model, tokenizer: objects, folders or names; the default tokenizer is that of the named model.
    input_mode: the kind of input at `input_key`: "history", "text" or "tokens".
    attention_mask_key: the mask of input ids without (masks_key, "all_attention_mask").
    generate_kwargs: see GenerateKwargs. tokenizer_kwargs: for texts.
    pad_output: dense [B, T] outputs; otherwise lazy stacks, or nested tensors of `layout`.
    pad_model_input=False: score packed sequences, without padding.
    inplace: True writes into the input, False into a new td, "empty" into an empty copy of the
    input; None is True unless there are several samples.
    device: of the model (a named one is loaded there): inputs move there and outputs back.
    num_samples: responses per prompt, in an additional batch dimension.
    chat_template_name, chat_template: a known template, or its Jinja text or file.
    *_key: the key of each output; None leaves it out.
    batching: run rows of several threads together, see BatchQueue; sizes alone enable it.
    prefer_tokens: ids have priority over the history or text; False renders even if ids exist.
    score_mask_key: a bool mask [B, T]; only its tokens are scored, the others are 0.
    micro_batch_tokens: the maximum of padded tokens in one scoring forward.

    A `stream` [B] in the input seeds each row; otherwise torch's generator does.
    Log-probs of a response are those of the sampling distribution (temperature, top-p, ...), scores
    those of the full distribution at the temperature.
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
        self.return_log_probs = return_log_probs is not False and log_probs_key is not None
        need_log_probs = generate and self.return_log_probs
        self.limits = GenerateKwargs.read(generate_kwargs or {}, log_probs=need_log_probs)
        _check_settings(settings, self.limits)
        self.tokenizer_kwargs = _tokenizer_options(tokenizer_kwargs or {}, input_mode)
        self._batched: BatchedCalls | None = None  # runs the calls of several threads together
        if batching or (batching is None and (min_batch_size or max_batch_size)):
            least = 1 if min_batch_size is None else min_batch_size
            sizes = {"min_size": least, "max_size": max_batch_size, "timeout": batching_timeout}
            self._batched = BatchedCalls(self, BatchQueue(**sizes))
        for name, value in settings.items():
            if name not in ("model", "device", "tokenizer_kwargs", "return_log_probs"):
                setattr(self, name, value)
        self.generate_kwargs = dict(generate_kwargs or {})
        self._settings = settings | {
            "generate_kwargs": self.generate_kwargs,
            "tokenizer_kwargs": dict(tokenizer_kwargs or {}),
        }
        self.num_samples = num_samples or self.limits.num_samples
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        self.temperature, self.max_new_tokens = self.limits.temperature, self.limits.max_new_tokens
        self.version = 0  # counts the weight syncs
        self._load(model, tokenizer)
        self._set_keys()

    def _load(self, model: Any, tokenizer: Any) -> None:
        """Store model and tokenizer, loaded if they are names, and derived attributes."""
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(find_model(str(tokenizer)))
        if isinstance(model, str | Path):
            files = find_model(str(model))
            tokenizer = load_tokenizer(files) if tokenizer is None else tokenizer
            model = load_model(files, device=self._settings["device"])
        self._settings |= {"model": model, "tokenizer": tokenizer}
        self.tokenizer = tokenizer
        self._set_model(model)
        wanted, actual = torch.device(self._settings["device"] or self.device), self.device
        if wanted.type != actual.type or wanted.index not in (None, actual.index):
            raise ValueError(f"expected the model on {wanted}, it is on {actual}; move it there")
        if tokenizer is None and self.input_mode != "tokens":
            raise ValueError(f"expected a tokenizer for input_mode={self.input_mode!r}, got none")
        template = self.chat_template or self.chat_template_name
        template = template or getattr(tokenizer, "chat_template", None)
        self.renderer: Any = None
        if self.input_mode == "history" or (template and tokenizer is not None):
            self.renderer = Renderer(tokenizer, self.chat_template, self.chat_template_name)
        ends = token_ids(getattr(self.model, "generation_config", None), "eos_token_id")
        ends += token_ids(tokenizer, "eos_token_id")
        ends += self.renderer.stop_ids if self.renderer else ()
        eos_ids = self.limits.eos_token_id
        self.stop_ids = frozenset(ends if eos_ids is None else eos_ids)
        self.stop = Stop(self.stop_ids, self.limits.stop_finder(tokenizer))
        pads = [self.limits.pad_token_id, *token_ids(tokenizer, "pad_token_id"), *ends, 0]
        self.pad_token_id = next(i for i in pads if i is not None)
        self.max_positions = max_positions(self.model)
        if self.generate:
            self.limits.check_positions(self.max_positions)

    def _set_model(self, model: Any) -> None:
        self.model, self.scorer = model, None

    @property
    def room(self) -> float:
        """Return the most tokens of a prompt; inf = any."""
        return self.limits.room(self.max_positions)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        weights = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        return next((w.device for w in weights), torch.device(self._settings["device"] or "cpu"))

    def _set_keys(self) -> None:
        """Derive in_keys and out_keys."""
        self._field = "prompt" if self.generate else "full"
        self.in_keys = [self.input_key or self.key_of(self.input_mode, self._field)]
        keys = [None if self.input_mode == "tokens" else self.text_key]
        keys += [self.masks_key, self.tokens_key]
        keys += [self.log_probs_key if self.return_log_probs else None]
        keys += [self.history_key if self.input_mode == "history" else None]
        keys += ["policy_version", "temperature"] if self.generate else []
        self.out_keys = [key for key in keys if key is not None]

    def key_of(self, container: str, field: str | None = None) -> NestedKey:
        """Return the key of a container or its field; a container without a key has its name."""
        name = getattr(self, f"{container}_key") or container
        return name if field is None else unravel_key((name, field))

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

    def copy_attributes(self, other: Any, *, same_weights: bool) -> None:
        """Copy the attributes that load_policy and weight syncs set on another wrapper."""
        names = ("source", "system_prompt", "classes")
        for name in (*names, "files", "version") if same_weights else names:
            if hasattr(other, name):
                setattr(self, name, getattr(other, name))

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
        td = flat(tensordict)
        out = self._generate(td) if self.generate else self._score(td, temperature_key)
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

    # Generating.

    def _generate(self, td: TensorDictBase) -> TensorDictBase:
        """Return n responses to each prompt of td [B], [B, n]."""
        reader = self.reader(td)
        records = reader.records(td)
        prompts = reader.prompts(td, records)
        self.limits.check_lengths(prompts.attention, self.max_positions)
        size, times = len(prompts.tokens), self.num_samples or 1
        streams = td.get("stream", None)
        if streams is None:
            streams = torch.randint(2**62, (size,))
        if times > 1:
            streams = fold(streams[:, None], torch.arange(times)).flatten()
            prompts = prompts.repeated(times)
            records = records and [row for row in records for _ in range(times)]
        sampled = self.calls._draw(prompts.tokens, prompts.attention, streams.cpu())
        done = self._output_format().generated(prompts, sampled)
        if not self.return_log_probs:
            del done[LogProbs]
        out = self._placed(done, batch_size=[size * times])
        out.set("policy_version", torch.full((size * times,), self.version))
        out.set("temperature", torch.full((size * times,), self.temperature or 1.0))
        if self.input_mode != "tokens":
            responses = self._decode(sampled.ids, sampled.mask & ~sampled.ends(self.stop_ids))
            if self.text_key is not None:
                out.set(self.text_key, self._generated_texts(prompts, sampled, responses))
            if self.history_key is not None and records is not None:
                prompt_chats = td.get(reader.key) if times == 1 else History.from_records(records)
                done = sampled.complete.tolist()
                out.set(self.history_key, _generated_chats(prompt_chats, records, responses, done))
        return out if self.num_samples is None else out.reshape(size, times)

    def _generated_texts(self, prompts: Sequences, sampled: Sampled, responses: list[str]) -> Text:
        """Return the texts of prompts, responses and both."""
        prompt = self._decode(prompts.tokens, prompts.attention)
        ids = torch.cat([prompts.tokens, sampled.ids], -1)
        full = self._decode(ids, torch.cat([prompts.attention, sampled.mask], -1))
        return Text(prompt=prompt, response=responses, full=full, batch_size=[len(responses)])

    def _decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        rows = [row.tolist() for row in unpad(ids, mask)]
        skip = self.limits.skip_special_tokens
        return self.tokenizer.batch_decode(rows, skip_special_tokens=skip)

    # Scoring.

    def _score(self, td: TensorDictBase, temperature_key: NestedKey | None) -> TensorDictBase:
        """Return masks, tokens, log-probs and texts of the full sequences of td [B]."""
        reader = self.reader(td)
        seq = reader.sequences(td)
        done = self._output_format().scored(seq, self._scored(td, seq, temperature_key))
        out = self._placed(done, batch_size=td.batch_size)
        if self.text_key is not None and self.input_mode != "tokens":
            out.set(self.text_key, self._scored_texts(td, seq, reader))
        if self.history_key is not None and reader.records(td) is not None:
            chats = ChatHistory(full=td.get(reader.key), batch_size=td.batch_size)
            out.set(self.history_key, chats)
        return out

    def _scored_texts(self, td: TensorDictBase, seq: Sequences, reader: InputReader) -> Text:
        """Return the texts of full sequences; the response leaves out its end-of-turn token."""
        parts, decode = seq.parts(), self._decode
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

    def _scored(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None = None
    ) -> Tensor:
        """Return the log-probs [B, T] of a td's sequences."""
        keep = None
        if self.score_mask_key is not None:
            keep = self.reader(td).mask_at(td, self.score_mask_key)
        group = td.get("group_id", None)
        group = None if group is None else group.to(self.device)
        scale = self.scoring_temperature(td, temperature_key)
        return self.calls._log_probs(seq.tokens, seq.attention, keep, scale, group)

    def scoring_temperature(
        self, td: TensorDictBase, key: NestedKey | None = None
    ) -> Tensor | float:
        """Return the scoring temperature: that of td [B] at `key`, else the wrapper's."""
        temperatures = None if key is None else td.get(key, None)
        return (self.temperature or 1.0) if temperatures is None else temperatures.to(self.device)

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Tensor | list[Tensor]:
        """Return the log-probs of the response, padded right (or ragged if outputs are).

        get_kwargs: as_list, as_padded_tensor, as_nested_tensor, layout, padding_value and _side.
        """
        if self.generate:
            raise RuntimeError("log_prob scores; expected generate=False, got generate=True")
        td = flat(data)
        seq = self.reader(td).sequences(td)
        part = seq.parts().get("response")
        if part is None:
            raise ValueError(
                "expected prompt tokens or an assistant mask, found neither; use "
                f"input_mode='history' or give {self.key_of('tokens', 'prompt')}"
            )
        get_kwargs = get_kwargs or {"as_padded_tensor": self.pad_output}
        return show_rows(unpad(self._scored(td, seq), part), data.batch_size, **get_kwargs)

    # Methods of engines, on token ids.

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        """Return a response to each prompt [B, T], padded left; streams [B] seed the rows."""
        raise NotImplementedError(f"{type(self).__name__} does not generate: it has no _draw")

    def _logits(self, tokens: Tensor, attention: Tensor) -> Tensor:
        """Return logits [B, T, V] at temperature 1; entry t predicts token t from those before."""
        raise NotImplementedError(f"{type(self).__name__} does not score: it has no _logits")

    def _log_probs(
        self,
        tokens: Tensor,
        attention: Tensor,
        keep: Tensor | None,
        temperature: Tensor | float,
        group_id: Tensor | None,
    ) -> Tensor:
        """Return the log-probs [B, T] of the tokens kept (None = all), 0 elsewhere.

        `temperature` is a number or [B]; rows of one `group_id` [B] share their prompt.
        """
        if self.scorer is not None:
            options = {"temperature": temperature, "group_id": group_id, **self._packing()}
            limit = self.micro_batch_tokens
            return score_in_parts(self.scorer, tokens, attention, keep, limit=limit, **options)
        temperature = torch.as_tensor(temperature, device=tokens.device).reshape(-1, 1, 1)
        logits = self._logits(tokens, attention).float() / temperature  # [B, T, V]
        table = logits.log_softmax(-1)
        values = table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return values.masked_fill(~predicted(attention, keep), 0)

    def _packing(self) -> dict[str, bool]:
        return {"pack": True} if self.pad_model_input is False else {}

    @property
    def calls(self) -> Any:
        """Return the object for these calls: this one, or the queue of several threads."""
        return self if self._batched is None else self._batched

    # Reading and writing.

    def reader(self, td: TensorDictBase) -> InputReader:
        """Return the reader of a td."""
        key = self.in_keys[0]
        if self.input_key is not None and isinstance(
            td.get(key, None), Text | Tokens | ChatHistory
        ):
            key = unravel_key((key, self._field))
        return InputReader(self, key)

    def _output_format(self) -> OutputFormat:
        layout = None if self.pad_output else self.layout
        return OutputFormat(self.pad_output, layout, self.pad_token_id)

    def _placed(self, done: dict[type, Any], *, batch_size: Sequence[int]) -> TensorDict:
        """Return a td with the containers at their keys, without those that have none."""
        keys = {Tokens: self.tokens_key, Masks: self.masks_key, LogProbs: self.log_probs_key}
        out = TensorDict(batch_size=batch_size)
        for kind, container in done.items():
            if keys[kind] is not None:
                out.set(keys[kind], container)
        return out

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

        Padded (the default), it is masked by the attention mask, or by that at `mask_key`: an
        LLMMaskedCategorical whose padding holds `padding_value` (0). Ragged sequences are padded on
        `padding_side`; padded ones stay unchanged. With `as_nested_tensor` it is a Categorical
        over nested logits of `layout` (strided), with as_padded_tensor=False one over rows of equal
        lengths; neither has a mask. `tensordict_out` gets the logits, at `logits_key`.
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
        """Remember the collector by a weak reference."""
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


def _tokenizer_options(kwargs: dict[str, Any], input_mode: str) -> dict[str, Any]:
    """Return the tokenizer_kwargs that change the ids of a text; the wrapper pads itself."""
    reserved = ("return_attention_mask", "return_tensors", "padding_side", "padding")
    options = {k: v for k, v in kwargs.items() if k not in reserved}
    if options and input_mode != "text":
        raise ValueError(f"tokenizer_kwargs {sorted(options)} are for input_mode='text' only")
    return options


def _generated_chats(
    prompts: History, records: Records, responses: list[str], complete: list[bool]
) -> ChatHistory:
    """Return the histories of prompts (messages `records`), of responses and of both."""
    turns = [
        [{"role": "assistant", "content": text, "is_complete": done}]
        for text, done in zip(responses, complete, strict=True)
    ]
    both = [[*chat, *turn] for chat, turn in zip(records, turns, strict=True)]
    response, full = History.from_records(turns), History.from_records(both)
    return ChatHistory(prompt=prompts, response=response, full=full, batch_size=[len(turns)])
