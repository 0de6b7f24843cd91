"""Transforms, environments seen through them, and whether both keep to what they declare."""

import pytest
import torch
from support.policies import make_wrapper, prompts
from support.tasks import Words
from tensordict import TensorDict

from envs import ChatEnv, Composite, EnvBase, NonTensor, TransformedEnv, Unbounded, check_env_specs
from envs.transforms import Compose, PolicyVersion, StepCounter, Transform


class Counter(EnvBase):
    """Add the action to a sum; the observation is the sum."""

    limit = 10

    def _specs(self):
        total = Composite({"total": Unbounded((2,))}, shape=(2,))
        return {
            "full_observation_spec": total,
            "full_reward_spec": Composite({"reward": Unbounded((2,))}, shape=(2,)),
            "full_done_spec": Composite({"done": Unbounded((2,), dtype=torch.bool)}, shape=(2,)),
            "full_action_spec": Composite({"action": Unbounded((2,))}, shape=(2,)),
        }

    def _reset(self, td):
        return TensorDict({"total": torch.zeros(2) if td is None else td["start"]}, [2])

    def _step(self, td):
        total = td["total"] + td["action"]
        return TensorDict({"total": total, "reward": td["action"], "done": total > 99}, [2])


class Scale(Transform):
    """Show `factor` times the total, and take the total as it was."""

    def __init__(self, factor, in_keys=("total",), out_keys=None, declared=None):
        super().__init__(in_keys, out_keys)
        self.factor, self.declared = factor, declared or self.out_keys[0]

    def _apply_transform(self, value):
        return value * self.factor

    def _inv_call(self, td):
        return td.set("total", td["total"] / self.factor) if "total" in self.out_keys else td

    def transform_observation_spec(self, observation_spec):
        observation_spec[self.declared] = Unbounded(observation_spec.shape)
        return observation_spec


class Shift(Transform):
    """Shift the observation up on the way out, and down on the way in."""

    def _call(self, td):
        return td.set("total", td["total"] + 1)

    def _inv_call(self, td):
        return td.set("total", td["total"] - 1)


def act(td, value=3.0):
    return td.set("action", torch.full((2,), value))


def start(*values):
    return TensorDict({"start": torch.tensor(values)}, [2])


def test_reset_and_step_run_the_transform():
    env = TransformedEnv(Counter(), Scale(2.0, out_keys=["double"]))
    td = env.reset(start(1.0, 4.0))
    assert td["double"].tolist() == [2.0, 8.0]
    out = env.step(act(td))
    assert out is td
    assert out["next", "double"].tolist() == [8.0, 14.0]
    assert out["next", "total"].tolist() == [4.0, 7.0]
    assert out["total"].tolist() == [1.0, 4.0]
    assert env.limit == 10  # the env's own attribute


def test_inverses_run_in_the_opposite_order_and_on_a_copy():
    env = TransformedEnv(Counter(), Compose(Scale(2.0), Shift()))
    td = act(env.reset(start(5.0, 0.0)))
    assert td["total"].tolist() == [11.0, 1.0]  # 2 * x + 1
    out = env.step(td)
    assert out["next", "total"].tolist() == [17.0, 7.0]  # 2 * (x + 3) + 1
    assert out["total"].tolist() == [11.0, 1.0]


def test_a_transform_has_a_parent_and_belongs_to_one_env():
    first, second = Scale(2.0), Shift()
    env = TransformedEnv(Counter(), Compose(first, second))
    assert second.container is env
    assert second.parent.reset(start(5.0, 0.0))["total"].tolist() == [10.0, 0.0]
    with pytest.raises(ValueError, match="already belongs"):
        TransformedEnv(Counter(), first)
    popped = env.transform.pop(0)
    assert TransformedEnv(Counter(), popped).reset(start(1.0, 1.0))["total"].tolist() == [2.0, 2.0]


def test_a_rollout_is_the_steps_of_a_policy_one_after_the_other():
    out = Counter().rollout(3, act)
    assert out.batch_size == (2, 3)
    assert out["total"].tolist() == [[0.0, 3.0, 6.0]] * 2
    assert out["next", "total"].tolist() == [[3.0, 6.0, 9.0]] * 2
    first = TensorDict({"total": torch.ones(2)}, [2])
    out = Counter().rollout(1, act, tensordict=first, auto_reset=False)
    assert out["next", "total"].tolist() == [[4.0], [4.0]]


def test_an_env_declares_what_its_transforms_add():
    double = Scale(2.0, out_keys=["double"])
    env = TransformedEnv(Counter(), Compose(double)).append_transform(StepCounter())
    check_env_specs(env)
    assert sorted(env.full_observation_spec) == ["double", "step_count", "total"]
    assert list(Counter().full_observation_spec) == ["total"], "the env below stays as it is"
    wrong = Scale(2.0, out_keys=["double"], declared="total")
    with pytest.raises(ValueError, match="double"):
        check_env_specs(TransformedEnv(Counter(), wrong))
    silent = Scale(2.0, out_keys=["double"])
    silent._call = lambda td: td
    with pytest.raises(ValueError, match="double"):
        check_env_specs(TransformedEnv(Counter(), silent))


KEYS = {"history": (), "text": ("text", "tokens"), "tokens": ("tokens",)}


@pytest.mark.parametrize("mode", KEYS)
def test_a_chat_env_keeps_to_its_specs_in_every_mode(mode):
    tokenizer = make_wrapper().tokenizer
    env = ChatEnv(batch_size=(3,), input_mode=mode, tokenizer=tokenizer)
    assert set(env.full_observation_spec) == {"history", "group_id", "turn", *KEYS[mode]}
    assert list(env.full_action_spec) == [mode]
    assert list(env.full_state_spec) == ["query"]
    check_env_specs(env)
    env = ChatEnv(Words(), group_size=2, input_mode=mode, tokenizer=tokenizer)
    env = env.append_transform(PolicyVersion("uuid"))
    assert env.full_reward_spec["reward_part", "length"].shape == (-1, 1)
    assert isinstance(env.full_state_spec["row"], NonTensor)
    check_env_specs(env, make_wrapper().get_new_version(input_mode=mode), data=prompts(2))
