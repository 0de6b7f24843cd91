"""What the whole session shares: a cache of its own, and a run that several files read."""

import contextlib
import fcntl
import json
import os
import signal
from pathlib import Path

import hypothesis
import pytest
from support.runs import SMALL, WANDB, Finished, train
from tensordict import list_to_stack, set_list_to_stack

from policies.cache import cache_dir

pytest.register_assert_rewrite("support.specification", "support.wrappers", "support.rollouts")
hypothesis.settings.register_profile("leash", derandomize=True, max_examples=25, deadline=None)
hypothesis.settings.load_profile("leash")
# A shell that started this in the background had it ignored, and so would every run.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Hide the GPUs: the tests compare on the CPU, but for `-m gpu` (make gpu-check)."""
    if not config.option.markexpr.startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what reads the small run, which trains for many iterations; skip what lacks its GPU."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch  # loaded only where a test asks for it

        missing = not torch.cuda.is_available()
        for item in on_gpu if missing else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        if "small_run" in getattr(item, "fixturenames", ()):
            item.add_marker("runs")


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
    folder.parent.mkdir(exist_ok=True)
    ended = folder.with_name("ended.json")
    with open(folder.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ended.exists():
            done = train(*SMALL, *WANDB, f"output_dir={folder}")
            ended.write_text(json.dumps([done.code, done.text, done.seconds]))
    done = Finished(*json.loads(ended.read_text()), folder)
    assert done.code == 0, done.text
    return done


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
