"""Code that runs on a server: SandboxFusion's API, spoken by a real server over a local box."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs.sandbox import Sandbox, make_sandbox
from envs.sandbox_http import HttpSandbox
from envs.transforms import ExecuteToolsInOrder, ToolRegistry, XMLBlockParser
from envs.transforms.python_interpreter import PythonInterpreter, PythonTool
from envs.transforms.tool_parsers import ToolCall
from trainer.runs.run_files import read_yaml


class Server(ThreadingHTTPServer):
    """POST /run_code as its page documents it; `faults` are answered before anything is run."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.faults, self.busy, self.most, self.keys = [], [], 0, 0, []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @contextmanager
    def counted(self):
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        yield
        with self.lock:
            self.busy -= 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.keys.append(self.headers.get("Authorization"))
            fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, bytes):
            self.say(200, fault)
        elif fault == "cut":
            self.close_connection = True
        elif fault:
            self.say(fault, b"{}", **({"Retry-After": "0.2"} if fault == 429 else {}))
        elif self.path != "/run_code" or asked["language"] != "python":
            self.say(404, b"{}")
        else:
            self.say(200, json.dumps(self.ran(asked)).encode())

    def ran(self, asked: dict) -> dict:
        # Counted before the reply leaves: a client may ask anew as soon as it has read it.
        timeout, most = asked["run_timeout"], 1 << 20
        with self.server.counted(), Sandbox(timeout=timeout, max_output=most) as box:
            done = box.run(asked["code"])
        late = "no end within" in done.output
        result = {"status": "TimeLimitExceeded" if late else "Finished", "execution_time": 0.1}
        text = done.output.partition("[stopped")[0]
        streams = {"stdout": text, "stderr": ""} if done.ok else {"stdout": "", "stderr": text}
        result |= {"return_code": None if late else int(not done.ok), **streams}
        status = "Success" if done.ok else "Failed"
        return {"status": status, "message": "", "compile_result": None, "run_result": result}

    def say(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        yield server
        server.shutdown()


def box(server: Server, **options) -> HttpSandbox:
    return make_sandbox(url=server.url, **{"timeout": 20.0, "wait": 0.01, **options})


def test_a_server_says_what_a_box_of_this_machine_says(server):
    for code in ("print(6 * 7)", "pass", "print('\\u00e9 \\u4e2d')", "1 / 0", "print('a'; b"):
        with Sandbox(timeout=20) as here:
            assert box(server).run(code) == here.run(code)
    late = box(server, timeout=1.0).run("print('x')\nwhile True: pass")
    assert (late.ok, late.output.split("\n")[-1]) == (False, "[stopped: no end within 1 s]")
    assert server.asked[-1]["run_timeout"] == 1.0
    assert server.asked[-1]["memory_limit_MB"] == 512
    assert set(server.keys) == {None}


def test_the_file_of_a_python_tool_needs_a_url_alone_to_run_on_a_server(server):
    tool = read_yaml(Path(__file__).parents[1] / "conf/env/python_tool.yaml")["transforms"]["tools"]
    limits = {**tool["registry"]["services"]["python"]}
    del limits["_target_"]
    assert limits.keys() >= {"file_size", "processes"}, "of a sandbox of this machine"
    assert box(server, **limits).run("print(3)").output == "3\n"


def test_output_is_bounded_whatever_the_server_sends(server):
    cut = box(server, max_output=1000).run("print('é' * 800)")
    assert cut.output.startswith("é" * 500)
    assert "cut after 1000 bytes" in cut.output
    done = box(server, max_output=100).run("print('x' * 100_000)")
    assert (done.ok, done.output) == (False, "[stopped: too much output]")
    assert box(server).run("print('\ud800')").output == "?\n", "no lone surrogate is sent"


@pytest.mark.parametrize("fault", [429, 500, 502, 503, "cut", b"no JSON", b"[1]", b'{"status":1}'])
def test_a_fault_of_the_server_is_tried_again(server, fault, monkeypatch):
    monkeypatch.setenv("BOX_KEY", "of a gateway")
    server.faults = [fault, fault]
    start = time.monotonic()
    assert box(server, key_variable="BOX_KEY").run("print(2)").output == "2\n"
    assert len(server.asked) == 3
    assert set(server.keys) == {"Bearer of a gateway"}
    assert fault != 429 or time.monotonic() - start > 0.4, "it waits as it is told to"


def test_a_server_that_is_lost_ends_the_run_and_one_that_fails_on_a_code_does_not(server):
    broken = b'{"status": "SandboxError", "message": "no room"}'
    for fault, said in ((broken, "no room"), (500, "HTTP Error 500")):
        server.faults = [fault] * 2
        done = box(server, tries=2).run("print(1)")
        assert (done.ok, said in done.output) == (False, True)
    server.faults = [503] * 2  # then it runs what is empty
    assert "503" in box(server, tries=2).run("print(1)").output
    server.faults = [503] * 4
    with pytest.raises(ValueError, match=r"run_code cannot be reached after 2 tries \(.*503"):
        box(server, tries=2).run("print(1)")
    asked = len(server.asked)
    for code in (401, 404, 422):
        server.faults = [code]
        with pytest.raises(ValueError, match=f"{code}.*; check url"):
            box(server).run("print(1)")
    assert len(server.asked) == asked + 3, "what is wrong with the request is not tried again"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for make in (PythonTool, PythonInterpreter):
            with pytest.raises(ValueError, match=r"cannot be reached .*[Rr]efused.*SandboxFusion"):
                make(url=url, tries=2, wait=0.0)


def test_at_most_so_many_runs_are_asked_for_at_a_time(server):
    boxes = [box(server, at_once=2) for _ in range(6)]
    sleep = "import time; time.sleep(0.3)"
    threads = [threading.Thread(target=each.run, args=(sleep,)) for each in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(server.asked), server.most) == (6, 2)


def test_a_tool_runs_there_and_a_lost_server_is_nothing_for_the_policy(server):
    tool = PythonTool(url=server.url, timeout=20.0, tries=2, wait=0.0)
    run = ExecuteToolsInOrder(ToolRegistry([tool]), XMLBlockParser(), pass_state_to_tools=False)
    call = ToolCall("python", {"code": "print(57 * 83)"}, None)
    assert run._execute(call, 0) == (True, "4731")
    server.faults = [503] * 4
    with pytest.raises(ValueError, match="cannot be reached"):
        run._execute(call, 0)
    many = PythonInterpreter(url=server.url, timeout=20.0, at_once=3)
    assert many._process_batch({0: "```python\nprint(1)\n```", 1: "```python\n1/0\n```"}) == {
        0: ["Code block 1 ran:\n1"],
        1: [
            'Code block 1 failed:\nTraceback (most recent call last):\n  File "<code>", line 1, in '
            "<module>\nZeroDivisionError: division by zero"
        ],
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "localhost:8080"}, "url to begin with http"),
        ({"at_once": 0}, "at_once a whole number"),
        ({"tries": 1.5}, "tries a whole number"),
        ({"timeout": 0.0}, "timeout > 0"),
        ({"timeout": float("nan")}, "timeout > 0"),
    ],
)
def test_wrong_settings_are_errors(wrong, said):
    with pytest.raises(ValueError, match=f"expected {said}"):
        make_sandbox(**{"url": "http://127.0.0.1:9", **wrong})


def test_names_that_live_on_need_a_box_of_this_machine(server):
    with pytest.raises(ValueError, match="persistent=true: a server keeps no names"):
        PythonInterpreter(url=server.url, persistent=True)
