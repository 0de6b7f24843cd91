"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

Also preflight=true, and resume=<run folder> with mode=chat, evaluate or export.
The parent checks the configuration and starts a fresh process per rank; it imports no torch.
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import build as parts
from conf import start
from conf.command_line import help_text, spell_out
from conf.compose import compose_experiment
from trainer.runs.failures import complain, last_words, say
from trainer.runs.launch import agree, prepare_joined
from trainer.runs.launch import start as launch
from trainer.runs.sweep_loop import run_sweep

OURS: dict[str, Any] = {"script": Path(__file__).resolve(), "compose": compose_experiment}


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
        settings = parts.keys_for(trainer.make_optimizer, opt)
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
            advantage=parts.build(algorithm.advantage, algorithm, cfg.trainer, **made),
            update=trainer.Update(
                scorer,
                optimizer,
                parts.build(algorithm.objective, algorithm, **made),
                runtime,
                lr=trainer.make_schedule(opt.schedule, lr=opt.lr, warmup=opt.warmup, total=steps),
                **parts.keys_for(trainer.Update, cfg.trainer, algorithm),
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
def show(cfg: DictConfig) -> None:
    """Let Hydra show what a flag asks for: --cfg job ..."""


def run(job: start.Job) -> None:
    """Train what is left of a job."""
    say(job.done) if job.done else launch(job.config, start.begin(job), **OURS)


def join(words: list[str], ranks: int) -> int:
    """Be one rank of `torchrun train.py` or `accelerate launch train.py`; return the exit code."""
    config = start.compose_joined(words, ranks=ranks)
    folder = agree(lambda: prepare_joined(config, start.run_folder(words), **OURS), config)
    return worker(str(folder / "config.yaml"), str(folder))


def worker(config: str, folder: str) -> int:
    """Train in this process; return its exit code."""
    from trainer import Stopped

    start.set_up()
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
    if {"--help", "-h"} & {*words}:
        print(help_text())
        return 0
    start.set_up()
    try:
        if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            return join(words, ranks)
        if any(word.startswith(("mode=", "preflight=")) for word in words):
            from conf.preflight_and_modes import asked
            from trainer.runs.aside import run_aside

            if config := asked(words):
                return run_aside(config, **OURS)
        wanted = start.read_command(words)
        if isinstance(wanted, start.Sweep):
            return run_sweep(wanted, run)
        run(wanted) if wanted else show()
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            complain(error)
        return 2
    except KeyboardInterrupt:  # outside of a run
        say("stopped before it began; nothing is saved")
        return 130
    return 0


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a reply may hold what this terminal cannot show
    sys.argv[1:] = spell_out(sys.argv[1:])  # Hydra reads them too
    sys.exit(cli(sys.argv[1:]))
