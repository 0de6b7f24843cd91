"""Untrusted Python code on a server, for more boxes than this machine has cores.

The server speaks SandboxFusion's API (github.com/bytedance/SandboxFusion, Apache-2.0):
POST /run_code {code, language, run_timeout, memory_limit_MB} -> {status, message, run_result}.
What the code can do there is up to the server. Left out: names that live on from run to run, files.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from envs.sandbox import Ran
from envs.web import OPENER

SLACK = 30.0  # seconds for a server's queue and its start of a box
SETUP = "check url; or leave it out, for sandboxes of this machine"
_FREE: dict[tuple[str, int], threading.BoundedSemaphore] = {}  # of all boxes of this process


class HttpSandbox:
    """A box on the server at `url`, e.g. http://localhost:8080; each run starts afresh.

    `timeout` (seconds), `memory` (MiB) and `max_output` (bytes) are for one run. At most `at_once`
    runs are asked for at a time. 429, 5xx, lost connections and a server that answers nothing are
    tried `tries` times, after `wait`, 2 * `wait` ... seconds or what the server asks for (at most
    60); a server that cannot be reached then is a ValueError. `key_variable` names an environment
    variable whose value is sent as a bearer token.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        memory: int = 512,
        max_output: int = 10_000,
        tries: int = 4,
        wait: float = 1.0,
        at_once: int = 16,
        key_variable: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"expected url to begin with http:// or https://, got {url!r}")
        counts = {"memory": memory, "max_output": max_output, "tries": tries, "at_once": at_once}
        for name, value in counts.items():
            if type(value) is not int or not 0 < value < 1 << 40:
                raise ValueError(f"expected {name} a whole number > 0, got {value!r}")
        if not (0 < timeout < math.inf and 0 <= wait < math.inf):
            raise ValueError(f"expected timeout > 0 and wait >= 0 seconds, got {timeout}, {wait}")
        self.url = f"{url.rstrip('/').removesuffix('/run_code')}/run_code"
        self.timeout, self.memory, self.max_output = timeout, memory, max_output
        self.tries, self.wait, self.key_variable = tries, wait, key_variable
        self._free = _FREE.setdefault((self.url, at_once), threading.BoundedSemaphore(at_once))

    def run(self, code: str) -> Ran:
        """Run code; what the server says of it, its output cut. ValueError without a server."""
        asked = {"language": "python", "run_timeout": self.timeout, "memory_limit_MB": self.memory}
        asked["code"] = code.encode("utf-8", "replace").decode()  # no lone surrogates
        body, fault = json.dumps(asked).encode(), ""
        for number in range(self.tries):
            pause = self.wait * 2**number
            try:
                with self._free:
                    answer = self._post(body)
                if isinstance(answer, Ran):
                    return answer
                fault = answer  # of the server, as it says; code may bring it about
                lost = False
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 429 and error.code < 500:
                    raise ValueError(f"{self.url}: {error}; {SETUP}") from None
                fault, lost = str(error), error.code != 500
                with suppress(TypeError, ValueError):  # no Retry-After, or a date
                    pause = max(pause, min(float(error.headers["Retry-After"]), 60.0))
            except (OSError, http.client.HTTPException) as error:  # a TimeoutError too
                reason = getattr(error, "reason", error)  # a URLError holds the socket's own
                late = isinstance(reason, TimeoutError)
                fault = f"no answer within {self.timeout + SLACK:g} s" if late else str(reason)
                lost = True
            if number + 1 < self.tries:
                time.sleep(pause)
        if lost and code and self.run("").ok:  # this code alone brings it down
            return Ran(False, f"[the sandbox failed: {fault:.200}]")
        if lost:
            what = f"{self.url} cannot be reached after {self.tries} tries ({fault:.200})"
            raise ValueError(f"{what}; start a SandboxFusion server there, or {SETUP}")
        return Ran(False, f"[the sandbox failed: {fault:.200}]")

    def close(self) -> None:
        """Do nothing: the server keeps nothing of a run."""

    def __enter__(self) -> HttpSandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _post(self, body: bytes) -> Ran | str:
        """Return what a run came to, or what the server says went wrong with itself."""
        headers = {"Content-Type": "application/json"}
        if self.key_variable and (key := os.environ.get(self.key_variable)):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, data=body, headers=headers)
        most = 12 * self.max_output + (1 << 16)  # JSON escapes a byte by up to six, in two streams
        with OPENER.open(request, timeout=self.timeout + SLACK) as response:
            data = response.read(most + 1)
        if len(data) > most:
            return Ran(False, "[stopped: too much output]")
        try:
            answer: dict[str, Any] = json.loads(data)
            status, ran = answer["status"], answer.get("run_result") or {}
            if status not in ("Success", "Failed"):
                return str(answer.get("message") or status)
            output = f"{ran.get('stdout') or ''}{ran.get('stderr') or ''}".encode()
        except (ValueError, LookupError, TypeError, AttributeError):
            return f"expected an answer of SandboxFusion, got {data[:80]!r}"
        text = output[: self.max_output].decode(errors="replace")
        if len(output) > self.max_output:
            text += f"\n[output cut after {self.max_output} bytes]"
        if ran.get("status") == "TimeLimitExceeded":
            text += f"\n[stopped: no end within {self.timeout:g} s]"
        return Ran(status == "Success", text.lstrip("\n") if not output else text)
