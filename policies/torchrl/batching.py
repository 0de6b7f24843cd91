"""Gather calls of several threads to one model into batches.

A caller submits rows and waits. The first caller that sees enough waiting rows, or has waited
`timeout` seconds, runs the next batch for all; one batch runs at a time. There is no extra thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from policies.padding import pad, pad_mask, unpad
from policies.sampler import Sampled

Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False)
class _Row:
    """A row of one call and its future result."""

    call: object
    run: Run
    value: Any
    result: Future = field(default_factory=Future)


class BatchQueue:
    """Run functions on rows of several callers at once.

    A batch starts when `min_size` rows wait, or `timeout` seconds after the oldest call; it has at
    most `max_size` rows (None = all waiting rows).

    >>> BatchQueue(max_size=2)(lambda rows: [row + 1 for row in rows], [1, 2, 3])
    [2, 3, 4]
    """

    def __init__(self, *, min_size: int = 1, max_size: int | None = None, timeout: float = 10.0):
        if min_size < 1 or (max_size is not None and max_size < min_size) or not timeout >= 0:
            sizes = f"{min_size} to {max_size} rows in {timeout} s"
            raise ValueError(f"expected 1 <= min_batch_size <= max_batch_size, got {sizes}")
        self.min_size, self.max_size, self.timeout = min_size, max_size, timeout
        self._changed = threading.Condition()
        self._waiting: deque[_Row] = deque()
        self._busy = False

    def __call__(self, run: Run, rows: Sequence[Any]) -> list[Any]:
        """Return the result of `run` for each row; only the row's caller gets its errors.

        Rows are batched with rows of other callers that pass an equal `run`.
        """
        call, deadline = object(), time.monotonic() + self.timeout
        mine = [_Row(call, run, value) for value in rows]
        with self._changed:
            self._waiting.extend(mine)
            self._changed.notify_all()
            while not all(row.result.done() for row in mine):
                left = deadline - time.monotonic()
                due = left <= 0 or len(self._waiting) >= self.min_size
                if due and self._waiting and not self._busy:
                    self._run_batch()
                else:
                    self._changed.wait(None if due else left)
        return [row.result.result() for row in mine]

    def _run_batch(self) -> None:
        """Run the next batch with the lock released meanwhile."""
        run, batch = self._waiting[0].run, list[_Row]()
        while self._waiting and self._waiting[0].run == run and len(batch) != self.max_size:
            batch.append(self._waiting.popleft())
        self._busy = True
        self._changed.release()
        try:
            _work(batch)
        finally:
            self._changed.acquire()
            self._busy = False
            self._changed.notify_all()


def _work(batch: list[_Row]) -> None:
    """Run a batch; if it fails, run each caller's rows alone, so that each gets its own error."""
    calls = dict.fromkeys(row.call for row in batch)
    try:
        results = batch[0].run([row.value for row in batch])
        pairs = list(zip(batch, results, strict=True))
    except BaseException as error:
        if len(calls) > 1 and isinstance(error, Exception):
            for call in calls:
                _work([row for row in batch if row.call is call])
            return
        for row in batch:
            row.result.set_exception(error)
        if not isinstance(error, Exception):  # Ctrl-C belongs to this thread too
            raise
    else:
        for row, result in pairs:
            row.result.set_result(result)


class BatchedCalls:
    """Batch the calls `_draw` and `_log_probs` of a wrapper over several threads.

    A call that needs a gradient runs alone: backwards of several threads cannot share a graph.
    """

    def __init__(self, model: Any, queue: BatchQueue) -> None:
        self.model, self.queue = model, queue

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        rows = zip(unpad(prompts, attention), streams.tolist(), strict=True)
        done = list(zip(*self.queue(self._draw_rows, list(rows)), strict=True))
        ids, log_probs, complete = done
        ended = torch.tensor(complete, device=prompts.device)
        return Sampled.of_rows(ids, log_probs, ended)

    def _log_probs(self, tokens, attention, keep, temperature, group_id) -> Tensor:
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            return self.model._log_probs(tokens, attention, keep, temperature, group_id)
        keep = attention if keep is None else keep
        each = torch.as_tensor(temperature).reshape(-1).expand(len(keep)).tolist()
        rows = zip(unpad(tokens, attention), unpad(keep, attention), each, strict=True)
        values = torch.cat(self.queue(self._score_rows, list(rows)))
        return values.new_zeros(attention.shape).masked_scatter(attention, values)

    # Batches of the queue: rows of any callers, one result per row.

    def _draw_rows(self, rows: list[tuple[Tensor, int]]) -> list[Any]:
        ids, streams = zip(*rows, strict=True)
        sampled = self.model._draw(*_padded(ids, "left"), torch.tensor(streams))
        columns = [unpad(sampled.ids, sampled.mask), unpad(sampled.log_probs, sampled.mask)]
        columns.append(sampled.complete.tolist())
        return list(zip(*columns, strict=True))

    @torch.no_grad()
    def _score_rows(self, rows: list[tuple[Tensor, Tensor, float]]) -> list[Tensor]:
        ids, keep, temperatures = zip(*rows, strict=True)
        tokens, attention = _padded(ids)
        temperature = torch.tensor(temperatures, device=tokens.device)
        done = self.model._log_probs(tokens, attention, pad(keep, False), temperature, None)
        return unpad(done, attention)


def _padded(rows: Sequence[Tensor], side: str = "right") -> tuple[Tensor, Tensor]:
    mask = pad_mask([len(row) for row in rows], side=side, device=rows[0].device)
    return pad(rows, side=side), mask
