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
from policies.history import History
from policies.outputs import store, store_padded
from policies.padding import is_ragged, pad, pad_mask, rows
from policies.random import fold
from policies.sampler import Sampled, Stop, sample
from policies.scorer import Scorer
from policies.wrapper import InputMode, LLMWrapperBase, NestedKey

GENERATE_KWARGS = {"temperature", "max_new_tokens", "max_prompt_tokens", "do_sample", "stop"}


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
    ) -> None:
        super().__init__()
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        if not generate and return_log_probs is False:
            raise ValueError("return_log_probs must be True when generate=False.")
        if num_samples is not None and inplace in (True, "empty"):
            raise ValueError("num_samples changes the batch shape; expected inplace=False")
        self._settings = settings
        self.scorer = model if isinstance(model, Scorer) else Scorer(model)
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, chat_template)
        self.generate, self.pad_output = generate, bool(pad_output)
        self.attention_mask_key, self.score_mask_key = attention_mask_key, score_mask_key
        self.return_log_probs = return_log_probs is not False
        self.inplace = (num_samples is None) if inplace is None else inplace
        self.num_samples = num_samples
        self.version = 0  # counts the weight syncs
        self.generate_kwargs = dict(generate_kwargs or {})
        self._read_generate_kwargs(self.generate_kwargs)
        self._set_keys(input_mode, settings)

    def _read_generate_kwargs(self, kwargs: dict[str, Any]) -> None:
        unknown = set(kwargs) - GENERATE_KWARGS
        if unknown:
            raise ValueError(
                f"generate_kwargs has {sorted(unknown)}, expected names among "
                f"{sorted(GENERATE_KWARGS)}; top-p, top-k and penalties are not offered because "
                "the training log-probs could not follow them"
            )
        self.temperature = float(kwargs.get("temperature", 1.0))
        if self.temperature < 0:
            raise ValueError(f"expected temperature >= 0, got {self.temperature}")
        if kwargs.get("do_sample") is False:
            self.temperature = 0.0
        self.max_new_tokens = int(kwargs.get("max_new_tokens", 64))
        self.max_prompt_tokens = kwargs.get("max_prompt_tokens")
        texts = list(kwargs.get("stop") or [])
        found = (lambda ids: any(t in self.tokenizer.decode(ids) for t in texts)) if texts else None
        self.stop = Stop(self.stop_ids, found)

    @property
    def model(self) -> nn.Module:
        """Return the language model."""
        return self.scorer.model

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end a reply: the template's and those of the generation config."""
        extra = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        extra = [] if extra is None else [extra] if isinstance(extra, int) else list(extra)
        return self.renderer.stop_ids | frozenset(extra)

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return next(self.model.parameters()).device

    # Input: ids if there are any, else the rendered history or the tokenised text.

    def _rows(self, td: TensorDictBase, field: str) -> Rows:
        """Return the prompt or full sequences of td as ragged ids."""
        ids = rows(td, (self.tokens_key, field))
        if ids is None and self.input_mode == "tokens":
            ids = rows(td, self.in_keys[0])
        if ids is not None:
            masks = rows(td, self.attention_mask_key)
            if masks is not None:
                ids = [row[mask.bool()] for row, mask in zip(ids, masks, strict=True)]
            return Rows([row.to(self.device) for row in ids])
        value = td.get(self.in_keys[0], None)
        if value is None:
            raise ValueError(
                f"expected {self.in_keys[0]} or token ids at {(self.tokens_key, field)} for "
                f"input_mode={self.input_mode!r}, got keys {sorted(map(str, td.keys()))}"
            )
        if self.input_mode == "history":
            return self._rendered(value, add_generation_prompt=field == "prompt")
        texts = [value] if isinstance(value, str) else list(value)
        ids = [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        return Rows([torch.tensor(i, device=self.device) for i in ids])

    def _rendered(self, history: History, *, add_generation_prompt: bool) -> Rows:
        """Render each chat once; adjacent repeats (the samples of a group) share the work."""
        ids, assistant = [], []
        last = None
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
        self._check_lengths(prompts.ids)
        times = self.num_samples or 1
        streams = td.get("stream", None)
        if streams is None:
            streams = torch.randint(2**62, (len(prompts.ids),))
        if times > 1:
            streams = fold(streams[:, None], torch.arange(times)).flatten()
        ids = [row for row in prompts.ids for _ in range(times)]
        known = prompts.assistant or [torch.zeros_like(r, dtype=torch.bool) for r in prompts.ids]
        was_training = self.model.training
        self.model.eval()
        with self.scorer.precision():
            drawn = sample(
                self.model,
                ids,
                streams=streams.cpu(),
                stop=self.stop,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
            )
        self.model.train(was_training)
        out = self._sampled(ids, [row for row in known for _ in range(times)], drawn)
        self._write_words(td, out, ids, drawn, times)
        return out if self.num_samples is None else out.reshape(len(prompts.ids), times)

    def _check_lengths(self, ids: list[Tensor]) -> None:
        limit = self.max_prompt_tokens
        for i, row in enumerate(ids):
            if limit is not None and len(row) > limit:
                raise ValueError(
                    f"prompt {i} of the batch has {len(row)} tokens, policy.max_prompt_tokens is "
                    f"{limit}; raise it, or drop the row: "
                    f"{self.tokenizer.decode(row[-40:].tolist())!r}"
                )

    def _sampled(self, ids: list[Tensor], assistant: list[Tensor], drawn: Sampled) -> TensorDict:
        """Return tokens, masks and log-probs of prompt + reply, [B]."""
        pairs = list(zip(ids, drawn.ids, strict=True))
        full = [torch.cat(pair) for pair in pairs]
        zeros = [torch.zeros(len(p), device=p.device) for p in ids]
        reply = [
            torch.arange(len(f), device=f.device) >= len(p) for f, p in zip(full, ids, strict=True)
        ]
        theirs = [torch.cat([a, m[len(a) :]]) for a, m in zip(assistant, reply, strict=True)]
        cuts, padded = [len(p) for p in ids], self.pad_output
        tokens = {"prompt": ids, "response": drawn.ids, "full": full}
        masks = {
            "all_attention_mask": [torch.ones_like(m) for m in reply],
            "all_assistant_mask": theirs,
            "all_response_mask": reply,
        }
        out = TensorDict(batch_size=[len(ids)])
        out.set(self.tokens_key, store(Tokens, tokens, padded=padded, cuts=cuts))
        out.set(self.masks_key, store(Masks, masks, padded=padded, cuts=cuts))
        if self.return_log_probs:
            values = [torch.cat(pair) for pair in zip(zeros, drawn.log_probs, strict=True)]
            fields = {"prompt": zeros, "response": drawn.log_probs, "full": values}
            out.set(self.log_probs_key, store(LogProbs, fields, padded=padded, cuts=cuts))
        out.set("temperature", torch.full((len(ids),), self.temperature or 1.0))
        return out

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
                attention = td.get(self.attention_mask_key, torch.ones_like(tokens))
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
        scores = self.scorer(
            seq.get((self.tokens_key, "full")),
            attention,
            keep,
            temperature=td.get("temperature", self.temperature or 1.0),
            group_id=td.get("group_id", None),
        )
        out = TensorDict(batch_size=td.batch_size)
        masks = dict(seq.get(self.masks_key).items())
        tokens = {"full": seq.get((self.tokens_key, "full"))}
        for key, kind, fields in (
            (self.tokens_key, Tokens, tokens),
            (self.masks_key, Masks, masks),
            (self.log_probs_key, LogProbs, {"full": scores.log_probs}),
        ):
            out.set(key, store_padded(kind, fields, attention, padded=self.pad_output))
        return out

    def _logits(self, td: TensorDictBase, side: str = "left") -> TensorDictBase:
        seq = self._sequences(td, side)
        attention = seq.get((self.masks_key, "all_attention_mask"))
        return seq.set("logits", self.scorer.logits(seq.get((self.tokens_key, "full")), attention))
