"""What a training run computes with its policy: chats or ids in, responses or scores out.

`load_policy` loads it, as a TransformersWrapper: this class, its engine (`_draw`, `_logits`) and
between them LLMWrapperBase, which adds the options of TorchRL's API. Of those a run sets
- to sample: pad_output=True, inplace=True, text_key=None, and in a later turn of a chat the ids so
  far as `tokens.prompt` with `attention_mask`;
- for its reference: generate=False, inplace=False, score_mask_key, micro_batch_tokens, and a
  log_probs_key of its own.
With these settings LLMWrapperBase does what is written here.

inputs.py reads and outputs.py writes; an engine computes on token ids.
Token in, token out: existing ids are used for generation and scores; a history is tokenised only
without ids.
Alignment: entry t of a `full` belongs to token t; unscored entries are 0.
"""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from policies.chats.containers import LogProbs, Masks, Text, Tokens
from policies.chats.renderer import Renderer
from policies.models.find import token_ids
from policies.padding import unpad
from policies.sampler import Sampled, Stop
from policies.scorer import max_positions, score_in_parts
from policies.wrappers.generate_kwargs import GenerateKwargs
from policies.wrappers.inputs import InputReader, NestedKey, Prompts, Sequences
from policies.wrappers.outputs import OutputFormat, generated_chats, update_in_place


class ChatPolicy(TensorDictModuleBase):
    """Generate responses to prompts or score full sequences, a TensorDict [B] at a time.

    limits: lengths, temperature, filters and stops of generation.
    generate: False scores.
    inplace: write into the input, else into a new TensorDict.
    *_key: the key of each output; None leaves it out.
    score_mask_key: a bool mask [B, T]; only its tokens are scored, the others are 0.
    micro_batch_tokens: the maximum of padded tokens in one scoring forward.

    A `stream` [B] in the input seeds each row; otherwise torch's generator does.
    Log-probs of a response are those of the sampling distribution (temperature, top-p, ...), scores
    those of the full distribution at the temperature.
    """

    # The same in every run; arguments of LLMWrapperBase.
    input_mode: str = "history"
    prefer_tokens: bool = True  # to a history
    attention_mask_key: NestedKey = "attention_mask"  # of ids without masks.all_attention_mask
    num_samples: int | None = None  # None is one per prompt
    return_log_probs: bool = True
    default_device = torch.device("cpu")  # of a model without weights

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any,
        renderer: Renderer | None,
        limits: GenerateKwargs,
        generate: bool = True,
        inplace: bool | str = True,
        history_key: NestedKey | None = "history",
        text_key: NestedKey | None = "text",
        tokens_key: NestedKey | None = "tokens",
        masks_key: NestedKey | None = "masks",
        log_probs_key: NestedKey | None = "log_probs",
        score_mask_key: NestedKey | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer, self.limits = tokenizer, limits
        self.renderer: Any = renderer
        self.generate, self.inplace = generate, inplace
        self.history_key, self.text_key = history_key, text_key
        self.tokens_key, self.masks_key = tokens_key, masks_key
        self.log_probs_key, self.score_mask_key = log_probs_key, score_mask_key
        self.micro_batch_tokens = micro_batch_tokens
        self.scoring_options: dict[str, Any] = {}  # further arguments of the scorer
        self.temperature, self.max_new_tokens = limits.temperature, limits.max_new_tokens
        self.version = 0  # counts the weight syncs
        self._set_model(model)
        self._set_ends()
        self._field = "prompt" if generate else "full"
        self.in_keys = [self.key_of("history", self._field)]
        keys = [text_key, masks_key, tokens_key, log_probs_key, history_key]
        keys += ["policy_version", "temperature"] if generate else []
        self.out_keys = [key for key in keys if key is not None]

    def _set_model(self, model: Any) -> None:
        """Store the model, and the scorer that computes with it if the engine has one."""
        self.model, self.scorer = model, None

    def _set_ends(self) -> None:
        """Find the ids that end a response, the id of padding, and the longest context."""
        ends = token_ids(getattr(self.model, "generation_config", None), "eos_token_id")
        ends += token_ids(self.tokenizer, "eos_token_id")
        ends += self.renderer.stop_ids if self.renderer else ()
        eos_ids = self.limits.eos_token_id
        self.stop_ids = frozenset(ends if eos_ids is None else eos_ids)
        self.stop = Stop(self.stop_ids, self.limits.stop_finder(self.tokenizer))
        pads = [self.limits.pad_token_id, *token_ids(self.tokenizer, "pad_token_id"), *ends, 0]
        self.pad_token_id = next(i for i in pads if i is not None)
        self.max_positions = max_positions(self.model)
        if self.generate:
            self.limits.check_positions(self.max_positions)

    @property
    def room(self) -> float:
        """Return the most tokens of a prompt; inf = any."""
        return self.limits.room(self.max_positions)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        weights = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        return next((w.device for w in weights), self.default_device)

    def key_of(self, container: str, field: str | None = None) -> NestedKey:
        """Return the key of a container or its field; a container without a key has its name."""
        name = getattr(self, f"{container}_key") or container
        return name if field is None else unravel_key((name, field))

    def forward(
        self, tensordict: TensorDictBase, *, temperature_key: NestedKey | None = None
    ) -> TensorDictBase:
        """Generate or score td [B].

        Scores are at the temperatures [B] at `temperature_key`, else at the policy's temperature.
        """
        out = self.outputs(tensordict, temperature_key)
        return update_in_place(out, tensordict) if self.inplace else out

    def outputs(self, td: TensorDictBase, temperature_key: NestedKey | None) -> TensorDictBase:
        """Return the responses to the prompts of td [B], or the scores of its sequences."""
        if self.generate:
            return self._generate(self._prompts(td))
        return self._score(td, self.reader(td).sequences(td), temperature_key)

    # Generating.

    def _prompts(self, td: TensorDictBase) -> Prompts:
        """Return the prompts of td, which must fit the limits."""
        reader = self.reader(td)
        records = reader.records(td)
        chats = None if records is None else td.get(reader.key)
        ids = reader.prompts(td, records)
        self.limits.check_lengths(ids.attention, self.max_positions)
        streams = td.get("stream", None)  # [B]
        if streams is None:
            streams = torch.randint(2**62, (len(ids.tokens),))  # [B]
        return Prompts(ids, streams, chats, records)

    def _generate(self, prompts: Prompts) -> TensorDictBase:
        """Return a response to each prompt: tokens, masks, log-probs, texts and histories."""
        ids, streams = prompts.ids, prompts.streams.cpu()  # [B, P], [B]
        sampled = self.calls._draw(ids.tokens, ids.attention, streams)
        size = len(streams)
        out = self._placed(self._output_format().generated(ids, sampled), size)
        out.set("policy_version", torch.full((size,), self.version))  # [B]
        out.set("temperature", torch.full((size,), self.temperature or 1.0))  # [B]
        self._add_chats(out, prompts, sampled)
        return out

    def _add_chats(self, out: TensorDictBase, prompts: Prompts, sampled: Sampled) -> None:
        """Write the texts and histories of prompts, of responses and of both."""
        responses = self._decode(sampled.ids, sampled.mask & ~sampled.ends(self.stop_ids))
        if self.text_key is not None:
            ids, attention = prompts.ids.tokens, prompts.ids.attention  # [B, P] each
            full = torch.cat([ids, sampled.ids], -1)  # [B, T]
            real = torch.cat([attention, sampled.mask], -1)  # [B, T]
            text = Text(
                prompt=self._decode(ids, attention),
                response=responses,
                full=self._decode(full, real),
                batch_size=[len(responses)],
            )
            out.set(self.text_key, text)
        if self.history_key is not None and prompts.records is not None:
            complete = sampled.complete.tolist()
            out.set(self.history_key, generated_chats(prompts, responses, complete))

    def _decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        rows = [row.tolist() for row in unpad(ids, mask)]
        skip = self.limits.skip_special_tokens
        return self.tokenizer.batch_decode(rows, skip_special_tokens=skip)

    # Scoring.

    def _score(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None
    ) -> TensorDictBase:
        """Return masks, tokens and log-probs of the full sequences of td."""
        scores = self._scored(td, seq, temperature_key)  # [B, T]
        return self._placed(self._output_format().scored(seq, scores), len(td))

    def _scored(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None = None
    ) -> Tensor:
        """Return the log-probs [B, T] of a td's sequences."""
        keep = None
        if self.score_mask_key is not None:
            keep = self.reader(td).mask_at(td, self.score_mask_key)  # [B, T]
        group = td.get("group_id", None)
        group = None if group is None else group.to(self.device)  # [B]
        scale = self.scoring_temperature(td, temperature_key)
        return self.calls._log_probs(seq.tokens, seq.attention, keep, scale, group)

    def scoring_temperature(
        self, td: TensorDictBase, key: NestedKey | None = None
    ) -> Tensor | float:
        """Return the scoring temperature: that of td [B] at `key`, else the policy's."""
        temperatures = None if key is None else td.get(key, None)
        return (self.temperature or 1.0) if temperatures is None else temperatures.to(self.device)

    # Methods of engines, on token ids.

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        """Return a response to each prompt [B, P], padded left; streams [B] seed the rows."""
        raise NotImplementedError(f"{type(self).__name__} does not generate: it has no _draw")

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
        return score_in_parts(
            self.scorer,
            tokens,
            attention,
            keep,
            limit=self.micro_batch_tokens,
            group_id=group_id,
            temperature=temperature,
            **self.scoring_options,
        )

    @property
    def calls(self) -> Any:
        """Return the object that has `_draw` and `_log_probs`: this one."""
        return self

    # Reading and writing.

    def reader(self, td: TensorDictBase) -> InputReader:
        """Return the reader of a td."""
        return InputReader(self, self.in_keys[0])

    def _output_format(self) -> OutputFormat:
        return OutputFormat(padded=True, pad_token_id=self.pad_token_id)

    def _placed(self, done: dict[type, Any], size: int) -> TensorDict:
        """Return a td [size] with the containers at their keys, without those that have none."""
        keys = {Tokens: self.tokens_key, Masks: self.masks_key}
        keys |= {LogProbs: self.log_probs_key if self.return_log_probs else None}
        out = TensorDict(batch_size=[size])
        for kind, container in done.items():
            if keys[kind] is not None:
                out.set(keys[kind], container)
        return out
