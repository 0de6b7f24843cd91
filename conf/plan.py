"""Which keys of the configuration go to which part of a run; a key that no part takes is an error.

A part is a class or function that a `_target_` names. Its arguments are the keys of its node, and
those keys of the sections that `plan` lists for it whose names are its arguments: GRPOObjective has
an argument `clip_low`, so it gets algorithm.clip_low. Imports torch.
"""

import difflib
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import yaml

from conf.build import (
    Section,
    arguments_of,
    arguments_of_node,
    build,
    data_arguments,
    find_target,
    has_teacher,
    make_leash,
    make_task,
    make_tools,
)
from conf.check import walk
from conf.schema import FOLDER, all_keys, changed, word
from envs.rewards.validate import in_one_line
from trainer.kl.controllers import CONTROLLERS
from trainer.runs.failures import REFUSED, Refused, headline
from trainer.surrogates import SURROGATES, find_surrogate

# Sections in which every key must be taken by a part.
SECTIONS = ("algorithm", "trainer", "optimizer", "kl", "teacher", "env", "policy")
REFERENCE = {"_target_": "conf.build.make_reference"}
RUNTIMES = {"ddp": "trainer.Runtime", "fsdp2": "trainer.scale.shards.ShardedRuntime"}
CHECKPOINTS = {"ddp": "trainer.Checkpoints", "fsdp2": "trainer.scale.shards.ShardedCheckpoints"}


class Part:
    """A class or function with the keys that the configuration gives it."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.node = dict(node)
        self.target = find_target(node["_target_"])

    def __call__(self, **objects: Any) -> Any:
        """Build it with those of the run's `objects` that are its arguments."""
        return build({"_convert_": "all", **self.node}, **objects)


class OfSection(UserDict[str, Any]):
    """The keys of a section; reading a key marks it as taken."""

    def __init__(self, node: Section, name: str, taken: set[str]) -> None:
        super().__init__(node)
        self.name, self.taken = name, taken

    def __getitem__(self, key: str) -> Any:
        self.taken.add(f"{self.name}.{key}")
        return super().__getitem__(key)


class Keys:
    """The keys of a configuration; reading a key through `config` does not take it."""

    def __init__(self, config: Section) -> None:
        self.config = config
        self.taken: set[str] = set()

    def __getitem__(self, section: str) -> OfSection:
        return OfSection(self.config[section], section, self.taken)

    def give(
        self, node: Mapping[str, Any] | str, *sections: str, objects: Sequence[str] = ()
    ) -> Part:
        """Return the part that a node or a target's name describes; take its keys of the sections.

        A key of the node comes before the same key of a section. `objects`: arguments that get an
        object of the run, not the key of that name. Raise ValueError if the part does not take a
        key of the node.
        """
        node = {"_target_": node} if isinstance(node, str) else node
        names, _ = arguments_of_node(node)
        arguments = {}
        for section in sections:
            for name in self[section]:
                if name in names and name not in (*node, *objects):
                    arguments[name] = self[section][name]
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
    task: Callable[[], Any]
    policy: Part
    engine: Part | None
    critic: Part | None
    env: Part
    tools: dict[str, Any]  # TypedTools by name
    call_tools: Part | None
    transforms: dict[str, Part]
    leash: Any  # the Leash itself, which needs no other object
    references: dict[str, Part]  # by the names of their leashes
    after_rollout: dict[str, Part]
    source: Part
    overlap: Part | None
    advantage: Part
    objective: Part
    optimizer: Part
    schedule: Part
    update: Part
    early_stopping: Part
    checkpoints: Part
    trainer: Part
    show_every: int

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

    def make_source(self, after_rollout: Iterable[Any], **objects: Any) -> Any:
        """Return the source of batches; with trainer.overlap > 0 it samples ahead."""
        source = self.source(after_rollout=[*after_rollout], **objects)
        return self.overlap(source=source, **objects) if self.overlap else source


def plan(config: Section) -> Plan:
    """Return the parts of a resolved configuration; no model is loaded.

    Raise `Refused`, a ValueError, for a key that no part takes, or a target that cannot be
    imported. Only training checks for such keys: other modes do not build all parts.
    """
    try:
        return _plan(config)
    except Exception as error:  # importing a user's module may raise anything
        raise Refused(in_one_line(error)) from error


def check(file: TextIO) -> int:
    """Plan the runs whose configurations are in a JSON file; print the first fault.

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
    samples = config["algorithm"]["rows"] == "prompts"
    algorithm, env, engine = keys["algorithm"], keys["env"], keys["policy"]["engine"]
    critic = algorithm.get("critic")
    size, turns = algorithm["group_size"] if samples else 1, env["max_turns"]
    of_task = data_arguments(env) | {key: env[key] for key in ("task", "rewards", "task_weight")}
    tools = make_tools(env["tools"])
    nodes_of(keys, config["observers"])  # a fault ends the run now; rank 0 builds them later
    source = keys.give(algorithm["source"], "algorithm", "trainer", objects=("after_rollout",))
    check_rows(keys, source)
    ahead = keys["trainer"]["overlap"] if samples else 0
    overlap = {"_target_": "trainer.scale.overlap.Overlap", "ahead": ahead}
    none = keys.give("trainer.NoReference")
    teacher, references = None, {"ref": none, "teacher": none}
    if keys["kl"]["measure"]:
        references["ref"] = keys.give(REFERENCE | {"name": "ref"}, "kl", "trainer")
    if samples and has_teacher(config):
        references["teacher"] = keys.give(REFERENCE | {"name": "teacher"}, "teacher", "trainer")
        teacher = make_leash(keys, "teacher")
    parts = Plan(
        runtime=keys.give(RUNTIMES[config["launch"]["strategy"]], "policy", "launch"),
        task=partial(make_task, of_task, needs_reward=algorithm["needs_reward"]),
        policy=policy_part(keys),
        engine=keys.give(engine) if engine else None,
        critic=keys.give({"_target_": "policies.Critic", **critic}) if critic else None,
        env=Part({"_target_": "envs.chat_env.ChatEnv", "group_size": size, "max_turns": turns}),
        tools=tools,
        call_tools=keys.give("envs.tools.CallTools", "env", objects=("tools",)) if tools else None,
        transforms=nodes_of(keys, env["transforms"]),
        leash=make_leash(keys, "kl", charges=samples or keys["kl"]["measure"], teacher=teacher),
        references=references,
        after_rollout=after_rollout_parts(keys, source),
        source=source,
        overlap=keys.give(overlap, "trainer") if ahead and not config["preflight"] else None,
        advantage=keys.give(algorithm["advantage"], "algorithm", "trainer"),
        objective=objective_part(keys),
        optimizer=keys.give({"_target_": config["optimizer"]["_target_"]}, "optimizer"),
        schedule=keys.give("trainer.make_schedule", "optimizer"),
        update=keys.give(
            "trainer.Update", "algorithm", "trainer", "optimizer", objects=("objective", "lr")
        ),
        early_stopping=keys.give("trainer.stopping.EarlyStopping", "trainer"),
        checkpoints=keys.give(CHECKPOINTS[config["launch"]["strategy"]], "checkpoint"),
        trainer=keys.give("trainer.Trainer", "trainer"),
        show_every=keys["trainer"]["show_every"],
    )
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
    return Part({name: value for name, value in keys["policy"].items() if name != "engine"})


def objective_part(keys: Keys) -> Part:
    """Return the part of the loss; it takes only the bounds that its surrogate reads."""
    node, unread = keys["algorithm"]["objective"], set()
    surrogate = node.get("surrogate", keys.config["algorithm"].get("surrogate"))
    if surrogate and "surrogate" in arguments_of_node(node)[0]:
        row = find_surrogate(build(surrogate) if isinstance(surrogate, Mapping) else surrogate)
        unread = {key for each in SURROGATES.values() for key in each.keys} - {*row.keys}
    return keys.give(node, "algorithm", objects=[*unread])


def nodes_of(keys: Keys, nodes: Mapping[str, Any] | None, *sections: str) -> dict[str, Part]:
    """Return the parts of named nodes; a node that is null has none."""
    return {name: keys.give(node, *sections) for name, node in (nodes or {}).items() if node}


def check_rows(keys: Keys, source: Part) -> None:
    """Raise ValueError if algorithm.rows is not the source's `reads_rows`, if it has one."""
    rows, name = keys["algorithm"]["rows"], source.node["_target_"]
    if (reads := getattr(source.target, "reads_rows", rows)) != rows:
        text = f"expected algorithm.rows={reads}, which {name} reads, got {rows}"
        raise ValueError(f"{text}; leave it out")


def after_rollout_parts(keys: Keys, source: Part) -> dict[str, Part]:
    """Return the functions of algorithm.after_rollout by name, if the source takes them.

    If an engine samples, trainer.ImportanceSampling is added first. Your own function that writes
    policy_weight replaces it; `importance: null` removes it.
    """
    if "after_rollout" not in arguments_of(source.target)[0]:
        return {}
    nodes = keys["algorithm"]["after_rollout"] or {}
    parts = nodes_of(keys, nodes, "trainer")
    corrected = any("policy_weight" in getattr(p.target, "writes", ()) for p in parts.values())
    if keys.config["policy"]["engine"] and not corrected and "importance" not in nodes:
        parts = {"importance": keys.give("trainer.ImportanceSampling", "trainer"), **parts}
    return parts


def _takers(key: str, config: Section) -> str:
    """Return " (<parts> would)", the parts of leash that take this key in other runs, or ""."""
    section, _, name = key.partition(".")
    takers = []
    if section == "teacher" and not has_teacher(config):
        takers = ["teacher.reference=<model>"]
    elif section in ("kl", "teacher"):
        owners = [each for each, make in CONTROLLERS.items() if name in arguments_of(make)[0]]
        takers = [f"{section}.controller={each}" for each in owners]
    elif section == "algorithm":
        rows = SURROGATES.items()
        takers = [f"algorithm.surrogate={each}" for each, row in rows if name in row.keys]
        files = [yaml.safe_load(path.read_text()) for path in (FOLDER / "algorithm").glob("*.yaml")]
        targets = sorted({node["_target_"] for file in files for _, node in walk(file)})
        if not takers:
            takers = [target for target in targets if name in arguments_of(find_target(target))[0]]
    return f" ({' or '.join(takers)} would)" if takers else ""
