"""Known ways to break the code, each with the check that must notice (make mutants).

A mutant is a target (module:attribute) and what it becomes: BROKEN has, by the mutant's name, a
function from the original to the broken version. Its check is a contract, another function that
compares with a second way of computing, in a file of tests too, or one of
tests/support/mutant_checks.py. The table says which mutants are killed; a survivor is exit code 1.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":  # the root and tests/ in place of this folder
    sys.path[:1] = map(str, Path(__file__).parents[2:0:-1])

import numpy as np
import pytest
import torch

from support import contracts
from support import mutant_checks as checks
from support.kl_tables import the_weighed_kl_is_the_reverse_one_whoever_sampled
from support.slow_maths import (
    a_bfloat16_generator_is_corrected,
    gae_agrees_with_the_paper,
    values_are_those_of_a_plain_forward,
)
from trainer.kl.controllers import ConstantKLController
from trainer.surrogates import token_ratio

TESTS = Path(__file__).parents[1]


def load(module: str) -> ModuleType:
    """Import a module, or a file of tests/ by its path, as pytest does."""
    path = TESTS / module
    with pytest.MonkeyPatch.context() as patch:
        if path.suffix == ".py":
            patch.syspath_prepend(path.parent)
        return import_module(path.stem if path.suffix == ".py" else module)


def check_of(file: str, name: str, *args: Any) -> Callable[[], None]:
    """Return a check that calls a function of a file of tests/, which is imported then."""

    def check() -> None:
        getattr(load(file), name)(*args)

    check.__name__ = " ".join([name, *map(str, args)])
    return check


@dataclass(frozen=True)
class Mutant:
    name: str
    check: Callable[[], Any]
    target: str  # module:attribute, see `load`

    def is_killed(self) -> bool:
        """Return whether the check fails on the broken code."""
        module, _, path = self.target.partition(":")
        *within, attribute = path.split(".")
        owner: Any = load(module)
        for part in within:
            owner = getattr(owner, part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, BROKEN[self.name](getattr(owner, attribute)))
            try:
                self.check()
            except (Exception, pytest.fail.Exception):
                return True
        return False


def after(change: Callable[[Any], Any]):
    """Break a function by changing what it returns."""

    def broken(f):
        def call(*args, **kwargs):
            return change(f(*args, **kwargs))

        return call

    return broken


def drop_end(out):
    return replace(out, lengths=(out.lengths - out.complete.int()).clamp(min=1))


def zero_first(out):
    out.log_probs[:, 0] = 0.0
    return out


def mean_per_micro_batch(out):
    weight = out.get("weight", None)
    return out if weight is None else out.set("weight", weight / weight.sum().clamp(min=1e-9))


def halve(out):
    """Keep the KL [B, T] of the first half of the tokens."""
    kl = out["kl_penalty"]
    return out.set("kl_penalty", kl * (torch.arange(kl.shape[-1]) < kl.shape[-1] // 2))


def masked(f, keep: Callable[[Any, int, bool], bool]):
    """Return a `Renderer.render` whose assistant mask is keep(renderer, id, mask) of each token."""

    def render(self, messages, **kwargs):
        out = f(self, messages, **kwargs)
        pairs = zip(out.ids, out.assistant, strict=True)
        return replace(out, assistant=[keep(self, i, a) for i, a in pairs])

    return render


def leave_open(f):
    """Go on as if every response had ended the template's way."""
    return lambda self, ids: max(self.ends.values())


def bootstrap_at_the_end(f):
    def gae(reward, value, mask, **options):
        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        return f(reward + last * value, value, mask, **options)

    return gae


def with_k3s_gradient_alone(f):
    """Weigh k3 by a ratio that has no gradient of its own."""

    def loss_term(self, scores, batch):
        if self.estimator != "k3_ratio":
            return f(self, scores, batch)
        plain = replace(self, estimator="k3")
        ratio = token_ratio(scores.log_probs, batch.get(("log_probs", "full")))
        return {"kl": ratio.detach() * f(plain, scores, batch)["kl"]}

    return loss_term


def with_the_tools(f):
    """Count the tokens between two sampled ones as sampled."""

    def summarize(batch, runtime, **options):
        sampled = batch["masks", "all_response_mask"]  # [B, T]
        after, before = sampled.cumsum(-1) > 0, sampled.flip(-1).cumsum(-1).flip(-1) > 0
        return f(batch.set(("masks", "all_response_mask"), after & before), runtime, **options)

    return summarize


def at_the_evaluations(f):
    def plan(self, name, samples, temperature):
        if name == "reference":
            temperature = self.plans[0][2].temperature
        return f(self, name, samples, temperature)

    return plan


def states_at_temperature_one(f):
    def retrieve(self, batch, *, keep_states=False):
        given = batch["temperature"]
        if keep_states:
            batch["temperature"] = torch.ones_like(given)
        return f(self, batch, keep_states=keep_states).set("temperature", given)

    return retrieve


def outside_the_loss(f):
    def charge_reward(self, batch):
        learnt = batch["loss_mask"]
        batch["loss_mask"] = batch["masks", "all_response_mask"]
        return f(self, batch).set("loss_mask", learnt)

    return charge_reward


def to_the_trainers_own(f):
    def loss_term(self, scores, batch):
        batch = batch.copy()
        batch["log_probs", "full"] = batch.get(("old_log_probs", "full"), scores.log_probs.detach())
        return f(self, scores, batch)

    return loss_term


def without_limits(f):
    def init(self, **options):
        f(self, **options)
        self._limits = {}

    return init


def nothing(f):
    return lambda *args, **kwargs: None


def yields_nothing(f):
    return lambda *args, **kwargs: iter(())


NEVER = ConstantKLController(kl_coef=0.0)
BROKEN: dict[str, Callable[[Any], Any]] = {
    "shift by one": after(lambda values: values.roll(1, -1)),
    "drop the end token": after(drop_end),
    "first log-prob zero": after(zero_first),
    "responses without a prompt": lambda f: (
        lambda module, q, k, v, trees, **more: f(
            module, q, k, v, [[0, *sizes] for sizes in trees], **more
        )
    ),
    "tokens in other rows": lambda f: lambda self, x, length: f(self, x.roll(1, 2), length),
    "a norm without its mean": after(lambda out: (1.01 * out[0], *out[1:])),
    "responses see each other": after(lambda mask: torch.ones_like(mask).tril()),
    # The policy finds no ids and renders the chat.
    "tokenise again": lambda f: lambda td, ids, attention: td,
    "cut responses stay open": leave_open,
    "no temperature": after(torch.ones_like),
    "mean per micro-batch": after(mean_per_micro_batch),
    "mask all ones": lambda f: masked(f, lambda self, i, a: True),
    "mask without end of turn": lambda f: masked(f, lambda own, i, a: a and i not in own.stop_ids),
    "KL charged twice": after(lambda out: out.set("kl_penalty", 2 * out["kl_penalty"])),
    "KL of some turns only": after(halve),
    "KL in the loss too": lambda f: (
        lambda self, scores, batch: f(replace(self, estimator="k3", where="loss"), scores, batch)
    ),
    "KL never charged": lambda f: lambda self, batch: f(replace(self, controller=NEVER), batch),
    "KL outside the loss mask": outside_the_loss,
    "tools in the divisor": with_the_tools,
    "a frontier as eval samples": at_the_evaluations,
    "forgetting where the policy writes": lambda f: lambda self: self.policy,
    "a forward KL the other way": lambda f: (
        lambda self, *rows, **more: f(self, *rows, **more | {"mixture": 1.0})
    ),
    "another row's teacher": lambda f: lambda row, column, teachers: next(iter(teachers)),
    "log a / p of counts": lambda f: (
        lambda policy, reference: (
            policy.mean(1) * np.log(np.maximum(policy.mean(1), 0.01) / (reference.mean(1) + 0.01))
        )
    ),
    "states at temperature 1": states_at_temperature_one,
    "every epoch in one order": lambda f: lambda size, seed: f(size, 0),
    "the reference has the adapter": lambda f: lambda model, adapter: nullcontext(),
    "GAE over tool tokens": lambda f: (
        lambda reward, value, mask, **options: (
            f(reward, value, torch.ones_like(mask), **options) * mask
        )
    ),
    "a limit goes on": bootstrap_at_the_end,
    "values of the next token": after(lambda values: values.roll(-1)),
    "a token's ratio in GSPO": lambda table: {**table, "sequence": table["token"]},
    "own reward in the baseline": lambda table: {**table, "leave_one_out": table["group_mean"]},
    "dropped rows in the baseline": lambda table: {
        name: lambda total, kept, f=f: f(total, torch.ones_like(kept)) for name, f in table.items()
    },
    "a mask per token": lambda f: lambda value, mask: value,
    "whitened padding": lambda f: (
        lambda advantage, mask, runtime: f(advantage, torch.ones_like(mask), runtime) * mask
    ),
    "another Beta density": after(torch.sqrt),
    "also what comes back": lambda f: lambda curr, gen, a: torch.ones_like(curr, dtype=torch.bool),
    "only what comes back": lambda f: lambda curr, gen, advantage: f(curr, gen, -advantage),
    "the distance of a ratio": lambda f: lambda gen, curr: ((curr - gen).exp() - 1).abs(),
    "KL of policy to sampler": lambda f: lambda gen, curr: f(curr, gen),
    "KL of the token alone": lambda f: lambda gen, curr: gen.exp() * (gen - curr),
    "twice the bound": lambda f: lambda low, high, most, tv, kl: f(low, high, most, 2 * tv, 2 * kl),
    "KL of later states dropped": after(torch.zeros_like),
    "KL of later states a token late": after(lambda kl: kl.roll(1, -1)),
    "KL weighed, no gradient": with_k3s_gradient_alone,
    "KL weighed by another ratio": to_the_trainers_own,
    "entropy without a gradient": lambda f: lambda *given, learn=False, **more: f(*given, **more),
    "the generator over the trainer": lambda f: (
        lambda log_ratio, *given, **more: f(-log_ratio, *given, **more)
    ),
    "experts balanced over all rows": lambda f: (
        lambda routers, keep, **more: f(routers, keep.flatten()[None], **more)
    ),
    "a head without its factor": lambda f: lambda head, hidden: hidden,
    "updates in train mode": lambda f: torch.nn.Module.train,
    "global generator": lambda f: (
        lambda stream, position: torch.rand(stream.shape, dtype=torch.float64)
    ),
    # The rooms that no contract is about.
    "any code may be named": yields_nothing,
    "any key on a resume": lambda f: lambda *args, **more: True,
    "another run's job": yields_nothing,
    "a dead run goes on": nothing,
    "an unverified checkpoint": lambda f: lambda at: json.loads((at / "state.json").read_text()),
    "markup in a report": lambda templates: templates.overlay(autoescape=False),
    "iterations logged twice": nothing,
    "secrets shown": lambda f: lambda name, value: False,
    "cells without a text": lambda f: lambda self, index, column: self.rows[index].get(column),
    "a reward fails in silence": nothing,
    "parts not divided": lambda f: lambda values, mask: torch.ones_like(values[:, :1]),
    "a batch not divided": lambda f: lambda values, runtime: (f(values, runtime)[0], 1.0),
    "a mixture the other way": lambda f: lambda mine, theirs, b: f(theirs, mine, b),
    "a teacher's own temperature ignored": lambda f: (
        lambda self, states, keep, scale: f(self, states, keep, scale / self.temperature_factor)
    ),
    "a tool's state forged": lambda f: lambda self, args, state=None: self.function(**args),
    "a sandbox without limits": without_limits,
    "a stale engine": nothing,
    "an engine's lost weights": nothing,
    "shards restored as zeros": lambda f: lambda to, value: f(to, torch.zeros_like(value)),
    "preflight says it only": lambda f: lambda self, text, *, of_responses=False: self.say(text),
}


ALGORITHMS, LOSSES = "trainer/test_algorithms.py", "trainer/test_update.py"
METRICS, SPLIT = "trainer/test_metrics.py", "trainer/kl/test_kl_split.py"
paper = partial(check_of, ALGORITHMS, "agrees_with_its_paper")
IN_THE_REWARD = check_of("trainer/kl/test_leash.py", "charged_once", "grpo", "reward")
WHOLE = check_of("trainer/test_algorithms.py", "test_a_masked_response_goes_as_a_whole")
LEFT_ONE_OUT = check_of("trainer/test_advantage.py", "leaves_the_baseline", "leave_one_out")
WEIGHED = the_weighed_kl_is_the_reverse_one_whoever_sampled
CORRECTED = a_bfloat16_generator_is_corrected
DISTILLED = check_of(LOSSES, "distils_as_the_loop", "jsd", None)
SEQUENCE = check_of(LOSSES, "distils_as_the_loop", "full", None, "sequence")
PLAIN_VALUES = values_are_those_of_a_plain_forward
MEANS = check_of(METRICS, "means_are_over_their_rows_or_tokens")
FRONTIER = check_of(METRICS, "a_frontier_is_of_responses_at_temperature_one")
FORWARD = check_of("trainer/kl/test_forgetting.py", "measures_the_reference_where_it_writes", 1)
CHOSEN = check_of(
    "trainer/kl/test_teachers.py", "rows_are_scored_by_their_teachers", *("code", "math") * 2
)
KEPT_STATES = check_of(LOSSES, "kept_states_give_the_kl_of_a_pass")
EPOCHS = check_of("trainer/test_collect.py", "every_epoch_has_an_order_of_its_own")
WITHOUT_ADAPTER = check_of(
    "policies/test_lora.py", "test_with_the_adapter_off_it_is_the_start_policy", True
)
BY_RESPONSE = check_of("trainer/test_invariance.py", "attends_response_by_response")
OWN_LAYERS = check_of("policies/test_models.py", "has_the_layers_of_transformers")
as_transformers = partial(check_of, "policies/test_models_table.py", "computes_as_transformers")
BIAS = check_of(SPLIT, "the_bias_is_the_rest_of_two_series", 0.5, 0.2)
BONUS = check_of("trainer/test_entropy.py", "the_bonus_is_that_of_a_plain_softmax")
BALANCED = check_of("policies/test_routers.py", "is_that_of_the_loop")
DIST, SAMPLE = (
    "policies.token_distribution",
    "policies.transformers_policy:sample",
)
RENDERER = "policies.chats.renderer:Renderer"
KL, LEASH, GAE = "envs.transforms.kl:KLComputation", "trainer.kl.leash:Leash", "trainer.gae:gae"
BASELINES, MASKS, OBJECTIVES = "trainer.baselines", "trainer.surrogates", "trainer.objectives"
ROWS: list[tuple[str, Callable, str]] = [
    ("shift by one", contracts.alignment, f"{DIST}:placed"),
    ("drop the end token", contracts.alignment, SAMPLE),
    ("first log-prob zero", contracts.alignment, SAMPLE),
    ("responses see each other", contracts.alignment, "policies.layout:tree_mask"),
    (
        "responses without a prompt",
        BY_RESPONSE,
        "policies.models.fast.attention:_by_response",
    ),
    ("tokens in other rows", contracts.alignment, "policies.models.fast.attention:Grid.fill"),
    (
        "a norm without its mean",
        OWN_LAYERS,
        "policies.models.fast.layers:_Norm.backward",
    ),
    (
        "a head without its factor",
        as_transformers("granite"),
        f"{DIST}:Head.scaled",
    ),
    (
        "updates in train mode",
        as_transformers("phimoe"),
        "policies.scorer:Scorer.train",
    ),
    ("tokenise again", contracts.token_in_token_out, "trainer.collect:_with_ids"),
    (
        "cut responses stay open",
        contracts.token_in_token_out,
        "policies.chats.next_turn:Gap.start_after",
    ),
    ("no temperature", contracts.one_temperature, f"{DIST}:_per_token"),
    ("mean per micro-batch", contracts.global_normalisation, "trainer.update:select_rows"),
    ("mask all ones", contracts.masks_are_exact, f"{RENDERER}.render"),
    ("mask without end of turn", contracts.masks_are_exact, f"{RENDERER}.render"),
    ("KL charged twice", contracts.one_leash, f"{KL}._step"),
    ("KL in the loss too", IN_THE_REWARD, f"{LEASH}.loss_term"),
    ("KL never charged", IN_THE_REWARD, f"{LEASH}.charge_reward"),
    ("KL of some turns only", contracts.one_leash, f"{KL}._step"),
    ("KL outside the loss mask", IN_THE_REWARD, f"{LEASH}.charge_reward"),
    ("tools in the divisor", MEANS, f"{METRICS}:summarize"),
    ("a frontier as eval samples", FRONTIER, "trainer.evaluation:Evaluate.plan"),
    ("forgetting where the policy writes", FORWARD, "trainer.kl.reference:Reference.sampler"),
    ("a forward KL the other way", FORWARD, "policies.scorer:Scorer.divergence"),
    ("another row's teacher", CHOSEN, "trainer.kl.teachers:teacher_of"),
    (
        "log a / p of counts",
        BIAS,
        f"{SPLIT}:rate_term",
    ),
    ("states at temperature 1", KEPT_STATES, "trainer.kl.reference:Reference.__call__"),
    ("every epoch in one order", EPOCHS, "trainer.sources:_order"),
    ("the reference has the adapter", WITHOUT_ADAPTER, "policies.models.lora:using"),
    ("GAE over tool tokens", gae_agrees_with_the_paper, GAE),
    ("a limit goes on", gae_agrees_with_the_paper, GAE),
    ("values of the next token", PLAIN_VALUES, "policies.critic:Critic.forward"),
    ("a token's ratio in GSPO", paper("gspo"), f"{OBJECTIVES}:RATIOS"),
    ("own reward in the baseline", paper("rloo"), f"{BASELINES}:BASELINES"),
    ("dropped rows in the baseline", LEFT_ONE_OUT, f"{BASELINES}:BASELINES"),
    ("whitened padding", paper("reinforce_pp"), "trainer.advantage:whiten"),
    ("parts not divided", paper("gdpo"), "trainer.advantage:spread"),
    ("a batch not divided", paper("gdpo"), "trainer.advantage:mean_and_std"),
    ("a mixture the other way", DISTILLED, f"{DIST}:_log_mixture"),
    ("a teacher's own temperature ignored", DISTILLED, "policies.scorer:Scorer.distribution"),
    ("another Beta density", paper("bnpo"), "trainer.advantage:beta_density"),
    *(
        row
        for name, divergence in (("dppo", "binary_tv"), ("dppo_kl", "binary_kl"))
        for row in (
            ("also what comes back", paper(name), f"{MASKS}:moves_away"),
            ("only what comes back", paper(name), f"{MASKS}:moves_away"),
            ("the distance of a ratio", paper(name), f"{MASKS}:{divergence}"),
            ("twice the bound", paper(name), f"{OBJECTIVES}:ClipRange"),
        )
    ),
    ("KL of policy to sampler", paper("dppo_kl"), f"{MASKS}:binary_kl"),
    ("KL of the token alone", paper("dppo_kl"), f"{MASKS}:binary_kl"),
    ("a mask per token", WHOLE, f"{MASKS}:_row_mean"),
    ("KL of later states dropped", SEQUENCE, "trainer.update:later_kl"),
    ("KL of later states a token late", SEQUENCE, "trainer.update:later_kl"),
    ("KL weighed, no gradient", WEIGHED, f"{LEASH}.loss_term"),
    ("KL weighed by another ratio", WEIGHED, f"{LEASH}.loss_term"),
    (
        "entropy without a gradient",
        BONUS,
        f"{DIST}:TokenDistribution.scores",
    ),
    ("experts balanced over all rows", BALANCED, "policies.scorer:imbalance"),
    ("the generator over the trainer", CORRECTED, "trainer.importance_sampling:correction"),
    ("global generator", contracts.same_seed, "policies.sampler:uniforms"),
    ("any code may be named", checks.targets, "conf.check:_targets"),
    ("any key on a resume", checks.resume, "conf.resume:is_among"),
    ("another run's job", checks.sweep, "conf.resume:differences"),
    ("a dead run goes on", checks.launch, "trainer.runs.launch:close_status"),
    ("an unverified checkpoint", checks.checkpoint, "trainer.checkpoint:read_state"),
    ("markup in a report", checks.report, "trainer.pages.page:_TEMPLATES"),
    ("iterations logged twice", checks.tracker, "trainer.pages.trackers.jsonl:_drop_after"),
    ("secrets shown", checks.secrets, "trainer.runs.redact:is_secret"),
    ("cells without a text", checks.data, "envs.data:Table.text"),
    ("a reward fails in silence", checks.reward, "envs.rewards.rewarded:Rewarded._tell"),
    ("a tool's state forged", checks.tool, "envs.torchrl.tools:Tool.__call__"),
    ("a sandbox without limits", checks.sandbox, "envs.tools.sandbox:Sandbox.__init__"),
    ("a stale engine", checks.stale_engine, "trainer.weight_sync:_check_arrived"),
    ("an engine's lost weights", checks.fresh_engine, "trainer.weight_sync:_check_unchanged"),
    ("shards restored as zeros", checks.shards, "policies.models.weights:put"),
    (
        "preflight says it only",
        checks.preflight,
        "trainer.modes.preflight.profile:Findings.problem",
    ),
]
MUTANTS = [Mutant(*row) for row in ROWS]


def main() -> int:
    """Print a line for each mutant; return 1 if one survives."""
    survivors = 0
    for mutant in MUTANTS:
        start, killed = time.perf_counter(), mutant.is_killed()
        survivors += not killed
        seconds, word = time.perf_counter() - start, "killed" if killed else "SURVIVES"
        print(f"{mutant.name:32} {mutant.check.__name__}: {word} ({seconds:.1f} s)", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants are killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
