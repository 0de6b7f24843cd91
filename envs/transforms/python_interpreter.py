"""Python for a chat: the ```python blocks of a reply, or calls of a tool, run in a sandbox."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensordict import TensorDictBase

from envs.rewards.functions import Refused
from envs.sandbox import make_sandbox
from envs.sandbox_backends import warn_of_limits
from envs.transforms.tools import ToolTransformBase

BLOCK = re.compile(r"```python[ \t]*\n(.*?)```", re.DOTALL)


class PythonInterpreter(ToolTransformBase):
    """Run the ```python blocks of a reply; each gives a message of role `tool_name`.

    See envs/sandbox.py for what the code cannot do. `timeout` (seconds) and `limits` (memory,
    file_size, processes, max_output of `Sandbox`) are for one block; with a `url` it runs on a
    server, and limits are those of `HttpSandbox`. Each block starts afresh; with
    `persistent` names live on in a chat until the next reset. `close()` ends what is running.
    `tokenizer` is accepted and not needed; `services`, TorchRL's pool of interpreters on Ray, is
    refused: a sandbox belongs to its machine.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        tool_name: str = "tool",
        persistent: bool = False,
        timeout: float = 10.0,
        services: str | None = None,
        service_name: str | None = None,
        namespace: str | None = None,
        **limits: Any,
    ) -> None:
        if services is not None or service_name is not None or namespace is not None:
            raise ValueError(
                "services, service_name, namespace: code runs in sandboxes of this machine; leave "
                "them out"
            )
        super().__init__()
        self.tool_role, self.persistent = tool_name, persistent
        self._settings = {"timeout": timeout, **limits}
        _try(self._settings)
        if persistent and "url" in limits:
            raise ValueError(
                "persistent=true: a server keeps no names; leave persistent or url out"
            )
        self._at_once = limits.get("at_once", 16) if "url" in limits else os.cpu_count() or 1
        self._boxes: dict[Any, Any] = {}
        self._owners: list[Any] = []

    def close(self) -> None:
        """End all interpreters."""
        for box in self._boxes.values():
            box.close()
        self._boxes.clear()

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        self.close()
        return td_reset

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        # Rows of finished chats may be gone: a chat is known by its stream where it has one.
        streams = tensordict.get("stream", None)
        self._owners = list(range(len(next_td))) if streams is None else streams.tolist()
        return super()._step(tensordict, next_td)

    def _process_batch(self, contents: dict[int, str]) -> dict[int, list[str] | None]:
        with ThreadPoolExecutor(self._at_once) as pool:
            work = pool.map(self._process_batch_item, contents.values(), contents.keys())
            return dict(zip(contents, work, strict=True))

    def _process_batch_item(self, content: str, index: int) -> list[str] | None:
        blocks = BLOCK.findall(content)
        results = []
        for number, code in enumerate(blocks, 1):
            if self.persistent:
                owner = self._owners[index] if self._owners else index
                ran = self._boxes.setdefault(owner, make_sandbox(**self._settings)).run(code)
            else:
                with make_sandbox(**self._settings) as box:
                    ran = box.run(code)
            how = "ran" if ran.ok else "failed"
            results.append(f"Code block {number} {how}:\n{ran.output}".rstrip())
        return results or None


def _try(settings: dict[str, Any]) -> None:
    """Raise ValueError now, not in the first step, for wrong limits and for no server."""
    box = make_sandbox(**settings)
    if not settings.get("url"):
        return warn_of_limits()
    if not (ran := box.run("")).ok:
        raise ValueError(f"{settings['url']}: expected it to run Python, got {ran.output:.200}")


class PythonTool:
    """Run Python code and return what it prints.

    A tool for a `ToolRegistry`, python(code); the line above is what it tells the policy. Each call
    has a sandbox of its own, with `limits` as `Sandbox` names them (timeout, memory, file_size,
    processes, max_output), or with a `url` as `HttpSandbox` does (url, timeout, at_once ...).
    """

    name = "python"
    schema_in = {"code": str}  # noqa: RUF012

    def __init__(self, **limits: Any) -> None:
        _try(limits)
        self._limits = limits

    def __call__(self, code: str) -> str:
        """Return the output; RuntimeError with it if the code failed."""
        try:
            with make_sandbox(**self._limits) as box:
                ran = box.run(code)
        except ValueError as error:  # no server: that is nothing for the policy to read
            raise Refused(str(error)) from error
        if not ran.ok:
            raise RuntimeError(ran.output.rstrip())
        return ran.output.rstrip()
