"""The pages in a headless Chromium (make test-browser); screenshots are kept in $SCREENSHOTS."""

import base64
import json
import math
import os
import selectors
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.pages import write_lines, write_status, write_words

from trainer.pages import page as page_module
from trainer.pages.panels import MAIN, MORE
from trainer.pages.report import write_report
from trainer.pages.sweep_page import write_sweep
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.runs.lock import locked

pytestmark = pytest.mark.browser
LONG = "unbreakable" * 12
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without its sandbox, which neither root nor a container may set up; it opens our own files only.
FLAGS = ("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--hide-scrollbars")
FLAGS += ("--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")


class Browser:
    """A headless Chromium with one tab, spoken to in the DevTools protocol over two pipes.

    No driver and no package is needed: it reads JSON messages that end in a zero byte from
    descriptor 3 and writes them to 4 (chromedevtools.github.io/devtools-protocol). `events` are the
    messages that were not answers, in order: (method, params).
    """

    def __init__(self, profile: Path) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        found = next(filter(None, map(shutil.which, NAMES)), None)
        assert found, f"expected one of {NAMES}: make test-browser installs it (Debian, root)"
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # It wants 3 and 4: a shell moves them there, after the descriptors of this process.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        words = [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        null = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        command = ["bash", "-c", script, "browser", *words]
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **null)
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
        while "Page.loadEventFired" not in [name for name, _ in self.events]:
            self._read()

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
        levels = [(n, p.get("type") or p.get("entry", {}).get("level"), p) for n, p in self.events]
        bad = ("error", "warning")
        return [str(p) for n, lv, p in levels if n == "Runtime.exceptionThrown" or lv in bad]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        sent = [p["request"]["url"] for n, p in self.events if n == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def all(self, selector: str, get: str = "textContent") -> list[Any]:
        """Return an attribute of all elements that a selector names."""
        return self.run(f"[...document.querySelectorAll('{selector}')].map((e) => e.{get})")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._ready.close()
        os.close(self._in)
        os.close(self._out)

    def _read(self) -> dict[str, Any]:
        """Return the next message; one that is no answer is kept among the events."""
        while b"\0" not in self._rest:
            assert self._ready.select(60), "the browser does not answer"
            data = os.read(self._in, 2**16)
            assert data, f"the browser has ended with code {self._process.wait()}"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


def metrics(i: int, scale: float) -> dict[str, float]:
    """Return all that a PPO run logs, with large, small and negative values."""
    names = [name for panel in (*MAIN, *MORE) for name in panel.metrics if "eval/" not in name]
    out = {n: scale * (1 + k % 3 + math.sin(i / (3 + k % 5))) for k, n in enumerate(names)}
    return out | {"perf/tokens_per_s": 123456.0, "kl/behaviour": 2e-7 * i, "reward_part/x": 0.5}


def write_run(folder: Path, *words: str, scale: float = 1.0, state: str = "finished") -> None:
    rows = [metrics(i, scale) for i in range(1, 61)]
    rows[-1] |= {"eval/sampled_accuracy": 0.814, "eval/greedy_accuracy": 0.5, "eval/pass@8": 0.9}
    before = {"eval/sampled_accuracy": 0.207, "eval/greedy_accuracy": 0.4}
    write_lines(folder, before, *rows, begin=0)
    own = [None if k % 7 == 4 else k for k in range(42)]
    pieces = {"text": ["The", " capital", f" {LONG}", " is", "\n", "Paris \U0001f600", "end"] * 6}
    pieces |= {name: [k and math.sin(k) for k in own] for name in ("kl", "advantage", "log_prob")}
    row = {"kind": "train", "answer": LONG, "system": "Be brief.", "parts": {LONG: 1.0}, "kl": 2.5}
    tracker = JsonlTracker(folder, resume=True)
    for i in (8, 9, 60):
        for g in range(9):
            named = {**row, "group": g, "prompt": f"{g} of {i}"}
            said = [{**named, "response": f"<b>r{i}{g}{k}", "reward": k / 8} for k in range(8)]
            chat = [
                {"role": "tool", "content": f"<b>result {g}"},
                {"role": "user", "content": LONG},
            ]
            first = {**said[0], "pieces": pieces, "messages": chat}
            tracker.responses([first, *said[1:]], i, kind="train")
    for kind in ("before", "after"):
        tried = [{"kind": kind, "prompt": f"{k}", "response": LONG} for k in range(8)]
        tracker.responses(tried, 60, kind=kind)
    note = {"level": "warn", "title": "KL explodes", "text": f"{LONG} read", "iteration": 7}
    write_status(folder, state=state, objective=scale, seconds=99, notes=[note])
    write_words(folder, "experiment=ppo_tiny", *words)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    write_run(root / "run")
    for coeff in (0, 0.01, 0.1, 1):
        write_run(root / "sweep" / f"kl.coeff={coeff}", f"kl.coeff={coeff}", scale=1 / (1 + coeff))
    write_words(root / "sweep" / "kl.coeff=9", "kl.coeff=9")
    write_lines(root / "long", *(metrics(i, 0.0123) for i in range(8)), begin=1993)
    empty = {"kind": "train", "prompt": "Say nothing.", "response": ""}
    JsonlTracker(root / "long", resume=True).responses([empty], 2000, kind="train")
    reports = {name: write_report(root / name) for name in ("run", "long")}
    return {"report": reports["run"], "long": reports["long"], "sweep": write_sweep(root / "sweep")}


# Elements that leave the page, or whose text leaves them.
OUTSIDE = """
[...document.querySelectorAll("body *")].filter((e) => {
  if (e.parentElement.closest(".scroll,pre,.response,script,style,svg")) return false;
  const box = e.getBoundingClientRect();
  const look = getComputedStyle(e), wide = e.scrollWidth > e.clientWidth + 1;
  return box.right > innerWidth + 1 || box.left < -1 ||
    (wide && e.clientWidth && look.display !== "inline" && look.overflowX === "visible" &&
     !e.querySelector("code"));  // the padding of a command may hang over
}).map((e) => e.outerHTML.slice(0, 200))
"""
# Texts of a chart that leave it, lie on each other or are too small to read, in CSS pixels.
UNREADABLE = """
[...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const frame = chart.getBoundingClientRect();
  if (!frame.width) return [];  // folded
  const texts = [...chart.querySelectorAll("text")].map((e) => [e, e.getBoundingClientRect()]);
  const bad = texts.filter(([, b]) => b.height < 9 || b.left < frame.left - 2 ||
    b.right > frame.right + 2 || b.top < frame.top - 2 || b.bottom > frame.bottom + 2);
  const on = texts.flatMap(([e, a], i) => texts.slice(0, i).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([f]) => [e, f]));
  const name = chart.getAttribute("aria-label");
  return [...bad.map(([e]) => name + ": " + e.textContent),
    ...on.map(([e, f]) => name + ": " + e.textContent + " on " + f.textContent)];
})
"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["report", "long", "sweep"])
def test_a_page_fits_and_asks_for_nothing(browser, pages, tmp_path, name, width):
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        browser.open(pages[name], width=width, dark=dark)
        browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert browser.complaints() == []
        assert browser.requests() == [pages[name].resolve().as_uri()]
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(OUTSIDE) + browser.run(UNREADABLE) == []
        browser.screenshot(folder / f"{name}_{width}{'_dark' if dark else ''}.png")


def test_the_button_in_a_header_sorts_by_number_and_back_with_empty_cells_last(browser, pages):
    browser.open(pages["sweep"], width=1280)
    place = browser.all("th").index("objective")
    for down in (False, True):
        browser.run(f"document.querySelectorAll('th button')[{place}].click()")
        texts = browser.all(f"tbody td:nth-child({place + 1})")
        values = [float(text) for text in texts if text]
        assert values == sorted(values, reverse=down)
        assert len(set(values)) == 4
        assert texts[len(values) :] == [""] * (len(texts) - len(values)) != []


def test_the_browser_of_responses_goes_through_iterations_and_finds_texts(browser, pages):
    browser.open(pages["report"], width=390)
    group = "#browser .group"
    assert browser.all("#browser output") == ["iteration 60 of 60"]
    assert len(browser.all("#browser u[title]")) > 20
    browser.run("document.querySelector('#browser .along button').click()")
    assert browser.all("#browser output") == ["iteration 9 of 60"]
    assert browser.all(f"{group} .prompt") == [f"{g} of 9" for g in range(6)]
    assert len(browser.all(f"{group}:first-of-type .said > .response")) == 8
    chat = browser.all(f"{group}:first-of-type .said details .response")
    assert chat == ["tool: <b>result 0", f"user: {LONG}"]
    assert "<b>r901" in browser.all(group)[0], "no markup"
    search = "document.querySelector('#browser [type=search]')"
    browser.run(f"{search}.value = '<B>R83'; {search}.dispatchEvent(new Event('input'))")
    found = browser.all(f"{group} .prompt")
    assert found == ["iteration 8 3 of 8"], "of any iteration, whatever the case"
    assert browser.complaints() == []


def test_a_running_page_shows_the_next_iteration_at_the_same_place(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "RELOAD", 0.5)
    write_run(tmp_path, state="running")
    with locked(tmp_path):
        browser.open(write_report(tmp_path), width=390)
        browser.run("document.querySelector('details').open = true; scrollTo(0, 700)")
        JsonlTracker(tmp_path, resume=True).log(metrics(61, 1.0), 61)
        write_report(tmp_path)
        browser.until("document.querySelector('.tiles')?.textContent.includes('61')")
        browser.until("document.querySelector('details')?.open && Math.abs(scrollY - 700) < 2")
        assert browser.complaints() == []
