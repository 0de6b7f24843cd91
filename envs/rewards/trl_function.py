"""Run reward functions written for TRL unchanged: on a batch, with keyword arguments.

Not supported: arguments of TRL's trainer (token ids, its state, its logs, environments), because
leash has no such trainer.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envs.rewards.functions import (
    FAULTS,
    REGISTERED,
    Function,
    RewardFunction,
    Score,
    SetupError,
    as_error,
    as_score,
    run_to_end,
)
from envs.tasks.task import Response, Row, assistant

HIDDEN = {"messages", "prompt", "prompts", "completion", "completions"}  # not passed as columns


class TRLFunction(RewardFunction):
    """A function f(prompts, completions, **columns) for TRL's GRPOTrainer, plain or async.

    It returns a number per response, or None where it does not apply. Prompts and completions are
    texts if the data's prompts are texts, else lists of messages; `conversational` overrides this.
    Columns come from the data. A batch that fails is repeated response by response unless
    on_error=raise; a result without a reward for each response ends the run.

    >>> def short(completions, most, **kwargs):
    ...     return [len(c[0]["content"]) <= n if n else None for c, n in zip(completions, most)]
    >>> rows = [{"messages": [], "columns": {"most": n}} for n in (3, 2, 0)]
    >>> TRLFunction(short).scores(rows, [Response("Yes", True, [])] * 3)
    [1.0, 0.0, nan]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        weight: float = 1.0,
        on_error: str = "raise",
        conversational: bool | None = None,
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        self.function, self.conversational = function, conversational
        self.needs = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.default is parameter.empty
        ]

    def scores(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Score]:
        """Return each response's score, math.nan for None, or its error."""
        if not rows:
            return []
        try:
            values = self.function(**self._arguments(rows, responses))
            values = run_to_end(_wait(values)) if inspect.isawaitable(values) else values
            count = len(values) if hasattr(values, "__len__") else f"{values!r:.80}"
            if count != len(rows):
                raise SetupError(f"expected {len(rows)} rewards, got {count}")
            return [math.nan if value is None else as_score(value) for value in values]
        except FAULTS as error:
            if self.on_error == "raise" or len(rows) == 1 or isinstance(error, SetupError):
                return [as_error(error)] * len(rows)
        return [
            self.scores([row], [response])[0] for row, response in zip(rows, responses, strict=True)
        ]

    def _arguments(self, rows: Sequence[Row], responses: Sequence[Response]) -> dict[str, Any]:
        """Return the arguments of the function; raise SetupError if it needs others."""
        pairs = list(zip(rows, responses, strict=True))
        prompts: list[Any] = [response.messages[:-1] or row["messages"] for row, response in pairs]
        completions: list[Any] = [[assistant(response.text)] for response in responses]
        texts = self.conversational is False
        if texts or (self.conversational is None and isinstance(rows[0].get("question"), str)):
            prompts = [chat[-1]["content"] for chat in prompts]
            completions = [response.text for response in responses]
        cells = [row.get("columns", row) for row in rows]
        names = dict.fromkeys(name for row in cells for name in row if name not in HIDDEN)
        out = {"prompts": prompts, "completions": completions}
        out |= {name: [row.get(name) for row in cells] for name in names}
        if lacking := [name for name in self.needs if name not in out]:
            raise SetupError(
                f"the function needs {', '.join(lacking)}, got the columns {', '.join(names)}; "
                "rename a column or an argument"
            )
        return out


async def _wait(work: Awaitable[Any]) -> Any:
    return await work


def register(name: str, function: Callable[..., Any] | RewardFunction) -> None:
    """Register a function of (row, response) or of TRL's (prompts, completions, ...) by name."""
    if not isinstance(function, RewardFunction):
        function = (TRLFunction if is_of_trl(function) else Function)(function)
    REGISTERED[name] = function


def is_of_trl(function: Callable[..., Any]) -> bool:
    """Return whether a function takes TRL's arguments."""
    return not {"prompts", "completions"}.isdisjoint(inspect.signature(function).parameters)
