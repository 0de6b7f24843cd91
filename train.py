"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

Also preflight=true, and resume=<run folder> with mode=chat, evaluate or export.
The parent checks the configuration and starts a fresh process per rank; it imports no torch.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from omegaconf import DictConfig, OmegaConf

    from conf import build as parts
except ModuleNotFoundError as missing:  # probably the system's Python
    sys.exit(f"error: {missing}; type .venv/bin/python in place of python (make setup makes it)")


def train(cfg: DictConfig, folder: Path, observers: Sequence[Any] = ()) -> float:
    """Build the parts of a run and run its mode; return its metric.

    `observers`: trainer.Observer objects in addition to those of the configuration.
    """
    import policies
    import trainer
    from policies.cache import sha256_of_inputs
    from policies.load import resolve_autocast
    from trainer.modes import run_mode
    from trainer.runs.versions import about_machine

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    algorithm, total, opt = cfg.algorithm, cfg.trainer.num_iterations, cfg.optimizer
    steps = total * algorithm.epochs * algorithm.minibatches
    with parts.make_runtime(cfg, folder) as runtime:
        runtime.write_status(machine=about_machine(runtime.device, runtime.ranks))
        task = parts.make_task(cfg.env)
        # A fault in the data or in a user's reward is raised before a model is loaded.
        if cfg.allow_targets or "envs.rewards.Registered" in str(cfg.env.rewards):
            parts.find_target("envs.rewards.validate.try_reward")(task)
        if "autocast" in cfg.policy:  # before shards are loaded on the CPU
            cfg.policy.autocast = resolve_autocast(cfg.policy.autocast, runtime.device)
        policy = runtime.load(lambda **at: parts.make_policy(cfg.policy, **at))
        runtime.write_status(model=policy.files.about(), products=str(policy.scorer.autocast))
        leash = parts.make_leash(cfg)
        reference = parts.make_reference(cfg, policy)
        if critic := algorithm.get("critic"):
            policy.scorer.critic = policies.Critic(policy.scorer, **critic)
        generator = parts.make_generator(cfg.policy, policy, runtime.folder)
        shared = {"task": task, "policy": policy, "generator": generator, "runtime": runtime}
        transforms = parts.make_transforms(cfg)
        shared |= {"env": parts.make_env(cfg, task, policy, transforms.values()), "leash": leash}
        verbs = parts.make_verbs(cfg, **shared)
        source = parts.make_source(cfg, verbs.values(), **shared)
        advantage = parts.build(algorithm.advantage, algorithm, cfg.trainer, **shared)
        objective = parts.build(algorithm.objective, algorithm, **shared)
        watching = parts.make_observers(cfg, runtime, observers)
        settings = parts.keys_for(make := trainer.make_optimizer, opt)
        scorer, optimizer = runtime.prepare(policy, make, settings, reference, advantage)
        loop = trainer.Trainer(
            runtime=runtime,
            policy=policy,
            generator=generator,
            source=source,
            retrieve_kl=reference,
            advantage=advantage,
            update=trainer.Update(
                scorer,
                optimizer,
                objective,
                runtime,
                lr=trainer.make_schedule(opt.schedule, lr=opt.lr, warmup=opt.warmup, total=steps),
                **parts.keys_for(trainer.Update, cfg.trainer, algorithm),
                max_tokens=cfg.policy.max_new_tokens * cfg.env.max_turns,
                max_grad_norm=opt.max_grad_norm,
                reference=reference.scorer,
            ),
            evaluate=trainer.Evaluate(
                **{name: shared[name] for name in ("task", "env", "generator", "runtime")},
                retrieve_kl=reference,
                **cfg.eval,
            ),
            leash=leash,
            checkpoints=trainer.Checkpoints(
                runtime, policy, optimizer, reference=reference, **cfg.checkpoint
            ),
            num_iterations=total,
            num_logged_replies=cfg.tracker.get("replies", "0"),
            profile=list(cfg.trainer.profile),
            early_stopping=parts.make_early_stopping(cfg.trainer),
            inputs=sha256_of_inputs(config),
            parts=trainer.resuming.stateful_parts(
                {"env.transforms": transforms, "algorithm.after_rollout": verbs},
                cfg.observers,
                {"source": source, "advantage": advantage, "objective": objective},
                task=task,
                observers=watching,
            ),
            observers=watching,
        )
        return run_mode(loop, config)


def worker(folder: str, resume: str | None = None) -> int:
    """Run the configuration of a run folder in this process; return the exit code."""
    from trainer.early_stopping import Stopped
    from trainer.runs.failures import record_failure
    from trainer.runs.folders import TEMPORARY
    from trainer.runs.lock import locked_by_rank
    from trainer.runs.run_log import run_log

    alone = "LEASH_PARENT" not in os.environ  # below torchrun or accelerate launch
    try:
        cfg: Any = OmegaConf.load(Path(folder) / "config.yaml")
        cfg.resume = resume or cfg.resume
        with run_log(Path(folder)), locked_by_rank(Path(folder)):
            value = train(cfg, Path(folder))
    except Stopped:
        return 143
    except BaseException as error:  # a reward may raise SystemExit; the parent prints one line
        return record_failure(Path(os.environ.get("LEASH_FOLDER", folder)), error)
    finally:
        if alone and Path(folder).name.startswith(TEMPORARY):
            shutil.rmtree(folder, ignore_errors=True)
    return int(alone and cfg.preflight and value > 0)


def main() -> int:
    """Do what the command line says, of `python train.py` or `leash`; return the exit code."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # below a daemon: the next file would get its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        if mode == "w":  # pdb may have read from stdin already
            getattr(sys, name).reconfigure(errors="replace")  # for unprintable characters
    sys.path.append(os.getcwd())  # the user's modules, after all others
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    from conf.cli import cli  # not needed by a worker

    return cli()


if __name__ == "__main__":
    sys.exit(main())
