"""The table of the batch's keys (trainer/batch.py) and what stands in batches."""

import pytest
from contracts import G, Words, leash, make_policy, one_process
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import trainer
from envs.chat_env import ChatEnv
from policies.load import load_reference
from policies.scorer import Critic
from trainer.batch import KEYS
from trainer.reference import Reference

OPTIONAL = ("<name>", "<metric>")


def entry_of(path: tuple[str, ...]) -> object:
    """Return the key of the table that stands for a path in a batch, None if there is none."""
    names = (path[0] if len(path) == 1 else path, *((path[0], name) for name in OPTIONAL))
    return next((key for key in names if key in KEYS), None)


def leaves(td: TensorDictBase, prefix: tuple[str, ...] = ()):
    """Yield key and value of every entry that holds one, through containers."""
    for name, value in td.items():
        if hasattr(value, "to_tensordict") and not isinstance(value, NonTensorStack):
            yield from leaves(value.to_tensordict(), (*prefix, name))
        elif value is not None:
            yield (*prefix, name), value


@pytest.fixture(scope="module")
def made() -> list[TensorDict]:
    """Return a batch of GRPO with all verbs there are, and one of PPO, as the update gets them."""
    policy, task, runtime = make_policy.__wrapped__(), Words(turns=2), one_process()
    parts = {"task": task, "generator": policy, "runtime": runtime, "size": 4}
    parts["env"] = ChatEnv(task, group_size=G, max_turns=2)
    verbs = [
        trainer.OverlongPenalty(max_tokens=12, buffer=4),
        trainer.DropTruncated(),
        trainer.ImportanceSampling(policy=policy),
    ]
    retrieve = Reference(policy, load_reference(policy))
    source = trainer.DynamicRollouts(**parts, after_rollout=verbs, rounds=1)
    grpo = trainer.GroupAdvantage(group_size=G, leash=leash())(retrieve(source(0)))
    policy.scorer.critic = Critic(policy.scorer)
    paid = leash(where="reward")
    gae = trainer.GAEAdvantage(policy=policy, runtime=runtime, leash=paid)
    ppo = gae(retrieve(trainer.Rollouts(**parts)(0)))
    return [grpo, ppo]


def test_every_entry_of_a_batch_is_in_the_table_with_its_shape_and_dtype(made) -> None:
    seen = set()
    for batch in made:
        shapes = {"[B, T]": batch["loss_mask"].shape, "[B]": batch.batch_size}
        for path, value in leaves(batch):
            key = entry_of(path)
            assert key is not None, f"{path} is not in trainer/batch.py"
            seen.add(key)
            shape, _, dtype = KEYS[key].kind.rpartition(" ")
            if dtype == "text":
                assert isinstance(value, NonTensorStack), path
                continue
            assert value.shape in [shapes[s] for s in shape.split(" or ")], path
            assert dtype in ("any", str(value.dtype).removeprefix("torch.")), path
    assert set(KEYS) - seen == {"weight"}, "the table has keys that no batch has"
