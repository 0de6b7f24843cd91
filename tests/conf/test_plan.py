"""Which keys go to which part: no typed key is ignored, and parts of a user's own get theirs."""

import os
from copy import deepcopy
from functools import reduce
from pathlib import Path

import pytest
import torch
from support.engines import Copy, beside
from support.runs import ROOT, SMALL, metrics, train

from conf.compose import compose_checked
from conf.plan import plan
from conf.schema import FOLDER, Key, leaves, part_of, word
from trainer.advantage import GroupAdvantage
from trainer.demonstrations import Demonstrations
from trainer.kl.controllers import KLControllerBase
from trainer.kl.estimators import Estimator
from trainer.objectives import Terms
from trainer.runs.folders import holds_run
from trainer.surrogates import Surrogate

HERE = "test_plan"
SECTIONS = ("algorithm", "trainer", "optimizer", "kl", "teacher", "env", "policy")
OFF = ("kl.coeff=0", "kl.measure=false")
UNJUDGED = ("eval.num_samples=0", "eval.greedy=false")
GOES_WITH = {"sft": OFF, "minor_sft": OFF, "reward": ("env=preferences", *OFF, *UNJUDGED)}
UNSAMPLED = set(GOES_WITH)
GOES_WITH["distil"] = ("kl.reference=tiny",)
ALGORITHMS = sorted(path.stem for path in (FOLDER / "algorithm").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml"))
# Keys that an algorithm's own parts do not read, by hand.
DPPO = {"clip_low", "clip_high", "kl_bound"}
REINFORCE = {"clip_low", "clip_high", "dual_clip", "tv_bound", "kl_bound", "ratio"}
CLIP = {"tv_bound", "kl_bound"}
ONE_SUM = {"baseline", "scale_by_std", "whiten", "clip_advantage", "credit"}
UNREAD = {"gdpo": CLIP | ONE_SUM, "dppo": DPPO, "rloo": REINFORCE, "cispo": {*CLIP, "dual_clip"}}
UNREAD |= {name: set() for name in ("ppo", "sft", "minor_sft", "reward", "distil")}
OF_CONTROLLERS = {"kl.target", "kl.horizon", "kl.end"}  # constant is the default
OF_TEACHERS = {name for name, _ in leaves("teacher")} - {"teacher.where"}
OF_TEACHERS -= {"teacher.estimator", "teacher.controller"}  # not tried
MAKE_TEACHERS = {"teacher.reference", "teacher.hint"}
OF_REFERENCES = {"kl.reference", "kl.refresh_every", "kl.refresh_decay"}
OF_REFERENCES |= {"kl.reference_temperature", "kl.hint"}
EXACT = ("grpo_full", "distil")  # the default of algorithm=distil is kl=distil
OF_SAMPLING = {"algorithm.group_size", "trainer.overlap", "kl.allow_biased"}
OF_DATA = {"env.eval_dataset", "env.split", "env.eval_split", "env.skip_bad_rows"}
OF_DATA |= {f"env.columns.{name}" for name in ("messages", "question", "answer")}

OF_TOOLS = {"env.tool_timeout", "env.max_calls"}  # env.tools is empty


def config_of(algorithm: str) -> dict:
    words = GOES_WITH.get(algorithm, ())
    config = compose_checked([f"algorithm={algorithm}", "policy.model=tiny", *words])
    config["kl"]["reference"] = None  # kl.measure=false does not take a teacher
    return config


def other_value(key: Key):
    """Return a value that is not the default's, or None for a part and a dict."""
    if key.type.startswith(("part", "node", "dict")) or (key.type == "any" and not key.limit):
        return None
    if isinstance(key.limit, list):
        return next(value for value in key.limit if value != key.default)
    if isinstance(key.default, bool):
        return not key.default
    if isinstance(key.default, int | float):
        return key.default + 1
    if isinstance(key.default, list):
        return [*key.default, 1]
    return "other"


def untaken(config: dict) -> set[str]:
    """Return the keys that no part takes, each tried with another value than its default."""
    out = set()
    for section in SECTIONS:
        for name, key in leaves(part_of(section, config[section])):
            value = other_value(key)
            untried = ("kl.where", "teacher.where", "algorithm.rows", f"{section}._target_")
            if value is None or name in untried:
                continue
            changed = deepcopy(config)
            *path, last = name.split(".")
            reduce(dict.__getitem__, path, changed)[last] = value
            try:
                plan(changed)
            except ValueError as error:
                assert str(error).startswith(f"{name}={word(value)}: no part")  # noqa: PT017
                out.add(name)
    return out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_is_taken_or_refused(algorithm):
    """A renamed argument of leash's own would show here, too."""
    want = {f"algorithm.{name}" for name in UNREAD.get(algorithm, CLIP)} | OF_CONTROLLERS
    want |= OF_DATA if algorithm != "reward" else set()
    want |= OF_REFERENCES | OF_SAMPLING if algorithm in UNSAMPLED else set()
    want |= OF_TEACHERS - (set() if algorithm in UNSAMPLED else MAKE_TEACHERS)
    want |= OF_TOOLS | {"kl.jsd_weight"} | (set() if algorithm in EXACT else {"kl.cap"})
    assert untaken(config_of(algorithm)) == want


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if not name.endswith("_own")])
def test_an_experiment_has_no_key_without_a_part(name):
    plan(compose_checked([f"experiment={name}"]))


# Parts of a user's own.


class PowerAdvantage:
    """An advantage with a key of its own; it takes no baseline and charges the KL."""

    def __init__(self, *, leash, power: float, group_size: int) -> None:
        self.leash, self.power, self.group_size = leash, power, group_size

    def __call__(self, batch):
        self.leash.charge_reward(batch)
        reward = batch["reward"].sum(-1, keepdim=True)  # [B, 1]
        return batch.set("advantage", (1 + reward**self.power) * batch["loss_mask"])


class Imitation:
    """An objective without keys and without a leash."""

    reads = ("advantage",)

    def __call__(self, scores, batch):
        return Terms({"policy": -scores.log_probs * batch["advantage"]})


def squared(power: float = 2.0) -> Estimator:
    return Estimator(lambda token: 0.5 * token.log_ratio.abs() ** power)


def linear_surrogate(slope: float = 1.0) -> Surrogate:
    return Surrogate(lambda curr, gen, r, advantage, bounds: -slope * r * advantage)


class Halving(KLControllerBase):
    """A controller that takes a key of its own."""

    def __init__(self, coeff: float, *, factor: float) -> None:
        super().__init__(coeff)
        self.factor = factor

    def update(self, kl_values):
        return self._set(self.coeff * self.factor)


class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, *, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()


def copy_engine(policy, *, tolerance: float = 1e-4) -> Copy:
    """An engine: a copy of the policy that samples."""
    engine = beside(policy)
    engine.tolerance = tolerance
    return engine


class Own(GroupAdvantage):
    """A subclass of leash's takes what its base takes."""


OWN = ("experiment=grpo_tiny", "policy.model=tiny", "allow_targets=true")
MINE = f"algorithm.advantage._target_={HERE}.PowerAdvantage"
POWER = "+algorithm.power=2"
SURROGATE = f"algorithm.surrogate={{_target_: {HERE}.linear_surrogate}}"
SFT = ("experiment=sft_tiny",)
REFUSED = [  # words, and the key that no part takes
    ([MINE, POWER, "algorithm.baseline=leave_one_out"], "algorithm.baseline=leave_one_out"),
    ([MINE, POWER, "algorithm.credit=return_to_go"], "algorithm.credit"),
    ([MINE, POWER, "+algorithm.pwer=3"], "algorithm.pwer=3"),
    ([f"algorithm.objective._target_={HERE}.Imitation", "algorithm.clip_high=0.9"], "clip_high"),
    ([SURROGATE, "algorithm.tv_bound=1"], "algorithm.tv_bound"),
    (["algorithm.surrogate=reinforce", "algorithm.ratio=sequence"], "algorithm.ratio"),
    ([f"kl.controller={{_target_: {HERE}.Halving, factor: 0.5}}", "kl.end=1"], "kl.end"),
    ([f"optimizer._target_={HERE}.SignDescent", "optimizer.eps=1"], "optimizer.eps"),
    (["env.split=test"], "env.split"),
    ([*SFT, "kl.estimator=full"], "kl.estimator=full"),
    ([*SFT, "kl=reward", *OFF], "kl.where=reward|kl.estimator=k1"),
    (["+algorithm.advantage.basline=mean"], "basline: trainer.GroupAdvantage takes"),
    (["+env.transforms.steps={_target_: envs.transforms.StepCounter, foo: 1}"], "foo: envs"),
    (["kl.controller={_target_: trainer.LinearKLController, end: 0, foo: 1}"], "foo: trainer"),
    (["algorithm.rows=demonstrations", *OFF], "algorithm.rows=prompts, which trainer.Rollouts"),
    (["env.max_turns=2", "+env.tools.mine._target_=no_file.f"], "'no_file'; expected it in"),
    (["+observers.mine._target_=no_file.Mine"], "No module named 'no_file'"),
    ([f"+observers.mine._target_={HERE}.Mine"], "test_plan has no Mine"),
    (["+env.rewards.mine._target_=no_file.Mine"], "^env.rewards.mine: No module named 'no_file'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "key"), REFUSED, ids=[key for _, key in REFUSED])
def test_a_key_that_no_part_takes_ends_the_run_before_a_model_is_loaded(words, key):
    with pytest.raises(ValueError, match=key):
        plan(compose_checked([*OWN, *words]))


def test_the_line_names_the_parts_that_would_take_a_key():
    with pytest.raises(ValueError, match="GroupAdvantage would"):
        plan(compose_checked([*OWN, MINE, POWER, "algorithm.baseline=leave_one_out"]))


def test_a_key_of_leash_with_a_typo_is_no_key_of_a_users_own():
    for words in (["algorithm.clip_hihg=0.3"], [POWER], ["optimizer.betass=[0.5,0.5]"]):
        with pytest.raises(ValueError, match="there is no key"):
            compose_checked([*OWN, *words])


def test_a_subclass_takes_what_its_base_takes():
    words = [f"algorithm.advantage._target_={HERE}.Own", "algorithm.baseline=leave_one_out"]
    assert plan(compose_checked([*OWN, *words])).advantage.node["baseline"] == "leave_one_out"


class Reversed(Demonstrations):
    """A subclass of leash's source."""


class Repeated:
    """A source of a user's own for SFT."""

    def __init__(self, *, task, prompts_per_iteration: int) -> None:
        self.rows, self.size = task.demonstrations(), prompts_per_iteration

    def __call__(self, iteration: int):
        raise NotImplementedError


@pytest.mark.parametrize("source", ["Reversed", "Repeated"])
def test_sft_takes_a_source_of_a_users_own(source):
    words = ["env=sort_digits", "algorithm=sft", *OFF, "policy.model=tiny", "allow_targets=true"]
    parts = plan(compose_checked([*words, f"algorithm.source._target_={HERE}.{source}"]))
    assert parts.source.node["prompts_per_iteration"] == 4


@pytest.mark.runs
def test_a_refused_run_costs_no_training_and_no_name(tmp_path: Path):
    """Neither a warm-up nor a job of the sweep is trained first; the same folder can be used."""
    run, sweep = tmp_path / "run", tmp_path / "sweep"
    cold = {"LEASH_CACHE": str(tmp_path / "cache")}
    words = ["experiment=grpo_tiny", "algorithm.tv_bound=0.5", f"output_dir={run}"]
    tried = [train(*words, **cold), train(*words, "policy.model=tiny")]
    jobs = ["algorithm.surrogate=tv_mask,clip", f"hydra.sweep.dir={sweep}"]
    tried.append(train("-m", *words[:2], *jobs, "policy.model=tiny", **cold))
    for done in tried:
        assert done.code == 2, done.text
        assert "algorithm.tv_bound=0.5" in done.text
    assert not holds_run(run)
    assert not sweep.exists()
    assert not any((tmp_path / "cache").rglob("model"))


@pytest.mark.runs
def test_a_run_of_parts_of_a_users_own_only(tmp_path: Path):
    """An algorithm file with its own key, estimator, controller, surrogate, optimiser, engine."""
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "defaults: [grpo, _self_]\n"
        "power: 2.0\n"
        f"advantage: {{_target_: {HERE}.PowerAdvantage}}\n"
        f"surrogate: {{_target_: {HERE}.linear_surrogate, slope: 1.0}}\n"
    )
    words = [
        *SMALL, "policy.model=tiny", "trainer.num_iterations=2", "eval.max_rows=4",
        "allow_targets=true", f"output_dir={tmp_path / 'run'}", "algorithm=mine",
        f"kl.estimator={{_target_: {HERE}.squared, power: 2}}",
        f"kl.controller={{_target_: {HERE}.Halving, factor: 0.5}}",
        f"optimizer._target_={HERE}.SignDescent", "optimizer.lr=1e-4",
        f"policy.engine={{_target_: {HERE}.copy_engine, tolerance: 1e-3}}",
    ]  # fmt: skip
    tests = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests")])
    done = train("--config-dir", str(tmp_path), *words, PYTHONPATH=tests)
    assert done.code == 0, done.text
    _, *rows = metrics(tmp_path / "run")
    assert [row["kl/coeff"] for row in rows] == [1.0, 0.5]
    assert rows[0]["sync/probe"] < 1e-3 < rows[0]["sync/probe_before"]
    assert rows[1]["loss/kl"] > 0
    assert "policy/importance_limited" in rows[0], "an engine's log-probs are corrected"
