"""Which keys of the configuration go to which part of a run; a key that no part takes is an error.

A part is a class or function that a `_target_` names. It gets the keys of its node and, by name,
the keys of the sections that `plan` lists for it, as far as they are its arguments. Imports torch.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import yaml

from conf.build import (
    Section,
    arguments_of,
    arguments_of_node,
    build,
    controller_arguments,
    data_arguments,
    find_target,
    has_teacher,
    make_leash,
    make_tools,
)
from conf.check import walk
from conf.schema import FOLDER, all_keys, changed, word
from envs.rewards.validate import in_one_line
from trainer.runs.failures import REFUSED, Refused, headline
from trainer.surrogates import SURROGATES, find_surrogate

# Nothing here is ignored.
SECTIONS = ("algorithm", "trainer", "optimizer", "kl", "teacher", "env", "policy")
RUNTIMES = {"ddp": "trainer.Runtime", "fsdp2": "trainer.scale.shards.ShardedRuntime"}


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
        object of the run, not the key of that name. ValueError for a key of the node that the part
        does not take.
        """
        node = {"_target_": node} if isinstance(node, str) else node
        names, _ = arguments_of_node(node)
        arguments = {}
        for section in sections:
            for name, value in self.config[section].items():
                if name in names and name not in (*node, *objects):
                    arguments[name] = value
                    self.take(f"{section}.{name}")
        return Part({**arguments, **node})

    def untaken(self) -> Iterator[tuple[str, Any]]:
        """Yield key and value where no part has taken it and it differs from its default."""
        for key, value in changed(self.config, SECTIONS):
            if not any(f"{key}.".startswith(f"{each}.") for each in self.taken):
                yield key, value


@dataclass(frozen=True)
class Plan:
    """The parts of a run; a call with the run's objects builds one."""

    runtime: Part
    policy: Part
    engine: Part | None
    critic: Part | None
    env: Part
    tools: dict[str, Any]  # TypedTools by name
    call_tools: Part | None
    transforms: dict[str, Part]
    leash: Any  # the Leash itself, which needs no other object
    after_rollout: dict[str, Part]
    source: Part
    advantage: Part
    objective: Part
    optimizer: Part
    schedule: Part
    update: Part
    early_stopping: Part
    trainer: Part

    def make_optimizer(self, model: Any) -> Any:
        """Return the optimiser of a model's parameters; only matrices are decayed."""
        decay = self.optimizer.node.get("weight_decay", 0.0)
        groups = find_target("trainer.parameter_groups")(model, weight_decay=decay)
        return self.optimizer(params=groups, model=model)

    def make_env(self, task: Any, policy: Any, transforms: Iterable[Any]) -> Any:
        """Return the chat environment of a task with its tools and the transforms appended."""
        schemas = [tool.schema for tool in self.tools.values()]
        env = self.env(task=task, system_prompt=policy.system_prompt, tools=schemas)
        if self.call_tools:
            transforms = [self.call_tools(tools=self.tools, renderer=policy.renderer), *transforms]
        for transform in transforms:
            env = env.append_transform(transform)
        return env


def plan(config: Section) -> Plan:
    """Return the parts of a resolved configuration; no model is loaded.

    `Refused`, a ValueError, for a key that no part takes, or a target that cannot be imported.
    Modes other than training do not check keys: they leave parts out.
    """
    try:
        return _plan(config)
    except Exception as error:  # importing a user's module may raise anything
        raise Refused(in_one_line(error)) from error


def check(file: TextIO) -> int:
    """Plan the runs whose configurations a JSON file has; print the first fault.

    Return the exit code.
    """
    for config in json.load(file):
        try:
            plan(config)
        except Refused as error:
            print(headline(error))
            return REFUSED
    return 0


def _plan(config: Section) -> Plan:
    keys = Keys(config)
    algorithm, engine = config["algorithm"], config["policy"]["engine"]
    critic = algorithm.get("critic")
    sizes = {"group_size": algorithm["group_size"], "max_turns": config["env"]["max_turns"]}
    tools = make_tools(config["env"]["tools"])
    nodes_of(keys, config["observers"])  # a fault ends the run here; rank 0 builds them later
    parts = Plan(
        runtime=keys.give(RUNTIMES[config["launch"]["strategy"]], "policy", "launch"),
        policy=policy_part(keys),
        engine=keys.give(engine) if engine else None,
        critic=keys.give({"_target_": "policies.Critic", **critic}) if critic else None,
        env=Part({"_target_": "envs.chat_env.ChatEnv", **sizes}),
        tools=tools,
        call_tools=keys.give("envs.tools.CallTools", "env", objects=("tools",)) if tools else None,
        transforms=nodes_of(keys, config["env"]["transforms"]),
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
        early_stopping=keys.give("trainer.stopping.EarlyStopping", "trainer"),
        trainer=keys.give("trainer.Trainer", "trainer"),
    )
    check_rows(algorithm, parts.source)
    take_keys_read_elsewhere(keys, parts)
    if config["mode"] == "train":
        for name, value in keys.untaken():
            _, key = all_keys().get(name, ("", None))
            remedy = f"set {name}={word(key.default)}" if key else "leave it out"
            near = difflib.get_close_matches(name, keys.taken, 1)
            remedy = f"did you mean {near[0]}?" if near and key is None else remedy
            text = f"no part of this run takes it{_takers(name, config)}; {remedy}"
            raise ValueError(f"{name}={word(value)}: {text}")
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


def nodes_of(keys: Keys, nodes: Mapping[str, Any] | None, *sections: str) -> dict[str, Part]:
    """Return the parts of named nodes; null takes a name out."""
    return {name: keys.give(node, *sections) for name, node in (nodes or {}).items() if node}


def check_rows(algorithm: Section, source: Part) -> None:
    """Raise ValueError if algorithm.rows is not what the source reads, as far as it says that."""
    reads = getattr(source.target, "reads_rows", algorithm["rows"])
    if reads != algorithm["rows"]:
        name = algorithm["source"]["_target_"]
        text = f"expected algorithm.rows={reads}, which {name} reads, got {algorithm['rows']}"
        raise ValueError(f"{text}; leave it out")


def after_rollout_parts(keys: Keys) -> dict[str, Part]:
    """Return the functions of algorithm.after_rollout by name.

    If an engine samples, trainer.ImportanceSampling comes first, unless a function of after_rollout
    writes its key, or after_rollout has `importance: null`.
    """
    nodes = keys.config["algorithm"]["after_rollout"] or {}
    parts = nodes_of(keys, nodes, "trainer")
    corrected = any("policy_weight" in getattr(p.target, "writes", ()) for p in parts.values())
    if keys.config["policy"]["engine"] and not corrected and "importance" not in nodes:
        parts = {"importance": keys.give("trainer.ImportanceSampling", "trainer"), **parts}
    return parts


def take_keys_read_elsewhere(keys: Keys, parts: Plan) -> None:
    """Take the keys that `Keys.give` does not hand over: those of conf/run.py and build.py."""
    config = keys.config
    keys.take("algorithm.source", "algorithm.advantage", "algorithm.objective", "algorithm.rows")
    keys.take("algorithm.critic", "algorithm.needs_reward")
    source, _ = arguments_of(parts.source.target)
    if "after_rollout" in source:
        keys.take("algorithm.after_rollout")
    objective = parts.objective.node
    if "surrogate" in objective:  # it reads only some of the bounds that the objective takes
        surrogate = objective["surrogate"]
        row = find_surrogate(build(surrogate) if isinstance(surrogate, Mapping) else surrogate)
        bounds = {key for each in SURROGATES.values() for key in each.keys} - {*row.keys}
        keys.taken -= {f"algorithm.{key}" for key in bounds}
    keys.take("trainer.show_every", "kl.measure", "env.max_turns")
    if config["algorithm"]["rows"] == "prompts":
        keys.take("algorithm.group_size", "trainer.overlap")
        if config["kl"]["measure"]:
            keys.take("kl.hint")
        for leash in parts.leash.each:
            section = leash.names.section
            keys.take(*(f"{section}.{name}" for name in ("estimator", "where", "allow_biased")))
            if leash.needs_reference:
                keys.take(f"{section}.cap")
            if leash.estimator == "jsd":
                keys.take(f"{section}.jsd_weight")
            if section == "teacher":
                keys.take("teacher.reference", "teacher.reference_temperature", "teacher.hint")
    for leash in parts.leash.each:
        section = leash.names.section
        _, of_controller = controller_arguments(config[section])
        keys.take(*(f"{section}.{name}" for name in ("controller", *of_controller)))
    if config["kl"]["measure"]:
        keys.take("kl.reference", "kl.refresh_every", "kl.refresh_decay")
        keys.take("kl.reference_temperature")
    keys.take("env.task", "env.rewards", "env.task_weight", "env.transforms", "policy.engine")
    keys.take("env.tools")
    keys.take(*(f"env.{name}" for name in data_arguments(config["env"])))


def _takers(key: str, config: Section) -> str:
    """Return " (<parts of leash> would)" for a key that a part of another run takes, or ""."""
    section, _, name = key.partition(".")
    takers = []
    if section == "teacher" and not has_teacher(config):
        takers = ["teacher.reference=<model>"]
    if section == "algorithm":
        rows = SURROGATES.items()
        takers = [f"algorithm.surrogate={each}" for each, row in rows if name in row.keys]
        files = [yaml.safe_load(path.read_text()) for path in (FOLDER / "algorithm").glob("*.yaml")]
        targets = sorted({node["_target_"] for file in files for _, node in walk(file)})
        if not takers:
            takers = [target for target in targets if name in arguments_of(find_target(target))[0]]
    return f" ({' or '.join(takers)} would)" if takers else ""
