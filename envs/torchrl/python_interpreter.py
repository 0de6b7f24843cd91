"""Run the ```python blocks of a response in a sandbox."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envs.tools.results import ToolTransformBase
from envs.tools.sandbox import Sandbox

BLOCK = re.compile(r"```python[ \t]*\n(.*?)```", re.DOTALL)


class PythonInterpreter(ToolTransformBase):
    """Run the ```python blocks of a response; each result is a message of role `tool_name`.

    Each block runs in a separate process with the limits of envs/tools/sandbox.py. `timeout`
    (seconds) and `limits` (memory, file_size, processes, max_output of `Sandbox`) apply to one
    block.
    """

    def __init__(self, *, tool_name: str = "tool", timeout: float = 10.0, **limits: Any) -> None:
        super().__init__()
        self.tool_role = tool_name
        self.sandbox = Sandbox(timeout=timeout, **limits)

    def _process_batch(self, contents: dict[int, str]) -> dict[int, list[str] | None]:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            work = pool.map(self._process_batch_item, contents.values(), contents.keys())
            return dict(zip(contents, work, strict=True))

    def _process_batch_item(self, content: str, index: int) -> list[str] | None:
        results = []
        for number, code in enumerate(BLOCK.findall(content), 1):
            ran = self.sandbox.run(code)
            how = "ran" if ran.ok else "failed"
            results.append(f"Code block {number} {how}:\n{ran.output}".rstrip())
        return results or None
