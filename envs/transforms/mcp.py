"""Tools of a server of the Model Context Protocol (MCP): a program that speaks it over its pipes.

The package `mcp` (`pip install -e '.[mcp]'`) is imported here only. It is asynchronous: a thread
of its own runs each connection.
Left out on purpose: servers over HTTP, resources, prompts, and servers that ask questions back.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import tempfile
import threading
import uuid
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import psutil

from envs.transforms.tool_registry import Tool
from policies.optional_packages import EXTRAS

MARK = "LEASH_MCP_SERVER"  # the environment variable that tells whose child a process is
CLOSED = -32000  # the code of an answer that will not come, for the connection is closed
TYPES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


class MCPServer:
    """A server started by `command`, and its `tools`, which a `ToolRegistry` takes as they are.

    `timeout` (seconds) is for a call, `start_timeout` for the start. A server that has ended is
    started again by the next call; a call that takes longer ends it, for it may hang. `env` adds to
    the few variables that it inherits (PATH, HOME, ...). It is a program like any other: it may do
    whatever you may. `close()` ends it with all of its children; so does the end of this process.
    Raises ValueError for a command that starts none, ImportError without the package.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout: float = 10.0,
        start_timeout: float = 60.0,
        env: dict[str, str] | None = None,
    ) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(f"expected command as a list of words, got {command!r}")
        self.timeout, self._lock = timeout, threading.Lock()
        self._how = (list(command), start_timeout, env)
        self._session = self._connect()
        self.tools = [self._tool(found) for found in self._session.found]

    def call(self, name: str, args: dict[str, Any]) -> str:
        """Return what a tool answers; what it fails with is a RuntimeError or a TimeoutError."""
        with self._lock:
            if not self._session.is_alive():
                self._session = self._connect()
        done = self._session.call(name, args, self.timeout)
        text = "\n".join(_shown(part) for part in done.content)
        if done.is_error:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """End the server; the next call starts it again."""
        self._end()

    def __enter__(self) -> MCPServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self) -> _Session:
        session = _Session(*self._how)
        self._end = weakref.finalize(self, session.close)
        return session

    def _tool(self, found: Any) -> Tool:
        known = found.input_schema.get("properties", {})
        kinds = {name: _kind(schema) for name, schema in known.items()}

        def function(_state: Any = None, **args: Any) -> str:  # the state is no argument of it
            return self.call(found.name, args)

        text = (found.description or "").strip().split("\n")[0]
        return Tool(found.name, function, kinds, found.output_schema or {}, text)


class _Session(threading.Thread):
    """The thread in which a connection lives, from its start to its end."""

    def __init__(self, command: list[str], timeout: float, env: dict[str, str] | None) -> None:
        super().__init__(daemon=True, name=f"mcp {command[0]}")
        self.command, self.timeout = command, timeout
        self.env = {**(env or {}), MARK: uuid.uuid4().hex}  # its children inherit it
        self.loop = asyncio.new_event_loop()
        self.stop = asyncio.Event()
        self.found: list[Any] = []
        self._ready: Future[None] = Future()
        self.start()
        self._ready.result()

    def run(self) -> None:
        """Connect, and stay until `close`."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                self.loop.run_until_complete(self._live(log))
            except Exception as error:
                if not self._ready.done():
                    log.seek(0)
                    said = log.read().strip().splitlines()[-1:] or [self._fault(error)]
                    self._ready.set_exception(
                        ValueError(f"expected an MCP server, got {said[0]!r} from {self.command}")
                    )
            finally:
                self.loop.close()
                self.kill()

    def _fault(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"no answer within {self.timeout:g} s"
        return str(error)

    async def _live(self, log: Any) -> None:
        try:
            from mcp import Client, StdioServerParameters, stdio_client
        except ImportError as error:
            missing = ImportError(EXTRAS["mcp"])
            missing.__cause__ = error
            self._ready.set_exception(missing)
            return
        given = StdioServerParameters(command=self.command[0], args=self.command[1:], env=self.env)
        async with asyncio.timeout(None) as patience:
            patience.reschedule(self.loop.time() + self.timeout)
            async with Client(stdio_client(given, errlog=log)) as self.client:
                cursor = None
                while True:
                    page = await self.client.list_tools(cursor=cursor)
                    self.found += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
                patience.reschedule(None)
                self._ready.set_result(None)
                await self.stop.wait()

    def call(self, name: str, args: dict[str, Any], timeout: float) -> Any:
        """Return the result of a call; without one the connection ends."""
        from mcp import MCPError

        future = asyncio.run_coroutine_threadsafe(self.client.call_tool(name, args), self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            self.kill()
            self.close()
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        except MCPError as error:
            if error.code == CLOSED:
                self.close()
            raise RuntimeError(str(error)) from None

    def close(self) -> None:
        """End the connection and with it the server."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.stop.set)
        self.join()

    def kill(self) -> None:
        """Kill what is left of the server and of its children."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.env[MARK]:
                    process.kill()


def _kind(schema: dict[str, Any]) -> Any:
    """Return the Python type of a JSON schema; one of several types is not checked."""
    kind = schema.get("type")
    return (
        TYPES.get(kind, inspect.Parameter.empty)
        if isinstance(kind, str)
        else inspect.Parameter.empty
    )


def _shown(part: Any) -> str:
    """Return a part of a result as text; what is no text by its kind."""
    if part.type == "text":
        return part.text
    return json.dumps({"type": part.type})
