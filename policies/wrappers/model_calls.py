"""What a wrapper asks its model, by token ids, for one caller or for several threads at once.

B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.padding import pad, pad_mask, predicted, unpad
from policies.sampler import Sampled
from policies.wrappers.inputs import Sequences


class CallsModel:
    """An engine implements `_draw` to generate, `_logits` to score; `_log_probs` if it is better.

    With a batch queue, rows of several threads run together. A call that needs a gradient runs
    alone: backwards of several threads cannot share a graph.
    """

    def _draw(self, ids: list[Tensor], streams: Tensor) -> Sampled:
        """Return a reply to each prompt; streams [B] fix the draws."""
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
        temperature = torch.as_tensor(temperature, device=tokens.device).reshape(-1, 1, 1)
        table = (self._logits(tokens, attention).float() / temperature).log_softmax(-1)
        values = table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return values.masked_fill(~predicted(attention, keep), 0)

    def _ask_draw(self, ids: list[Tensor], streams: Tensor) -> Sampled:
        if self._queue is None:
            return self._draw(ids, streams)
        done = self._queue(self._draw_rows, list(zip(ids, streams.tolist(), strict=True)))
        replies, log_probs, complete = (list(column) for column in zip(*done, strict=True))
        return Sampled(replies, log_probs, torch.tensor(complete))

    def _ask_log_probs(
        self,
        seq: Sequences,
        keep: Tensor | None,
        temperature: Tensor | float,
        group_id: Tensor | None,
    ) -> Tensor:
        if self._runs_alone():
            return self._log_probs(seq.tokens, seq.attention, keep, temperature, group_id)
        keep = seq.attention if keep is None else keep
        each = torch.as_tensor(temperature).reshape(-1).expand(len(keep)).tolist()
        columns = unpad(seq.tokens, seq.attention), unpad(keep, seq.attention), each
        done = self._queue(self._score_rows, list(zip(*columns, strict=True)))
        return _spread(done, seq.attention)

    def _ask_logits(self, seq: Sequences) -> Tensor:
        if self._runs_alone():
            return self._logits(seq.tokens, seq.attention)
        done = self._queue(self._logit_rows, unpad(seq.tokens, seq.attention))
        return _spread(done, seq.attention)

    def _runs_alone(self) -> bool:
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return self._queue is None or learns

    # Batches of the queue: rows of any callers in, one result a row out.

    def _draw_rows(self, rows: list[tuple[Tensor, int]]) -> list[Any]:
        ids, streams = zip(*rows, strict=True)
        drawn = self._draw(list(ids), torch.tensor(streams))
        columns = drawn.ids, drawn.log_probs, drawn.complete.tolist()
        return list(zip(*columns, strict=True))

    def _score_rows(self, rows: list[tuple[Tensor, Tensor, float]]) -> list[Tensor]:
        ids, keep, temperatures = zip(*rows, strict=True)
        tokens, attention = _padded(ids)
        temperature = torch.tensor(temperatures, device=tokens.device)
        with torch.no_grad():
            done = self._log_probs(tokens, attention, pad(keep, False), temperature, None)
        return unpad(done, attention)

    def _logit_rows(self, rows: list[Tensor]) -> list[Tensor]:
        tokens, attention = _padded(rows)
        with torch.no_grad():
            return unpad(self._logits(tokens, attention), attention)


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return pad(rows), pad_mask([len(row) for row in rows], device=rows[0].device)


def _spread(rows: list[Tensor], attention: Tensor) -> Tensor:
    """Return rows [t, ...] at the attended places of zeros [B, T, ...]."""
    values = torch.cat(rows)
    out = values.new_zeros(*attention.shape, *values.shape[1:])
    out[attention] = values
    return out
