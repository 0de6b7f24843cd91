"""How a wrapper generates: prompts in, replies as ids, masks, log-probs, text and history out.

B prompts, n samples of each.
"""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.random import fold
from policies.sampler import Sampled
from policies.wrappers.outputs import generated


class Generates:
    """The generating half of a wrapper."""

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
        drawn = self._ask_draw(ids, streams.cpu())
        out = self._sampled(ids, [row for row in known for _ in range(times)], drawn)
        self._write_words(td, out, ids, drawn, times)
        return out if self.num_samples is None else out.reshape(len(prompts.ids), times)

    def _sampled(self, ids: list[Tensor], assistant: list[Tensor], drawn: Sampled) -> TensorDict:
        """Return tokens, masks and log-probs of prompt + reply, [B]."""
        log_probs = self.log_probs_key if self.return_log_probs else None
        keys = {Tokens: self.tokens_key, Masks: self.masks_key, LogProbs: log_probs}
        form, cuts = self._form(), [len(p) for p in ids]
        out = TensorDict(batch_size=[len(ids)])
        for kind, fields in generated(ids, assistant, drawn).items():
            if keys[kind] is not None:
                out.set(keys[kind], form.store(kind, fields, cuts))
        out.set("policy_version", torch.full((len(ids),), self.version))
        return out.set("temperature", torch.full((len(ids),), self.temperature or 1.0))

    def _write_words(self, td, out: TensorDict, ids: list[Tensor], drawn: Sampled, times: int):
        """Add the texts and, in history mode, the histories of prompt, response and both."""
        text = self.input_mode != "tokens" and self.text_key is not None
        history = self.input_mode == "history" and self.history_key is not None
        prompt = td.get(self.in_keys[0], None) if history else None
        if not text and prompt is None:
            return
        replies = [r[:-1] if len(r) and int(r[-1]) in self.stop_ids else r for r in drawn.ids]
        texts = self._decode(replies)
        if text:
            both = [torch.cat(pair) for pair in zip(ids, drawn.ids, strict=True)]
            fields = {"prompt": self._decode(ids), "response": texts, "full": self._decode(both)}
            out.set(self.text_key, Text(**fields, batch_size=[len(ids)]))
        if prompt is not None:
            prompt = prompt.repeat_interleave(times, 0) if times > 1 else prompt
            response = History.from_replies(texts, drawn.complete.tolist())
            full = prompt.extend(response, inplace=False, dim=-1)
            fields = {"prompt": prompt, "response": response, "full": full}
            out.set(self.history_key, ChatHistory(**fields, batch_size=[len(ids)]))

    def _decode(self, rows: list[Tensor]) -> list[str]:
        skip = self.limits.skip_special_tokens
        return self.tokenizer.batch_decode([r.tolist() for r in rows], skip_special_tokens=skip)
