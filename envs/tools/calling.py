"""Execute the tool calls of responses. Each result is a message of role "tool".

The message has the tool's name and the id of the call. What goes wrong (an unknown tool, wrong
arguments, an error, a time-out, a call that cannot be read) is a result too: the policy reads it,
and the chat goes on.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from envs.rewards.functions import FAULTS, finished
from envs.tools.functions import TypedTool
from envs.tools.reading import Call, CallReader
from envs.tools.results import ToolTransformBase, as_text, in_thread
from policies.chats.renderer import Renderer

AT_ONCE = 32  # calls of an async function
METRICS = ("tools/calls", "tools/failures", "tools/seconds")  # docs/metrics.md


@dataclass(frozen=True)
class Outcome:
    """The result of a call as text, whether it failed, and how long it took."""

    text: str
    failed: bool
    seconds: float


class CallTools(ToolTransformBase):
    """Execute the calls of a response by `tools`, at most `max_calls` a turn.

    Plain functions run in a thread, one call after the other, chat by chat; an object with
    `at_once` runs that many calls together, and so does an async function. A call ends after
    `tool_timeout` seconds, but the thread of a plain function is not stopped.
    Writes under ("next", "logged") the calls, failed calls and seconds of the turn, each [B].
    """

    def __init__(
        self,
        tools: Mapping[str, TypedTool],
        renderer: Renderer,
        *,
        tool_timeout: float = 10.0,
        max_calls: int = 8,
    ) -> None:
        super().__init__()
        self.tools, self.read = tools, CallReader(renderer)
        self.tool_timeout, self.max_calls = tool_timeout, max_calls
        self._numbers = torch.zeros(0, len(METRICS))

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        self._numbers = torch.zeros(len(next_td), len(METRICS))  # [B, metrics] of this turn
        next_td = super()._step(tensordict, next_td)
        for name, value in zip(METRICS, self._numbers.unbind(-1), strict=True):
            next_td.set(("logged", name), value)
        return next_td

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the numbers of a turn, each [B], to TorchRL's specs."""
        from policies.torchrl.specs import Composite, Unbounded  # no run needs a spec

        shape = observation_spec.shape
        observation_spec["logged"] = Composite(
            dict.fromkeys(METRICS, Unbounded(shape)), shape=shape
        )
        return observation_spec

    def _process_batch(self, contents: dict[int, str]) -> dict[int, Any]:
        schemas = [tool.schema for tool in self.tools.values()]
        most = 1 if self.read.single else None  # a template of one call takes one result
        calls = {row: self.read(text, schemas)[:most] for row, text in contents.items()}
        outcomes = iter(finished(self._play(list(calls.values()))))
        return {row: self._results(row, turn, outcomes) for row, turn in calls.items()}

    def _results(
        self, row: int, calls: list[Call], outcomes: Iterator[Outcome]
    ) -> list[dict[str, Any]]:
        """Return the messages of a chat's calls, and count them."""
        first = sum(message["role"] == self.tool_role for message in self.chats[row])
        results = []
        for number, call in enumerate(calls, first):
            done = next(outcomes)
            self._numbers[row] += torch.tensor([1.0, float(done.failed), done.seconds])
            # A template's markup in a name or an id would end the run.
            known = call.id if re.fullmatch("[a-zA-Z0-9]{9}", call.id) else f"call{number:05}"
            name = call.name if call.name in self.tools else "unknown"
            results.append({"content": done.text, "name": name, "tool_call_id": known})
        return results

    async def _play(self, turns: list[list[Call]]) -> list[Outcome]:
        """Return the outcomes of the calls of several chats, in their order."""
        plain = asyncio.Semaphore(1)
        free = {}
        for name, tool in self.tools.items():
            at_once = getattr(tool.function, "at_once", AT_ONCE if tool.waits else None)
            free[name] = asyncio.Semaphore(at_once) if at_once else plain
        return await asyncio.gather(
            *(self._outcome(n, call, free) for calls in turns for n, call in enumerate(calls))
        )

    async def _outcome(self, place: int, call: Call, free: dict[str, asyncio.Semaphore]) -> Outcome:
        """Return the outcome of a call, the `place`-th of its turn."""
        tool = self.tools.get(call.name)
        fault = call.fault and f"this call cannot be read: {call.fault}"
        if not fault and tool is None:
            fault = f"there is no tool {call.name}; there are {', '.join(self.tools)}"
        if not fault and tool is not None:
            try:
                fault = tool.fault(call.arguments)
            except RecursionError:
                fault = "the arguments are nested too deep"
        if not fault and place >= self.max_calls:
            fault = f"at most {self.max_calls} calls a turn are made"
        if fault or tool is None:
            return Outcome(f"Error: {fault}", failed=True, seconds=0.0)
        async with free[call.name]:
            begun = time.perf_counter()
            try:
                text, failed = as_text(await self._value(tool, call.arguments)), False
            except FAULTS as error:
                text, failed = f"Error: {_describe(error)}", True
        return Outcome(text, failed, time.perf_counter() - begun)

    async def _value(self, tool: TypedTool, arguments: Mapping[str, Any]) -> Any:
        work = partial(tool.function, **tool.fixed, **arguments)
        try:
            async with asyncio.timeout(self.tool_timeout) as limit:
                return await (work() if tool.waits else asyncio.wrap_future(in_thread(work)))
        except TimeoutError as error:
            late = TimeoutError(f"no result within {self.tool_timeout:g} s")
            raise (late if limit.expired() else error) from None


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of its own __str__
        return type(error).__name__
