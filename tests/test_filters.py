"""Top-k, top-p and min-p: evaluation and chat sample under them, training refuses them."""

from dataclasses import replace

import pytest
from contracts import Words, make_policy
from contracts import prompts as env_prompts

from conf.compose import compose_checked, set_up
from envs.chat_env import ChatEnv
from policies.load import load_policy, load_reference
from policies.sampler import Filters
from trainer import GRPOLoss
from trainer.collect import collect

FILTERS = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}


def filtered(**filters: float):
    policy = make_policy()
    return policy.get_new_version(generate_kwargs={**policy.generate_kwargs, **filters})


@pytest.mark.parametrize("name", [*FILTERS, "repetition_penalty", "min_new_tokens"])
def test_training_refuses_what_its_log_probs_do_not_follow(name):
    policy, env = filtered(**{name: FILTERS.get(name, 2)}), ChatEnv(Words())
    with pytest.raises(ValueError, match=name):
        collect(env_prompts(1), env, policy)
    with pytest.raises(ValueError, match=name):
        GRPOLoss(policy.get_new_version(generate=False))(make_policy()(env.reset(env_prompts(1))))
    batch = collect(env_prompts(1), env, policy, learn=False)
    assert (batch["log_probs", "full"][batch["loss_mask"]] <= 0).all()


def test_the_keys_reach_the_policy_and_a_training_with_them_is_refused():
    set_up()
    words = [f"policy.{name}={value}" for name, value in FILTERS.items()]
    for word in words:
        with pytest.raises(ValueError, match=word.split("=")[0]):
            compose_checked(["experiment=grpo_tiny", word])
    policy = load_policy("tiny", **FILTERS)
    assert policy.limits.filters == replace(Filters(), **FILTERS)
    assert load_reference(policy).limits.filters == policy.limits.filters
    with pytest.raises(ValueError, match=r"policy.top_p .*from 0 to 1"):
        compose_checked(["experiment=grpo_tiny", "policy.top_p=1.1"])
