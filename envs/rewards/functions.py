"""Reward functions: one number per response; `Rewarded` weights and sums them.

A function takes (row, response), as `Task.reward` does, and returns a number. An error replaces the
number of its response, so that `on_error` applies to each response separately. Plain functions have
no time-out, because a thread cannot be stopped; use `SubprocessReward` for code that may hang.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from envs.tasks.task import Response, Row

Score = float | Exception  # math.nan: the function does not apply to the response
ON_ERROR = ("raise", "zero", "drop_group")
FAULTS = (Exception, SystemExit, asyncio.CancelledError)  # errors of user code; not Ctrl-C


class SetupError(Exception):
    """An error of the set-up, not of a response: it ends the run for any `on_error`."""


class RewardFunction:
    """Base of reward functions: a weight, `on_error`, and `scores`, which a subclass overrides.

    `on_error`: "raise" ends the run; "zero" counts the response as 0; "drop_group" removes all
    responses to its prompt from loss and reward metrics. Both count in `reward/errors`.
    """

    tried: ClassVar[bool] = True  # whether a run computes one score before it loads a model

    def __init__(self, *, weight: float = 1.0, on_error: str = "raise") -> None:
        if on_error not in ON_ERROR:
            raise ValueError(f"expected on_error in {', '.join(ON_ERROR)}, got {on_error!r}")
        if not math.isfinite(weight):
            raise ValueError(f"expected a finite weight, got {weight}")
        self.weight, self.on_error = weight, on_error

    def scores(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Score]:
        """Return the score of each response, or its error."""
        raise NotImplementedError(f"{type(self).__name__} has no scores(rows, responses)")


class Function(RewardFunction):
    """A function of (row, response), plain or async; SystemExit counts as an error.

    Async functions run concurrently, at most `at_once`, each with a `timeout` in seconds (null:
    none). The time-out works only while a function awaits. A function that blocks (time.sleep, a
    plain HTTP request, a long computation) delays all others: use `SubprocessReward` for it.

    >>> short = Function(lambda row, response: 1 / len(response.text))
    >>> short.scores([{}, {}], [Response("four", True, []), Response("", True, [])])
    [0.25, ZeroDivisionError('division by zero')]
    """

    def __init__(
        self,
        function: Callable[[Row, Response], Any],
        *,
        weight: float = 1.0,
        on_error: str = "raise",
        timeout: float | None = None,
        at_once: int = 32,
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        if at_once < 1 or (timeout is not None and not timeout > 0):
            raise ValueError(f"expected timeout > 0 and at_once >= 1, got {timeout} and {at_once}")
        self.function, self.timeout, self.at_once = function, timeout, at_once
        self.waits = is_async(function)
        if timeout is not None and not self.waits:
            raise ValueError(f"timeout={timeout} stops async functions only; use SubprocessReward")

    def scores(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Score]:
        """Return each response's score, or the error that the function raised."""
        if self.waits:
            return gather(
                self.function, rows, responses, timeout=self.timeout, at_once=self.at_once
            )
        out: list[Score] = []
        for row, response in zip(rows, responses, strict=True):
            try:
                out.append(as_score(self.function(row, response)))
            except FAULTS as error:
                out.append(as_error(error))
        return out


REGISTERED: dict[str, RewardFunction] = {}  # name in the configuration -> function


class Registered(RewardFunction):
    """The function `name` in `REGISTERED`; raise an error that ends the run if it is missing."""

    def __init__(self, name: str) -> None:
        self.name, self.function = name, REGISTERED.get(name)
        base = self.function or RewardFunction()
        super().__init__(weight=base.weight, on_error=base.on_error)

    def scores(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Score]:
        """Return the scores of the function."""
        if self.function is not None:
            return self.function.scores(rows, responses)
        gone = f"{self.name} was given to conf.api.train by Python code that has ended"
        return [SetupError(f"{gone}; put it into a file and name that: docs/own_task.md")] * len(
            rows
        )


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function or an object's __call__ is async."""
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def as_error(fault: BaseException) -> Exception:
    """Return an exception of a function as the error of its response."""
    return fault if isinstance(fault, Exception) else RuntimeError(repr(fault))


def as_score(value: Any) -> float:
    """Return a reward as a float; raise ValueError unless it is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number as the reward, got {value!r:.80}")
    return number


def gather(
    function: Callable[[Row, Response], Awaitable[Any]],
    rows: Sequence[Row],
    responses: Sequence[Response],
    *,
    timeout: float | None,
    at_once: int,
) -> list[Score]:
    """Return the scores of an async function for all responses, run concurrently."""
    free = asyncio.Semaphore(at_once)

    async def one(row: Row, response: Response) -> Score:
        async with free:
            try:
                async with asyncio.timeout(timeout):
                    return as_score(await function(row, response))
            except FAULTS as error:
                if timeout and isinstance(error, TimeoutError):
                    return TimeoutError(f"no reward within {timeout:g} s")
                return as_error(error)

    async def everything() -> list[Score]:
        return await asyncio.gather(*map(one, rows, responses))

    return run_to_end(everything())


def run_to_end(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end and return the result."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:  # inside a running loop, as in a notebook
        return pool.submit(asyncio.run, work).result()
