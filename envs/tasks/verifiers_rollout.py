"""A rollout of the library verifiers, from which leash hears what is asked and says its replies.

The library is imported here only (`pip install -e '.[verifiers]'`).
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from envs.tasks.episodes import Episode, Turn
from envs.tasks.task import Message, Reply, Row, assistant
from policies.optional_packages import EXTRAS

# What failed while chats are scored, for the library logs it and goes on with 0.
FAILED: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("FAILED", default=None)


class Rollout(Episode):
    """A rollout of the library; `answer` says what the policy said.

    `parser` reads the calls in a reply where the environment has tools.
    """

    def __init__(self, env: Any, row: Row, parser: Callable[[str], Any]) -> None:
        self.seen, self.parser = list(row["messages"]), parser
        self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        given = {**row["input"], "prompt": row["messages"]}
        self.task = asyncio.create_task(env.rollout(given, waiting_client()(self), "leash", {}))

    async def asked(self) -> list[Message] | None:
        """Return what the policy is asked next, None at the end."""
        prompt = asyncio.create_task(self.prompts.get())
        await asyncio.wait({prompt, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if prompt.done():
            return prompt.result()
        prompt.cancel()
        self.task.result()  # raises what ended it
        return None

    async def answer(self, reply: Reply) -> Turn:
        """Return what the environment says to a reply; the rollout's state at its end."""
        said = [*self.seen, assistant(reply.text)]
        self.replies.put_nowait(reply)
        if (prompt := await self.asked()) is None:
            return Turn([], state=self.task.result())
        if len(prompt) <= len(said) or prompt[: len(self.seen)] != self.seen:
            raise ValueError(
                f"expected the environment to go on with the chat, got {prompt!r:.200}; what was "
                "said before stays as it is"
            )
        self.seen = [*said, *prompt[len(said) :]]
        return Turn(prompt[len(said) :])

    async def close(self) -> None:
        """Give up the rollout, which then cleans up."""
        self.task.cancel()
        await asyncio.wait({self.task})


@cache
def waiting_client() -> type:
    """Return the library's client that asks a `Rollout` for each completion."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
    from verifiers.types import Response  # pyright: ignore[reportMissingImports]

    class Waiting(Client):
        async def get_response(self, prompt, model, sampling_args, tools=None, **_):
            rollout = self.client
            rollout.prompts.put_nowait(plain(prompt))
            reply = await rollout.replies.get()
            said = rollout.parser(reply.text) if tools else {"calls": [], "text": reply.text}
            calls = [
                {"id": f"call_{i}", "name": call.tool, "arguments": json.dumps(call.args)}
                for i, call in enumerate(said["calls"])
            ]
            ended = "tool_calls" if calls else "stop"
            message = {
                "content": said["text"],
                "tool_calls": calls or None,
                "finish_reason": ended if reply.complete else "length",
                "is_truncated": not reply.complete,
            }
            return Response(id="leash", created=0, model=model, message=message)

    Waiting.__abstractmethods__ = frozenset()  # of a client that speaks to a server
    return Waiting


class _Failures(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if (failed := FAILED.get()) is not None and "Error calling" in record.getMessage():
            failed.append(sys.exc_info()[1])
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)


def load(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return an environment; the handlers of signals that it sets are taken back."""
    try:
        import verifiers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(EXTRAS["verifiers"]) from error
    if not hasattr(verifiers, "load_environment"):
        raise ValueError("expected verifiers below 0.4, which has environments no more")
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
    """Return messages with role and content alone; ValueError where that is no text.

    >>> plain([{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    out = []
    for message in prompt:
        given = message if isinstance(message, Mapping) else message.model_dump()
        content = given["content"] or ""
        if not isinstance(content, str):
            if kinds := {part["type"] for part in content} - {"text"}:
                raise ValueError(f"expected texts in the messages, got {', '.join(sorted(kinds))}")
            content = "".join(part["text"] for part in content)
        out.append({"role": given["role"], "content": content})
    return out
