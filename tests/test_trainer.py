"""The loop in this process: stops, resumes, and what the one at the terminal is told."""

import json
import re
import shutil
from pathlib import Path

import pytest
from contracts import Words, make_policy
from runs import lines, metrics
from small_runs import (
    IN_EVALUATION_2,
    IN_ITERATION_2,
    IN_ITERATION_4,
    Counted,
    Unjudged,
    crash,
    stop,
    train,
)

from policies.cache import write_manifest
from trainer.checkpoint import Checkpoints
from trainer.kl_control import (
    TargetKLController,
    make_kl_controller,
)
from trainer.optimizer import make_optimizer
from trainer.reports.trackers.jsonl import JsonlTracker
from trainer.runs.run_files import load_run, read_lines
from trainer.runtime import Runtime


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


def told(folder: Path) -> list[tuple]:
    rows = lines(folder / "transcripts.jsonl")
    return sorted((r["iteration"], r["kind"], r["prompt"], r["response"]) for r in rows)


def damage(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / "checkpoints" / name / "model" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])


def test_an_evaluation_that_a_stop_cut_off_is_made_up_on_resume(straight, tmp_path) -> None:
    shown = train(tmp_path, Counted(IN_EVALUATION_2, stop))
    assert shown.endswith(
        f"saved at iteration 2; go on with: python train.py resume={tmp_path}\nstopped\n"
    )
    rows = metrics(tmp_path)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2], "the iteration is not lost"
    assert "eval/reward" not in rows[-1]
    shown = train(tmp_path, Counted(3, stop), resume=True)  # and again
    assert shown.endswith("stopped\n")
    train(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(straight)
    assert told(tmp_path) == told(straight)


def test_a_kl_that_nobody_measured_does_not_move_the_coefficient(tmp_path) -> None:
    control = TargetKLController(0.1, target=1.0, horizon=10)
    train(tmp_path, Unjudged(), every=0, control=control)
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row.get("kl/coeff") for row in rows] == [None, 0.1, 0.1, 0.1, 0.1]
    assert not any("kl/ref_sequence" in row for row in rows)


@pytest.mark.parametrize(
    ("controller", "settings"),
    [
        ("adaptive", {"target": 0.02, "horizon": 40}),
        ("budget", {"target": 0.02}),
        ("linear", {"end": 0.7, "total": 4}),
    ],
)
def test_what_is_steered_goes_on_where_a_stop_left_it(controller, settings, tmp_path) -> None:
    def run(folder: str, task: Words | None = None, resume: bool = False) -> list[dict]:
        control = make_kl_controller(controller=controller, coeff=0.1, **settings)
        steps = {"entropy_coeff": 0.01, "entropy_target": 9.0, "target_kl": 1e-9, "epochs": 2}
        train(tmp_path / folder, task, resume=resume, control=control, **steps)
        return metrics(tmp_path / folder)

    whole = run("whole")
    assert len(run("cut", Counted(IN_ITERATION_2, stop))) == 2
    assert run("cut", resume=True) == whole
    coeffs = [row["kl/coeff"] for row in whole[1:]]
    if controller == "linear":
        assert coeffs == pytest.approx([0.1, 0.3, 0.5, 0.7])
    elif controller == "budget":
        by_hand = make_kl_controller(controller=controller, coeff=0.1, **settings)
        want, share = [by_hand.coeff], by_hand.k3_share
        for row in whole[1:-1]:
            tokens = row["response/length_mean"]  # of a reply
            k1, k3 = row["kl/ref_sequence"], row["kl/ref_k3"] * tokens
            want.append(by_hand.update([k1 + share * (k3 - k1)]))
        assert coeffs == pytest.approx(want)
    else:  # 16 replies an iteration, horizon 40: by at most 0.2 * 16 / 40
        want = [0.1]
        for row in whole[1:-1]:
            error = min(max(row["kl/ref_sequence"] / 0.02 - 1, -0.2), 0.2)
            want.append(want[-1] * (1 + error * 16 / 40))
        assert coeffs == pytest.approx(want)
        assert len(set(coeffs)) == 4
    bonus = [row["policy/entropy_coeff"] for row in whole[1:]]
    assert bonus == pytest.approx([0.01, 0.015, 0.02, 0.025])
    assert [row["optim/early_stopped"] for row in whole[1:]] == [0.5] * 4
    assert whole[-1]["progress/step"] == 8


def test_damaged_checkpoints_are_skipped_by_name(straight, tmp_path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    damage(folder, "iteration_000003", "iteration_000004")
    shown = train(folder, resume=True)
    assert shown.splitlines()[1] == (
        "  resumed  from iteration 2, skipped damaged iteration_000004, iteration_000003"
    )
    assert metrics(folder) == metrics(straight)
    assert told(folder) == told(straight)
    saved = json.loads((folder / "checkpoints" / "iteration_000002" / "state.json").read_text())
    took = sum(row["time/iteration_s"] for row in read_lines(folder / "metrics.jsonl")[-2:])
    assert load_run(folder).status["seconds"] > saved["seconds"] + took, "of both starts"


def test_nothing_but_damaged_checkpoints_is_an_error_and_changes_nothing(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    names = [f"iteration_{i:06d}" for i in range(4, 0, -1)]
    damage(folder, *names)
    with pytest.raises(ValueError, match=f"only damaged ones .{', '.join(names)}.; .*remove"):
        train(folder, resume=True)
    assert metrics(folder) == metrics(straight)


def test_without_checkpoints_a_resumed_run_starts_over(straight, tmp_path) -> None:
    shown = train(tmp_path, Counted(IN_ITERATION_2, crash), every=3)
    said = "nothing is saved: it ended before its first checkpoint; begin again with: "
    assert f"{said}python train.py resume=" in " ".join(shown.split())
    assert shown.endswith("boom\n")
    assert [row["progress/iteration"] for row in metrics(tmp_path)] == [0, 1]
    shown = train(tmp_path, resume=True, every=20)
    assert "resumed  from iteration 0, there is no checkpoint" in shown
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["iteration_000004"], "the last iteration is saved, due or not"
    assert metrics(tmp_path) == metrics(straight)
    assert told(tmp_path) == told(straight)


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path) -> None:
    (tmp_path / "report.html").mkdir()
    shown = train(tmp_path).splitlines()
    assert shown[-1].startswith("chat     python train.py mode=chat")
    assert len(metrics(tmp_path)) == 5


def test_an_error_on_leaving_does_not_hide_the_one_that_ended_the_run(
    tmp_path, monkeypatch
) -> None:
    def fail(*_, **__) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(JsonlTracker, "end", fail)
    shown = train(tmp_path, Counted(IN_ITERATION_4, crash)).splitlines()
    assert shown[-1] == "boom"
    assert shown[-2] == "and then, on leaving: OSError: the disk is gone"
    assert len(metrics(tmp_path)) == 4  # iterations 0 to 3


class Second(Runtime):
    """Rank 1 of two, whose disk shows nothing; rank 0 has chosen."""

    is_main, ranks = False, 2
    chosen = (Path("/run/checkpoints/iteration_000002"), ["iteration_000003"])

    def gather(self, value):
        if isinstance(value, str):  # the folder of the run
            return [value, value]
        assert value == (None, [])
        return [self.chosen, value]


def test_the_checkpoint_that_rank_0_chose_is_taken_on_all(tmp_path) -> None:
    policy = make_policy()
    found = Checkpoints(Second(tmp_path), policy, make_optimizer(policy.model, lr=1.0))
    (found.folder / "iteration_000009").mkdir(parents=True)
    assert found.newest() == Second.chosen[0]
    assert found.skipped == ["iteration_000003"]


def test_a_run_goes_on_with_the_data_that_it_began_with(tmp_path):
    data = {"env.dataset": "a" * 64}
    train(tmp_path, Counted(IN_ITERATION_4, stop), data=data)
    with pytest.raises(ValueError, match=r"the data of env\.dataset .*put the old one back"):
        train(tmp_path, resume=True, data={"env.dataset": "b" * 64})
    train(tmp_path, resume=True, data=data)
    assert load_run(tmp_path).state == "finished"


def test_a_run_whose_folder_is_removed_says_so_and_makes_no_new_one(tmp_path):
    folder = tmp_path / "run"
    # Moved, not removed: the display's own thread may write while a folder is being emptied.
    gone = Counted(IN_ITERATION_2, lambda: folder.rename(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=re.escape(str(folder))):
        train(folder, gone)
    assert not (folder / "model").exists()


def test_a_checkpoint_beyond_the_last_iteration_is_refused(tmp_path):
    train(tmp_path)
    (saved,) = tmp_path.glob("checkpoints/iteration_000004")
    late = saved.rename(saved.with_name("iteration_1000000"))
    state = json.loads((late / "state.json").read_text())
    (late / "state.json").write_text(json.dumps({**state, "iteration": 10**6}))
    (late / "MANIFEST.json").unlink()
    write_manifest(late, {"format": 1})
    with pytest.raises(ValueError, match=r"trainer\.num_iterations >= 1000000"):
        train(tmp_path, resume=True)
