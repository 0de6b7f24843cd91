"""A run in this process: `train` builds its parts and runs its mode, `worker` starts a rank."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import trainer
from conf import build
from conf.plan import plan
from envs.rewards.validate import try_reward
from policies.chats.templates import dated
from policies.contents import sha256_of_inputs
from trainer.runs.failures import record_failure
from trainer.runs.folders import TEMPORARY
from trainer.runs.lock import locked_by_rank
from trainer.runs.run_log import run_log
from trainer.stopping import Stopped


def train(cfg: DictConfig, folder: Path, observers: Sequence[Any] = ()) -> float:
    """Execute the mode of a run; return the sweep metric (preflight: number of problems)."""
    # These import torch, which the parent process does not.
    from policies.load import resolve_autocast
    from trainer.modes import run_mode
    from trainer.runs.versions import about_machine

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    steps = cfg.trainer.num_iterations * cfg.algorithm.epochs * cfg.algorithm.minibatches
    parts = plan(config)
    if cfg.preflight_gpu:
        from trainer.scale.dry_run import cluster  # few runs have one

        return cluster.run(parts, config, folder)
    runtime = parts.runtime(folder=folder, seed=cfg.seed)
    # Rank 0 decides (resume=auto): other ranks may look after rank 0 has created the folder.
    cfg.resume = config["resume"] = runtime.gather(cfg.resume)[0]
    with runtime, dated(runtime.gather(cfg.date)[0]):  # clocks of nodes may differ
        runtime.write_status(machine=about_machine(runtime.device, runtime.ranks))

        # ---- the task, the policy and the environment between them
        task = parts.task()
        build.check_task_cells(task, build.cells_of(config))
        try_reward(task)  # finds errors in the data and in the user's reward
        custom = build.custom_observers(cfg, runtime, observers)
        # By the device that trains, because FSDP2 loads the weights on the CPU first.
        autocast = resolve_autocast(cfg.policy.get("autocast"), runtime.device)
        policy = runtime.load(lambda **device: parts.policy(autocast=autocast, **device))
        runtime.write_status(model=policy.files.about(), products=str(policy.scorer.autocast))
        if "strftime_now" in str(policy.tokenizer.chat_template):
            runtime.write_status(date=cfg.date)
        transforms = {name: part() for name, part in parts.transforms.items()}
        env = parts.make_env(task, policy, transforms.values())
        references = {name: part(policy=policy, env=env) for name, part in parts.references.items()}
        if parts.critic:
            policy.scorer.critic = parts.critic(scorer=policy.scorer)
        generator = policy
        if parts.engine:
            generator = parts.engine(policy=policy, folder=runtime.folder / ".engine")

        # ---- from prompts to a batch with advantages
        shared = {"task": task, "policy": policy, "generator": generator, "runtime": runtime}
        shared |= {"env": env, "leash": parts.leash}
        after_rollout = {name: part(**shared) for name, part in parts.after_rollout.items()}
        source = parts.make_source(after_rollout.values(), **shared)
        advantage = parts.advantage(**shared)

        # ---- from a batch to new weights
        objective = parts.objective(**shared)
        all_observers = build.make_observers(cfg, runtime, custom, show_every=parts.show_every)
        scorer, optimizer = runtime.prepare(
            policy, parts.make_optimizer, *references.values(), advantage
        )
        exact = parts.leash.exact_leash
        update = parts.update(
            scorer=scorer,
            optimizer=optimizer,
            objective=objective,
            runtime=runtime,
            leash=parts.leash,
            lr=parts.schedule(total=steps),
            max_tokens=cfg.policy.max_new_tokens * cfg.env.max_turns,
            reference=references[exact.name].scorer if exact else None,
        )

        # ---- outside the loop: evaluations and checkpoints
        evaluate = trainer.Evaluate(
            task=task,
            env=env,
            generator=generator,
            runtime=runtime,
            retrieve_kl=references["ref"],
            **cfg.eval,
        )
        saved = {"policy": policy, "optimizer": optimizer, "reference": references["ref"]}
        checkpoints = parts.checkpoints(runtime=runtime, **saved)
        with_state = trainer.resuming.stateful_parts(
            {"env.transforms": transforms, "algorithm.after_rollout": after_rollout},
            cfg.observers,
            {"source": source, "advantage": advantage, "objective": objective},
            task=task,
            observers=all_observers,
        )

        loop = parts.trainer(
            runtime=runtime,
            policy=policy,
            generator=generator,
            source=source,
            retrieve_kl=references["ref"],
            teacher=references["teacher"],
            advantage=advantage,
            update=update,
            evaluate=evaluate,
            checkpoints=checkpoints,
            num_logged_responses=cfg.tracker.get("responses", "0"),
            early_stopping=parts.early_stopping(),
            inputs=sha256_of_inputs(config),
            parts=with_state,
            observers=all_observers,
        )
        return run_mode(loop, config)


def worker(folder: str, resume: str | None = None) -> int:
    """Run the configuration of a run folder in this process; return the exit code."""
    alone = "LEASH_PARENT" not in os.environ  # started by torchrun or accelerate launch
    try:
        cfg: Any = OmegaConf.load(Path(folder) / "config.yaml")
        cfg.resume = resume or cfg.resume
        with run_log(Path(folder)), locked_by_rank(Path(folder)):
            value = train(cfg, Path(folder))
    except Stopped:
        return 143
    except BaseException as error:  # a user's reward may raise SystemExit
        return record_failure(Path(os.environ.get("LEASH_FOLDER", folder)), error)
    finally:
        if alone and Path(folder).name.startswith(TEMPORARY):
            shutil.rmtree(folder, ignore_errors=True)
    return int(alone and cfg.preflight and value > 0)  # value: the number of problems
