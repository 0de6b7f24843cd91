"""Known ways to break the code, each with the contract that must notice.

A mutant is a target (module, attribute) and a function from the original to the broken version.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import contracts
import torch
from adapted import with_the_adapter_off_it_is_the_start_policy
from baselines import leaves_the_baseline
from charges import charged_once
from enumeration import a_bfloat16_generator_is_corrected
from gae_by_hand import agrees_with_the_paper
from kl_tables import the_weighed_kl_is_the_reverse_one_whoever_sampled
from papers import agrees_with_its_paper
from plain_entropy import the_bonus_is_that_of_a_plain_softmax
from plain_values import values_are_those_of_a_plain_forward

import envs.transforms.kl
import policies.chats.chat_template
import policies.layout
import policies.lora
import policies.sampler
import policies.scorer
import policies.token_distribution
import policies.wrappers.transformers_wrapper
import trainer.advantage
import trainer.collect
import trainer.gae
import trainer.importance_sampling
import trainer.losses
import trainer.objectives
import trainer.surrogates
import trainer.update
from trainer.kl import Leash
from trainer.kl_control import ConstantKLController
from trainer.surrogates import token_ratio


@dataclass(frozen=True)
class Mutant:
    name: str
    contract: Callable[[], None]
    owner: Any
    attribute: str
    broken: Callable[[Any], Any]


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


WRAPPER = policies.wrappers.transformers_wrapper
DIST = policies.token_distribution
COLLECT = trainer.collect
RENDERER = policies.chats.chat_template.Renderer
KL = envs.transforms.kl.KLComputation
MASKS = trainer.surrogates
in_the_reward = partial(charged_once, "grpo", "reward")
MUTANTS = (
    Mutant("shift by one", contracts.alignment, DIST, "placed", roll),
    Mutant("drop the end token", contracts.alignment, WRAPPER, "sample", drop_end),
    Mutant("first log-prob zero", contracts.alignment, WRAPPER, "sample", zero_first),
    Mutant(
        "replies see each other", contracts.alignment, policies.layout, "tree_mask", see_everything
    ),
    Mutant("tokenise again", contracts.token_in_token_out, COLLECT, "_with_ids", tokenise_again),
    Mutant("cut replies stay open", contracts.token_in_token_out, RENDERER, "extend", leave_open),
    Mutant(
        "ignore the temperature", contracts.one_temperature, DIST, "_per_kept", ignore_temperature
    ),
    Mutant(
        "mean per micro-batch",
        contracts.global_normalisation,
        trainer.update,
        "select_rows",
        mean_per_micro_batch,
    ),
    Mutant("mask all ones", contracts.masks_are_exact, RENDERER, "render", all_ones),
    Mutant("mask without end of turn", contracts.masks_are_exact, RENDERER, "render", content_only),
    Mutant("KL charged twice", contracts.one_leash, KL, "_step", charge_twice),
    Mutant("KL in the loss too", in_the_reward, Leash, "loss_term", loss_too),
    Mutant("KL never charged", in_the_reward, Leash, "charge_reward", nowhere),
    Mutant("KL of some turns only", contracts.one_leash, KL, "_step", score_first_turn_only),
    Mutant(
        "the reference has the adapter",
        with_the_adapter_off_it_is_the_start_policy,
        policies.lora,
        "using",
        adapter_stays_on,
    ),
    Mutant("GAE over tool tokens", agrees_with_the_paper, trainer.gae, "gae", walk_over_everything),
    Mutant("a limit goes on", agrees_with_the_paper, trainer.gae, "gae", bootstrap_at_the_end),
    Mutant(
        "values of the next token",
        values_are_those_of_a_plain_forward,
        policies.scorer.Critic,
        "forward",
        one_state_late,
    ),
    Mutant(
        "ratio of a token in GSPO",
        partial(agrees_with_its_paper, "gspo"),
        trainer.objectives,
        "RATIOS",
        every_token_its_own_ratio,
    ),
    Mutant(
        "own reward in the baseline",
        partial(agrees_with_its_paper, "rloo"),
        trainer.losses,
        "BASELINES",
        own_reward_in_the_baseline,
    ),
    Mutant(
        "dropped rows in the baseline",
        partial(leaves_the_baseline, "leave_one_out"),
        trainer.losses,
        "BASELINES",
        all_rows_count,
    ),
    Mutant(
        "padding is whitened too",
        partial(agrees_with_its_paper, "reinforce_pp"),
        trainer.advantage,
        "whitened",
        padding_counts,
    ),
    Mutant(
        "another Beta density",
        partial(agrees_with_its_paper, "bnpo"),
        trainer.advantage,
        "beta_density",
        shape_one_half,
    ),
    *(
        Mutant(f"{name}: {said}", partial(agrees_with_its_paper, name), MASKS, attribute, broken)
        for name, divergence in (("dppo", "binary_tv"), ("dppo_kl", "binary_kl"))
        for said, attribute, broken in (
            ("also what comes back", "leaves", on_both_sides),
            ("only what comes back", "leaves", on_the_way_back),
            ("the distance of a ratio", divergence, of_the_ratio),
        )
    ),
    Mutant(
        "KL of the policy to the sampler",
        partial(agrees_with_its_paper, "dppo_kl"),
        MASKS,
        "binary_kl",
        from_the_policy,
    ),
    Mutant(
        "KL of the sampled token alone",
        partial(agrees_with_its_paper, "dppo_kl"),
        MASKS,
        "binary_kl",
        without_the_rest,
    ),
    *(
        Mutant(
            f"twice the bound of {name}",
            partial(agrees_with_its_paper, name),
            trainer.objectives,
            "Bounds",
            twice_as_far,
        )
        for name in ("dppo", "dppo_kl")
    ),
    Mutant(
        "KL weighed without a gradient",
        the_weighed_kl_is_the_reverse_one_whoever_sampled,
        Leash,
        "loss_term",
        with_k3s_gradient_alone,
    ),
    Mutant(
        "KL weighed by the trainer's own ratio",
        the_weighed_kl_is_the_reverse_one_whoever_sampled,
        Leash,
        "loss_term",
        to_the_trainers_own,
    ),
    Mutant(
        "entropy without a gradient",
        the_bonus_is_that_of_a_plain_softmax,
        DIST,
        "_score",
        entropy_detached,
    ),
    Mutant(
        "the generator over the trainer",
        a_bfloat16_generator_is_corrected,
        trainer.importance_sampling,
        "correction",
        the_other_way_round,
    ),
    Mutant("global generator", contracts.same_seed, policies.sampler, "uniforms", global_generator),
)
