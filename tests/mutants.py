"""Known ways to break the code, each with the check that must notice: python tests/mutants.py.

A mutant is a target (module:attribute) and a function from the original to the broken version. Its
check is a contract, another function that compares with a second way of computing, or one of
tests/mutant_checks.py. The table says which mutants are killed; a survivor is exit code 1.
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
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import contracts
import mutant_checks as rooms
import pytest
import torch
from adapted import with_the_adapter_off_it_is_the_start_policy
from enumeration import a_bfloat16_generator_is_corrected
from gae_by_hand import agrees_with_the_paper
from kl_tables import the_weighed_kl_is_the_reverse_one_whoever_sampled
from papers import PAPERS, agrees_with_its_paper
from plain_values import values_are_those_of_a_plain_forward
from test_advantage import leaves_the_baseline
from test_entropy import the_bonus_is_that_of_a_plain_softmax
from test_leash import charged_once

from trainer.kl_control import ConstantKLController
from trainer.surrogates import token_ratio


@dataclass(frozen=True)
class Mutant:
    name: str
    check: Callable[[], Any]
    target: str  # module:attribute
    broken: Callable[[Any], Any]

    def is_killed(self) -> bool:
        """Return whether the check fails on the broken code."""
        module, _, path = self.target.partition(":")
        *within, attribute = path.split(".")
        owner: Any = import_module(module)
        for part in within:
            owner = getattr(owner, part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, self.broken(getattr(owner, attribute)))
            try:
                self.check()
            except (Exception, pytest.fail.Exception):
                return True
        return False


def roll(original):
    return lambda values, keep: original(values, keep).roll(1, -1)


def drop_end(original):
    def sample(*args, **kwargs):
        out = original(*args, **kwargs)
        return replace(out, lengths=(out.lengths - out.complete.int()).clamp(min=1))

    return sample


def zero_first(original):
    def sample(*args, **kwargs):
        out = original(*args, **kwargs)
        out.log_probs[:, 0] = 0.0
        return out

    return sample


def ignore_temperature(original):
    return lambda temperature, keep: torch.ones_like(original(temperature, keep))


def mean_per_micro_batch(original):
    def select_rows(batch, rows):
        out = original(batch, rows)
        weight = out.get("weight", None)
        return out if weight is None else out.set("weight", weight / weight.sum().clamp(min=1e-9))

    return select_rows


def all_ones(original):
    def render(self, messages, **kwargs):
        out = original(self, messages, **kwargs)
        return replace(out, assistant=[True] * len(out.ids))

    return render


def content_only(original):
    def render(self, messages, **kwargs):
        out = original(self, messages, **kwargs)
        kept = [a and i not in self.stop_ids for i, a in zip(out.ids, out.assistant, strict=True)]
        return replace(out, assistant=kept)

    return render


def tokenise_again(original):
    return lambda td, ids, attention: td  # the policy finds no ids and renders the chat


def leave_open(original):
    def extend(self, ids, messages, new):
        end, self._end = self._end, ids[-1]  # as if every reply had ended the template's way
        done = original(self, ids, messages, new)
        self._end = end
        return done

    return extend


def see_everything(original):
    def mask(segment):
        out = original(segment)
        return torch.ones_like(out).tril()

    return mask


def global_generator(original):
    return lambda stream, position: torch.rand(stream.shape, dtype=torch.float64)


def charge_twice(original):
    def step(self, tensordict, following):
        out = original(self, tensordict, following)
        return out.set("kl_penalty", 2 * out.get("kl_penalty"))

    return step


def loss_too(original):
    def loss_term(self, scores, batch):
        return original(replace(self, estimator="k3", where="loss"), scores, batch)

    return loss_term


def nowhere(original):
    def charge_reward(self, batch):
        return original(replace(self, controller=ConstantKLController(kl_coef=0.0)), batch)

    return charge_reward


def score_first_turn_only(original):
    def step(self, tensordict, following):
        out = original(self, tensordict, following)
        kl = out.get("kl_penalty")
        return out.set("kl_penalty", kl * (torch.arange(kl.shape[-1]) < kl.shape[-1] // 2))

    return step


def walk_over_everything(original):
    return lambda reward, value, mask, **options: (
        original(reward, value, torch.ones_like(mask), **options) * mask
    )


def bootstrap_at_the_end(original):
    def gae(reward, value, mask, **options):
        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        return original(reward + last * value, value, mask, **options)

    return gae


def every_token_its_own_ratio(original):
    return {**original, "sequence": original["token"]}


def own_reward_in_the_baseline(original):
    return {**original, "leave_one_out": original["group_mean"]}


def all_rows_count(original):
    return {
        name: lambda total, kept, baseline=baseline: baseline(total, torch.ones_like(kept))
        for name, baseline in original.items()
    }


def padding_counts(original):
    return lambda advantage, mask, runtime: (
        original(advantage, torch.ones_like(mask), runtime) * mask
    )


def shape_one_half(original):
    return lambda p, mean, std: original(p, mean, std).sqrt()


def one_state_late(original):
    return lambda self, lay, states: original(self, lay, states).roll(-1)


def entropy_detached(original):
    return lambda *given, learn=False, **options: original(*given, **options)


def the_other_way_round(original):
    return lambda log_ratio, *given, **options: original(-log_ratio, *given, **options)


def on_both_sides(original):
    return lambda curr, gen, advantage: torch.ones_like(curr, dtype=torch.bool)


def on_the_way_back(original):
    return lambda curr, gen, advantage: original(curr, gen, -advantage)


def of_the_ratio(original):
    return lambda gen, curr: ((curr - gen).exp() - 1).abs()


def from_the_policy(original):
    return lambda gen, curr: original(curr, gen)


def without_the_rest(original):
    return lambda gen, curr: gen.exp() * (gen - curr)


def twice_as_far(original):
    return lambda low, high, most, tv, kl: original(low, high, most, 2 * tv, 2 * kl)


def with_k3s_gradient_alone(original):
    """Weigh k3 by a ratio that has no gradient of its own."""

    def loss_term(self, scores, batch):
        if self.estimator != "k3_ratio":
            return original(self, scores, batch)
        plain = replace(self, estimator="k3")
        ratio = token_ratio(scores.log_probs, batch.get(("log_probs", "full")))
        return {"kl": ratio.detach() * original(plain, scores, batch)["kl"]}

    return loss_term


def to_the_trainers_own(original):
    def loss_term(self, scores, batch):
        batch = batch.copy()
        batch["log_probs", "full"] = batch.get(("old_log_probs", "full"), scores.log_probs.detach())
        return original(self, scores, batch)

    return loss_term


def adapter_stays_on(original):
    return lambda model, adapter: nullcontext()


# The rooms that no contract is about.


def nothing(original):
    return lambda *args, **kwargs: None


def yields_nothing(original):
    return lambda *args, **kwargs: iter(())


def always(original):
    return lambda *args, **kwargs: True


def unverified(original):
    return lambda folder: json.loads((folder / "state.json").read_text())


def without_escapes(original):
    return original.overlay(autoescape=False)


def show_all(original):
    return lambda name, value: False


def any_cell(original):
    return lambda self, index, column: self.rows[index].get(column)


def any_argument(original):
    return lambda self, args, state=None: self.function(**args)


def without_limits(original):
    def init(self, **options):
        original(self, **options)
        self._limits = {}

    return init


def zeros(original):
    return lambda self, tensor, like: torch.zeros_like(like)


def say_alone(original):
    return lambda self, text, *, of_replies=False: self.say(text)


PAPER = {name: partial(agrees_with_its_paper, name) for name in PAPERS}
IN_THE_REWARD = partial(charged_once, "grpo", "reward")
LEFT_ONE_OUT = partial(leaves_the_baseline, "leave_one_out")
WEIGHED = the_weighed_kl_is_the_reverse_one_whoever_sampled
DIST, SAMPLE = "policies.token_distribution", "policies.wrappers.transformers_wrapper:sample"
RENDERER = "policies.chats.chat_template:Renderer"
KL, LEASH, GAE = "envs.transforms.kl:KLComputation", "trainer.kl:Leash", "trainer.gae:gae"
LOSSES, MASKS, OBJECTIVES = "trainer.losses", "trainer.surrogates", "trainer.objectives"
ROWS: list[tuple[str, Callable, str, Callable]] = [
    ("shift by one", contracts.alignment, f"{DIST}:placed", roll),
    ("drop the end token", contracts.alignment, SAMPLE, drop_end),
    ("first log-prob zero", contracts.alignment, SAMPLE, zero_first),
    ("replies see each other", contracts.alignment, "policies.layout:tree_mask", see_everything),
    ("tokenise again", contracts.token_in_token_out, "trainer.collect:_with_ids", tokenise_again),
    ("cut replies stay open", contracts.token_in_token_out, f"{RENDERER}.extend", leave_open),
    ("no temperature", contracts.one_temperature, f"{DIST}:_per_kept", ignore_temperature),
    (
        "mean per micro-batch",
        contracts.global_normalisation,
        "trainer.update:select_rows",
        mean_per_micro_batch,
    ),
    ("mask all ones", contracts.masks_are_exact, f"{RENDERER}.render", all_ones),
    ("mask without end of turn", contracts.masks_are_exact, f"{RENDERER}.render", content_only),
    ("KL charged twice", contracts.one_leash, f"{KL}._step", charge_twice),
    ("KL in the loss too", IN_THE_REWARD, f"{LEASH}.loss_term", loss_too),
    ("KL never charged", IN_THE_REWARD, f"{LEASH}.charge_reward", nowhere),
    ("KL of some turns only", contracts.one_leash, f"{KL}._step", score_first_turn_only),
    (
        "the reference has the adapter",
        with_the_adapter_off_it_is_the_start_policy,
        "policies.lora:using",
        adapter_stays_on,
    ),
    ("GAE over tool tokens", agrees_with_the_paper, GAE, walk_over_everything),
    ("a limit goes on", agrees_with_the_paper, GAE, bootstrap_at_the_end),
    (
        "values of the next token",
        values_are_those_of_a_plain_forward,
        "policies.scorer:Critic.forward",
        one_state_late,
    ),
    ("a token's ratio in GSPO", PAPER["gspo"], f"{OBJECTIVES}:RATIOS", every_token_its_own_ratio),
    (
        "own reward in the baseline",
        PAPER["rloo"],
        f"{LOSSES}:BASELINES",
        own_reward_in_the_baseline,
    ),
    ("dropped rows in the baseline", LEFT_ONE_OUT, f"{LOSSES}:BASELINES", all_rows_count),
    ("whitened padding", PAPER["reinforce_pp"], "trainer.advantage:whitened", padding_counts),
    ("another Beta density", PAPER["bnpo"], "trainer.advantage:beta_density", shape_one_half),
    *(
        (f"{name}: {change}", PAPER[name], f"{MASKS}:{attribute}", broken)
        for name, divergence in (("dppo", "binary_tv"), ("dppo_kl", "binary_kl"))
        for change, attribute, broken in (
            ("also what comes back", "leaves", on_both_sides),
            ("only what comes back", "leaves", on_the_way_back),
            ("the distance of a ratio", divergence, of_the_ratio),
        )
    ),
    ("KL of policy to sampler", PAPER["dppo_kl"], f"{MASKS}:binary_kl", from_the_policy),
    ("KL of the token alone", PAPER["dppo_kl"], f"{MASKS}:binary_kl", without_the_rest),
    ("twice the bound of dppo", PAPER["dppo"], f"{OBJECTIVES}:Bounds", twice_as_far),
    ("twice the bound of dppo_kl", PAPER["dppo_kl"], f"{OBJECTIVES}:Bounds", twice_as_far),
    ("KL weighed, no gradient", WEIGHED, f"{LEASH}.loss_term", with_k3s_gradient_alone),
    ("KL weighed by another ratio", WEIGHED, f"{LEASH}.loss_term", to_the_trainers_own),
    (
        "entropy without a gradient",
        the_bonus_is_that_of_a_plain_softmax,
        f"{DIST}:_score",
        entropy_detached,
    ),
    (
        "the generator over the trainer",
        a_bfloat16_generator_is_corrected,
        "trainer.importance_sampling:correction",
        the_other_way_round,
    ),
    ("global generator", contracts.same_seed, "policies.sampler:uniforms", global_generator),
    ("any code may be named", rooms.targets, "conf.check:_targets", yields_nothing),
    ("any key on a resume", rooms.resume, "conf.resume:is_among", always),
    ("another run's job", rooms.sweep, "conf.resume:differences", yields_nothing),
    ("a dead run goes on", rooms.launch, "trainer.runs.launch:close_status", nothing),
    ("an unverified checkpoint", rooms.checkpoint, "trainer.checkpoint:read_state", unverified),
    ("markup in a report", rooms.report, "trainer.reports.page:_TEMPLATES", without_escapes),
    (
        "iterations logged twice",
        rooms.tracker,
        "trainer.reports.trackers.jsonl:_drop_after",
        nothing,
    ),
    ("secrets shown", rooms.secrets, "trainer.runs.redact:is_secret", show_all),
    ("cells without a text", rooms.data, "envs.data:Table.text", any_cell),
    ("a reward fails in silence", rooms.reward, "envs.rewards.rewarded:Rewarded._tell", nothing),
    ("a tool's state forged", rooms.tool, "envs.transforms.tools:Tool.__call__", any_argument),
    ("a sandbox without limits", rooms.sandbox, "envs.sandbox:Sandbox.__init__", without_limits),
    ("a stale engine", rooms.stale_engine, "trainer.weight_sync:_check_arrived", nothing),
    ("an engine's lost weights", rooms.fresh_engine, "trainer.weight_sync:_check_held", nothing),
    ("shards restored as zeros", rooms.shards, "policies.sharding:Shards.scatter", zeros),
    (
        "preflight says it only",
        rooms.preflight,
        "trainer.modes.preflight.play:Findings.problem",
        say_alone,
    ),
]
MUTANTS = [Mutant(*row) for row in ROWS]


def main() -> int:
    """Print a line for each mutant; return 1 if one survives."""
    survivors = 0
    for mutant in MUTANTS:
        start, check = time.perf_counter(), getattr(mutant.check, "func", mutant.check)
        killed, of = mutant.is_killed(), " ".join(getattr(mutant.check, "args", ()))
        survivors += not killed
        seconds, word = time.perf_counter() - start, "killed" if killed else "SURVIVES"
        print(f"{mutant.name:32} {check.__name__} {of}: {word} ({seconds:.1f} s)", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants are killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
