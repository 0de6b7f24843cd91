"""Execute the tool calls of responses. Each result is a message of role "tool".

The message has the tool's name and the id of the call. A failure (an unknown tool, wrong arguments,
an error, a time-out, a call that cannot be read) does not end the chat: the policy gets the error
as the result.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from envs.tools.functions import TypedTool
from envs.tools.process import Outcome, ToolProcess
from envs.tools.reading import Call, CallReader
from envs.tools.results import ToolTransformBase
from policies.chats.renderer import Renderer

METRICS = ("tools/calls", "tools/failures", "tools/seconds")  # docs/metrics.md


class CallTools(ToolTransformBase):
    """Execute the calls of a response by `tools`, at most `max_calls` per turn.

    Plain functions run one call after the other, chat by chat. An object with an attribute
    `at_once` runs that many calls at a time, an async function 32. All run in one process; a call
    ends after `tool_timeout` seconds, by killing the process if needed (envs/tools/process.py).
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
        self.max_calls = max_calls
        self._process = ToolProcess(
            {name: tool.portable for name, tool in tools.items()},
            at_once={name: tool.at_once for name, tool in tools.items() if tool.at_once},
            timeout=tool_timeout,
        )
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
        most = 1 if self.read.single else None  # some templates take only one result
        calls = {row: self.read(text, schemas)[:most] for row, text in contents.items()}
        flat = [(c, self._fault(n, c)) for turn in calls.values() for n, c in enumerate(turn)]
        sent = [(c.name, c.arguments) for c, fault in flat if not fault]
        done = iter(self._process.outcomes(sent))
        outcomes = (Outcome(f"Error: {f}", True, 0.0) if f else next(done) for _, f in flat)
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

    def _fault(self, place: int, call: Call) -> str:
        """Return why a call, the `place`-th of its turn, is not executed, or ""."""
        tool = self.tools.get(call.name)
        if call.fault:
            return f"this call cannot be read: {call.fault}"
        if tool is None:
            return f"there is no tool {call.name}; there are {', '.join(self.tools)}"
        try:
            fault = tool.fault(call.arguments)
        except RecursionError:
            return "the arguments are nested too deep"
        if not fault and place >= self.max_calls:
            return f"at most {self.max_calls} calls a turn are made"
        return fault
