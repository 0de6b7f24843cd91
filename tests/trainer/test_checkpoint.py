"""Checkpoints are complete or absent, exact, and believed only after every byte was checked."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from support.policies import make_policy

from policies.files import write_manifest
from trainer.checkpoint import FORMAT, Checkpoints
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime


def step(policy, optimizer, seed: int) -> None:
    """Take one AdamW step on a loss of its own."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in weights(policy))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def weights(policy) -> list:
    return list(policy.model.parameters())


def make(folder: Path, *, steps: int = 0, **options):
    """Return a policy and optimiser after some steps, and their checkpoints."""
    policy = make_policy.__wrapped__()
    optimizer = make_optimizer(policy.model, lr=1e-3, weight_decay=0.1)
    for seed in range(steps):
        step(policy, optimizer, seed)
    return policy, optimizer, Checkpoints(Runtime(folder), policy, optimizer, **options)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name for p in checkpoints.folder.iterdir())


def test_what_comes_back_is_what_was_saved_to_the_bit(tmp_path):
    policy, optimizer, saved = make(tmp_path, steps=3)
    state = {"objective": 0.1, "kl": {"coeff": 0.2}, "tokens": 12}
    saved.save(3, state)
    other, fresh, found = make(tmp_path)
    assert found.newest() == tmp_path / "checkpoints" / "iteration_000003"
    assert found.restore(found.newest()) == {"format": FORMAT, "iteration": 3, "parts": {}, **state}
    for a, b in zip(weights(policy), weights(other), strict=True):
        assert torch.equal(a, b)
        old, new = optimizer.state[a], fresh.state[b]
        assert set(old) == set(new) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(old[k], new[k]) and old[k].dtype == new[k].dtype for k in old)
    step(policy, optimizer, 9)
    step(other, fresh, 9)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy), weights(other), strict=True))


# What does not count.


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def sealed(folder: Path, **state) -> None:
    """Change the state of a checkpoint and list its files anew, hashes right."""
    old = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**old, **state}))
    (folder / "MANIFEST.json").unlink()
    write_manifest(folder, {"format": FORMAT})


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Return a folder with two sound checkpoints; a test copies it."""
    folder = tmp_path_factory.mktemp("two")
    _, _, saved = make(folder, steps=1)
    for iteration in (1, 2):
        saved.save(iteration, {})
    return folder


FILES = ("model/model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json")
DAMAGES = {
    f"{file}: {damage.__name__}": lambda folder, file=file, damage=damage: damage(folder / file)
    for file in FILES
    for damage in (flip, cut, Path.unlink)
} | {  # and what looks like a checkpoint, hashes right
    "other weights": lambda folder: shutil.copy(folder / FILES[0], folder / "model/z.safetensors"),
    "no weights": lambda folder: shutil.rmtree(folder / "model") or sealed(folder),
    "another iteration": partial(sealed, iteration=10**6),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_goes(two, tmp_path, damage):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "checkpoints" / "iteration_000002")
    _, _, saved = make(tmp_path, keep_last=1)
    assert saved.newest().name == "iteration_000001"
    assert saved.skipped == ["iteration_000002"]
    saved.save(3, {})
    assert names(saved) == ["iteration_000003"]


def test_only_damaged_ones_and_those_of_a_later_leash_are_errors(two, tmp_path):
    _, _, saved = make(shutil.copytree(two, tmp_path / "run"))
    sealed(saved.newest(), format=FORMAT + 1)
    with pytest.raises(ValueError, match="iteration_000002"):
        saved.newest()
    for path in saved.folder.iterdir():
        cut(path / "state.json")
    with pytest.raises(ValueError, match=r"iteration_000002, iteration_000001"):
        saved.newest()


# Which are kept.


def test_saves_come_when_due_and_only_the_last_are_kept(tmp_path):
    _, _, saved = make(tmp_path, every=2, keep_last=2)
    for iteration in range(1, 9):
        saved.maybe_save(iteration, {})
    assert names(saved) == ["iteration_000006", "iteration_000008"]
    saved.maybe_save(9, {}, last=True)
    assert names(saved) == ["iteration_000008", "iteration_000009"]
    saved.save(1_000_000, {})
    assert saved.newest().name == "iteration_1000000", "in the order of numbers"
    _, _, never = make(tmp_path / "never")
    never.maybe_save(2, {}, last=True)
    assert not never.folder.exists()


@pytest.mark.parametrize("objectives", [[0.1, 0.9, 0.3, 0.2], [None, 0.0, -1.0, -3.0]])
def test_the_best_is_kept_beside_the_last(tmp_path, objectives):
    _, _, saved = make(tmp_path, keep_last=1, keep_best=True)
    for iteration, objective in enumerate(objectives, start=1):
        saved.save(iteration, {"objective": objective})
    assert names(saved) == ["iteration_000002", "iteration_000004"]
    (saved.folder / "iteration_000002" / "state.json").write_text("{torn")
    saved.save(5, {"objective": -9.0})
    assert names(saved) == ["iteration_000004", "iteration_000005"], "a damaged one is never it"


# What is interrupted.


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
    (saved.folder / ".trash-iteration_000000" / "model").mkdir(parents=True)  # one was killed
    for tokens in (1, 2):  # to save again replaces
        saved.save(2, {"tokens": tokens})
        assert saved.restore(saved.newest())["tokens"] == tokens
    assert names(saved) == ["iteration_000001", "iteration_000002"]


# What is loaded.


def test_weights_of_another_model_are_refused(two):
    other, _, found = make(two)
    other.model.lonely = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="lonely"):
        found.restore(found.newest())
