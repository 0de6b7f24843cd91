"""Several teachers: each row is scored, and learnt from, as in a run with its teacher alone."""

import json

import pytest
import torch
from support.policies import G, make_policy, rollout, scaled
from support.runs import metrics, train
from support.updates import double_policy, gradient
from tensordict import NonTensorData, NonTensorStack, TensorDict

from trainer.checkpoint import save_model
from trainer.kl.controllers import ConstantKLController
from trainer.kl.leash import Leash
from trainer.kl.reference import Reference
from trainer.kl.teachers import Teachers
from trainer.objectives import DistilObjective, GRPOObjective

FACTORS = {"math": 0.9, "code": 1.1}
NAMES = ("code", "math", "math", "code")  # of the prompts of `rollout`


def choose(batch: TensorDict, names: list[str]) -> TensorDict:
    """Return the batch whose rows have a column that names a teacher."""
    rows = batch["row"].tolist()
    rows = [{**row, "columns": {"domain": n}} for row, n in zip(rows, names, strict=True)]
    return batch.set("row", NonTensorStack(*map(NonTensorData, rows)))


def make() -> tuple[dict[str, Reference], TensorDict]:
    """Return teachers, whose policy is one, and a batch of it."""
    policy = double_policy()
    models = {name: scaled(policy, factor) for name, factor in FACTORS.items()}
    batch = rollout(policy, turns=2)
    batch["advantage"] = torch.randn(batch["loss_mask"].shape, dtype=torch.float64)
    choose(batch, [name for name in NAMES for _ in range(G)])
    return {n: Reference(policy, model, name="teacher") for n, model in models.items()}, batch


def leash(estimator: str) -> Leash:
    """Return a leash whose teacher alone costs."""
    teacher = Leash(ConstantKLController(kl_coef=0.5), estimator, name="teacher")
    return Leash(ConstantKLController(kl_coef=0.0), "k3_ratio", teacher=teacher)


def rows_are_scored_by_their_teachers(*names: str) -> None:
    """Raise AssertionError unless a row has the scores of its teacher; `names`: of the prompts."""
    teachers, batch = make()
    choose(batch, [name for name in names for _ in range(G)])
    got = Teachers(teachers, "domain")(batch.clone())
    for name, teacher in teachers.items():
        mine = got["teachers", name]
        assert mine.tolist() == [row["columns"]["domain"] == name for row in batch["row"]]
        want = teacher(batch.clone())
        for key in (("teacher_log_probs", "full"), "teacher_kl_penalty"):
            torch.testing.assert_close(got.get(key)[mine], want.get(key)[mine], rtol=0, atol=1e-9)
    assert got["teacher_kl_penalty"].abs().max() > 0.01


@pytest.mark.parametrize("names", [NAMES, ("code",) * 4], ids=["both", "one has no row"])
def test_a_row_has_the_scores_of_its_teacher_alone(names):
    rows_are_scored_by_their_teachers(*names)


def test_names_may_be_numbers_in_the_configuration_and_in_the_rows():
    teachers, batch = make()
    choose(batch, [name for name in (1, 2) for _ in range(2 * G)])
    got = Teachers({1: teachers["math"], 2: teachers["code"]}, "domain")(batch)  # pyright: ignore[reportArgumentType]
    assert got["teachers", "2"].tolist() == [False] * (2 * G) + [True] * (2 * G)


@pytest.mark.parametrize(("objective", "estimator"), [
    (DistilObjective, "full"), (DistilObjective, "k3_ratio"),
    (GRPOObjective, "jsd"), (GRPOObjective, "k3_ratio"),
])  # fmt: skip
def test_the_gradient_is_the_sum_of_those_of_single_teachers(objective, estimator):
    """A mean over all tokens: each teacher's by its share of them."""
    teachers, batch = make()
    policy = teachers["math"].policy
    several, made = Teachers(teachers, "domain"), objective(leash=leash(estimator))
    options = {"reference": several.scorer, "leash": made.leash, "micro_batch_tokens": 60}
    whole = several(batch.clone())
    got, logged = gradient(policy, made, whole, **options)
    want, kl, tokens = torch.zeros_like(got), 0.0, float(batch["loss_mask"].sum())
    for name, teacher in teachers.items():
        part = teacher(batch[whole["teachers", name]].clone())
        share = float(part["loss_mask"].sum()) / tokens
        each, alone = gradient(policy, made, part, **options | {"reference": teacher.scorer})
        want += share * each
        kl += share * alone.get(f"kl/teacher_{estimator}", 0.0)
    assert want.norm() > 1e-4
    assert (got - want).norm() < 1e-6 * want.norm()
    assert logged.get(f"kl/teacher_{estimator}", 0.0) == pytest.approx(kl, rel=1e-5)


def test_a_row_that_names_no_teacher_ends_the_run_with_the_names():
    teachers, batch = make()
    with pytest.raises(ValueError, match=r"domain.*math or code, got 'law'.*teacher\.reference"):
        Teachers(teachers, "domain")(choose(batch, ["law"] * len(batch)))


@pytest.mark.runs
def test_a_run_distils_from_both_and_resumes_with_the_same(tmp_path):
    path, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = [{"prompt": f"Sort {i}", "domain": ["math", "code"][i % 2]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for name, factor in FACTORS.items():
        save_model(scaled(make_policy(), factor), tmp_path / name)
    named = ",".join(f"{name}:{tmp_path / name}" for name in FACTORS)
    words = ("experiment=distil_own", "policy.model=tiny", f"env.dataset={path}", "eval.every=0")
    words += (f"teacher.reference={{{named}}}", "teacher.column=domain", "teacher.estimator=full")
    words += ("kl.estimator=k3_ratio", "kl.coeff=0.01", "trainer.prompts_per_iteration=8")
    words += ("policy.max_new_tokens=4", "eval.max_rows=2", "checkpoint.every=1")
    done = train(*words, "trainer.num_iterations=2", f"output_dir={folder}")
    assert done.code == 0, done.text
    for line in metrics(folder)[1:]:
        low, high = sorted(line[f"kl/teacher/{name}"] for name in FACTORS)
        assert low < line["kl/teacher"] < high
        assert line["kl/teacher_full"] > 0
    save_model(scaled(make_policy(), 1.2), tmp_path / "code")
    done = train(f"resume={folder}", "trainer.num_iterations=3")
    assert done.code != 0
    assert "expected the teacher code that this run began with" in done.text
