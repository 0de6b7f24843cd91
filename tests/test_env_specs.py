"""What environments and transforms declare, and whether they keep to it."""

from unittest.mock import Mock

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict

from envs import ChatEnv, Composite, EnvBase, NonTensor, TransformedEnv, Unbounded, check_env_specs
from envs.transforms import (
    Compose,
    KLComputation,
    PolicyVersion,
    RetrieveKL,
    StepCounter,
    Transform,
)
from policies.load import load_reference


class Counter(EnvBase):
    """Add the action to a sum; the observation is the sum."""

    def _specs(self):
        total = Composite({"total": Unbounded((2,))}, shape=(2,))
        return {
            "full_observation_spec": total,
            "full_reward_spec": Composite({"reward": Unbounded((2, 1))}, shape=(2,)),
            "full_action_spec": Composite({"action": Unbounded((2,))}, shape=(2,)),
        }

    def _reset(self, td):
        return TensorDict({"total": torch.zeros(2)}, [2])

    def _step(self, td):
        total = td["total"] + td["action"]
        return TensorDict({"total": total, "reward": total.unsqueeze(-1)}, [2])


class Doubled(Transform):
    """A user's own transform: shows twice the total, and takes half the action."""

    def __init__(self, declared="double"):
        super().__init__(["total"], ["double"])
        self.declared = declared

    def _apply_transform(self, value):
        return value * 2

    def _inv_call(self, td):
        return td.set("action", td["action"] / 2)

    def transform_observation_spec(self, observation_spec):
        observation_spec[self.declared] = Unbounded(observation_spec.shape)
        return observation_spec

    def transform_action_spec(self, action_spec):
        action_spec["action"] = Unbounded((2,), dtype=torch.float32)
        return action_spec


def test_a_users_own_transforms_work_with_their_hooks_and_specs():
    env = TransformedEnv(Counter(), Compose(Doubled())).append_transform(StepCounter())
    check_env_specs(env)
    assert sorted(env.full_observation_spec) == ["double", "step_count", "total"]
    assert list(Counter().full_observation_spec) == ["total"], "the env below stays as it is"
    td = env.reset()
    out = env.step(td.set("action", torch.tensor([4.0, -2.0])))["next"]
    assert out["double"].tolist() == [4.0, -2.0], "2 * (0 + 4 / 2)"
    assert out["step_count"].tolist() == [[1], [1]]


def test_a_key_that_is_declared_or_written_alone_is_named():
    with pytest.raises(ValueError, match="double"):
        check_env_specs(TransformedEnv(Counter(), Doubled(declared="total")))
    silent = Doubled()
    silent._call = lambda td: td
    with pytest.raises(ValueError, match="double: missing"):
        check_env_specs(TransformedEnv(Counter(), silent))


KEYS = {"history": (), "text": ("text", "tokens"), "tokens": ("tokens",)}


@pytest.mark.parametrize("mode", KEYS)
def test_a_chat_env_keeps_to_its_specs_in_every_mode(mode):
    tokenizer = make_policy().tokenizer
    env = ChatEnv(batch_size=(3,), input_mode=mode, tokenizer=tokenizer)
    assert set(env.full_observation_spec) == {"history", "group_id", "turn", *KEYS[mode]}
    assert list(env.full_action_spec) == [mode]
    assert list(env.full_state_spec) == ["query"]
    check_env_specs(env)
    env = ChatEnv(Words(), group_size=2, input_mode=mode, tokenizer=tokenizer)
    env = env.append_transform(PolicyVersion("uuid"))
    assert env.full_reward_spec["reward_part", "length"].shape == (-1, 1)
    check_env_specs(env, make_policy().get_new_version(input_mode=mode), data=prompts(2))


def test_specs_do_not_move_the_env():
    class Still(ChatEnv):
        def _reset(self, td):
            raise AssertionError("a spec was asked for, not a reset")

    env = Still(Words()).append_transform(KLComputation())
    assert env.full_reward_spec["reward"].shape == (-1, -1, 1)
    assert env.full_observation_spec["kl_penalty"].shape == (-1, -1)
    assert isinstance(env.full_state_spec["row"], NonTensor)


def test_from_collector_needs_its_collector_before_it_declares_anything():
    policy = make_policy()
    kl = RetrieveKL(ref_model=load_reference(policy))
    with pytest.raises(ValueError, match="container"):
        kl.transform_observation_spec(Composite())
    env = ChatEnv(Words(), group_size=2).append_transform(kl)
    with pytest.raises(ValueError, match="collector"):
        _ = env.full_observation_spec
    collector = Mock(policy=policy)
    env.register_collector(collector)
    found = env.full_observation_spec
    assert found["log_probs", "full"].shape == found["ref_log_probs", "full"].shape == (-1, -1)
    assert env.full_reward_spec["reward"].shape == (-1, -1, 1)
    check_env_specs(env, policy, data=prompts(2))
