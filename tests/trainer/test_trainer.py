"""The loop in this process: stops, resumes, ends once it has learnt enough, samples ahead."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import Copy
from support.policies import G, make_policy
from support.runs import lines, metrics
from support.small_runs import IN_EVALUATION_2, IN_ITERATION_2, Counted, crash, stop, train
from support.tasks import Words
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scorer
from policies.transformers_policy import TransformersPolicy
from trainer.evaluation import Evaluate
from trainer.kl.controllers import BudgetKLController
from trainer.objectives import PPOObjective
from trainer.runs.discover import nothing_left
from trainer.runs.run_files import load_run, read_status
from trainer.scale.overlap import Overlap
from trainer.sources import Rollouts
from trainer.stopping import EarlyStopping
from trainer.trainer import Trainer


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Return the folder of a run of four iterations that nothing stops; a test may copy it."""
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


def responses(folder: Path) -> list[tuple]:
    rows = lines(folder / "transcripts.jsonl")
    return sorted((r["iteration"], r["kind"], r["prompt"], r["response"]) for r in rows)


@pytest.mark.runs
def test_an_evaluation_that_a_stop_cut_off_is_made_up_on_resume(straight, tmp_path) -> None:
    assert train(tmp_path, Counted(IN_EVALUATION_2, stop)).endswith("stopped\n")
    rows = metrics(tmp_path)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2], "the iteration is not lost"
    assert "eval/reward" not in rows[-1]
    assert train(tmp_path, Counted(3, stop), resume=True).endswith("stopped\n")  # and again
    train(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(straight)
    assert responses(tmp_path) == responses(straight)


@pytest.mark.runs
@pytest.mark.parametrize("on_stop", [True, False])
def test_a_stop_saves_also_without_other_checkpoints(straight, tmp_path, on_stop) -> None:
    def keep(loop: Trainer) -> None:
        loop.checkpoints.on_stop = on_stop

    train(tmp_path, Counted(IN_ITERATION_2, stop), every=0, change=keep)
    assert (tmp_path / "checkpoints" / "iteration_000001").is_dir() == on_stop
    again = Counted()
    train(tmp_path, again, every=0, change=keep, resume=True)
    played = 4 * 16 + 3 * 12 - (16 + 12 if on_stop else 0)  # the first iteration and evaluation
    assert again.count == played
    assert metrics(tmp_path) == metrics(straight)
    assert responses(tmp_path) == responses(straight)


@pytest.mark.runs
def test_what_is_steered_goes_on_where_a_stop_left_it(tmp_path) -> None:
    def run(folder: str, task: Words | None = None, resume: bool = False) -> list[dict]:
        control = BudgetKLController(0.1, target=0.02)
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


@pytest.mark.runs
def test_without_checkpoints_a_resumed_run_starts_over(straight, tmp_path) -> None:
    assert train(tmp_path, Counted(IN_ITERATION_2, crash), every=3).endswith("boom\n")
    assert [row["progress/iteration"] for row in metrics(tmp_path)] == [0, 1]
    train(tmp_path, resume=True, every=20)
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["iteration_000004"], "the last iteration is saved, due or not"
    assert metrics(tmp_path) == metrics(straight)
    assert responses(tmp_path) == responses(straight)


@pytest.mark.runs
def test_a_run_goes_on_with_the_data_that_it_began_with(tmp_path) -> None:
    def run(letter: str, **how) -> None:
        inputs = {"env.dataset": letter * 64}
        train(tmp_path, change=lambda loop: setattr(loop, "inputs", inputs), **how)

    run("a")
    with pytest.raises(ValueError, match=r"the files of env\.dataset"):
        run("b", resume=True)
    run("a", resume=True)
    assert load_run(tmp_path).state == "finished"


@pytest.mark.runs
def test_without_an_evaluation_the_objective_is_the_last_reward(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("trainer.speed.peak_flops", lambda device: 1e9)
    passes = []

    def exact(loop: Trainer) -> None:
        loop.evaluate.plans.clear()
        loop.update.leash = replace(loop.update.leash, estimator="full")
        loop.update.reference = body = loop.retrieve_kl.scorer
        body.model.base_model.register_forward_hook(lambda *_: passes.append(1))

    train(tmp_path, change=exact, epochs=2)
    assert len(passes) == 4, "one pass of the reference in an iteration, not in an epoch"
    *_, before, row = lines(tmp_path / "metrics.jsonl")
    assert load_run(tmp_path).status["objective"] == row["reward/mean"]
    tokens = row["progress/tokens"] - before["progress/tokens"]
    sampled = row["response/length_mean"] * (row["progress/samples"] - before["progress/samples"])
    for phase, count in {"collect": sampled, "score": tokens, "update": 2 * tokens}.items():
        speed = row[f"perf/{phase}_tokens_per_s"]
        assert speed * row[f"time/{phase}_s"] == pytest.approx(count)
    weights = sum(p.numel() for p in make_policy().model.parameters())
    computed = (sampled + (tokens - sampled) / G) / tokens  # prompts are shared by a group
    assert row["perf/mfu"] == pytest.approx(
        6e-9 * weights * computed * row["perf/update_tokens_per_s"]
    )


# A run that ends once it has learnt enough: at a value, or when evaluations stagnate.


RULE = "kl/ref_sequence 1e-4"


@pytest.mark.parametrize("values", [[2, 0.6, 0.5], [0.1, 0.4, 0.7]])
def test_a_metric_that_falls_or_rises_to_a_value_ends_the_run(values):
    enough = EarlyStopping(stop_at="loss/total 0.5")
    ended = [bool(enough({"loss/total": value}, i)) for i, value in enumerate(values, 1)]
    assert ended == [False, False, True]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_counts_evaluations_since_the_best_one(patience):
    scores = [0.2, 0.4, 0.4, 0.3, 0.5, 0.1, 0.5, 0.4]
    enough, ended = EarlyStopping(patience=patience), []
    for i, score in enumerate(scores):
        enough({"loss/total": 1.0}, i)  # an iteration without an evaluation counts nothing
        if enough({"eval/sampled_accuracy": score, "eval/reward": 9.0 + i}, i):
            ended.append(i)
    best = [scores.index(max(scores[: i + 1])) for i in range(len(scores))]
    assert ended[0] == next(i for i in range(1, 8) if i - best[i] >= patience)


@pytest.mark.parametrize(("name", "iteration"), [("eval/acuracy", 0), ("kl/refsequence", 1)])
def test_a_metric_that_the_run_does_not_log_is_refused_when_it_is_first_missing(name, iteration):
    logged = [{"eval/reward": 1.0}, {"kl/ref": 0.0}]  # by an evaluation, by training
    enough = EarlyStopping(stop_at=f"{name} 1")
    assert enough(logged[1 - iteration], iteration) is None
    with pytest.raises(ValueError, match=name):
        enough(logged[iteration], iteration)


@pytest.mark.parametrize(
    "name", ["kl/efficiency", "kl/in_wrong", "kl/needed_train", "eval_train/reward"]
)
def test_a_metric_of_some_evaluations_alone_is_not_missing_before(name):
    enough = EarlyStopping(stop_at=f"{name} 1")
    before = {"eval/reward": 1.0, "eval_train/reward": 0.0}
    assert enough(before, 0) is None
    assert enough({"kl/ref": 0.0}, 1) is None
    assert enough(before | {name: 0.5}, 2) is None
    assert enough(before | {name: 1.5}, 3)


@pytest.mark.runs
def test_the_run_ends_there_and_equals_a_longer_one_up_to_there_and_goes_on(straight, tmp_path):
    ended = tmp_path / "ended"
    train(ended, enough=EarlyStopping(stop_at=RULE))  # a KL, which rises from 0
    (ended / "config.yaml").write_text(f"trainer: {{stop_at: {RULE}}}")
    done, kl = metrics(ended), [line.get("kl/ref_sequence") for line in metrics(straight)]
    assert 1 < len(done) < 5
    assert done[-1]["kl/ref_sequence"] >= 1e-4 > done[-2].get("kl/ref_sequence", 0)
    assert [line.get("kl/ref_sequence") for line in done] == kl[: len(done)]
    status = read_status(ended)
    assert (status["state"], status["iteration"]) == ("finished", len(done) - 1)
    assert (ended / "model").is_dir()
    rows = [row for row in lines(ended / "transcripts.jsonl") if row["iteration"] == len(done) - 1]
    assert {row["kind"] for row in rows} == {"train", "after"}, "its evaluation is the last one"

    settings = {"num_iterations": 4, "stop_at": RULE, "patience": None}
    config = {"resume": str(ended), "mode": "train", "trainer": settings}
    assert "came to" in str(nothing_left(config))
    assert nothing_left(config | {"trainer": settings | {"stop_at": None}}) is None
    train(ended, resume=True, enough=EarlyStopping(stop_at=RULE))  # the final model was lost, say
    assert metrics(ended) == done
    train(ended, resume=True)
    assert [line.get("kl/ref_sequence") for line in metrics(ended)][1:] == kl[1:]


@pytest.mark.runs
@pytest.mark.parametrize("rule", [{"stop_at": RULE}, {"patience": 1}])
def test_a_run_that_was_stopped_and_goes_on_ends_where_an_uninterrupted_one_does(tmp_path, rule):
    train(tmp_path / "a", enough=EarlyStopping(**rule))
    train(tmp_path / "b", Counted(IN_ITERATION_2, stop), enough=EarlyStopping(**rule))
    train(tmp_path / "b", resume=True, enough=EarlyStopping(**rule))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


# Sampling ahead: the weights that sample each batch, to the bit, and what errors leave. It is for
# an engine in another process (tests/policies/test_vllm_runs.py); these play in a thread, by a
# copy.


def engine_of(policy: TransformersPolicy) -> Copy:
    """Return an engine that computes to the bit what the policy does: torch looks at gradients."""
    same = {name: getattr(policy, name) for name in ("tokenizer", "renderer", "limits")}
    return Copy(Scorer(copy.deepcopy(policy.model)), **same)


class Slow:
    """Sample batch j by the weights after max(0, j - behind) iterations, from a list of all."""

    def __init__(self, source: Rollouts, policy: TransformersPolicy, behind: int) -> None:
        self.behind, self.weights, self.source = behind, list[dict[str, Tensor]](), source
        self.model, self.source.generator = policy.model, engine_of(policy)
        self.rows, self.env, self.prompts = source.rows, source.env, source.prompts

    @torch.no_grad()
    def __call__(self, iteration: int) -> TensorDictBase:
        assert len(self.weights) == iteration
        self.weights.append({k: v.clone() for k, v in self.model.state_dict().items()})
        chosen = max(0, iteration - self.behind)
        self.source.generator.model.load_state_dict(self.weights[chosen])
        self.source.generator.version = chosen
        return self.source(iteration)


def slowly(loop: Trainer, behind: int) -> None:
    """Put the slow source into a loop."""
    loop.source = Slow(loop.source, loop.policy, behind)


def ahead(loop: Trainer, number: int) -> None:
    """Let a loop sample so many iterations ahead."""
    old, total = loop.evaluate, loop.num_iterations
    loop.source.generator = loop.generator = engine_of(loop.policy)
    parts = {"env": loop.source.env, "generator": loop.generator, "runtime": loop.runtime}
    sizes = {"num_samples": 2, "prompts_per_batch": old.prompts_per_batch, "every": old.every}
    loop.evaluate = Evaluate(task=old.task, **parts, **sizes)
    loop.source = Overlap(loop.source, loop.policy, ahead=number, num_iterations=total)


def learnt(folder: Path) -> tuple[list[dict], bytes]:
    """Return the metrics of a run that do not depend on how it sampled, and its model."""
    own = ("sync/", "policy/staleness")
    rows = [{k: v for k, v in row.items() if not k.startswith(own)} for row in metrics(folder)]
    return rows, (folder / "model" / "model.safetensors").read_bytes()


def staleness(folder: Path) -> list[int | None]:
    return [row.get("policy/staleness") for row in metrics(folder)]


@pytest.fixture(scope="module")
def two_ahead(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    train(folder, change=lambda loop: ahead(loop, 2))
    return folder


@pytest.mark.runs
def test_batch_j_is_sampled_by_the_weights_of_j_less_those_ahead(two_ahead, straight, tmp_path):
    train(tmp_path, change=lambda loop: slowly(loop, 2))
    assert learnt(two_ahead) == learnt(tmp_path)
    assert learnt(two_ahead) != learnt(straight)
    assert staleness(two_ahead) == [None, 0, 1, 2, 2]


@pytest.mark.runs
def test_a_resumed_run_samples_its_first_batches_by_the_weights_that_it_has(two_ahead, tmp_path):
    folder = shutil.copytree(two_ahead, tmp_path / "run")
    for later in (2, 3, 4):
        shutil.rmtree(folder / "checkpoints" / f"iteration_{later:06d}")
    train(folder, resume=True, change=lambda loop: ahead(loop, 2))
    assert staleness(folder)[2:] == [0, 1, 2]


@pytest.mark.runs
def test_an_error_in_a_batch_ahead_leaves_the_iterations_before_it_whole(tmp_path):
    task = Counted(IN_EVALUATION_2 + 4, crash)  # sampled while the second iteration is learnt
    assert train(tmp_path, task, change=lambda loop: ahead(loop, 1)).endswith("boom\n")
    rows = metrics(tmp_path)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2]
    assert "eval/sampled_accuracy" in rows[-1]
    assert (tmp_path / "checkpoints" / "iteration_000002").is_dir()


# What an advantage must write


class Silent:
    """An advantage that writes nothing."""

    def __call__(self, batch):
        return batch


class Short(Silent):
    """An advantage of another shape."""

    def __call__(self, batch):
        return batch.set("advantage", batch["reward_raw"].sum(-1, keepdim=True))  # [B, 1]


class Unpriced(Silent):
    """An advantage that writes no reward."""

    def __call__(self, batch):
        return batch.set("advantage", batch["reward_raw"])


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (Silent(), "Silent to write advantage"),
        (Short(), r"Short to write advantage, \[B, T\].*got the shape"),
        (Unpriced(), "Unpriced to write reward, .*charge_reward"),
    ],
)
def test_a_part_that_does_not_write_what_others_read_is_named(part, line, tmp_path):
    with pytest.raises(ValueError, match=line):
        train(tmp_path, change=lambda loop: setattr(loop, "advantage", part))


def test_an_advantage_without_the_value_that_the_objective_reads_is_named(tmp_path):
    def learn_values(loop):
        loop.update.objective = PPOObjective(leash=loop.update.leash)

    with pytest.raises(ValueError, match="GroupAdvantage"):
        train(tmp_path, change=learn_values)
