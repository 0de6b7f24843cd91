"""Runs of three iterations of which each rank holds a part of every weight, and what they equal.

Also a script for torchrun: two ranks train every case in a folder of its own, in one process group.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from contracts import make_policy
from invariance import Pairs
from omegaconf import OmegaConf
from runs import ROOT

import train as script
from conf.compose import compose_checked
from conf.start import set_up
from envs.tasks.task import Reply, Reward
from trainer.checkpoint import save_model

ALGORITHMS = sorted(path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml"))
EXPERIMENTS = {name: f"{name}_tiny" for name in ALGORITHMS} | {"reward": "rm_tiny"}
SILENT = ("sft", "minor_sft", "reward")
SMALL = (
    "allow_targets=true",
    "trainer.num_iterations=3",
    "trainer.prompts_per_iteration=4",
    "trainer.micro_batch_tokens=120",
    "policy.max_new_tokens=6",
    "optimizer.lr=1e-2",  # a step is then no sign of rounding where a gradient is nothing
    "optimizer.eps=1e-2",
    "eval.max_rows=3",
    "eval.num_samples=1",
    "eval.greedy=false",
    "checkpoint.every=3",
    "tracker=none",
)
REPLIES = ("algorithm.group_size=4", "kl.coeff=0.1")
STEPS = ("algorithm.minibatches=2", "algorithm.epochs=2")
MORE = {
    "ppo, head": ("ppo", "algorithm.critic.kind=head"),
    "grpo, exact KL": ("grpo", "kl.estimator=full"),
    "grpo, KL in the reward": ("grpo", "kl.where=reward", "kl.estimator=k1"),
    "grpo, LoRA": ("grpo", "policy.lora.r=4"),
    "grpo, LoRA, exact KL": ("grpo", "policy.lora.r=4", "kl.estimator=full"),
    "grpo, LoRA, refresh": ("grpo", "policy.lora.r=4", "kl.refresh_every=1", "kl.refresh_decay=0.5"),
    "ppo, LoRA": ("ppo", "policy.lora.r=4"),
    "grpo, refresh": ("grpo", "kl.refresh_every=1", "kl.refresh_decay=0.5"),
    "grpo, gradient checkpointing": ("grpo", "policy.gradient_checkpointing=true"),
    "grpo, exact KL, gradient checkpointing": ("grpo", "kl.estimator=full", "policy.gradient_checkpointing=true"),
    "grpo, top-p": ("grpo", "policy.top_p=0.9", "policy.top_k=60"),
    "grpo, target KL": ("grpo", "algorithm.target_kl=0.001", "algorithm.epochs=3"),
    "grpo, importance": ("grpo", "algorithm.after_rollout={importance: {_target_: trainer.ImportanceSampling}}"),
    "sft, packed": ("sft", "algorithm.packing=true"),
    "grpo, bfloat16": ("grpo", "policy.dtype=bfloat16"),
    "grpo, autocast": ("grpo", "policy.autocast=bfloat16"),
    "grpo, a rank without rows": ("grpo", "algorithm.scale_by_std=false"),
    "grpo, offload": ("grpo", "launch.offload=true"),
}
CASES = {name: (name,) for name in ALGORITHMS} | MORE
TASKS = {"grpo, a rank without rows": "sharded.OnlyOne"}


class OnlyOne(Pairs):
    """Replies to all prompts but one are not judged, so that one rank has none to learn from."""

    def reward(self, row: dict, reply: Reply) -> Reward:
        found = super().reward(row, reply)
        return replace(found, dropped=row["answer"] != "Write")


def make_model(folder: Path) -> Path:
    """Write the tiny model with weights by which tokens differ and replies end now and then."""
    save_model(make_policy(), folder)
    return folder


def words_of(name: str, *, ranks: int) -> list[str]:
    """Return the command line of a case."""
    algorithm, *words = CASES[name]
    replies = () if algorithm in SILENT else REPLIES
    replies += STEPS if algorithm in ("ppo", "cispo", "dapo", "gspo") else ()
    launch = [f"launch.num_processes={ranks}", *([os.environ.get("HOW", "launch=fsdp2")] if ranks > 1 else [])]
    words = [word for word in words if ranks > 1 or not word.startswith("launch.")]
    return [f"experiment={EXPERIMENTS[algorithm]}", *SMALL, *replies, *launch, *words]


def run(name: str, folder: Path, *, model: Path, ranks: int) -> Path:
    """Train a case in this process, which is one of the ranks."""
    set_up()
    torch.set_num_threads(1)
    config = compose_checked([*words_of(name, ranks=ranks), f"policy.model={model}"])
    task = {"_target_": TASKS.get(name, "invariance.Pairs")}
    config["env"] |= {"task": task, "rewards": {}}
    script.train(OmegaConf.create(config), folder)
    return folder


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        start = time.perf_counter()
        try:
            run(name, Path(sys.argv[1], name), model=Path(sys.argv[1], "model"), ranks=2)
        except Exception as error:
            if len(sys.argv) > 3 or True:
                import traceback
                traceback.print_exc()
                print("FAILED", name, error, flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    torch.distributed.destroy_process_group()
