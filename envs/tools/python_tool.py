"""Run Python in a sandbox as a tool."""

import os
from typing import Any

from envs.tools.sandbox import Sandbox


class PythonTool:
    """Run Python code and return what it prints.

    Use it in `env.tools` or, as python(code), in a `ToolRegistry`. Each call runs in a separate
    process with the `limits` of `Sandbox` (timeout, memory, file_size, processes, max_output).
    Raise RuntimeError with the output if the code fails.
    """

    name = "python"
    schema_in = {"code": str}  # noqa: RUF012
    at_once = os.cpu_count() or 1  # concurrent calls

    def __init__(self, **limits: Any) -> None:
        self.sandbox = Sandbox(**limits)

    def __call__(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: The program.

        """
        ran = self.sandbox.run(code)
        if not ran.ok:
            raise RuntimeError(ran.output.rstrip())
        return ran.output.rstrip()
