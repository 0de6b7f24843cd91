"""Gather what several threads ask of one model into batches.

A caller hands in rows and waits. Whoever finds enough rows waiting, or has itself waited for
`timeout` seconds, runs the next batch for all; one batch runs at a time. No thread of its own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from policies.padding import pad, pad_mask, unpad
from policies.sampler import Sampled

Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False)
class _Call:
    """The rows of one caller, and what became of them."""

    run: Run
    rows: list[Any]
    deadline: float
    results: dict[int, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def open(self) -> bool:
        return self.error is None and len(self.results) < len(self.rows)


class BatchQueue:
    """Run functions over rows of several callers at once.

    A batch starts when `min_size` rows wait, or `timeout` seconds after the oldest call; it has at
    most `max_size` rows (None = all that wait).

    >>> BatchQueue(max_size=2)(lambda rows: [row + 1 for row in rows], [1, 2, 3])
    [2, 3, 4]
    """

    def __init__(self, *, min_size: int = 1, max_size: int | None = None, timeout: float = 10.0):
        if min_size < 1 or (max_size is not None and max_size < 1) or not timeout >= 0:
            raise ValueError(
                "expected min_batch_size and max_batch_size >= 1 and batching_timeout >= 0 s, got "
                f"{min_size}, {max_size}, {timeout}"
            )
        if max_size is not None and min_size > max_size:
            raise ValueError(f"min_batch_size ({min_size}) must be <= max_batch_size ({max_size})")
        self.min_size, self.max_size, self.timeout = min_size, max_size, timeout
        self._changed = threading.Condition()
        self._waiting: deque[tuple[_Call, int]] = deque()
        self._busy = False

    def __call__(self, run: Run, rows: Sequence[Any]) -> list[Any]:
        """Return run's result of each row. A failure of `run` reaches the caller of the row only.

        Rows are run together with those of other callers of an equal `run`.
        """
        call = _Call(run, list(rows), time.monotonic() + self.timeout)
        with self._changed:
            self._waiting.extend((call, i) for i in range(len(call.rows)))
            self._changed.notify_all()
            while call.open:
                left = call.deadline - time.monotonic()
                due = left <= 0 or len(self._waiting) >= self.min_size
                if due and self._waiting and not self._busy:
                    self._run_batch()
                else:
                    self._changed.wait(None if due else left)
        if call.error is not None:
            raise call.error
        return [call.results[i] for i in range(len(call.rows))]

    def cleanup(self, *, flush: bool = False) -> None:
        """Empty the queue: with `flush` run what waits, else its callers get a RuntimeError."""
        with self._changed:
            for call in {call for call, _ in self._waiting}:
                if flush:
                    call.deadline = 0.0
                else:
                    self._fail(call, RuntimeError("the batch queue was emptied before its turn"))
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def state(self) -> dict[str, Any]:
        """Return how many rows wait, whether a batch runs, and the settings."""
        with self._changed:
            return {
                "batching_enabled": True,
                "min_batch_size": self.min_size,
                "max_batch_size": self.max_size,
                "timeout": self.timeout,
                "queue_size": len(self._waiting),
                "processing": self._busy,
            }

    def __reduce__(self):
        """Copy the settings; locks and waiting callers stay here."""
        return _make, (self.min_size, self.max_size, self.timeout)

    def _run_batch(self) -> None:
        """Run the next batch with the lock given back for as long as it takes."""
        run, batch = self._waiting[0][0].run, list[tuple[_Call, int]]()
        while self._waiting and self._waiting[0][0].run == run and len(batch) != self.max_size:
            batch.append(self._waiting.popleft())
        self._busy = True
        self._changed.release()
        try:
            self._work(batch)
        finally:
            self._changed.acquire()
            self._busy = False
            self._changed.notify_all()

    def _work(self, batch: list[tuple[_Call, int]]) -> None:
        """Run a batch; if it fails, each caller's rows alone, so that failures find their owner."""
        calls = list(dict.fromkeys(call for call, _ in batch))
        try:
            results = calls[0].run([call.rows[i] for call, i in batch])
            for (call, i), result in zip(batch, results, strict=True):
                call.results[i] = result
        except BaseException as error:
            stopped = not isinstance(error, Exception)
            if len(calls) == 1 or stopped:
                for call in calls:
                    self._fail(call, error)
            else:
                for call in calls:
                    self._work([item for item in batch if item[0] is call])
            if stopped:  # Ctrl-C belongs to this thread too
                raise

    def _fail(self, call: _Call, error: BaseException) -> None:
        with self._changed:
            call.error = error
            self._waiting = deque(item for item in self._waiting if item[0] is not call)


def _make(min_size: int, max_size: int | None, timeout: float) -> BatchQueue:
    return BatchQueue(min_size=min_size, max_size=max_size, timeout=timeout)


class BatchedCalls:
    """Make the calls of a model for several threads at once, their rows together.

    `model` has `_draw`, `_logits` and `_log_probs` as LLMWrapperBase does, and so has this. A call
    that needs a gradient runs alone: backwards of several threads cannot share a graph. So does one
    that scores over what a sampler kept.
    """

    def __init__(self, model: Any, queue: BatchQueue) -> None:
        self.model, self.queue = model, queue

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        rows = zip(unpad(prompts, attention), streams.tolist(), strict=True)
        done = list(zip(*self.queue(self._draw_rows, list(rows)), strict=True))
        ids, log_probs, complete, *found = done
        support = None
        if found:
            from policies.support import Support

            support = Support.of_rows(pad(found[0]), list(found[1]))
        ended = torch.tensor(complete, device=prompts.device)
        return Sampled.of_rows(ids, log_probs, ended, support)

    def _logits(self, tokens: Tensor, attention: Tensor) -> Tensor:
        if self._learns():
            return self.model._logits(tokens, attention)
        return _spread(self.queue(self._logit_rows, unpad(tokens, attention)), attention)

    def _log_probs(self, tokens, attention, keep, temperature, group_id, **support) -> Tensor:
        if self._learns() or support:
            return self.model._log_probs(tokens, attention, keep, temperature, group_id, **support)
        keep = attention if keep is None else keep
        each = torch.as_tensor(temperature).reshape(-1).expand(len(keep)).tolist()
        rows = zip(unpad(tokens, attention), unpad(keep, attention), each, strict=True)
        return _spread(self.queue(self._score_rows, list(rows)), attention)

    def _learns(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())

    # Batches of the queue: rows of any callers in, one result a row out.

    def _draw_rows(self, rows: list[tuple[Tensor, int]]) -> list[Any]:
        ids, streams = zip(*rows, strict=True)
        drawn = self.model._draw(*_padded(ids, "left"), torch.tensor(streams))
        columns = [unpad(drawn.ids, drawn.mask), unpad(drawn.log_probs, drawn.mask)]
        columns.append(drawn.complete.tolist())
        if drawn.support is not None:
            columns += [unpad(drawn.support.get("sizes"), drawn.mask), drawn.support.row_words()]
        return list(zip(*columns, strict=True))

    @torch.no_grad()
    def _score_rows(self, rows: list[tuple[Tensor, Tensor, float]]) -> list[Tensor]:
        ids, keep, temperatures = zip(*rows, strict=True)
        tokens, attention = _padded(ids)
        temperature = torch.tensor(temperatures, device=tokens.device)
        done = self.model._log_probs(tokens, attention, pad(keep, False), temperature, None)
        return unpad(done, attention)

    @torch.no_grad()
    def _logit_rows(self, rows: list[Tensor]) -> list[Tensor]:
        tokens, attention = _padded(rows)
        return unpad(self.model._logits(tokens, attention), attention)


def _padded(rows: Sequence[Tensor], side: str = "right") -> tuple[Tensor, Tensor]:
    mask = pad_mask([len(row) for row in rows], side=side, device=rows[0].device)
    return pad(rows, side=side), mask


def _spread(rows: list[Tensor], attention: Tensor) -> Tensor:
    """Return rows [t, ...] at the attended places of zeros [B, T, ...]."""
    values = torch.cat(rows)
    out = values.new_zeros(*attention.shape, *values.shape[1:])
    out[attention] = values
    return out


def batched_calls(
    model: Any,
    batching: bool | None,
    min_size: int | None,
    max_size: int | None,
    timeout: float,
) -> BatchedCalls:
    """Return what a wrapper's batching arguments ask for; sizes alone ask for a queue."""
    sized = min_size is not None or max_size is not None
    if batching is False and sized:
        raise ValueError("min_batch_size and max_batch_size must be None if batching is False.")
    size = 1 if min_size is None else min_size
    return BatchedCalls(model, BatchQueue(min_size=size, max_size=max_size, timeout=timeout))
