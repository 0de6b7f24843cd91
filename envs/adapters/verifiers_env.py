"""Run environments of the library verifiers, with their rows, turns, stops and rubrics.

The library's rollout runs each chat; its client waits for the response that leash samples. Only
this file imports the library (`pip install -e '.[verifiers]'`). Not supported: images; environments
that rewrite earlier turns, because sampled ids never change; `verifiers.v1` (all of 0.4), because
its harnesses are programs that request completions over HTTP.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import math
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from envs.adapters.episodes import Episode, Episodes, Turn
from envs.chat_rows import split_off
from envs.rows import LazyRows
from envs.tasks.task import Message, Response, Reward, Row, assistant
from envs.tools.parsers import XMLBlockParser
from policies.optional_packages import EXTRAS

# Errors while chats are scored: the library only logs them and scores 0.
FAILED: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("FAILED", default=None)


class Verifiers(Episodes):
    """The environment that load_environment(**arguments) of the installed module `name` returns.

    The last response of a chat gets the rubric's weighted sum as its reward; the rubric's functions
    are the reward parts. A reward of at least pass_threshold is right. If a function fails, the
    response is dropped with its group and counted. Without eval data a seeded tenth is held out.
    `max_turns` limits the environment's turns. `parser` reads the calls of an environment with
    tools.
    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        max_turns: int = 1,
        parser: Callable[[str], Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(at_once=1024)
        self.name, self.parser = name, parser or XMLBlockParser()
        self.env = load(name, arguments or {})
        self.names = sorted(set(self.env.rubric._get_reward_func_names()))
        self.together = self.env.rubric.has_group_rewards
        for env in getattr(self.env, "envs", [self.env]):  # an EnvGroup has several
            if (turns := env.max_turns) != 1 and max_turns == 1:
                raise ValueError(f"{name} has {turns} turns; set env.max_turns above 1")
            if turns != 1 and self.together:
                raise ValueError(f"{name} compares responses, which needs one turn each")
            env.max_turns = min(turns, max_turns) if turns > 0 else max_turns
        train, held_out = self.env.build_dataset(), self.env.build_eval_dataset()
        places: Sequence[Any] = range(len(train)), range(len(held_out or ()))
        if held_out is None:
            held_out, prompts = train, [json.dumps(prompt) for prompt in train["prompt"]]
            places = split_off(prompts, seed=seed)
        sources = {"train": (train, places[0]), "eval": (held_out, places[1])}
        self._rows = {
            split: LazyRows(partial(_row, split, data), indices)
            for split, (data, indices) in sources.items()
        }

    async def open(self, row: Row) -> Episode:
        """Start the rollout of a row, which waits for its first response."""
        episode = Rollout(self.env, row, self.parser)
        await episode.next_prompt()
        return episode

    async def finish(self, rows: Sequence[Row], turns: list[Turn]) -> list[Turn]:
        """Add the rewards of finished chats to their turns."""
        ended: dict[int, list[int]] = {}  # group -> indices of chats that are scored together
        for i in (i for i, turn in enumerate(turns) if not turn.messages):
            ended.setdefault(id(rows[i]) if self.together else i, []).append(i)
        groups = [[turns[i].state for i in group] for group in ended.values()]
        failures = await asyncio.gather(*map(self._score, groups))
        for group, failed in zip(ended.values(), failures, strict=True):
            for i in group:
                turns[i] = replace(turns[i], reward=self._reward(turns[i].state, failed))
        return turns

    async def _score(self, states: list[Any]) -> list[Any]:
        """Score chats by the library; return the errors of the rollouts and of the functions."""
        failed = [state["error"] for state in states if state.get("error") is not None]
        FAILED.set(failed)
        async with self._free:
            await self.env.rubric.score_group(states)
            await asyncio.gather(*map(self.env.rubric.cleanup, states))
        if failed:
            warnings.warn(f"{self.name}: {failed[0]!r}: dropped, see reward/errors", stacklevel=2)
        return failed

    def _reward(self, state: Any, failed: list[Any]) -> Reward:
        total, metrics = float(state["reward"]), state["metrics"]
        parts = {name: float(metrics.get(name, math.nan)) for name in self.names}
        right = total >= self.env.pass_threshold
        return Reward(total, parts, right, errors=len(failed), dropped=bool(failed))


def _row(split: str, data: Any, index: int) -> Row:
    row = data[int(index)]
    return {"messages": plain(row["prompt"]), "place": f"{split} {index}", "input": row}


class Rollout(Episode):
    """A rollout of the library; `answer` gives it the policy's response.

    `parser` reads the calls in a response if the environment has tools.
    """

    def __init__(self, env: Any, row: Row, parser: Callable[[str], Any]) -> None:
        self.seen, self.parser = list(row["messages"]), parser
        self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.responses: asyncio.Queue[Response] = asyncio.Queue()
        inputs = {**row["input"], "prompt": row["messages"]}
        self.task = asyncio.create_task(env.rollout(inputs, waiting_client()(self), "leash", {}))

    async def next_prompt(self) -> list[Message] | None:
        """Return the policy's next prompt, None at the end."""
        prompt = asyncio.create_task(self.prompts.get())
        await asyncio.wait({prompt, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if prompt.done():
            return prompt.result()
        prompt.cancel()
        self.task.result()  # raises its error
        return None

    async def answer(self, response: Response) -> Turn:
        """Return the environment's messages after a response; at the end also the state."""
        expected = [*self.seen, assistant(response.text)]
        self.responses.put_nowait(response)
        if (prompt := await self.next_prompt()) is None:
            return Turn([], state=self.task.result())
        if len(prompt) <= len(expected) or prompt[: len(self.seen)] != self.seen:
            raise ValueError(
                f"expected the environment to go on with the chat, got {prompt!r:.200}"
            )
        self.seen = [*expected, *prompt[len(expected) :]]
        return Turn(prompt[len(expected) :])

    async def close(self) -> None:
        """Cancel the rollout and wait for its clean-up."""
        self.task.cancel()
        await asyncio.wait({self.task})


@cache
def waiting_client() -> type:
    """Return a client class of the library that takes completions from a `Rollout`."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
    from verifiers.types import Response  # pyright: ignore[reportMissingImports]

    class Waiting(Client):
        async def get_response(self, prompt, model, sampling_args, tools=None, **_):
            rollout = self.client
            rollout.prompts.put_nowait(plain(prompt))
            response = await rollout.responses.get()
            parsed = (
                rollout.parser(response.text) if tools else {"calls": [], "text": response.text}
            )
            calls = [
                {"id": f"call_{i}", "name": call.tool, "arguments": json.dumps(call.args)}
                for i, call in enumerate(parsed["calls"])
            ]
            ended = "tool_calls" if calls else "stop"
            message = {
                "content": parsed["text"],
                "tool_calls": calls or None,
                "finish_reason": ended if response.complete else "length",
                "is_truncated": not response.complete,
            }
            return Response(id="leash", created=0, model=model, message=message)

    Waiting.__abstractmethods__ = frozenset()  # they are for clients with a server
    return Waiting


class _Failures(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if (failed := FAILED.get()) is not None and "Error calling" in record.getMessage():
            failed.append(sys.exc_info()[1])
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)


def load(name: str, arguments: Mapping[str, Any]) -> Any:
    """Load an environment and restore the signal handlers that it changes."""
    try:
        import verifiers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["verifiers"]) from error
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        env = verifiers.load_environment(name, **arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    logger = logging.getLogger("verifiers")
    if not any(isinstance(handler, _Failures) for handler in logger.handlers):
        logger.addHandler(_Failures())
    return env


def plain(prompt: Sequence[Any]) -> list[Message]:
    """Return messages with only role and content; raise ValueError if a content is not text.

    >>> plain([{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    out = []
    for message in prompt:
        fields = message if isinstance(message, Mapping) else message.model_dump()
        content = fields["content"] or ""
        if not isinstance(content, str):
            if any(part["type"] != "text" for part in content):
                raise ValueError(f"expected texts in the messages, got {content!r:.200}")
            content = "".join(part["text"] for part in content)
        out.append({"role": fields["role"], "content": content})
    return out
