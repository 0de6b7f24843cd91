"""The TRL side of benchmarks/yardstick.py: GRPOTrainer with the settings of a leash run.

    .venv-trl/bin/python -m benchmarks.yardstick_trl <run of leash> <model> <its own folder>

Runs in an environment with trl. Task, rows, their order and the reward are leash's; the training is
TRL's. Writes log.jsonl, a line per optimiser step, versions.json and model/. Settings without a
counterpart in TRL are refused.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from conf.build import make_task
from envs.rewards.compute import compute_rewards
from envs.tasks.task import Response, Row, Task
from trainer.optimizer import make_schedule
from trainer.sources import pick_rows

AGGREGATION = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
# Keys without an argument of TRL, and the one value that TRL implements.
SAME = {
    "algorithm.baseline": "group_mean",
    "algorithm.surrogate": "clip",
    "algorithm.credit": "trajectory",
    "algorithm.after_rollout": None,
    "algorithm.target_kl": None,
    "algorithm.entropy_target": None,
    "algorithm.clip_advantage": None,
    "algorithm.whiten": False,
    "kl.where": "loss",
    "kl.controller": "constant",
    "kl.refresh_every": 0,
    "kl.reference": None,
    "policy.lora.r": 0,
    "policy.stop": [],
    "policy.dtype": "float32",
    "policy.chat_template": None,
    "policy.system_prompt": None,
    "env.max_turns": 1,
    "env.transforms": {},
    "trainer.overlap": 0,
    "trainer.stop_at": None,
    "trainer.patience": None,
    "optimizer.weight_decay": 0.0,  # leash decays only matrices; no decay here
}
KL = {"k3": False, "k3_ratio": True}  # use_bias_correction_kl


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a GRPOConfig for a resolved configuration of leash.

    ValueError for a setting without a counterpart in TRL.
    """
    check(config, SAME)
    if (estimator := config["kl"]["estimator"]) not in KL:
        raise ValueError(f"expected kl.estimator in {sorted(KL)}, as in TRL, got {estimator}")
    algorithm, trainer = config["algorithm"], config["trainer"]
    responses = trainer["prompts_per_iteration"] * algorithm["group_size"]
    parts = algorithm["minibatches"]
    return {
        **shared_settings(config),
        "num_generations": algorithm["group_size"],
        "per_device_train_batch_size": responses // parts,  # the full minibatch: no split
        "steps_per_generation": parts,
        "num_iterations": algorithm["epochs"],
        "max_steps": trainer["num_iterations"] * algorithm["epochs"] * parts,
        "beta": config["kl"]["coeff"],
        "use_bias_correction_kl": KL[estimator],
        "epsilon": algorithm["clip_low"],
        "epsilon_high": algorithm["clip_high"],
        "delta": algorithm["dual_clip"],
        "importance_sampling_level": algorithm["ratio"],
        "loss_type": AGGREGATION[algorithm["aggregation"]],
        "scale_rewards": "group" if algorithm["scale_by_std"] else "none",
        "entropy_coef": algorithm["entropy_coeff"],
    }


def check(config: Mapping[str, Any], same: Mapping[str, Any]) -> None:
    """Raise ValueError unless the keys `same` have their values, which TRL implements too."""
    for key, value in same.items():
        if (got := _at(config, key)) != value:
            raise ValueError(f"expected {key}={value}, which TRL can do too, got {got}")
    if config["policy"]["autocast"] == "auto":
        raise ValueError("expected policy.autocast=bfloat16 or null, as TRL needs it, got auto")


def shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of every trainer of TRL that samples."""
    policy = config["policy"]
    return {
        "seed": config["seed"],
        "gradient_accumulation_steps": 1,
        "max_completion_length": policy["max_new_tokens"],
        "temperature": policy["temperature"],
        "top_p": policy["top_p"],
        "top_k": policy["top_k"],
        "min_p": policy["min_p"] or None,
        "learning_rate": config["optimizer"]["lr"],
        "max_grad_norm": config["optimizer"]["max_grad_norm"],
        "gradient_checkpointing": policy["gradient_checkpointing"],
        "bf16": policy["autocast"] == "bfloat16",
        "use_cpu": policy["device"] == "cpu" or not torch.cuda.is_available(),
        "shuffle_dataset": False,  # the rows come in leash's order
        "disable_dropout": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _at(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node[name]
    return node


def order(config: Mapping[str, Any], count: int) -> list[int]:
    """Return the indices of `count` rows in the order of leash's iterations."""
    size = config["trainer"]["prompts_per_iteration"]
    each = (
        pick_rows(i, size=count, count=size, seed=config["seed"])
        for i in range(config["trainer"]["num_iterations"])
    )
    return [place for chosen in each for place in chosen]


def reward_of(
    task: Task, rows: Sequence[Row], ends: Callable[[], Sequence[int]]
) -> Callable[..., list[float]]:
    """Return a task's reward as a reward function of TRL, which reads the column `row`.

    A response is complete if its last token is one of `ends()`.
    """

    def reward(
        prompts: Sequence[list], completions: Sequence[list], completion_ids: Sequence[list[int]],
        row: Sequence[int], **_: Any,
    ) -> list[float]:  # fmt: skip
        stops = set(ends())
        responses = [
            Response(
                completion[0]["content"], bool(ids) and ids[-1] in stops, [*prompt, *completion]
            )
            for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True)
        ]
        return [reward.total for reward in compute_rewards(task, [rows[i] for i in row], responses)]

    return reward


def parts_of_trainer(
    config: Mapping[str, Any], task: Task, start: Path, folder: Path, *, steps: int
) -> dict[str, Any]:
    """Return the parts of every trainer of TRL: model, tokenizer, rows, optimiser, log."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Log(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seconds = time.perf_counter() - self.begin

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with (folder / "log.jsonl").open("a") as out:  # closed, so that the line is written
                line = {"step": state.global_step, "seconds": self.seconds, **(logs or {})}
                out.write(json.dumps(line) + "\n")

    optim, rows = config["optimizer"], task.rows("train")
    chosen = order(config, len(rows))
    data = {"prompt": [rows[i]["messages"] for i in chosen], "row": chosen}
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    adamw = {name: optim[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=tuple(optim["betas"]), fused=True, **adamw
    )
    # The warm-up of transformers starts with a step of 0.
    rate = make_schedule(optim["schedule"], lr=1.0, warmup=optim["warmup"], total=steps)
    return {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(start, padding_side="left"),
        "train_dataset": Dataset.from_dict(data),
        "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)),
        "callbacks": [Log()],
    }


def train(config: Mapping[str, Any], start: Path, folder: Path) -> None:
    """Train the model in the folder `start` with the configuration of a leash run."""
    from trl import GRPOConfig, GRPOTrainer

    task, arguments = make_task(config["env"]), settings(config)
    parts = parts_of_trainer(config, task, start, folder, steps=arguments["max_steps"])
    reward = reward_of(task, task.rows("train"), lambda: trainer.eos_token_ids)
    args = GRPOConfig(output_dir=str(folder / "trl"), **arguments)
    trainer = GRPOTrainer(reward_funcs=reward, args=args, **parts)
    trainer.train()
    trainer.save_model(str(folder / "model"))


def read_arguments(about: str | None) -> argparse.Namespace:
    """Return the run of leash, the model and the folder, which then exists."""
    parser = argparse.ArgumentParser(description=about)
    for name in ("run", "start", "folder"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


def main(train: Callable[..., None]) -> None:
    """Train and write a log."""
    args = read_arguments(__doc__)
    (args.folder / "log.jsonl").unlink(missing_ok=True)
    packages = ("trl", "transformers", "torch", "accelerate", "datasets")
    (args.folder / "versions.json").write_text(json.dumps({p: version(p) for p in packages}))
    config = yaml.safe_load((args.run / "config.yaml").read_text())
    train(config, args.start, args.folder)


if __name__ == "__main__":
    main(train)
