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
from policies.scorer import Critic
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
            shape, _, dtype = row.kind.rpartition(" ")
            if dtype == "text":
                assert isinstance(value, NonTensorStack), key
                continue
            assert value.shape in [shapes[s] for s in shape.split(" or ")], key
            assert dtype in ("any", str(value.dtype).removeprefix("torch.")), key
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


CONTAINERS = {"tokens": "Tokens", "masks": "Masks", "log_probs": "LogProbs"}  # set as a whole


def literal(node: ast.AST | None) -> tuple[str, ...]:
    """Return a key as it is written, what is no constant of it as "*"; () where nothing is."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    if not parts or not isinstance(parts[0], ast.Constant):
        return ()
    return tuple(str(p.value) if isinstance(p, ast.Constant) else "*" for p in parts)


def matching(key: tuple[str, ...]) -> set:
    """Return the keys of the table that a written one names: itself, or what a container holds."""
    told = {entry: names(entry) for entry in KEYS}
    exact = {k for k, n in told.items() if len(n) == len(key) and n[0] == key[0]}
    exact = {k for k in exact if told[k] == key or told[k][-1] in OPTIONAL}
    within = {k for k, n in told.items() if len(key) == 1 < len(n) and n[0] == key[0]}
    return exact or {k for k in within if told[k][-1] in OPTIONAL}


def files_of(key, column: str) -> list[str]:
    """Return the readers or the writers that the table tells."""
    writers, _, readers = KEYS[key].files.partition(">")
    return (writers if column == "writers" else readers).split()


def used(tree: ast.AST) -> tuple[set, set]:
    """Return the keys that a file reads from what it calls `batch`, and those that it writes."""
    read, written = set(), set()
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    for n in calls:
        owner = n.func
        while isinstance(owner, ast.Attribute | ast.Call | ast.Subscript):
            owner = owner.func if isinstance(owner, ast.Call) else owner.value
        what = n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
        if what == "reads":
            read |= {key for arg in n.args for key in matching(literal(arg))}
        elif getattr(owner, "id", "") == "batch" and what in ("get", "set"):
            key = literal(n.args[0])
            assert key, f"line {n.lineno}: write the key where it is used"
            fields = {
                k.arg
                for made in calls
                if getattr(made.func, "id", "") == CONTAINERS.get(key[0]) and len(key) == 1
                for k in made.keywords
            }
            found = matching(key) or {k for k in KEYS if k in {(key[0], f) for f in fields}}
            assert found, f"{key} is not in trainer/batch.py"
            (read if what == "get" else written).update(found)
    for n in ast.walk(tree):
        if isinstance(n, ast.Compare) and getattr(n.comparators[0], "id", "") == "batch":
            read |= matching(literal(n.left))
    return read, written


def test_readers_and_writers_are_those_of_the_code() -> None:
    """Both ways. What RetrieveKL does for the reference goes by that transform's own keys."""
    read, written = {}, {}
    for path in sorted(ROOT.glob("*.py")):
        name = path.stem
        read[name], written[name] = used(ast.parse(path.read_text()))
    written["reference"] = {("ref_log_probs", "full"), "kl_penalty"}
    read["reference"] = {key for key in KEYS if "reference" in files_of(key, "readers")}
    for found, column in ((read, "readers"), (written, "writers")):
        for key in KEYS:
            files = sorted(name for name, keys in found.items() if key in keys)
            assert files_of(key, column) == files, f"{column} of {key}"


def test_the_reference_needs_what_the_table_says(made) -> None:
    batch, policy = made[0].clone(), make_policy()
    batch["temperature"] += 0.5
    keys = [key for key in KEYS if "reference" in files_of(key, "readers")]
    retrieve = Reference(policy, load_reference(policy))
    whole, part = retrieve(batch.clone()), retrieve(batch.select(*keys))
    assert torch.equal(whole["kl_penalty"], part["kl_penalty"])
    for key in keys:
        rest = batch.select(*(k for k in keys if k != key))
        try:
            other = retrieve(rest)["kl_penalty"]
        except (KeyError, ValueError):
            continue
        assert not torch.equal(other, whole["kl_penalty"]), f"{key} changes nothing"


def test_a_part_that_reads_an_unknown_key_says_so_at_import() -> None:
    with pytest.raises(KeyError, match=r"'advantge' is no key of a batch.*trainer/batch\.py"):
        reads("advantge")
