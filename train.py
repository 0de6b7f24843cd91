"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

The parent composes and checks the configuration, then starts the run in a fresh process per rank
(`--worker`), where `train` puts the parts together. Nothing here imports torch before that.
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from conf.compose import (
    compose_checked,
    expand,
    experiment_of,
    load_for_resume,
    nothing_left,
    set_up,
    unique_folder,
)
from trainer.launch import agree, explain_failure, resolve_experiment, run
from trainer.sweep import write_sweep

HERE = Path(__file__).resolve()
FAILED: list[str] = []  # jobs of this sweep that ended with an error
SWEEPS: list[Path] = []  # its folder, once a job has started


def train(cfg: DictConfig, folder: Path) -> float:
    """Put the parts of a run together and train; return the metric that a sweep compares."""
    import policies
    import trainer
    from envs import ChatEnv
    from envs.transforms import Compose, RetrieveKL

    algorithm, size = cfg.algorithm, cfg.trainer.prompts_per_iteration
    steps = cfg.trainer.num_iterations * algorithm.epochs * algorithm.minibatches
    with trainer.Runtime(folder, seed=cfg.seed, device=cfg.policy.device) as runtime:
        policy = build(cfg.policy, device=str(runtime.device))
        runtime.write_status(model=policy.found.about())
        task, kl = build(cfg.env.task), trainer.ConstantKLController(kl_coef=cfg.kl.coeff)
        env = ChatEnv(
            task,
            group_size=algorithm.group_size,
            max_turns=cfg.env.max_turns,
            system_prompt=policy.system_prompt,
        )
        reference = policies.load_reference(policy, cfg.kl.reference) if cfg.kl.measure else None
        optimizer = trainer.make_optimizer(policy.model, **cfg.optimizer)
        scorer, optimizer = runtime.accelerator.prepare(policy.scorer, optimizer)
        parts: dict[str, Any] = {"task": task, "env": env, "policy": policy, "runtime": runtime}
        loop = trainer.Trainer(
            runtime=runtime,
            policy=policy,
            source=build(algorithm.source, size=size, **parts),
            retrieve_kl=RetrieveKL(ref_model=reference, add_to_reward=False)
            if reference
            else Compose(),
            advantage=build(algorithm.advantage, kl=kl),
            update=trainer.Update(
                scorer,
                optimizer,
                build(algorithm.objective, kl=kl),
                runtime,
                lr=trainer.make_schedule(**cfg.optimizer, total=steps),
                epochs=algorithm.epochs,
                minibatches=algorithm.minibatches,
                micro_batch_tokens=cfg.trainer.micro_batch_tokens,
                aggregation=algorithm.aggregation,
                max_tokens=cfg.policy.max_new_tokens * cfg.env.max_turns,
                max_grad_norm=cfg.optimizer.max_grad_norm,
                reference=reference.scorer if reference else None,
            ),
            evaluate=trainer.Evaluate(**parts, **cfg.eval),
            kl=kl,
            checkpoints=trainer.Checkpoints(runtime, policy, optimizer, **cfg.checkpoint),
            tracker=make_tracker(cfg, folder) if runtime.is_main else None,
            display=trainer.Display(
                cfg.trainer.num_iterations, title=folder.parent.name, quiet=not runtime.is_main
            ),
            num_iterations=cfg.trainer.num_iterations,
        )
        if cfg.resume:
            loop.resume()
        return loop.run()


def build(node: DictConfig, **parts: Any) -> Any:
    """Make what a node's _target_ names; a fault in it is raised as it is, not Hydra's wrapping."""
    try:
        return instantiate(node, **parts)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def make_tracker(cfg: DictConfig, folder: Path) -> Any:
    """Return the tracker, told what the run is called and which sweep it belongs to."""
    sweep = folder.parent if "=" in folder.name else None
    return build(cfg.tracker, _partial_=True)(
        folder=str(folder),
        config=OmegaConf.to_container(cfg),
        name=folder.name,
        group=str(sweep) if sweep else None,
        tags=[cfg.policy.model.rpartition("/")[2], cfg.algorithm.objective._target_],
        resume=cfg.resume is not None,
    )


def prepare(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the warm-up that a configuration asks for, write config.yaml and return it."""

    def warm_up(name: str) -> dict[str, Any]:
        return compose_checked([f"experiment={name}"])

    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_experiment(config["policy"]["model"], warm_up, start)
    config = {**config, "policy": {**config["policy"], "model": model}}
    OmegaConf.save(config, folder / "config.yaml")
    return config


def start(config: dict[str, Any], folder: Path) -> float:
    """Run one job in fresh processes, its warm-up first; return the metric of a sweep."""

    config = prepare(config, folder)
    launch = config["launch"]
    status = run(
        HERE,
        folder / "config.yaml",
        folder,
        ranks=launch["num_processes"],
        threads=launch["threads"],
    )
    return float(status["objective"])


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run one job in Hydra's folder; a failed job of a sweep does not stop the others."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        SWEEPS[:] = [Path(HydraConfig.get().sweep.dir)]
    try:
        return start(OmegaConf.to_container(cfg, resolve=True), folder)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        FAILED.append(folder.name)
        return float("nan")


def join(words: list[str], ranks: int) -> int:
    """Be one rank of `torchrun train.py` or `accelerate launch train.py`; return the exit code."""
    if any(word.startswith("-") for word in words):
        raise ValueError("no flags or sweeps under torchrun; use python train.py -m")
    if any(word.startswith("resume=") for word in words):
        raise ValueError("resume by python train.py resume=<run folder> launch.num_processes=N")
    config = compose_checked([*words, f"launch.num_processes={ranks}"])

    def make() -> tuple[str, dict[str, Any]]:
        experiment = experiment_of(words)
        folder = config["output_dir"] or unique_folder(f"outputs/{experiment}")
        return folder, prepare(config, Path(folder))

    folder, config = agree(make, device=config["policy"]["device"])
    code = finish(OmegaConf.create(config), Path(folder))
    if code == 1:
        print(f"error: {explain_failure(Path(folder))}", file=sys.stderr)
    return code


def worker(config: str, folder: str) -> int:
    """Train in this process; return its exit code."""
    set_up()
    return finish(OmegaConf.load(config), Path(folder))


def finish(cfg: Any, folder: Path) -> int:
    """Train, and say in the exit code how it ended."""
    from trainer import Stopped

    try:
        train(cfg, folder)
    except Stopped:
        return 143
    except Exception:  # it is in errors/rank<k>.txt, and the parent says so in one line
        return 1
    return 0


def cli(words: list[str]) -> int:
    """Check everything that can be checked, then run; return the exit code."""
    if words[:1] == ["--worker"]:
        return worker(*words[1:])
    set_up()
    flags = {word for word in words if word.startswith("-")}
    sweep = bool(flags & {"-m", "--multirun"})
    overrides = [word for word in words if not word.startswith("-")]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        if ranks > 1:
            return join(words, ranks)
        resume = [word for word in overrides if word.startswith("resume=")]
        if resume:
            folder = resume[0].removeprefix("resume=")
            others = [word for word in overrides if word not in resume]
            config = load_for_resume(folder, others)
            done = nothing_left(Path(folder), config)
            print(done) if done else start(config, Path(folder))
            return 0
        if not flags - {"-m", "--multirun"}:
            for job in expand(overrides) if sweep else [overrides]:
                if compose_checked(job)["output_dir"] and sweep:
                    raise ValueError("output_dir is one folder; a sweep takes hydra.sweep.dir=")
        main()
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        for folder in SWEEPS:
            print(f"sweep    {write_sweep(folder)}")
    for name in FAILED if SWEEPS else ():
        print(f"failed   {name}", file=sys.stderr)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
