"""Checkpoints are complete or absent, exact, and believed only after every byte was checked."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contracts import make_policy
from saved import make, step, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from policies.cache import write_manifest
from trainer.checkpoint import Checkpoints, save_model
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime

ROOT = Path(__file__).parents[1]


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name for p in checkpoints.folder.iterdir())


def test_what_comes_back_is_what_was_saved_to_the_bit(tmp_path):
    policy, optimizer, saved = make(tmp_path, steps=3)
    state = {"objective": 0.1, "kl": {"coeff": 0.2}, "tokens": 12}
    saved.save(3, state)
    other, fresh, found = make(tmp_path)
    assert found.newest() == tmp_path / "checkpoints" / "iteration_000003"
    assert found.restore(found.newest()) == {"format": 1, "iteration": 3, **state}
    for a, b in zip(weights(policy), weights(other), strict=True):
        assert torch.equal(a, b)
        old, new = optimizer.state[a], fresh.state[b]
        assert set(old) == set(new) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(old[k], new[k]) and old[k].dtype == new[k].dtype for k in old)
    step(policy, optimizer, 9)
    step(other, fresh, 9)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy), weights(other), strict=True))


def test_frozen_parameters_have_no_moments(tmp_path):
    policy = make_policy.__wrapped__()
    for p in weights(policy)[:-1]:
        p.requires_grad_(False)
    optimizer = make_optimizer(policy.model, lr=1e-3)
    weights(policy)[-1].sum().backward()
    optimizer.step()
    saved = Checkpoints(Runtime(tmp_path), policy, optimizer)
    saved.save(1, {})
    optimizer.state.clear()
    saved.restore(saved.newest())
    assert len(optimizer.state) == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = ("model/model.safetensors", "optimizer.safetensors", "state.json")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in FILES for damage in (flip, cut, Path.unlink)),
        ("MANIFEST.json", cut),
        ("MANIFEST.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_does_not_count(tmp_path, file, damage):
    _, _, saved = make(tmp_path, steps=1)
    for iteration in (1, 2):
        saved.save(iteration, {})
    newest = saved.newest()
    damage(newest / file)
    assert saved.newest().name == "iteration_000001"
    assert saved.skipped == ["iteration_000002"]
    damage(saved.newest() / file)
    with pytest.raises(
        ValueError, match=r"only damaged ones \(iteration_000002, iteration_000001\)"
    ):
        saved.newest()


def sealed(folder: Path, **state) -> None:
    """Change the state of a checkpoint and list its files anew, hashes right."""
    old = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**old, **state}))
    (folder / "MANIFEST.json").unlink()
    write_manifest(folder, {"format": 1})


def other_weights(folder: Path) -> None:
    shutil.copy(folder / "model/model.safetensors", folder / "model/zzz.safetensors")


def empty_manifest(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    write_manifest(folder, {"format": 1})


def without_weights(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    sealed(folder)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def dangling(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere")


def beyond(folder: Path) -> None:
    sealed(folder, iteration=10**6)


@pytest.mark.parametrize(
    "damage", [other_weights, empty_manifest, without_weights, a_file, dangling, beyond]
)
def test_what_only_looks_like_a_checkpoint_is_passed_over_and_goes(tmp_path, damage):
    """Other weights beside the listed ones were loaded once, without a word."""
    _, _, saved = make(tmp_path, steps=1, keep_last=2)
    for iteration in (1, 2):
        saved.save(iteration, {})
    damage(saved.folder / "iteration_000002")
    _, _, found = make(tmp_path, keep_last=1)
    assert found.newest().name == "iteration_000001"
    assert found.skipped == ["iteration_000002"]
    found.save(2, {})
    found.save(3, {})
    assert names(found) == ["iteration_000003"]


def test_files_that_tools_leave_are_no_damage(tmp_path):
    _, _, saved = make(tmp_path)
    saved.save(1, {})
    (saved.newest() / "model" / ".DS_Store").touch()
    (saved.folder / "iteration_000001 (copy)").mkdir()
    assert saved.newest().name == "iteration_000001"
    assert saved.skipped == []


def test_a_checkpoint_of_a_later_leash_is_refused_by_its_format(tmp_path):
    _, _, saved = make(tmp_path)
    saved.save(1, {})
    saved.save(2, {})
    sealed(saved.newest(), format=2)
    with pytest.raises(ValueError, match=r"iteration_000002 is of format 2, this leash reads 1; "):
        saved.newest()


def test_a_linked_checkpoint_counts_and_only_the_link_goes(tmp_path):
    _, _, saved = make(tmp_path, steps=1, keep_last=1)
    saved.save(1, {})
    elsewhere, place = tmp_path / "disk 2", saved.newest()
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    assert saved.restore(saved.newest())["iteration"] == 1
    for iteration in (2, 3):
        saved.save(iteration, {})
    assert names(saved) == ["iteration_000003"]
    assert (elsewhere / "MANIFEST.json").is_file()


def test_a_million_iterations_come_after_those_before(tmp_path):
    _, _, saved = make(tmp_path, keep_last=2)
    for iteration in (999_999, 1_000_000, 1_000_001):
        saved.save(iteration, {})
    assert saved.newest().name == "iteration_1000001"
    assert names(saved) == ["iteration_1000000", "iteration_1000001"]


@pytest.mark.parametrize("text", ["{torn", "[1]", '{"objective": "high"}', None])
def test_a_damaged_one_is_never_the_best(tmp_path, text):
    _, _, saved = make(tmp_path, keep_last=1, keep_best=True)
    for iteration, objective in ((1, 0.9), (2, 0.5)):
        saved.save(iteration, {"objective": objective})
    state = saved.folder / "iteration_000001" / "state.json"
    state.unlink() if text is None else state.write_text(text)
    saved.save(3, {"objective": 0.1})
    saved.save(4, {"objective": 0.6})
    assert names(saved) == ["iteration_000004"]


def test_saves_come_when_due_and_only_the_last_are_kept(tmp_path):
    _, _, saved = make(tmp_path, every=2, keep_last=2)
    for iteration in range(1, 9):
        saved.maybe_save(iteration, {})
    assert names(saved) == ["iteration_000006", "iteration_000008"]
    saved.maybe_save(9, {}, last=True)
    assert names(saved) == ["iteration_000008", "iteration_000009"]
    _, _, never = make(tmp_path / "never")
    never.maybe_save(2, {}, last=True)
    assert not never.folder.exists()


@pytest.mark.parametrize(
    ("objectives", "kept"),
    [
        ([0.1, 0.9, 0.3, 0.2], [2, 4]),
        ([-2.0, 0.0, -1.0, -3.0], [2, 4]),  # zero is a score like any other
        ([None, None, None, 0.5], [4]),
        ([0.1, 0.2, 0.3, 0.4], [4]),
    ],
)
def test_the_best_is_kept_beside_the_last(tmp_path, objectives, kept):
    _, _, saved = make(tmp_path, keep_last=1, keep_best=True)
    for iteration, objective in enumerate(objectives, start=1):
        saved.save(iteration, {"objective": objective})
    assert names(saved) == [f"iteration_{i:06d}" for i in kept]


def test_after_a_damaged_one_the_new_ones_are_kept(tmp_path):
    """Resumed at 2 because 4 is damaged, the run saves 3: it is 4 that has to go."""
    _, _, saved = make(tmp_path, keep_last=1)
    saved.save(2, {})
    (tmp_path / "checkpoints" / "iteration_000004").mkdir()
    saved.save(3, {})
    assert names(saved) == ["iteration_000003"]
    assert saved.newest().name == "iteration_000003"


def test_saving_again_replaces_and_clears_what_was_left_behind(tmp_path):
    _, _, saved = make(tmp_path, steps=1)
    saved.save(1, {"tokens": 1})
    for name in (".part-iteration_000001", ".trash-iteration_000000", ".part-iteration_000007"):
        (saved.folder / name / "model").mkdir(parents=True)
    saved.save(1, {"tokens": 2})
    assert names(saved) == ["iteration_000001"]
    assert json.loads((saved.newest() / "state.json").read_text())["tokens"] == 2


SAVER = """
import os
import shutil
import signal
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import trainer.checkpoint as checkpoint
from saved import make
_, _, saved = make(Path(sys.argv[1]), steps=1, keep_last=1)
saved.save(1, {})
checkpoint.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
saved.save(2, {})
"""


def test_a_killed_save_leaves_nothing_that_counts(tmp_path):
    command = [sys.executable, "-c", SAVER, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    _, _, found = make(tmp_path)
    assert names(found) == [".part-iteration_000002", "iteration_000001"]
    assert found.restore(found.newest())["iteration"] == 1
    found.save(3, {})
    assert names(found) == ["iteration_000001", "iteration_000003"]


def test_a_removal_that_is_interrupted_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    _, _, saved = make(tmp_path, keep_last=1)
    saved.save(1, {})

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.shutil.rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            saved.save(2, {})
    assert names(saved) == [".trash-iteration_000001", "iteration_000002"]
    saved.save(3, {})
    assert names(saved) == ["iteration_000003"]


@pytest.mark.parametrize("fails", ["save_file", "write_manifest", "discard"])
def test_a_save_that_fails_at_any_point_leaves_the_one_before(tmp_path, fails, monkeypatch):
    _, _, saved = make(tmp_path, steps=1)
    saved.save(1, {})

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"trainer.checkpoint.{fails}", full)
        with pytest.raises(OSError, match="no space"):
            saved.save(2, {})
    assert saved.newest().name == "iteration_000001"
    assert not list(saved.folder.glob("iteration_000002"))
    saved.save(2, {})
    assert saved.newest().name == "iteration_000002"


def test_weights_of_another_model_are_refused(tmp_path):
    _, _, saved = make(tmp_path)
    saved.save(1, {})
    other, _, found = make(tmp_path)
    other.model.lonely = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"does not fit the model: \['lonely"):
        found.restore(saved.newest())


def test_a_saved_model_is_an_ordinary_one(tmp_path):
    policy = make_policy()
    save_model(policy, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Sort 3"}], add_generation_prompt=True, return_dict=False
    )
    rendered = policy.renderer.render(
        [{"role": "user", "content": "Sort 3"}], add_generation_prompt=True
    )
    assert ids == rendered.ids
    with torch.no_grad():
        a, b = (m.eval()(torch.tensor([ids])).logits for m in (model, policy.model))
    assert torch.equal(a, b)
