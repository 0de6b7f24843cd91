"""The loop in this process: stops, resumes, and what it says about them."""

import shutil
from pathlib import Path

import pytest
from contracts import Words
from runs import lines, metrics
from small_runs import (
    IN_EVALUATION_2,
    IN_ITERATION_2,
    Counted,
    crash,
    stop,
    train,
)

from trainer.kl_control import make_kl_controller
from trainer.runs.run_files import load_run

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Return the folder of a run of four iterations that nothing stops; a test may copy it."""
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


def replies(folder: Path) -> list[tuple]:
    rows = lines(folder / "transcripts.jsonl")
    return sorted((r["iteration"], r["kind"], r["prompt"], r["response"]) for r in rows)


def test_an_evaluation_that_a_stop_cut_off_is_made_up_on_resume(straight, tmp_path) -> None:
    shown = train(tmp_path, Counted(IN_EVALUATION_2, stop))
    assert shown.endswith(
        f"saved at iteration 2; go on with: python train.py resume={tmp_path}\nstopped\n"
    )
    rows = metrics(tmp_path)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2], "the iteration is not lost"
    assert "eval/reward" not in rows[-1]
    assert train(tmp_path, Counted(3, stop), resume=True).endswith("stopped\n")  # and again
    train(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(straight)
    assert replies(tmp_path) == replies(straight)


def test_what_is_steered_goes_on_where_a_stop_left_it(tmp_path) -> None:
    def run(folder: str, task: Words | None = None, resume: bool = False) -> list[dict]:
        control = make_kl_controller(controller="budget", coeff=0.1, target=0.02)
        steps = {"entropy_coeff": 0.01, "entropy_target": 9.0, "target_kl": 1e-9, "epochs": 2}
        train(tmp_path / folder, task, resume=resume, control=control, **steps)
        return metrics(tmp_path / folder)

    whole = run("whole")
    assert len(run("cut", Counted(IN_ITERATION_2, stop))) == 2
    assert run("cut", resume=True) == whole
    for name in ("kl/coeff", "policy/entropy_coeff"):
        assert len({row[name] for row in whole[1:]}) == 4, "it moves"
    assert [row["optim/early_stopped"] for row in whole[1:]] == [0.5] * 4
    assert whole[-1]["progress/step"] == 8


def test_damaged_checkpoints_are_skipped_by_name(straight, tmp_path) -> None:
    copied = shutil.copytree(straight, tmp_path / "run")
    for name in ("iteration_000003", "iteration_000004"):
        path = copied / "checkpoints" / name / "model" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    shown = train(copied, resume=True)
    assert "from iteration 2, skipped damaged iteration_000004, iteration_000003" in shown
    assert metrics(copied) == metrics(straight)
    assert replies(copied) == replies(straight)


def test_without_checkpoints_a_resumed_run_starts_over(straight, tmp_path) -> None:
    shown = train(tmp_path, Counted(IN_ITERATION_2, crash), every=3)
    assert "nothing is saved" in shown
    assert shown.endswith("boom\n")
    assert [row["progress/iteration"] for row in metrics(tmp_path)] == [0, 1]
    assert "from iteration 0, there is no checkpoint" in train(tmp_path, resume=True, every=20)
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["iteration_000004"], "the last iteration is saved, due or not"
    assert metrics(tmp_path) == metrics(straight)
    assert replies(tmp_path) == replies(straight)


def test_a_run_goes_on_with_the_data_and_the_iterations_that_it_began_with(tmp_path) -> None:
    def resume(name: str, value: object) -> None:
        train(tmp_path, resume=True, change=lambda loop: setattr(loop, name, value))

    train(tmp_path, change=lambda loop: setattr(loop, "inputs", {"env.dataset": "a" * 64}))
    with pytest.raises(ValueError, match=r"trainer\.num_iterations >= 4"):
        resume("num_iterations", 2)
    with pytest.raises(ValueError, match=r"the files of env\.dataset"):
        resume("inputs", {"env.dataset": "b" * 64})
    resume("inputs", {"env.dataset": "a" * 64})
    assert load_run(tmp_path).state == "finished"


def test_without_an_evaluation_the_objective_is_the_last_reward(tmp_path) -> None:
    train(tmp_path, change=lambda loop: loop.evaluate.plans.clear())
    assert load_run(tmp_path).status["objective"] == metrics(tmp_path)[-1]["reward/mean"]
