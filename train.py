"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

Also preflight=true, and resume=<run folder> with mode=chat, evaluate or export (conf/modes.py).
The parent checks the configuration and starts a fresh process per rank; it imports no torch.
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf import compose, continued, defaults, modes, parts
from trainer.reports.sweep import LiveSweep
from trainer.runs.failures import complain, last_words, say
from trainer.runs.launch import agree, prepare_joined, start

OURS: dict[str, Any] = {"script": Path(__file__).resolve(), "compose": compose.compose_experiment}
FAILED: list[str] = []  # jobs of this sweep that ended with an error
SWEEPS: list[LiveSweep] = []  # this sweep, once a job has started


def train(cfg: DictConfig, folder: Path) -> float:
    """Put the parts of a run together and train, or what `mode` says; return its metric."""
    import policies
    import trainer
    from trainer.modes import run_mode
    from trainer.runs.versions import about_machine

    algorithm, total, opt = cfg.algorithm, cfg.trainer.num_iterations, cfg.optimizer
    steps = total * algorithm.epochs * algorithm.minibatches
    with trainer.Runtime(folder, seed=cfg.seed, device=cfg.policy.device) as runtime:
        runtime.write_status(machine=about_machine(runtime.device, runtime.ranks))
        task = parts.make_task(cfg.env)  # data that is not there is told before a model is loaded
        policy = parts.build(cfg.policy, device=str(runtime.device))
        runtime.write_status(model=policy.found.about())
        leash = parts.make_leash(cfg)
        reference = parts.make_reference(cfg, policy)
        if critic := algorithm.get("critic"):
            policy.scorer.critic = policies.Critic(policy.scorer, **critic)
        settings = parts.taken(trainer.make_optimizer, opt)
        optimizer = trainer.make_optimizer(policy.scorer, **settings)
        scorer, optimizer = runtime.accelerator.prepare(policy.scorer, optimizer)
        generator = policy  # the policy itself samples
        made = {"task": task, "policy": policy, "generator": generator, "runtime": runtime}
        made |= {"env": parts.make_env(cfg, task, policy), "leash": leash}
        loop = trainer.Trainer(
            runtime=runtime,
            policy=policy,
            generator=generator,
            source=parts.make_source(cfg, **made),
            retrieve_kl=reference,
            advantage=parts.build(algorithm.advantage, **made),
            update=trainer.Update(
                scorer,
                optimizer,
                parts.build(algorithm.objective, **made),
                runtime,
                lr=trainer.make_schedule(opt.schedule, lr=opt.lr, warmup=opt.warmup, total=steps),
                **parts.taken(trainer.Update, cfg.trainer, algorithm),
                max_tokens=cfg.policy.max_new_tokens * cfg.env.max_turns,
                max_grad_norm=opt.max_grad_norm,
                reference=reference.scorer,
            ),
            evaluate=trainer.Evaluate(
                task=task, env=made["env"], generator=generator, runtime=runtime, **cfg.eval
            ),
            leash=leash,
            checkpoints=trainer.Checkpoints(
                runtime, policy, optimizer, reference=reference, **cfg.checkpoint
            ),
            num_iterations=total,
            observers=parts.make_observers(cfg, runtime),
        )
        return run_mode(loop, OmegaConf.to_container(cfg, resolve=True))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run one job in Hydra's folder; a failed job of a sweep does not stop the others."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = continued.find(compose.settle(cfg), folder)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            SWEEPS[:] = SWEEPS or [continued.live(sys.argv[1:], HydraConfig.get().sweep.dir)]
            SWEEPS[0].begin(HydraConfig.get().job.num, run.done)
        return float("nan") if run.done else start(run.config, defaults.keep(folder), **OURS)
    except (RuntimeError, ValueError, OSError) as error:
        complain(error)
        FAILED.append(folder.name)
        return float("nan")


def join(words: list[str], ranks: int) -> int:
    """Be one rank of `torchrun train.py` or `accelerate launch train.py`; return the exit code."""
    config = compose.compose_joined(words, ranks=ranks)
    folder = agree(lambda: prepare_joined(config, compose.run_folder(words), **OURS), config)
    return worker(str(folder / "config.yaml"), str(folder))


def worker(config: str, folder: str) -> int:
    """Train in this process; return its exit code."""
    from trainer import Stopped

    compose.set_up()
    try:
        train(OmegaConf.load(config), Path(folder))
    except Stopped:
        return 143
    except Exception as error:  # the parent says it in one line
        last_words(Path(folder), error)
        return 1
    return 0


def cli(words: list[str]) -> int:
    """Check everything that can be checked, then run; return the exit code."""
    if words[:1] == ["--worker"]:
        return worker(*words[1:])
    compose.set_up()
    try:
        if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            return join(words, ranks)
        if beside := modes.asked(words):
            return modes.carry_out(beside, **OURS)
        if (resumed := continued.check(words)) is None:
            main()
        elif resumed.done:
            say(resumed.done)
        else:
            start(resumed.config, resumed.folder, **OURS)
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            complain(error)
        return 2
    except KeyboardInterrupt:  # outside of a run
        say("stopped between two jobs" if SWEEPS else "stopped before it began; nothing is saved")
        return 130
    finally:
        for sweep in SWEEPS:
            sweep.end()
    for name in FAILED if SWEEPS else ():
        print(f"failed   {name}", file=sys.stderr)
    return 1 if FAILED else 0


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a reply may hold what this terminal cannot show
    sys.argv[1:] = compose.spell_out(sys.argv[1:])  # Hydra reads them too
    sys.exit(cli(sys.argv[1:]))
