"""Tools of a real MCP server: listed, called, timed out, started again, and ended."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from processes import alive, gone
from tensordict import TensorDict

from envs import ChatEnv
from envs.transforms import ExecuteToolsInOrder, MCPServer, ToolRegistry, XMLBlockParser
from policies.chats.history import History

pytest.importorskip("mcp")
ROOT = Path(__file__).parents[1]
SERVER = '''
import os, subprocess, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
)
open(sys.argv[1], "a").write(f"{os.getpid()} {child.pid}\\n")

@server.tool()
def add(a: int, b: float = 1.0) -> float:
    """Add two numbers.

    More words.
    """
    return a + b

@server.tool()
def divide(a: int, b: int) -> float:
    """Divide."""
    return a / b

@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> list[str]:
    """Return the command of a server that notes the ids of its processes in its argument."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "server.py").write_text(SERVER)
    return [sys.executable, str(folder / "server.py")]


def notes(path: Path) -> list[str]:
    """Return a line for each start of the server: its process and that of its child."""
    return path.read_text().splitlines()


def ask(env, reply: str) -> str:
    td = env.reset(TensorDict({"query": ["Go."]}, batch_size=[1]))
    chat = [*td["history"].prompt.chats()[0], {"role": "assistant", "content": reply}]
    td.set(("history", "full"), History.from_chats([chat]))
    return env.step(td)["next"]["history"].prompt.chats()[0][-1]["content"]


def test_a_chat_calls_the_tools_of_a_server(program, tmp_path):
    with MCPServer([*program, str(tmp_path / "pids")], timeout=30) as server:
        registry = ToolRegistry([server])
        lines = registry.describe().split("\n")
        assert lines[:2] == [
            "add(a: int, b: float): Add two numbers.",
            "divide(a: int, b: int): Divide.",
        ]
        tools = ExecuteToolsInOrder(registry, XMLBlockParser())
        env = ChatEnv(batch_size=(1,)).append_transform(tools)
        said = ask(
            env,
            '<tool name="add">{"a": 40, "b": 2}</tool><tool name="divide">{"a": 1, "b": 0}</tool>'
            '<tool name="add">{"a": "x"}</tool><tool name="add">{"b": 2}</tool>',
        ).split("\n")
        assert said[0] == "1. add gave: 42.0"
        assert said[1] == "2. divide failed: RuntimeError: Error executing tool divide"
        assert said[2] == "3. add failed: TypeError: expected a to be int, got str"
        assert "4. add failed: RuntimeError: " in "\n".join(said[3:]), "the server misses a"
        started = [int(word) for word in notes(tmp_path / "pids")[0].split()]
        assert all(map(alive, started))
    assert gone(*started), "the server and its child end with the context"


def test_a_slow_call_times_out_and_a_lost_server_starts_again(program, tmp_path):
    server = MCPServer([*program, str(tmp_path / "pids")], timeout=1)
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        server.call("wait", {"seconds": 60})
    server.timeout = 60
    with pytest.raises(RuntimeError, match=r"(?i)closed"):
        server.call("leave", {})
    assert server.call("add", {"a": 1}) == "2.0"
    hung, left, last = ([int(w) for w in line.split()] for line in notes(tmp_path / "pids"))
    assert gone(*hung, *left)
    assert all(map(alive, last))
    del server
    gc.collect()  # what is forgotten is closed
    assert gone(*last)


def test_what_is_no_server_is_named(tmp_path):
    python, note = [sys.executable, "-c"], tmp_path / "pids"
    broken = [*python, "raise SystemExit('no such thing')"]
    for command, said in ((broken, "no such thing"), (["/no/server"], "/no/server")):
        with pytest.raises(ValueError, match=f"expected an MCP server, got .*{said}"):
            MCPServer(command)
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(ValueError, match="no answer within 2 s"):
        MCPServer([*python, code, str(note)], start_timeout=2)
    assert gone(int(note.read_text()))
    with pytest.raises(ValueError, match="list of words"):
        MCPServer("uvx server")


def test_the_end_of_the_process_ends_the_server(program, tmp_path):
    code = (
        "import sys; from envs.transforms import MCPServer\n"
        "server = MCPServer(sys.argv[1:]); print(server.call('add', {'a': 1}))"
    )
    command = [sys.executable, "-c", code, *program, str(tmp_path / "pids")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
    assert gone(*(int(word) for word in (tmp_path / "pids").read_text().split()))
