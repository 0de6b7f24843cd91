"""Distillation through the command line: prompts alone and a teacher; the gradient: test_update."""

import json

import pytest
from support.policies import make_policy, scaled
from support.runs import SMALL, metrics, train
from support.runs import lines as read_lines

from conf.build import make_task
from envs.tasks.task import Response
from trainer.checkpoint import save_model
from trainer.stopping import EarlyStopping


@pytest.fixture
def prompts(tmp_path) -> str:
    rows = [{"prompt": f"Sort the digits in ascending order: {1000 + 37 * i}"} for i in range(40)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.runs
def test_prompts_and_a_teacher_are_enough(prompts, tmp_path):
    """The teacher is the same model, four times as sure of its tokens."""
    words = ("policy.model=tiny", "kl.reference=tiny", "kl.reference_temperature=0.25")
    steps = ("trainer.num_iterations=45", "trainer.prompts_per_iteration=16", "optimizer.lr=3e-3")
    folder = tmp_path / "run"
    options = ("policy.max_new_tokens=8", "eval.every=0", f"output_dir={folder}")
    done = train("experiment=distil_own", *words, f"env.dataset={prompts}", *steps, *options)
    assert done.code == 0, done.text
    lines = metrics(folder)
    kls = [line["kl/ref_full"] for line in lines if "kl/ref_full" in line]
    assert sum(kls[-5:]) < sum(kls[:5]) / 3
    assert all(line.get("loss/policy") is None for line in lines)
    assert [name for line in lines for name in line if name.startswith("reward/")] == []
    assert {row["reward"] for row in read_lines(folder / "transcripts.jsonl")} == {None}
    evaluations = [line for line in lines if "eval/kl_ref" in line]
    assert [line for line in lines if "eval/sampled_accuracy" in line] == []
    status = json.loads((folder / "status.json").read_text())
    assert status["objective"] == -evaluations[-1]["eval/kl_ref"]
    told = [note["rule"] for note in status.get("notes", [])]
    assert {*told} <= {"mostly_truncated"}, "equal rewards are no fault; such a model never ends"


@pytest.mark.runs
def test_a_run_with_a_leash_and_a_teacher_logs_both_and_resumes_with_the_same_teacher(tmp_path):
    teacher, folder = tmp_path / "teacher", tmp_path / "run"
    save_model(scaled(make_policy(), 1.2), teacher)
    words = ("policy.model=tiny", f"teacher.reference={teacher}")
    words += ("teacher.controller=budget", "teacher.target=1", f"output_dir={folder}")
    done = train(*SMALL, *words, "trainer.num_iterations=2", "checkpoint.every=1", "eval.every=0")
    assert done.code == 0, done.text
    done = train(f"resume={folder}", "trainer.num_iterations=3")
    assert done.code == 0, done.text
    lines = [line for line in metrics(folder) if "loss/total" in line]
    assert [line["progress/iteration"] for line in lines] == [1, 2, 3]
    for line in lines:
        for name in ("kl/ref_full", "kl/teacher", "kl/teacher_sequence", "kl/teacher_k3"):
            assert name in line
        assert line["loss/kl_teacher"] > 0
        total = sum(line[f"loss/{name}"] for name in ("policy", "kl", "kl_teacher"))
        assert line["loss/total"] == pytest.approx(total)
    assert lines[0]["kl/coeff"] == lines[2]["kl/coeff"] == 1
    state = json.loads((folder / "checkpoints/iteration_000002/state.json").read_text())
    coeffs = [line["kl/teacher_coeff"] for line in lines]
    assert coeffs[2] == state["kl_teacher"]["coeff"] != coeffs[0]
    save_model(scaled(make_policy(), 1.1), teacher)
    done = train(f"resume={folder}", "trainer.num_iterations=4")
    assert done.code != 0
    assert "expected the teacher that this run began with" in done.text


def test_a_task_without_rewards_gives_zeros_and_drops_nothing(prompts):
    node = {"_target_": "envs.tasks.Prompts", "dataset": prompts, "columns": {"question": "prompt"}}
    env = {"task": node, "rewards": {}, "task_weight": 1.0}
    task = make_task(env, needs_reward=False)
    row = task.rows("train")[0]
    (reward,) = task.rewards([row], [Response("1", True, [])])
    assert (reward.total, reward.dropped, task.rewarded) == (0.0, False, False)
    with pytest.raises(NotImplementedError, match="rewards nothing"):
        make_task(env).rewards([row], [Response("1", True, [])])


def test_patience_waits_for_a_smaller_kl_where_nothing_is_rewarded():
    enough = EarlyStopping(patience=2)
    kls = [0.5, 0.3, 0.2, 0.25, 0.3]
    ended = [bool(enough({"eval/kl_ref": kl}, i)) for i, kl in enumerate(kls)]
    assert ended == [False, False, False, False, True]


@pytest.mark.runs
def test_sft_is_anchored_to_its_start_and_measures_its_own_responses(tmp_path):
    """The same weights at the start, so the first divergence is 0; a resume has the reference."""
    short = ("policy.model=tiny", "trainer.prompts_per_iteration=8", "eval.max_rows=8")
    anchor = ("kl.measure=true", "kl.estimator=forward", "eval.frontier=4", "checkpoint.every=2")
    last = {}
    for coeff in (0, 2):
        words = (*short, *anchor, f"kl.coeff={coeff}", f"output_dir={tmp_path}/{coeff}")
        done = train("experiment=sft_tiny", *words, "trainer.num_iterations=4")
        assert done.code == 0, done.text
        last[coeff] = metrics(tmp_path / str(coeff))[-1]
        kls = [line.get("kl/ref_forward") for line in metrics(tmp_path / str(coeff))]
        assert kls[0] is None
        assert kls[1] == pytest.approx(0.0, abs=1e-6)
        assert kls[-1] > 0
    assert last[2]["loss/kl"] == pytest.approx(2 * last[2]["kl/ref_forward"], rel=1e-5)
    assert last[2]["kl/ref_forward"] < last[0]["kl/ref_forward"]
    assert last[2]["eval/kl_ref_sequence"] > 0
    assert "kl/efficiency" in last[2]
    done = train(f"resume={tmp_path}/0", "trainer.num_iterations=6", "checkpoint.every=2")
    assert done.code == 0, done.text
    assert metrics(tmp_path / "0")[-1]["kl/ref_forward"] > last[0]["kl/ref_forward"]
