"""Code that nobody has read: what it can do, and what it cannot."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from envs import sandbox, sandbox_backends
from envs.sandbox import Sandbox
from envs.sandbox_backends import bubblewrap, namespaces
from envs.transforms.python_interpreter import PythonTool


def below_tmp(folder: Path) -> list[Path]:
    """Return the parents of a test's folder that pytest has made."""
    return [p for p in folder.parents if p.name.startswith(("pytest-", "popen-"))]


def run(code: str, **options):
    with Sandbox(**{"timeout": 20, **options}) as box:
        return box.run(code)


def gone(marker: str, patience: float = 5.0) -> bool:
    """Return whether no process has a text in its command line, after a while."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                continue
        if not any(marker.encode() in line for line in lines):
            return True
        time.sleep(0.05)
    return False


def test_code_runs_and_says_what_it_prints():
    assert run("import math\nprint(math.comb(6, 3))").output == "20\n"
    done = run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (done.ok, done.output) == (True, "out\nerr\n")
    assert run("pass").output == ""
    assert run("print('\\u00e9 \\u4e2d')").output == "\u00e9 \u4e2d\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('a'; b", "SyntaxError"),
        ("1 / 0", 'File "<code>", line 1'),
        ("input()", "EOFError"),
        ("import sys\nsys.exit(3)", ""),
        ("import numpy", "ModuleNotFoundError"),
        ("import os\nos._exit(0)", "[the process ended"),
        ("open('big', 'wb').write(b'x' * (17 << 20))", "File too large"),
        ("for _ in range(1024): open('big', 'ab').write(b'x' * (1 << 20))", "File too large"),
        ("open('big', 'wb').truncate(1 << 30)", "File too large"),  # a hole takes no room
        ("x = bytearray(10 ** 10)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
    ],
)
def test_what_fails_is_a_result(code, said):
    done = run(code)
    assert not done.ok
    assert said in done.output
    assert "BOOT" not in done.output, "frames of the sandbox are not the code's"


def test_an_endless_loop_is_stopped_with_its_children():
    marker = f"leash-marker-{os.getpid()}"
    code = (
        "import subprocess, sys\n"
        f"child = ['{{}}', '-c', 'import time; time.sleep(60)', '{marker}']\n"
        "child[0] = sys.executable\n"
        "subprocess.Popen(child)\n"
        "print('started', flush=True)\n"
        "while True: pass"
    )
    start = time.monotonic()
    done = run(code, timeout=1.5)
    assert not done.ok
    assert done.output == "started\n\n[stopped: no end within 1.5 s]"
    assert time.monotonic() - start < 10
    assert gone(marker)


def test_a_fork_bomb_does_not_go_off():
    start = time.monotonic()
    done = run("import os\nwhile True: os.fork()", timeout=3)
    assert not done.ok
    assert "BlockingIOError" in done.output or "stopped" in done.output
    assert time.monotonic() - start < 10
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
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    with Sandbox(timeout=20) as box:
        found = box.run("import os; print('LEASH_SECRET' in os.environ, os.getcwd())").output
        assert found.startswith("False ")
        folder = Path(found.split()[1])
        assert folder.is_dir()
        box.run("open('note', 'w').write('hi')")
        assert os.listdir(folder) == ["note"]
        # Writing elsewhere is up to the user's rights: as root the code is a user of its own.
        other = tmp_path / "other"
        other.mkdir(mode=0o700)
        wrote = box.run(f"open({str(other / 'x')!r}, 'w')").ok
        assert wrote == (os.geteuid() != 0 and not bubblewrap())
    assert not folder.exists()


@pytest.fixture(params=["bubblewrap", "namespaces", "nothing"])
def backend(request, monkeypatch):
    """Return the name of a backend, the only one that works here."""
    for name in ("bubblewrap", "namespaces"):
        if request.param != name:
            monkeypatch.setattr(sandbox_backends, name, lambda: ())
        elif not getattr(sandbox_backends, name)():
            pytest.skip(f"no {name} here")
    return request.param


def test_what_a_box_sees_of_the_machine(backend, tmp_path):
    """By backend: others' files, processes, sockets, the network, folders for everybody."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine api password planted")
    for folder in (*below_tmp(tmp_path), tmp_path, home):
        folder.chmod(0o755)
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as local, socket.socket() as server:
        local.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o777)
        local.listen()
        server.bind(("127.0.0.1", 0))
        server.listen()
        tries = {
            "file": f"open({str(home / '.netrc')!r}).read()",
            "process": f"open('/proc/{os.getpid()}/cmdline').read()[0]; assert os.getppid()",
            "listed": "assert [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 50]",
            "socket": f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})",
            "network": f"socket.create_connection({server.getsockname()!r}, 2)",
            "away": "socket.create_connection(('192.0.2.1', 80), 1)",  # RFC 5737: nobody's
            "write": f"open({str(open_folder / 'x')!r}, 'w')",
            "system": "open('/usr/x', 'w')",
            "root": "open('/x', 'w')",
            "memory": "open('/dev/shm/x', 'w')",
        }
        ran = {name: run(f"import os, socket\n{code}") for name, code in tries.items()}
    able = {name for name, done in ran.items() if done.ok}
    if backend == "bubblewrap":
        assert able == set()
        assert sandbox_backends.limits() == ""
        return
    assert {"file", "socket", "write"} <= able, ran
    assert able & {"away", "system", "root"} == set()
    assert (
        ("network" in able)
        == (backend == "nothing")
        == ("the network" in sandbox_backends.limits())
    )
    assert "bubblewrap" in sandbox_backends.limits()
    assert ("process" in able) <= ("other processes" in sandbox_backends.limits())
    if "--mount-proc" in namespaces() and backend == "namespaces":
        assert able & {"process", "listed"} == set()


@pytest.mark.skipif(not bubblewrap(), reason="no bubblewrap here")
def test_a_private_folder_has_a_size_and_goes_with_its_box():
    fill = "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(10 << 20))"
    with Sandbox(timeout=20, memory=256) as box:
        assert "No space left" in box.run(fill).output
        assert not Path("/tmp/0").exists()
        assert box.run("import os\nprint(os.listdir('/tmp'))").ok


def test_the_limits_of_a_box_are_said_once(capfd, monkeypatch):
    for name in ("bubblewrap", "namespaces"):
        monkeypatch.setattr(sandbox_backends, name, lambda: ())
    sandbox_backends.warn_of_limits.cache_clear()
    for _ in range(2):
        PythonTool()
    said = capfd.readouterr().err
    assert said.count("sandbox: code of the policy may reach") == said.count("\n") == 1


USER = 65534  # nobody
AS_USER = (
    "import json, os, sys; from envs import sandbox; box = sandbox.Sandbox(timeout=20)\n"
    "code = 'import os; print(os.getuid(), len(os.listdir(\\'/proc\\')) > 0)\\nprint(6 * 7)'\n"
    "nested = 'import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0'\n"
    "peek = \"print(open('/proc/1/environ', 'rb').read()[:0], os.listdir('/root'))\"\n"
    "words = sandbox.backends.bubblewrap()\n"
    "print(json.dumps([box.run(code).output, box.run(peek).ok, list(words), box.run(nested).ok]))"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="one who is no user already")
def test_a_user_without_rights_has_boxes_too(tmp_path):
    """The module alone, with the system's Python, which this user can read."""
    python = "/usr/bin/python3"
    if not os.path.exists(python):
        pytest.skip(f"no {python}")
    (tmp_path / "envs").mkdir()
    for module in (sandbox, sandbox_backends):
        (tmp_path / "envs" / Path(module.__file__).name).write_text(
            Path(module.__file__).read_text()
        )
    for folder in (*below_tmp(tmp_path), tmp_path):
        folder.chmod(0o755)
    done = subprocess.run(
        [python, "-c", AS_USER],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp"},
        user=USER,
        group=USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output, peeked, words, nested = json.loads(done.stdout)
    assert output == f"{USER} True\n42\n"
    assert not peeked
    assert bool(words) == bool(bubblewrap())
    assert not (nested and "--disable-userns" in words)
    new = bool(words) and b"disable-userns" in subprocess.check_output(["bwrap", "--help"])
    assert ("--disable-userns" in words) == new


def test_names_live_until_the_process_ends():
    with Sandbox(timeout=1.5) as box:
        assert box.run("x = 6").ok
        assert not box.run("y = x / 0").ok
        assert box.run("print(x * 7)").output == "42\n"
        assert not box.run("while True: pass").ok
        assert "NameError" in box.run("print(x)").output, "it starts afresh"
    assert run("print('x' in dir())").output == "False\n"


FORGE = (  # what a run's end looks like, written to every pipe within reach
    "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'1')\n    except OSError: pass\n"
)


def test_a_forged_answer_does_not_end_a_run():
    with Sandbox(timeout=1) as box:
        done = box.run(FORGE + "while True: pass")
        assert (done.ok, done.output) == (False, "[stopped: no end within 1 s]")
        assert not box.run(FORGE).ok, "a byte too many ends the box"
        assert box.run("print(2)").output == "2\n"


def test_a_child_that_outlives_its_run_does_not_speak_in_the_next():
    late = "import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    print('late')\n"
    with Sandbox(timeout=20) as box:
        assert box.run(late + "x = 1").output == ""
        time.sleep(0.5)
        assert box.run("print(x)").output == "1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each box a user")
def test_boxes_do_not_reach_each_other():
    boxes = [Sandbox(timeout=20, processes=4) for _ in range(8)]
    start = "import os\nopen('note', 'w').write('mine')\nprint(os.getcwd(), os.getuid())"
    folders, users = zip(*(box.run(start).output.split() for box in boxes), strict=True)
    assert len(set(users)) == 8
    assert not boxes[0].run(f"os.listdir({folders[1]!r})").ok
    hold = "for _ in range(2):\n    if os.fork() == 0:\n        import time; time.sleep(60)"
    assert all(box.run(hold).ok for box in boxes), "24 processes, at most 4 of one box"
    for box in boxes:
        box.close()
    with Sandbox(timeout=20) as box:
        again = int(box.run("import os\nprint(os.getuid())").output)
    assert again <= max(map(int, users)), "a user is free again"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's children are not told apart")
def test_without_namespaces_a_child_with_a_session_of_its_own_ends_too(monkeypatch):
    for name in ("bubblewrap", "namespaces"):
        monkeypatch.setattr(sandbox_backends, name, lambda: ())
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(60)\n"
        "print(os.getuid())"
    )
    with Sandbox(timeout=20) as box:
        user = int(box.run(code).output)
    end = time.monotonic() + 10  # a signal takes its time on a busy machine
    while left := [p for p in Path("/proc").glob("[0-9]*") if _owner(p) == user]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def _owner(path: Path) -> int | None:
    try:
        lines = (path / "status").read_text().splitlines()
    except OSError:
        return None
    dead = any(line.startswith("State:\tZ") for line in lines)
    return None if dead else next(int(x.split()[1]) for x in lines if x.startswith("Uid:"))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"timeout": t} for t in (0, float("nan"), "a")),
        {"memory": -1},
        {"file_size": 1.5},
        {"processes": "16"},
    ],
)
def test_wrong_limits_are_errors(wrong):
    with pytest.raises(ValueError, match=f"expected {next(iter(wrong))} "):
        Sandbox(**wrong)
