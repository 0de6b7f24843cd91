"""What an error says to the user: one line, with a remedy where it is known."""

import errno
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from policies.cache import write_text
from trainer.runs import versions
from trainer.runs.failures import LESS_MEMORY, TOLD, headline, last_words
from trainer.runs.launch import kill_reason

GLOO = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. Check"
CUDA = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.80 GiB"


def fault(action) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (lambda: torch.empty(2**50), f"out of memory (tried {2**52} bytes); {LESS_MEMORY}"),
        (lambda: json.loads("{"), "JSONDecodeError: Expecting property name enclosed in double"),
        (lambda: Path("/no/such").read_text(), "[Errno 2] No such file or directory: '/no/such'"),
        (
            lambda: save_file({"a": torch.ones(1)}, "/dev/full/x"),
            "SafetensorError: Error while serializing: ",
        ),
    ],
)
def test_errors_of_libraries_become_one_line(action, line):
    assert headline(fault(action)).startswith(line)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("expected a,\n  got b"), "expected a, got b"),
        (ImportError("it needs peft: pip install -e '.[lora]'"), "it needs peft: pip install"),
        (RuntimeError("first\nException raised from here"), "RuntimeError: first"),
        (torch.OutOfMemoryError(CUDA), f"out of memory (tried 20.50 GiB); {LESS_MEMORY}"),
        (MemoryError(), f"out of memory; {LESS_MEMORY}"),
        (RuntimeError(GLOO), "lost contact with another rank, which failed or was killed"),
    ],
)
def test_each_kind_of_error_has_its_line(error, line):
    assert headline(error).startswith(line)
    assert "\n" not in headline(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_what_cannot_be_written_has_a_remedy(number):
    """As Python words it, and as the Rust of safetensors does."""
    words = f"{os.strerror(number)} (os error {number})"
    for error in (
        OSError(number, os.strerror(number), "/a"),
        SafetensorError(f"I/O error: {words}"),
    ):
        assert headline(error).startswith("cannot write (")
        assert headline(error).endswith("write elsewhere with output_dir=")
        assert os.strerror(number) in headline(error)


def test_a_limit_of_file_sizes_is_named(tmp_path):
    """By ulimit -f, whatever writes."""
    limits, tensors = resource.getrlimit(resource.RLIMIT_FSIZE), {"a": torch.ones(99_999)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        errors = [
            fault(lambda: write_text(tmp_path / "b", "x" * (1 << 18))),
            fault(lambda: save_file(tensors, tmp_path / "c")),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(headline(error).startswith("cannot write (") for error in errors)


def test_a_killed_process_is_asked_for_its_memory_only_where_that_can_be():
    assert kill_reason(-9, "rank 2") == (
        f"rank 2 was killed (signal 9, SIGKILL); out of memory? {LESS_MEMORY}"
    )
    assert "memory" not in kill_reason(-11, "rank 2")


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_a_run_that_fails_says_why_and_keeps_the_traceback(tmp_path):
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        last_words(tmp_path, error)
    assert status(tmp_path)["state"] == "failed"
    path = tmp_path / "errors" / "rank0.txt"
    assert f"ZeroDivisionError: division by zero (traceback: {path})" == status(tmp_path)["reason"]
    text = path.read_text()
    assert text.splitlines()[0] == status(tmp_path)["reason"]
    assert "_ = 1 / 0" in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_text_that_a_policy_wrote_ends_a_run_quickly_and_in_a_line_of_bounded_length(tmp_path):
    for text in ("key" * 700, "1" * 60_000):
        start = time.process_time()
        last_words(tmp_path, RuntimeError(f"bad reply {text}"))
        assert time.process_time() - start < 2
        assert len(status(tmp_path)["reason"]) < 2_200


def test_secrets_stay_out_of_what_a_failure_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_HF_TOKEN", "hf_planted_1")
    text = "401 for hf_planted_1, https://me:url_planted_2@hub/x, extra_token=in_planted_3; plain"
    try:
        raise KeyError(text) from ValueError("hf_planted_1")
    except KeyError as error:
        last_words(tmp_path, error)
    for written in (status(tmp_path)["reason"], (tmp_path / "errors" / "rank0.txt").read_text()):
        assert "planted" not in written
        assert "plain" in written


def fault_on_a_full_disk() -> OSError:
    with pytest.raises(OSError, match="No space left") as caught:
        Path("/dev/full").write_text("x")
    return caught.value


def test_failure_on_a_full_disk_is_still_told(tmp_path, capsys, monkeypatch):
    """By the status of the run, which is written where it is; else at the terminal, once."""
    monkeypatch.setenv("LEASH_PARENT", "1")
    monkeypatch.setattr("trainer.runs.failures.write_text", lambda *_: fail_to_write())
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "iteration": 2}))
    assert last_words(tmp_path, fault_on_a_full_disk()) == 1
    assert capsys.readouterr().err == ""
    assert (status(tmp_path)["state"], status(tmp_path)["iteration"]) == ("failed", 2)
    assert "No space left" in status(tmp_path)["reason"]
    (tmp_path / "status.json").unlink()
    assert last_words(tmp_path, fault_on_a_full_disk()) == TOLD
    assert capsys.readouterr().err.startswith("error: cannot write ([Errno 28] No space left")


def fail_to_write() -> None:
    raise fault_on_a_full_disk()


def test_looking_up_the_commit_touches_nothing_of_a_checkout(tmp_path, monkeypatch):
    """A run that is killed then, or may write no large file, leaves no lock behind."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    (tmp_path / "a").write_text("x")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    index = tmp_path / ".git" / "index"
    for text, more in (("x", ""), ("y", "+")):
        (tmp_path / "a").write_text(text)
        os.utime(tmp_path / "a", (1, 1))  # git wants to write down that it has looked
        before = index.stat()
        sha = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        assert versions.about_machine(torch.device("cpu"), 1)["commit"] == sha.stdout.strip() + more
        assert (index.stat().st_ino, index.stat().st_mtime_ns) == (
            before.st_ino,
            before.st_mtime_ns,
        )
