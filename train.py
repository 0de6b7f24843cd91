"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

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

from conf import compose
from conf.parts import build, make_reference, make_task, make_tracker
from trainer.failures import complain, last_words
from trainer.launch import agree, prepare_joined, start
from trainer.sweep import job_line, write_sweep

OURS: dict[str, Any] = {"script": Path(__file__).resolve(), "compose": compose.compose_experiment}
FAILED: list[str] = []  # jobs of this sweep that ended with an error
SWEEPS: list[Path] = []  # its folder, once a job has started


def train(cfg: DictConfig, folder: Path) -> float:
    """Put the parts of a run together and train; return the metric that a sweep compares."""
    import trainer
    from envs import ChatEnv
    from envs.transforms import Compose, RetrieveKL

    algorithm, total, opt = cfg.algorithm, cfg.trainer.num_iterations, cfg.optimizer
    steps = total * algorithm.epochs * algorithm.minibatches
    with trainer.Runtime(folder, seed=cfg.seed, device=cfg.policy.device) as runtime:
        policy = build(cfg.policy, device=str(runtime.device))
        runtime.write_status(model=policy.found.about())
        task, kl = make_task(cfg.env), trainer.ConstantKLController(kl_coef=cfg.kl.coeff)
        env = ChatEnv(
            task,
            group_size=algorithm.group_size,
            max_turns=cfg.env.max_turns,
            system_prompt=policy.system_prompt,
        )
        reference = make_reference(cfg, policy)
        retrieve = RetrieveKL(ref_model=reference, add_to_reward=False) if reference else Compose()
        parts: dict[str, Any] = {"task": task, "env": env, "policy": policy, "runtime": runtime}
        advantage = build(algorithm.advantage, kl=kl, **parts)  # may bring a critic to optimise
        adam = OmegaConf.masked_copy(opt, ["lr", "weight_decay", "betas", "eps"])
        optimizer = trainer.make_optimizer(policy.scorer, **adam)
        scorer, optimizer = runtime.accelerator.prepare(policy.scorer, optimizer)
        loop = trainer.Trainer(
            runtime=runtime,
            policy=policy,
            source=build(algorithm.source, size=cfg.trainer.prompts_per_iteration, **parts),
            retrieve_kl=retrieve,
            advantage=advantage,
            update=trainer.Update(
                scorer,
                optimizer,
                build(algorithm.objective, kl=kl),
                runtime,
                lr=trainer.make_schedule(opt.schedule, lr=opt.lr, warmup=opt.warmup, total=steps),
                epochs=algorithm.epochs,
                minibatches=algorithm.minibatches,
                micro_batch_tokens=cfg.trainer.micro_batch_tokens,
                aggregation=algorithm.aggregation,
                max_tokens=cfg.policy.max_new_tokens * cfg.env.max_turns,
                max_grad_norm=opt.max_grad_norm,
                reference=reference.scorer if reference else None,
            ),
            evaluate=trainer.Evaluate(**parts, **cfg.eval),
            kl=kl,
            checkpoints=trainer.Checkpoints(runtime, policy, optimizer, **cfg.checkpoint),
            tracker=make_tracker(cfg, folder) if runtime.is_main else None,
            display=trainer.show_run(folder, total, quiet=not runtime.is_main),
            num_iterations=total,
            reference=reference.found.sha256 if reference else "",
        )
        return loop.run(resume=cfg.resume is not None)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run one job in Hydra's folder; a failed job of a sweep does not stop the others."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        SWEEPS[:] = [Path(HydraConfig.get().sweep.dir)]
        jobs = compose.expand([word for word in sys.argv[1:] if not word.startswith("-")])
        print(job_line(HydraConfig.get().job.num, jobs), flush=True)
    try:
        return start(compose.settle(cfg), folder, **OURS)
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
        if (resumed := compose.check_words(words)) is None:
            main()
        elif resumed.done:
            print(resumed.done)
        else:
            start(resumed.config, resumed.folder, **OURS)
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            complain(error)
        return 2
    except KeyboardInterrupt:  # outside of a run
        return 130
    finally:
        for folder in SWEEPS:
            print(f"sweep    {write_sweep(folder)}")
    for name in FAILED if SWEEPS else ():
        print(f"failed   {name}", file=sys.stderr)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
