"""What an error says to the user: one line, with a remedy where it is known."""

import errno
import logging
import os

import pytest
import torch
from safetensors import SafetensorError
from support.pages import write_lines

import train
from trainer.runs.failures import LESS_MEMORY, headline, print_error, record_failure, say
from trainer.runs.folders import TEMPORARY
from trainer.runs.launch import kill_reason
from trainer.runs.run_files import read_lines, read_status
from trainer.runs.run_log import LOG_FILE, VERBOSE, run_log

GLOO = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. Check"
CUDA = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.80 GiB"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a")


def allocation() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    return caught.value


ERRORS = [
    (ValueError("expected a,\n  got b"), "expected a, got b"),
    (KeyError("a"), "KeyError: 'a'"),
    (RuntimeError("first\nException raised from here"), "RuntimeError: first"),
    (torch.OutOfMemoryError(CUDA), f"out of memory (tried 20.50 GiB); {LESS_MEMORY}"),
    (allocation(), f"out of memory (tried {2**52} bytes); {LESS_MEMORY}"),
    (RuntimeError(GLOO), "lost contact with another rank"),
    (FULL, "cannot write ("),
    (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), "cannot write ("),
]


@pytest.mark.parametrize(("error", "line"), ERRORS, ids=[line for _, line in ERRORS])
def test_each_kind_of_error_has_its_line(error, line):
    assert headline(error).startswith(line)
    assert "\n" not in headline(error)


def test_a_killed_process_is_asked_for_its_memory_only_where_that_can_be():
    assert LESS_MEMORY in kill_reason(-9, "rank 2")
    assert "memory" not in kill_reason(-11, "rank 2")


def test_a_failure_leaves_its_line_and_traceback_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_HF_TOKEN", "hf_planted_1")
    text = "401 for hf_planted_1, https://me:url_planted_2@hub/x, extra_token=in_planted_3; plain"
    with pytest.raises(KeyError) as caught:
        raise KeyError(text + "x" * 60_000) from ValueError("hf_planted_1")
    assert record_failure(tmp_path, caught.value) == 1
    reason, kept = read_status(tmp_path)["reason"], (tmp_path / "errors/rank0.txt").read_text()
    for written in (reason, kept):
        assert "planted" not in written
        assert "plain" in written
    assert kept.startswith(f"{reason}\n")
    assert "raise KeyError(text" in kept
    assert read_status(tmp_path)["state"] == "failed"
    assert len(reason) < 2_200


def test_a_line_does_not_name_a_traceback_that_is_removed(tmp_path):
    (made := tmp_path / f"{TEMPORARY}made").mkdir()
    record_failure(made, KeyError("a"))
    reason = read_status(made)["reason"]
    assert reason.startswith("KeyError: 'a' (traceback: ")
    assert TEMPORARY not in reason


def test_a_failure_on_a_full_disk_is_in_the_status_or_printed(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise FULL

    monkeypatch.setenv("LEASH_PARENT", "1")
    monkeypatch.setattr("trainer.runs.failures.write_text", fail)
    (tmp_path / "status.json").write_text('{"state": "running", "iteration": 2}')
    record_failure(tmp_path, FULL)
    assert capsys.readouterr().err == ""
    status = read_status(tmp_path)
    assert (status["state"], status["iteration"]) == ("failed", 2)
    assert "No space left" in status["reason"]
    (tmp_path / "status.json").unlink()
    record_failure(tmp_path, FULL)
    assert capsys.readouterr().err.startswith("error: cannot write (")


def test_run_log_has_what_was_logged_and_told_without_secrets(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OWN_API_KEY", "sk-verysecret")
    with run_log(tmp_path), run_log(tmp_path):
        logging.getLogger("mine").info("sent %s", "sk-verysecret")
        say("a line")
        print_error("a fault")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a line\n", "error: a fault\n")
    lines = [line.split(" ", 2)[2] for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert lines == ["INFO mine: sent <hidden>", "INFO leash: a line", "INFO leash: error: a fault"]


def test_a_verbose_log_has_what_the_named_modules_debug(tmp_path, monkeypatch):
    monkeypatch.setenv(VERBOSE, "loud,loud.too")
    with run_log(tmp_path):
        for name in ("loud.too", "silent"):
            logging.getLogger(name).debug("a detail")
    text = (tmp_path / LOG_FILE).read_text()
    assert "DEBUG loud.too: a detail\n" in text
    assert "silent" not in text


def test_a_worker_alone_records_its_failure_and_removes_its_temporary_folder(
    tmp_path, capsys, monkeypatch
):
    run, made = tmp_path / "run", tmp_path / f"{TEMPORARY}made"
    for folder in (run, made):
        folder.mkdir()
    monkeypatch.setenv("LEASH_FOLDER", str(run))
    monkeypatch.delenv("LEASH_PARENT", raising=False)
    assert train.worker(str(made)) == 1  # without a configuration
    assert "config.yaml" in capsys.readouterr().err
    assert read_status(run)["state"] == "failed"
    assert not made.exists()


def test_a_large_file_is_read_at_both_its_ends(tmp_path):
    write_lines(tmp_path, *[{"reward/mean": i / 8} for i in range(1, 101)])
    path = tmp_path / "metrics.jsonl"
    every, size = read_lines(path), path.stat().st_size
    assert read_lines(path, most=size) == every
    some = read_lines(path, most=size // 5)  # a torn line between them is left out
    assert (some[0], some[-1]) == (every[0], every[-1])
    assert 16 <= len(some) <= 20
    assert [line for line in every if line in some] == some
