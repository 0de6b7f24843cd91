"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

preflight=true trains nothing; mode=chat, evaluate, export, frontier use resume=<run folder>.
The parent process checks the configuration, starts one process per rank and imports no torch.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

for name in ("conf", "envs", "policies", "trainer"):
    origin = Path(getattr(find_spec(name), "origin", None) or name).resolve()
    if origin != Path(__file__).resolve().parent / name / "__init__.py":  # beside python -m train
        sys.exit(f"error: {name} is {origin}, not that of leash; rename yours")
try:
    from omegaconf import DictConfig, OmegaConf

    from conf import build
except ModuleNotFoundError as missing:  # probably the system's Python
    sys.exit(f"error: {missing}; use .venv/bin/python, which `make setup` creates")


def train(cfg: DictConfig, folder: Path, observers: Sequence[Any] = ()) -> float:
    """Execute the mode of a run; return the sweep metric (preflight: number of problems)."""
    import policies
    import trainer
    from policies.cache import sha256_of_inputs
    from policies.load import resolve_autocast
    from trainer.modes import run_mode
    from trainer.runs.versions import about_machine

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    algorithm, total, opt = cfg.algorithm, cfg.trainer.num_iterations, cfg.optimizer
    steps = total * algorithm.epochs * algorithm.minibatches
    with build.make_runtime(cfg, folder) as runtime:
        runtime.write_status(machine=about_machine(runtime.device, runtime.ranks))
        task = build.make_task(cfg.env)
        # Find errors in the data and in the user's reward before a model is loaded.
        if cfg.allow_targets or "envs.rewards.Registered" in str(cfg.env.rewards):
            build.find_target("envs.rewards.validate.try_reward")(task)
        custom = build.custom_observers(cfg, runtime, observers)
        if "autocast" in cfg.policy:  # for the real device: shards are loaded on the CPU
            cfg.policy.autocast = resolve_autocast(cfg.policy.autocast, runtime.device)
        policy = runtime.load(lambda **device: build.make_policy(cfg.policy, **device))
        runtime.write_status(model=policy.files.about(), products=str(policy.scorer.autocast))
        leash = build.make_leash(cfg)
        reference = build.make_reference(cfg, policy)
        if critic := algorithm.get("critic"):
            policy.scorer.critic = policies.Critic(policy.scorer, **critic)
        generator = build.make_generator(cfg.policy, policy, runtime.folder)
        shared = {"task": task, "policy": policy, "generator": generator, "runtime": runtime}
        transforms = build.make_transforms(cfg)
        shared |= {"env": build.make_env(cfg, task, policy, transforms.values()), "leash": leash}
        after_rollout = build.make_verbs(cfg, **shared)
        source = build.make_source(cfg, after_rollout.values(), **shared)
        advantage = build.build(algorithm.advantage, algorithm, cfg.trainer, **shared)
        objective = build.build(algorithm.objective, algorithm, **shared)
        all_observers = build.make_observers(cfg, runtime, custom)
        make_optimizer = trainer.make_optimizer
        settings = build.keys_for(make_optimizer, opt)
        scorer, optimizer = runtime.prepare(policy, make_optimizer, settings, reference, advantage)
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
                **build.keys_for(trainer.Update, cfg.trainer, algorithm),
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
            early_stopping=build.make_early_stopping(cfg.trainer),
            inputs=sha256_of_inputs(config),
            parts=trainer.resuming.stateful_parts(
                {"env.transforms": transforms, "algorithm.after_rollout": after_rollout},
                cfg.observers,
                {"source": source, "advantage": advantage, "objective": objective},
                task=task,
                observers=all_observers,
            ),
            observers=all_observers,
        )
        return run_mode(loop, config)


def worker(folder: str, resume: str | None = None) -> int:
    """Run the configuration of a run folder in this process; return the exit code."""
    from trainer.early_stopping import Stopped
    from trainer.runs.failures import record_failure
    from trainer.runs.folders import TEMPORARY
    from trainer.runs.lock import locked_by_rank
    from trainer.runs.run_log import run_log

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


def main() -> int:
    """Run the command line of `python train.py` or `leash`; return the exit code."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # closed by a daemon: no file may get number 0, 1 or 2
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        if mode == "w":  # reconfigure fails on a stdin that pdb has read
            getattr(sys, name).reconfigure(errors="replace")  # for unprintable characters
    sys.path.append(os.getcwd())  # the user's modules come last
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    from conf.cli import cli  # a worker does not need it

    return cli()


if __name__ == "__main__":
    sys.exit(main())
