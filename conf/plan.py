"""Which keys of the configuration go to which part of a run; a key that no part takes is an error.

A part is a class or function that a `_target_` names. It gets the keys of its node and, by name,
the keys of the sections that `plan` lists for it, as far as they are its arguments. Imports torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.build import (
    Section,
    arguments_of,
    build,
    controller_arguments,
    data_arguments,
    find_target,
    make_leash,
)
from conf.schema import FOLDER, changed
from trainer.kl_control import CONTROLLERS
from trainer.surrogates import SURROGATES, find_surrogate

SECTIONS = ("algorithm", "trainer", "optimizer", "kl", "env", "policy")  # nothing here is ignored
RUNTIMES = {"ddp": "trainer.Runtime", "fsdp2": "trainer.shards.ShardedRuntime"}


class Part:
    """A class or function with the keys that the configuration gives it."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.node = dict(node)
        self.target = find_target(node["_target_"])

    def __call__(self, **objects: Any) -> Any:
        """Build it with those of the run's `objects` that are its arguments."""
        return build({"_convert_": "all", **self.node}, **objects)


class Keys:
    """The keys of a configuration, and those that a part has taken."""

    def __init__(self, config: Section) -> None:
        self.config = config
        self.taken: set[str] = set()

    def take(self, *keys: str) -> None:
        """Note keys or whole sections that a part gets in another way than by `give`."""
        self.taken.update(keys)

    def give(
        self, node: Mapping[str, Any] | str, *sections: str, objects: Sequence[str] = ()
    ) -> Part:
        """Return the part of a node, or of a target's name, with its keys of the sections.

        A key of the node comes before the same key of a section. `objects`: arguments that get an
        object of the run, not the key of that name.
        """
        node = {"_target_": node} if isinstance(node, str) else node
        names, _ = arguments_of(find_target(node["_target_"]))
        arguments = {}
        for section in sections:
            for name, value in self.config[section].items():
                if name in names and name not in (*node, *objects):
                    arguments[name] = value
                    self.take(f"{section}.{name}")
        return Part({**arguments, **node})

    def untaken(self) -> Iterator[str]:
        """Yield each key that no part has taken and that differs from its default, as key=value."""
        for key, value in changed(self.config, SECTIONS):
            if not any(f"{key}.".startswith(f"{each}.") for each in self.taken):
                yield f"{key}={value}"


@dataclass(frozen=True)
class Plan:
    """The parts of a run; a call with the run's objects builds one."""

    runtime: Part
    policy: Part
    leash: Any  # the Leash itself, which needs no other object
    after_rollout: dict[str, Part]
    source: Part
    advantage: Part
    objective: Part
    optimizer: Part
    schedule: Part
    update: Part
    trainer: Part

    def make_optimizer(self, model: Any) -> Any:
        """Return the optimiser of a model's parameters; only matrices are decayed."""
        decay = self.optimizer.node.get("weight_decay", 0.0)
        groups = find_target("trainer.parameter_groups")(model, weight_decay=decay)
        return self.optimizer(params=groups, model=model)


def plan(config: Section) -> Plan:
    """Return the parts of a resolved configuration; no model is loaded.

    ValueError for a key that no part takes. Modes other than training do not check that: they
    leave parts out.
    """
    keys = Keys(config)
    algorithm = config["algorithm"]
    parts = Plan(
        runtime=keys.give(RUNTIMES[config["launch"]["strategy"]], "policy", "launch"),
        policy=policy_part(keys),
        leash=make_leash(config),
        after_rollout=after_rollout_parts(keys),
        source=keys.give(algorithm["source"], "algorithm", "trainer", objects=("after_rollout",)),
        advantage=keys.give(algorithm["advantage"], "algorithm", "trainer"),
        objective=keys.give(algorithm["objective"], "algorithm"),
        optimizer=keys.give({"_target_": config["optimizer"]["_target_"]}, "optimizer"),
        schedule=keys.give("trainer.make_schedule", "optimizer"),
        update=keys.give(
            "trainer.Update", "algorithm", "trainer", "optimizer", objects=("objective", "lr")
        ),
        trainer=keys.give("trainer.Trainer", "trainer"),
    )
    take_the_rest(keys, parts)
    if config["mode"] == "train":
        for fault in keys.untaken():
            name = fault.partition("=")[0]
            raise ValueError(f"{fault}: no part of this run takes it{_takers(name)}")
    return parts


def policy_part(keys: Keys) -> Part:
    """Return the part that loads the policy; a function with **kwargs takes all keys."""
    section = keys.config["policy"]
    target = section["_target_"]
    _, takes_any = arguments_of(find_target(target))
    if not takes_any:
        return keys.give({"_target_": target}, "policy")
    keys.take("policy")
    return Part({name: value for name, value in section.items() if name != "engine"})


def after_rollout_parts(keys: Keys) -> dict[str, Part]:
    """Return the functions of algorithm.after_rollout by name.

    If an engine samples, trainer.ImportanceSampling comes first, unless a function of after_rollout
    writes its key, or after_rollout has `importance: null`.
    """
    nodes = keys.config["algorithm"]["after_rollout"] or {}
    parts = {name: keys.give(node, "trainer") for name, node in nodes.items() if node}
    corrected = any("policy_weight" in getattr(p.target, "writes", ()) for p in parts.values())
    if keys.config["policy"]["engine"] and not corrected and "importance" not in nodes:
        parts = {"importance": keys.give("trainer.ImportanceSampling", "trainer"), **parts}
    return parts


def take_the_rest(keys: Keys, parts: Plan) -> None:
    """Take the keys that parts get in another way than by name."""
    config = keys.config
    keys.take("algorithm.source", "algorithm.advantage", "algorithm.objective", "algorithm.rows")
    keys.take("algorithm.critic", "algorithm.group_size", "env.max_turns")  # Critic and ChatEnv
    source, _ = arguments_of(parts.source.target)
    if "after_rollout" in source:
        keys.take("algorithm.after_rollout")
    objective = parts.objective.node
    if "surrogate" in objective:  # it reads only some of the bounds that the objective takes
        surrogate = objective["surrogate"]
        row = find_surrogate(build(surrogate) if isinstance(surrogate, Mapping) else surrogate)
        bounds = {key for each in SURROGATES.values() for key in each.keys} - {*row.keys}
        keys.taken -= {f"algorithm.{key}" for key in bounds}
    keys.take("trainer.overlap", "trainer.stop_at", "trainer.patience", "trainer.show_every")
    keys.take("kl.controller", "kl.estimator", "kl.where", "kl.allow_biased", "kl.measure")
    _, of_controller = controller_arguments(config["kl"])
    keys.take(*(f"kl.{name}" for name in of_controller))
    if config["kl"]["measure"]:
        keys.take("kl.reference", "kl.refresh_every", "kl.refresh_decay")
    keys.take("env.task", "env.rewards", "env.task_weight", "env.transforms", "policy.engine")
    keys.take(*(f"env.{name}" for name in data_arguments(config["env"])))


def _takers(key: str) -> str:
    """Return " (<parts of leash> would)" for a key that a part of another run takes, or ""."""
    section, _, name = key.partition(".")
    takers = []
    if section == "kl":
        makers = CONTROLLERS.items()
        takers = [f"kl.controller={each}" for each, make in makers if name in arguments_of(make)[0]]
    if section == "algorithm":
        rows = SURROGATES.items()
        takers = [f"algorithm.surrogate={each}" for each, row in rows if name in row.keys]
        texts = [path.read_text() for path in (FOLDER / "algorithm").glob("*.yaml")]
        targets = sorted({*re.findall(r"_target_: (trainer\.\w+)", "\n".join(texts))})
        if not takers:
            takers = [target for target in targets if name in arguments_of(find_target(target))[0]]
    return f" ({' or '.join(takers)} would); leave it out" if takers else "; leave it out"
