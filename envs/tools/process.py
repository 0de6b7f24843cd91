"""Execute tool calls in a separate process, which is killed if a call does not end in time.

The process loads no torch.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from envs.rewards.functions import is_async
from envs.rewards.workers import Workers

GRACE = 1.0  # seconds that a call has to stop before its process is killed
Request = tuple[str, Mapping[str, Any]]  # name and arguments of a call


@dataclass(frozen=True)
class Outcome:
    """The result of a call as text, whether it failed, and how long it took."""

    text: str
    failed: bool
    seconds: float


class ToolProcess:
    """Execute calls of `functions`, by name, in one process, which keeps their state.

    Plain functions run one call after the other; `at_once` maps other names to the number of calls
    that run at a time. A call ends after `timeout` seconds. If it cannot be cancelled, the process
    is killed: calls that run at the same time fail too, and the next call starts another process.

    >>> import operator
    >>> tools = ToolProcess({"add": operator.add, "int": int}, at_once={}, timeout=5)
    >>> [done.text for done in tools.outcomes([("int", {}), ("add", {})])]
    ['0', 'Error: TypeError: add expected 2 arguments, got 0']
    """

    def __init__(
        self, functions: Mapping[str, Any], *, at_once: Mapping[str, int], timeout: float
    ) -> None:
        self.at_once, self.timeout = at_once, timeout
        self._worker = Workers(Tools(functions, at_once, timeout), timeout=timeout, processes=1)

    def outcomes(self, requests: Sequence[Request]) -> list[Outcome]:
        """Return the outcome of each call; run the concurrent calls first."""
        counts = Counter(name for name, _ in requests if name in self.at_once)
        rounds = [math.ceil(count / self.at_once[name]) for name, count in counts.items()]
        late = max(rounds, default=0) * (self.timeout + GRACE)
        together = [request for request in requests if request[0] in self.at_once]
        first = iter(self._send(together, late) if together else ())
        return [
            next(first) if each[0] in self.at_once else self._send([each], self.timeout)[0]
            for each in requests
        ]

    def _send(self, requests: list[Request], timeout: float) -> list[Outcome]:
        """Return the outcomes of requests; all fail if the process does not reply in time."""
        begun = time.perf_counter()
        (answer,) = self._worker.map([(requests,)], timeout=timeout)
        if isinstance(answer, Exception):
            late = TimeoutError(f"no result within {self.timeout:g} s")
            error = describe(late if isinstance(answer, TimeoutError) else answer)
            return [Outcome(error, True, time.perf_counter() - begun)] * len(requests)
        outcomes, ended = answer
        if not ended:
            self._worker.kill()
        return outcomes


class Tools:
    """The functions, inside the process."""

    def __init__(
        self, functions: Mapping[str, Any], at_once: Mapping[str, int], timeout: float
    ) -> None:
        self.functions, self.at_once, self.timeout = functions, at_once, timeout

    def __repr__(self) -> str:
        return f"env.tools ({', '.join(self.functions)})"  # for the error of a process

    def __call__(self, requests: list[Request]) -> tuple[list[Outcome], bool]:
        """Return the outcomes of concurrent calls, and whether all calls have ended."""
        work = [partial(self.functions[name], **arguments) for name, arguments in requests]
        if requests[0][0] not in self.at_once:
            return [_outcome(each) for each in work], True
        self.loop = asyncio.new_event_loop()  # not closed: that would wait for every call
        return self.loop.run_until_complete(self._together(requests, work))

    async def _together(
        self, requests: list[Request], work: list[Callable[[], Any]]
    ) -> tuple[list[Outcome], bool]:
        free = {name: asyncio.Semaphore(count) for name, count in self.at_once.items()}
        threads, ended = ThreadPoolExecutor(len(work)), True

        async def one(name: str, each: Callable[[], Any]) -> Outcome:
            nonlocal ended
            async with free[name]:
                begun, waits = time.perf_counter(), is_async(self.functions[name])
                task = (
                    self.loop.create_task(_awaited(each))
                    if waits
                    else self.loop.run_in_executor(threads, _outcome, each)
                )
                if (await asyncio.wait({task}, timeout=self.timeout))[0]:
                    return task.result()
                task.cancel()
                stopped = (await asyncio.wait({task}, timeout=GRACE / 2))[0]
                ended &= bool(stopped) and waits  # a thread cannot be cancelled
                error = describe(TimeoutError(f"no result within {self.timeout:g} s"))
                return Outcome(error, True, time.perf_counter() - begun)

        names = (name for name, _ in requests)
        outcomes = await asyncio.gather(*map(one, names, work))
        return outcomes, ended


def _outcome(work: Callable[[], Any]) -> Outcome:
    begun = time.perf_counter()
    try:
        text, failed = as_text(work()), False
    except BaseException as error:  # user code may raise SystemExit or KeyboardInterrupt
        text, failed = describe(error), True
    return Outcome(text, failed, time.perf_counter() - begun)


async def _awaited(work: Callable[[], Any]) -> Outcome:
    begun = time.perf_counter()
    try:
        text, failed = as_text(await work()), False
    except BaseException as error:
        text, failed = describe(error), True
    return Outcome(text, failed, time.perf_counter() - begun)


def describe(error: BaseException) -> str:
    """Return an error as a result that the policy reads."""
    try:
        return f"Error: {type(error).__name__}: {error}"
    except Exception:  # raised by the error's __str__
        return f"Error: {type(error).__name__}"


def as_text(value: Any) -> str:
    """Return a tool's result as text: JSON unless it is a text; numpy arrays become lists."""

    def known(part: Any) -> Any:
        return part.tolist() if hasattr(part, "tolist") else str(part)

    return value if isinstance(value, str) else json.dumps(value, default=known, ensure_ascii=False)
