"""The table of the batch's keys (trainer/batch.py) and the code, held together both ways."""

import ast
from pathlib import Path

import pytest
import torch
from contracts import G, Words, leash, make_policy, one_process
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import trainer
from envs.chat_env import ChatEnv
from policies.load import load_reference
from policies.value_head import Critic
from trainer.batch import KEYS, reads
from trainer.reference import Reference
from trainer.update import SCORED, Update

ROOT = Path(trainer.__file__).parent
OPTIONAL = {"<name>", "<metric>"}


def names(key) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def known(key: tuple[str, ...]) -> object:
    """Return the key of the table that stands for a path in a batch."""
    for entry in KEYS:
        told = names(entry)
        pairs = list(zip(told, key, strict=False)) if len(told) == len(key) else [("", None)]
        if all(a in (b, *OPTIONAL) for a, b in pairs):
            return entry
    return None


def leaves(td: TensorDictBase, prefix: tuple[str, ...] = ()):
    """Yield key and value of every entry that holds one, through containers."""
    for name, value in td.items():
        if hasattr(value, "to_tensordict") and not isinstance(value, NonTensorStack):
            yield from leaves(value.to_tensordict(), (*prefix, name))
        elif value is not None:
            yield (*prefix, name), value


def batches() -> list[TensorDict]:
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


@pytest.fixture(scope="module")
def made() -> list[TensorDict]:
    return batches()


def test_every_entry_of_a_batch_is_in_the_table_with_its_shape_and_dtype(made) -> None:
    seen = set()
    for batch in made:
        shapes = {"[B, T]": batch["loss_mask"].shape, "[B]": batch.batch_size}
        for key, value in leaves(batch):
            entry = known(key)
            assert entry is not None, f"{key} is not in trainer/batch.py"
            row = KEYS[entry]
            seen.add(entry)
            if row.dtype == "text":
                assert isinstance(value, NonTensorStack), key
                continue
            assert value.shape in [shapes[s] for s in row.shape.split(" or ")], key
            assert row.dtype in ("any", str(value.dtype).removeprefix("torch.")), key
    assert set(KEYS) - seen == {"weight"}, "the table has keys that no batch has"


def test_weight_is_what_the_update_adds(made, monkeypatch) -> None:
    batch, policy = made[0], make_policy()
    objective, held = trainer.GRPOObjective(leash=leash()), []
    original = trainer.update.select_rows

    def select_rows(td: TensorDictBase, rows: list[int]) -> TensorDictBase:
        held.append(td)
        return original(td, rows)

    monkeypatch.setattr("trainer.update.select_rows", select_rows)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    update = Update(policy.scorer, optimizer, objective, one_process(), lr=lambda step: 0.0)
    update(batch.clone())
    inside = {known(key) for td in held for key, _ in leaves(td)}
    there = {known(key) for key, _ in leaves(batch)}
    assert inside == {*SCORED, *objective.reads} & there | {"weight"}


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_writers_and_readers_name_the_key(key) -> None:
    row, leaf = KEYS[key], next(n for n in reversed(names(key)) if n not in OPTIONAL)
    for file in {row.writer, *row.readers}:
        tree = ast.parse((ROOT / f"{file}.py").read_text())
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        # the reference writes by RetrieveKL, under that transform's own names
        told = leaf in texts or names(key)[0] in texts or file == "reference"
        keyword = {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords}
        assert told or leaf in keyword, f"trainer/{file}.py does not name {key}"


def test_a_part_that_reads_an_unknown_key_says_so_at_import() -> None:
    with pytest.raises(KeyError, match=r"'advantge' is no key of a batch.*trainer/batch\.py"):
        reads("advantge")
