"""Code that nobody has read: what it can do, and what it cannot."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from envs.tools.sandbox import Sandbox, bubblewrap


def run(code: str, **options):
    return Sandbox(**{"timeout": 20, **options}).run(code)


def test_code_runs_and_says_what_it_prints():
    done = run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (done.ok, done.output) == (True, "out\nerr\n")
    assert run("print('\\u00e9 \\u4e2d')").output == "\u00e9 \u4e2d\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('a'; b", "SyntaxError"),
        ("1 / 0", 'File "<code>", line 1'),
        ("import numpy", "ModuleNotFoundError"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "[the process ended"),
        ("open('big', 'wb').truncate(1 << 30)", "File too large"),  # a hole takes no room
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
    ],
)
def test_what_fails_is_a_result(code, said):
    done = run(code)
    assert not done.ok
    assert said in done.output
    assert "BOOT" not in done.output, "frames of the sandbox are not the code's"


CHILDREN = [
    "subprocess.Popen(child)",
    "subprocess.Popen(child, start_new_session=True)",
    "if not os.fork():\n"  # a daemon
    "    os.setsid()\n"
    "    os.chdir('/')\n"
    "    os.fork() and os._exit(0)\n"
    "    os.closerange(0, 64)\n"
    "    os.execve(child[0], child, {})",
]


@pytest.mark.parametrize("start", CHILDREN)
@pytest.mark.parametrize("end", ["", "while True: pass"])
def test_the_end_of_the_code_is_the_end_of_its_children(start, end):
    marker = f"leash-marker-{os.getpid()}"
    code = (
        "import os, subprocess, sys, time\n"
        f"child = [sys.executable, '-c', 'import time; time.sleep(60)', '{marker}']\n"
        f"{start}\n"
        "time.sleep(0.2)\n"
        "print('started', flush=True)\n"
        f"{end}"
    )
    done = run(code, timeout=1.5, processes=10_000)  # a user other than root has some already
    assert done.ok == (not end)
    assert done.output.startswith("started\n\n[stopped" if end else "started\n")
    left = [p for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=10)[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="a limit on processes counts all of a user")
def test_calls_at_once_do_not_share_their_processes():
    code = (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(1)']\n"
        "for started in [subprocess.Popen(child) for _ in range(9)]: started.wait()"
    )
    with ThreadPoolExecutor(2) as pool:
        assert all(done.ok for done in pool.map(run, [code, code]))


def test_a_fork_bomb_does_not_go_off():
    done = run("import os\nwhile True: os.fork()", timeout=2)
    assert not done.ok
    assert "BlockingIOError" in done.output or "stopped" in done.output
    assert run("print(1)").ok, "there is room for the next one"


def test_endless_output_is_cut_and_stopped():
    done = run("while True: print('abc' * 100)", max_output=1000)
    assert not done.ok
    assert done.output.startswith("abc")
    assert len(done.output) < 1100
    assert "cut after 1000 bytes" in done.output
    assert run("print('x' * 999)", max_output=1000).ok


def test_it_owns_nothing_but_a_folder_that_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_SECRET", "password")
    found = run("import os; print('LEASH_SECRET' in os.environ, os.listdir(), os.getcwd())").output
    assert found.startswith("False [] ")
    assert not Path(found.split()[2]).exists()
    box = Sandbox(timeout=20)
    assert box.run("open('note', 'w').write('hi'); x = 1").ok
    assert "NameError" in box.run("print(x)").output, "names do not live on"
    # Writing elsewhere is up to the user's rights: as root the code is nobody's.
    (other := tmp_path / "other").mkdir(mode=0o700)
    wrote = run(f"open({str(other / 'x')!r}, 'w')").ok
    assert wrote == (os.geteuid() != 0 and not bubblewrap())


@pytest.mark.skipif(not bubblewrap(), reason="no bubblewrap here")
def test_in_bubblewrap_there_is_no_home_and_no_network(tmp_path):
    (tmp_path / "secret").write_text("password")
    assert not run(f"open({str(tmp_path / 'secret')!r})").ok
    assert not run("import socket; socket.create_connection(('127.0.0.1', 22), 1)").ok
    assert run("import socket; print(socket.if_nameindex())").output == "[(1, 'lo')]\n"
    assert run("open('/tmp/x', 'w').write('x')").ok
