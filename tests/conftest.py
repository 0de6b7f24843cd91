"""What the whole session shares: a cache of its own, and runs that several files read."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from runs import SMALL, WANDB, Finished, launch
from tensordict import list_to_stack, set_list_to_stack

from policies.cache import cache_dir

pytest.register_assert_rewrite("specification_rows")
hypothesis.settings.register_profile("leash", derandomize=True, max_examples=25, deadline=None)
hypothesis.settings.load_profile("leash")
# A shell that started this in the background had it ignored, and so would every run.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Path:
    """Put leash's cache into a temporary folder; a converted SmolLM2 is not made again.

    The processes of pytest-xdist share it, so that one of them warms up for all.
    """
    users = sorted(cache_dir().glob("models/SmolLM2-*"))
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for path in users:
        with contextlib.suppress(FileExistsError):  # another process was first
            (folder / "models" / path.name).symlink_to(path)
    os.environ["LEASH_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def small_run(cache) -> Finished:
    """Run a short grpo_tiny end to end, with W&B offline; its warm-up fills the cache.

    One process of pytest-xdist runs it, the others wait; no test writes into its folder.
    """
    folder = cache.parent / "small" / "run"
    told = folder.with_name("told.json")
    with small_lock(folder):
        if not told.exists():
            tell(folder, begin(folder), time.perf_counter())
    done = Finished(*json.loads(told.read_text())).at(folder)
    assert done.code == 0, done.text
    return done


@pytest.fixture(scope="session", autouse=True)
def small_run_ahead(request, cache):
    """Begin that run beside the first tests, so that no process waits idly for its warm-up."""
    wanted = any("small_run" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if os.environ.get("PYTEST_XDIST_WORKER") != "gw0" or not wanted:
        yield
        return
    folder = cache.parent / "small" / "run"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(small_lock(folder, fcntl.LOCK_NB))
        except BlockingIOError:  # another process was first
            yield
            return
        if folder.exists():
            yield
            return
        process, start, lock = begin(folder), time.perf_counter(), held.pop_all()

    def wait() -> None:
        with lock:
            tell(folder, process, start)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    if process.poll() is None:  # the tests have ended early
        process.send_signal(signal.SIGTERM)
    thread.join()


@contextlib.contextmanager
def small_lock(folder: Path, how: int = 0) -> Iterator[None]:
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield


def begin(folder: Path) -> subprocess.Popen:
    return launch(*SMALL, *WANDB, f"output_dir={folder}")


def tell(folder: Path, process: subprocess.Popen, start: float) -> None:
    text = process.communicate(timeout=900)[0]
    told = json.dumps([process.returncode, text, time.perf_counter() - start])
    folder.with_name("told.json").write_text(told)


@pytest.fixture
def no_wandb_account(monkeypatch, tmp_path):
    """Hide every W&B account and setting; those of the test end with it."""
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, "")  # so that it is as before at the end
        monkeypatch.delenv(name)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    yield
    wandb.teardown()  # its settings outlive a run


@pytest.fixture(params=["default", True])
def list_setting(request):
    """Run a test under each tensordict setting, and see that it is left alone."""
    given = contextlib.nullcontext()
    if request.param != "default":
        given = set_list_to_stack(request.param)
    with given:
        before = list_to_stack()
        yield
        assert list_to_stack() == before
