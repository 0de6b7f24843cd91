"""What a damaged run folder is answered with: a line that names the file, no model loaded."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from own_data import words_of

from conf.compose import compose_checked
from conf.names import FOLDER
from conf.resume import read_saved
from conf.start import read_command
from policies.cache import write_text
from trainer.reports.__main__ import main as report
from trainer.reports.report import write_report
from trainer.reports.trackers.jsonl import JsonlTracker
from trainer.runs.failures import headline
from trainer.runs.run_files import load_run, read_lines, read_status

EXPERIMENTS = sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml"))


@pytest.fixture(scope="module")
def config() -> dict:
    return compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])


def changed(config: dict, key: str, value: object) -> bytes:
    copy = json.loads(json.dumps(config))
    *path, last = key.split(".")
    node = copy
    for step in path:
        node = node[step]
    node[last] = value
    return yaml.safe_dump(copy, sort_keys=False).encode()


def without(config: dict, key: str) -> bytes:
    return yaml.safe_dump({k: v for k, v in config.items() if k != key}).encode()


DAMAGES = {
    "empty": lambda c: (b"", "nothing"),
    "cut": lambda c: (changed(c, "seed", 1)[:-300], "."),
    "half": lambda c: (changed(c, "seed", 1)[: len(changed(c, "seed", 1)) // 2], "."),
    "no YAML": lambda c: (b"{ : ]", "line 1"),
    "NULs": lambda c: (b"\0" * 2000, "no YAML"),
    "no text": lambda c: (b"\xff\xfe\x80" * 9, "no YAML"),
    "a list": lambda c: (b"- 1\n- 2\n", r"\[1, 2\]"),
    "a number": lambda c: (b"7", "no YAML of keys"),
    "nested": lambda c: (b"[" * 5000, "."),
    "no group": lambda c: (without(c, "kl"), "kl"),
    "a group null": lambda c: (changed(c, "kl", None), "kl"),
    "a group list": lambda c: (changed(c, "algorithm", [1]), "algorithm"),
    "no key": lambda c: (changed(c, "eval", {"every": 1}), r"eval\.\w+"),
    "a type": lambda c: (changed(c, "trainer.num_iterations", "abc"), "num_iterations.*'abc'"),
    "a bool": lambda c: (changed(c, "trainer.num_iterations", True), "num_iterations.*True"),
    "a section": lambda c: (changed(c, "policy.lora", 4), r"policy\.lora"),
    "unknown key": lambda c: (changed(c, "kl.ceoff", 1), r"no key kl\.ceoff"),
    "unknown group": lambda c: (changed(c, "kk", {"a": 1}), "no key kk"),
    "tags": lambda c: (b"!!python/object/apply:os.system ['touch MARK']", "line 1"),
    "a tag inside": lambda c: (b"seed: !!python/name:os.system\n", "line 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_is_one_line_that_names_it(damage, config, tmp_path):
    data, said = DAMAGES[damage](config)
    (tmp_path / "config.yaml").write_bytes(data)
    with pytest.raises(ValueError, match=said) as caught:
        read_command([f"resume={tmp_path}"])
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/config.yaml is damaged: ")
    assert line.endswith("; put a copy of it back, or start a new run")
    assert "\n" not in line
    assert len(line) < 300
    assert not (tmp_path / "MARK").exists()
    load_run(tmp_path)  # a page is drawn of what there is


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_sound_config_of_every_experiment_is_none(experiment, tmp_path):
    saved = compose_checked(words_of(experiment))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    assert read_saved(tmp_path / "config.yaml") == saved


WRONG = [5, "x", [1], {"a": 1}, None, True, 1e400, -1, "\0", [[]], [{}], {"sha256": 5}]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_status_of_wrong_types_is_read_as_one_without_them(wrong, config, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    names = ("state", "reason", "iteration", "objective", "model", "machine", "notes", "resumed")
    for status in (dict.fromkeys((*names, "seconds"), wrong), wrong):
        (tmp_path / "status.json").write_text(json.dumps(status))
        assert isinstance(read_status(tmp_path), dict)
        job = read_command([f"resume={tmp_path}"])
        assert job.done is None
        assert load_run(tmp_path).state
        write_report(tmp_path)


def test_noise_among_the_metrics_is_left_out_and_does_not_stay(tmp_path):
    good = [{"progress/iteration": i, "reward/mean": 0.5, "loss/total": None} for i in (1, 2, 3)]
    lines = [json.dumps(line).encode() for line in good]
    noise = [b"\0" * 50, b"\xff\xfe", b"[1]", b'"x"', b"{", b"[" * 9000, b"7", b"{}", b"NaN"]
    noise += [b'{"progress/iteration": "2", "reward/mean": 9}', b'{"progress/iteration": null}']
    noise += [b'{"progress/iteration": 2, "reward/mean": "x", "loss/total": [1]}', b'{"a": 1}']
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([lines[0], *noise, *lines[1:]]))
    assert [line["progress/iteration"] for line in load_run(tmp_path).metrics] == [1, 2, 3]
    write_report(tmp_path)
    (tmp_path / "transcripts.jsonl").write_bytes(b"\n".join(noise))
    JsonlTracker(tmp_path, resume=True).resume(3, "", again=False, seconds=0.0)
    read = read_lines(path)
    assert [line for line in read if len(line) == 3] == good
    assert [line for line in read if len(line) != 3] == [{"progress/iteration": 2}]
    assert read_lines(tmp_path / "transcripts.jsonl") == []


ODD = {  # what may stand in the place of a file, as an archive may hold it
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}
OF_A_RUN = ("status.json", "metrics.jsonl", "transcripts.jsonl", "config.yaml", "limit.json")
OF_A_RUN += ("eval.json", "errors/rank0.txt", ".lock", ".hydra/overrides.yaml")
OF_A_RUN += (".hydra/defaults.yaml", ".hydra/hydra.yaml", "report.html")
OF_A_SWEEP = ("sweep.json", "multirun.yaml", "sweep.csv", "limit.json", "sweep.html")


@pytest.fixture
def patience():
    """Raise in what waits for a pipe, or reads a device to its end."""

    def over(*_: object) -> None:
        raise AssertionError("it waits, or reads without end")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run_of(folder: Path, config: dict) -> Path:
    """Write the folder of a run with all of its files."""
    for name in (".hydra", "errors", "checkpoints/iteration_000001"):
        (folder / name).mkdir(parents=True)
    said = [{"progress/iteration": i, "reward/mean": 0.5, "kl/ref_sequence": 0.1} for i in (1, 2)]
    reply = {"iteration": 1, "split": "train", "prompt": "a", "response": "b", "reward": 1.0}
    texts = {
        "status.json": '{"state": "failed", "reason": "x", "iteration": 2}',
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in said),
        "transcripts.jsonl": json.dumps(reply) + "\n",
        "config.yaml": yaml.safe_dump(config),
        "limit.json": '{"reward": [[0.5, 1.0]], "success": [[0, 1]]}',
        ".hydra/overrides.yaml": "[seed=1]",
    }
    for name in OF_A_RUN:
        (folder / name).write_text(texts.get(name, ""))
    return folder


def replaced(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    ODD[kind](path)


def pages(folder: Path, capsys) -> int:
    """Write the pages of a folder; return the exit code. What is said is one line."""
    code = report([str(folder)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) == (code != 0), said.err
    return code


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_in_the_place_of_one_is_passed_over_or_told(
    kind, config, tmp_path, capsys, patience
):
    """One file of a run after another, and of a sweep: neither a page nor a start waits for it."""
    sound = run_of(tmp_path / "sound", config)
    assert pages(sound, capsys) == 0
    for name in OF_A_RUN:
        folder = shutil.copytree(sound, tmp_path / "run")
        replaced(folder / name, kind)
        code = pages(folder, capsys)
        assert code == (2 if name == "report.html" and kind.endswith("folder") else 0), name
        if name != "config.yaml":
            assert read_command([f"resume={folder}"]).folder == folder
        else:
            with pytest.raises(ValueError, match=f"^resume={folder}: expected a"):
                read_command([f"resume={folder}"])
        shutil.rmtree(folder)
    for name in OF_A_SWEEP:
        shutil.copytree(sound, tmp_path / "sweep" / "seed=1")
        (tmp_path / "sweep" / "multirun.yaml").write_text("")
        replaced(tmp_path / "sweep" / name, kind)
        pages(tmp_path / "sweep", capsys)
        shutil.rmtree(tmp_path / "sweep")


def test_a_folder_in_the_place_of_a_file_that_is_written_is_told(tmp_path):
    (tmp_path / "limit.json").mkdir()
    with pytest.raises(OSError, match="expected a file there, got a folder; move it away") as error:
        write_text(tmp_path / "limit.json", "x")
    assert headline(error.value).endswith(f"'{tmp_path}/limit.json'")
    assert [path.name for path in tmp_path.iterdir()] == ["limit.json"]
