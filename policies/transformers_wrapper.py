"""The policy on a Hugging Face causal language model.

Token in, token out: whatever carries ids is generated from or scored by those ids, in any input
mode; a history or text is tokenised only where there are none. B rows, T tokens.
Left out on purpose: top-p, top-k, penalties (see policies/sampler.py).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from policies.chat_template import Renderer
from policies.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.generate_kwargs import GenerateKwargs
from policies.history import History
from policies.outputs import generated, store, store_padded
from policies.padding import attended, is_ragged, pad, pad_mask, rows
from policies.random import fold
from policies.sampler import Sampled, Stop, sample
from policies.scorer import Scorer, max_positions, score_in_parts
from policies.wrapper import InputMode, LLMWrapperBase, NestedKey


@dataclass(frozen=True)
class Rows:
    """Ragged sequences: B x [t] ids, and the assistant mask of each where it is known."""

    ids: list[Tensor]
    assistant: list[Tensor] | None = None


class TransformersWrapper(LLMWrapperBase):
    """Generate with or score by a causal LM; in and out is one TensorDict.

    `generate_kwargs`: temperature (0 = greedy), max_new_tokens, max_prompt_tokens (longer prompts
    are an error), do_sample, stop (texts).
    `score_mask_key` names a bool mask [B, T]; only its tokens are scored, the others read 0.
    `micro_batch_tokens` bounds the padded tokens of one scoring forward.
    A `stream` [B] in the input fixes the draws of each row; otherwise torch's generator seeds them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any,
        input_mode: InputMode = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        pad_output: bool = False,
        inplace: bool | Literal["empty"] | None = None,
        num_samples: int | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        history_key: str = "history",
        text_key: str = "text",
        tokens_key: str = "tokens",
        masks_key: str = "masks",
        log_probs_key: str = "log_probs",
        score_mask_key: NestedKey | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        if not generate and return_log_probs is False:
            raise ValueError("return_log_probs must be True when generate=False.")
        if num_samples is not None and inplace in (True, "empty"):
            raise ValueError("num_samples changes the batch shape; expected inplace=False")
        self.generate_kwargs = settings["generate_kwargs"] = dict(generate_kwargs or {})
        self._settings = settings
        self.scorer = model if isinstance(model, Scorer) else Scorer(model)
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, chat_template)
        self.generate, self.pad_output = generate, bool(pad_output)
        self.attention_mask_key, self.score_mask_key = attention_mask_key, score_mask_key
        self.micro_batch_tokens = micro_batch_tokens
        self.return_log_probs = return_log_probs is not False
        self.inplace = (num_samples is None) if inplace is None else inplace
        self.num_samples = num_samples
        self.version = 0  # counts the weight syncs
        self.limits = GenerateKwargs.read(self.generate_kwargs)
        self.temperature, self.max_new_tokens = self.limits.temperature, self.limits.max_new_tokens
        self.max_positions = max_positions(self.model)
        if generate:
            self.limits.check_positions(self.max_positions)
        self.stop_ids = self.renderer.stop_ids | _eos_ids(self.model)
        self.stop = Stop(self.stop_ids, self.limits.found(tokenizer))
        self._set_keys(input_mode, settings)

    @property
    def model(self) -> nn.Module:
        """Return the language model."""
        return self.scorer.model

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return next(self.model.parameters()).device

    # Input: ids if there are any, else the rendered history or the tokenised text.

    def _rows(self, td: TensorDictBase, field: str) -> Rows:
        """Return the prompt or full sequences of td as ragged ids."""
        key = self.in_keys[0] if self.input_mode == "tokens" else (self.tokens_key, field)
        ids = rows(td, key)
        if ids is not None:
            masks = rows(td, self.attention_mask_key)
            if masks is None and field == "prompt":  # it fills the first columns of an output
                masks = rows(td, (self.masks_key, "all_attention_mask"))
                masks = masks and [mask[: len(row)] for mask, row in zip(masks, ids, strict=True)]
            ids = attended(ids, masks, ragged=is_ragged(td.get(self.tokens_key, td)))
            return Rows([row.to(self.device) for row in ids])
        value = td.get(self.in_keys[0], None)
        if value is None:
            raise ValueError(
                f"expected {self.in_keys[0]} or token ids at {(self.tokens_key, field)} for "
                f"input_mode={self.input_mode!r}, got keys {sorted(map(str, td.keys()))}"
            )
        if self.input_mode == "history":
            return self._rendered(value, add_generation_prompt=field == "prompt")
        texts = value if isinstance(value, list) else value.tolist()
        ids = [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        return Rows([torch.tensor(i, device=self.device) for i in ids])

    def _rendered(self, history: History, *, add_generation_prompt: bool) -> Rows:
        """Render each chat once; adjacent repeats (the samples of a group) share the work."""
        ids, assistant, last = [], [], None
        for chat in history.chats():
            if chat != last:
                done = self.renderer.render(chat, add_generation_prompt=add_generation_prompt)
                last = chat
                row = torch.tensor(done.ids, device=self.device)
                mask = torch.tensor(done.assistant, dtype=torch.bool, device=self.device)
            ids.append(row)
            assistant.append(mask)
        return Rows(ids, assistant)

    # Generation.

    def _generate(self, td: TensorDictBase) -> TensorDictBase:
        prompts = self._rows(td, "prompt")
        self.limits.check_lengths(prompts.ids, self.tokenizer, self.max_positions)
        times = self.num_samples or 1
        streams = td.get("stream", None)
        if streams is None:
            streams = torch.randint(2**62, (len(prompts.ids),))
        if times > 1:
            streams = fold(streams[:, None], torch.arange(times)).flatten()
        ids = [row for row in prompts.ids for _ in range(times)]
        known = prompts.assistant or [torch.zeros_like(r, dtype=torch.bool) for r in prompts.ids]
        drawn = self._draw(ids, streams.cpu())
        out = self._sampled(ids, [row for row in known for _ in range(times)], drawn)
        self._write_words(td, out, ids, drawn, times)
        return out if self.num_samples is None else out.reshape(len(prompts.ids), times)

    def _draw(self, ids: list[Tensor], streams: Tensor) -> Sampled:
        """Sample a reply to each prompt; streams [B] fix the draws. Another engine overrides it."""
        training = self.model.training
        self.model.eval()
        wishes = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        with self.scorer.precision():
            drawn = sample(self.model, ids, streams=streams, stop=self.stop, **wishes)
        self.model.train(training)
        return drawn

    def _sampled(self, ids: list[Tensor], assistant: list[Tensor], drawn: Sampled) -> TensorDict:
        """Return tokens, masks and log-probs of prompt + reply, [B]."""
        keys = {Tokens: self.tokens_key, Masks: self.masks_key, LogProbs: self.log_probs_key}
        cuts = [len(p) for p in ids]
        out = TensorDict(batch_size=[len(ids)])
        for kind, fields in generated(ids, assistant, drawn).items():
            if kind is not LogProbs or self.return_log_probs:
                out.set(keys[kind], store(kind, fields, padded=self.pad_output, cuts=cuts))
        out.set("policy_version", torch.full((len(ids),), self.version))
        return out.set("temperature", torch.full((len(ids),), self.temperature or 1.0))

    def _write_words(self, td, out: TensorDict, ids: list[Tensor], drawn: Sampled, times: int):
        """Add the texts and, in history mode, the histories of prompt, response and both."""
        complete = drawn.complete.tolist()
        stop = self.stop.ids
        replies = [r[:-1] if len(r) and int(r[-1]) in stop else r for r in drawn.ids]
        texts = self.tokenizer.batch_decode([r.tolist() for r in replies])
        if self.input_mode != "tokens":
            out.set(self.text_key, self._texts(ids, drawn.ids, texts))
        if self.input_mode == "history" and td.get(self.in_keys[0], None) is not None:
            prompt = td.get(self.in_keys[0])
            if times > 1:
                prompt = prompt.repeat_interleave(times, 0)
            response = History.from_replies(texts, complete)
            full = prompt.extend(response, inplace=False, dim=-1)
            fields = {"prompt": prompt, "response": response, "full": full}
            out.set(self.history_key, ChatHistory(**fields, batch_size=[len(ids)]))

    def _texts(self, ids: list[Tensor], replies: list[Tensor], texts: list[str]) -> Text:
        """Return what was read, what was written, and both as they stand in the sequence."""
        prompts = self.tokenizer.batch_decode([i.tolist() for i in ids])
        whole = self.tokenizer.batch_decode(
            [torch.cat(pair).tolist() for pair in zip(ids, replies, strict=True)]
        )
        return Text(prompt=prompts, response=texts, full=whole, batch_size=[len(ids)])

    # Scoring.

    def _sequences(self, td: TensorDictBase, side: str = "left") -> TensorDict:
        """Return tokens.full and masks as a padded [B, T] batch: as they lie if dense."""
        out = TensorDict(batch_size=td.batch_size)
        full = (self.tokens_key, "full")
        if full in td.keys(True) and not is_ragged(td.get(self.tokens_key)):
            tokens = td.get(full).to(self.device)
            attention = td.get((self.masks_key, "all_attention_mask"), None)
            if attention is None:
                attention = td.get(self.attention_mask_key, None)
            if attention is None:
                attention = torch.ones_like(tokens)
            if attention.shape != tokens.shape:
                raise ValueError(
                    f"expected an attention mask of shape {tuple(tokens.shape)} as the tokens "
                    f"have, got {tuple(attention.shape)}"
                )
            assistant = td.get((self.masks_key, "all_assistant_mask"), None)
            masks = {"all_attention_mask": attention.bool(), "all_assistant_mask": assistant}
        else:
            found = self._rows(td, "full")
            tokens = pad(found.ids, side=side)
            lengths = [len(r) for r in found.ids]
            known = found.assistant or rows(td, (self.masks_key, "all_assistant_mask"))
            masks = {
                "all_attention_mask": pad_mask(lengths, side=side),
                "all_assistant_mask": None if known is None else pad(known, False, side=side),
            }
        out.set(full, tokens)
        for name, mask in masks.items():
            if mask is not None:
                out.set((self.masks_key, name), mask.to(self.device))
        return out

    def _score(self, td: TensorDictBase) -> TensorDictBase:
        seq = self._sequences(td)
        attention = seq.get((self.masks_key, "all_attention_mask"))
        keep = None if self.score_mask_key is None else td.get(self.score_mask_key, None)
        log_probs = score_in_parts(
            self.scorer,
            seq.get((self.tokens_key, "full")),
            attention,
            keep,
            limit=self.micro_batch_tokens,
            temperature=td.get("temperature", self.temperature or 1.0),
            group_id=td.get("group_id", None),
        )
        parts = self._parts(td, seq)
        out = TensorDict(batch_size=td.batch_size)
        masks = dict(seq.get(self.masks_key).items())
        out.set(self.masks_key, store_padded(Masks, masks, attention, padded=self.pad_output))
        for key, kind, full in (
            (self.tokens_key, Tokens, seq.get((self.tokens_key, "full"))),
            (self.log_probs_key, LogProbs, log_probs),
        ):
            fields = {"full": full}
            stored = store_padded(kind, fields, attention, padded=self.pad_output, parts=parts)
            out.set(key, stored)
        return out

    def _parts(self, td: TensorDictBase, seq: TensorDict) -> dict[str, Tensor]:
        """Return where the response and the assistant are, as far as the td tells, [B, T] each.

        The response starts where sampling, else what follows the prompt, else the assistant does.
        """
        attention = seq.get((self.masks_key, "all_attention_mask"))
        assistant = seq.get((self.masks_key, "all_assistant_mask"), None)
        response = self._mask(td, (self.masks_key, "all_response_mask"), "left")
        if response is None:
            response = self._after_prompt(td, attention)
        response = assistant if response is None else response
        out = {} if assistant is None else {"assistant": assistant}
        if response is not None:
            out["response"] = (response.to(attention.device).cumsum(-1) > 0) & attention
        return out

    def _logits(self, td: TensorDictBase, side: str = "left") -> TensorDictBase:
        seq = self._sequences(td, side)
        attention = seq.get((self.masks_key, "all_attention_mask"))
        logits = self.scorer.logits(seq.get((self.tokens_key, "full")), attention)
        temperature = td.get("temperature", self.temperature or 1.0)
        scale = torch.as_tensor(temperature, device=logits.device).reshape(-1, 1, 1)
        return seq.set("logits", logits / scale)


def _eos_ids(model: nn.Module) -> frozenset[int]:
    """Return the EOS ids of a model's generation config."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
