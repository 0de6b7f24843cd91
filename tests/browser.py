"""A headless Chromium for tests, spoken to in the DevTools protocol over two pipes.

No driver and no package is needed: --remote-debugging-pipe reads JSON messages that end in a zero
byte from descriptor 3 and writes them to 4 (chromedevtools.github.io/devtools-protocol).
"""

import base64
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without its sandbox, which neither root nor a container may set up; it opens our own files only.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--hide-scrollbars"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find() -> str:
    """Return the path of a Chromium; a missing one is an error, not a skip."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"expected one of {NAMES}: make test-browser installs it (Debian, root)"
    return found


class Browser:
    """One browser with one tab.

    `events` are the messages that were not answers, in order: (method, params).
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # It wants 3 and 4: a shell moves them there, after the descriptors of this process.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        words = [find(), *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._in, selectors.EVENT_READ)
        self._rest, self._count, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Open a file at a width (CSS pixels) and wait until it is loaded."""
        phone = width < 600
        size = {"width": width, "height": 844 if phone else 900}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("Page.loadEventFired")

    def wait(self, method: str, *, seconds: float = 60) -> None:
        """Wait for an event that has not been seen since the page was opened."""
        limit = time.monotonic() + seconds
        while method not in [name for name, _ in self.events]:
            self._read(limit - time.monotonic())

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds, also over reloads."""
        limit = time.monotonic() + 30
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < limit, f"never: {condition}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Save the whole page, also what one would have to scroll to."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Return the errors of the page: exceptions, console errors, what the browser logged."""
        out = []
        for name, params in self.events:
            level = params.get("type") or params.get("entry", {}).get("level")
            if name == "Runtime.exceptionThrown" or level in ("error", "warning"):
                out.append(str(params))
        return out

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        sent = [p["request"]["url"] for n, p in self.events if n == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def close(self) -> None:
        """End the browser and remove its profile."""
        self._process.kill()
        self._process.wait()
        self._ready.close()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _read(self, seconds: float = 60) -> dict[str, Any]:
        """Return the next message; one that is no answer is kept among the events."""
        while b"\0" not in self._rest:
            assert self._ready.select(max(seconds, 0)), "the browser does not answer"
            data = os.read(self._in, 2**16)
            assert data, f"the browser has ended with code {self._process.wait()}"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message
