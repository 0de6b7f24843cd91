"""Two iterations of GRPO for a family of each kind of model, with LoRA and without it.

Also a script for two ranks, see `runs.on_two_ranks`: its folder has models/<kind>.
"""

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sharded
import torch
from invariance import Pairs
from omegaconf import OmegaConf

import train as script
from conf.compose import compose_checked, set_up
from envs.tasks.task import Response
from trainer.runtime import Runtime

KINDS = {
    "dense": "qwen3",
    "sliding window": "gemma3_text",
    "experts": "qwen3_moe",
    "hybrid": "qwen3_5_text",
    "wrapper": "gemma3",
}
TRAINED = {"all": (), "adapter": ("policy.lora.r=4", "optimizer.lr=1e-2")}
LAUNCHES = ("ddp", "fsdp2")
WORDS = (
    "experiment=grpo_tiny",
    "kl.estimator=full",
    *sharded.SMALL,
    *sharded.RESPONSES,
    "trainer.num_iterations=2",
    "checkpoint.every=2",
    "eval.num_samples=0",
)


class Letters(Pairs):
    """A model of random weights earns something: the more letters differ, the more."""

    def reward(self, row: dict, response: Response) -> float:
        return len(set(response.text)) / 10


@cache
def composed(trained: str, ranks: int, launch: str) -> dict[str, Any]:
    ways = (f"launch={launch}", f"launch.num_processes={ranks}")
    config = compose_checked([*WORDS, *TRAINED[trained], *ways])
    config["env"] |= {"task": {"_target_": "kinds.Letters"}, "rewards": {}}
    return config


def run(model: Path, folder: Path, trained: str, *, ranks: int = 1, launch: str = "ddp") -> None:
    """Train in this process, which is one of the ranks, and write the run into a folder."""
    set_up()
    torch.set_num_threads(1)
    config = OmegaConf.create(composed(trained, ranks, launch))
    config.policy.model = str(model)
    with patch("conf.build.make_observers", sharded.only_metrics):
        script.train(config, folder)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with Runtime(place) as both:
        for model, trained, launch in product((place / "models").iterdir(), TRAINED, LAUNCHES):
            there = place / f"{model.name}, {trained}, {launch}"
            run(model, there, trained, ranks=2, launch=launch)
        both.accelerator.wait_for_everyone()
        both.accelerator.end_training()
