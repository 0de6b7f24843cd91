"""Two iterations of GRPO on a model, with LoRA and without it, and what they leave behind.

Also a script for two ranks, see `runs.on_two_ranks`: its folder has models/<kind>.
"""

import shutil
import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import train as script
from conf.compose import compose_checked, set_up
from envs.tasks.task import Response
from policies.load import load_policy
from policies.models.find import quiet
from support import sharded
from support.invariance import Pairs
from support.runs import do
from trainer.checkpoint import save_model
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
    "checkpoint.every=1",
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
    config["env"] |= {"task": {"_target_": "support.families.Letters"}, "rewards": {}}
    return config


def run(
    model: Path,
    folder: Path,
    trained: str,
    *,
    ranks: int = 1,
    launch: str = "ddp",
    resume: bool = False,
) -> None:
    """Train in this process, which is one of the ranks, and write the run into a folder."""
    set_up()
    torch.set_num_threads(1)
    config = OmegaConf.create(composed(trained, ranks, launch))
    config.policy.model = str(model)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    config.resume = str(folder) if resume else None
    with patch("conf.build.make_observers", sharded.only_metrics):
        script.train(config, folder)


@dataclass(frozen=True)
class Left:
    """What a run leaves behind, as tensors by name, and the names in files of published weights."""

    unbroken: dict[str, Tensor]  # the last checkpoint: weights and moments
    resumed: dict[str, Tensor]  # the same of a run that went on from the first one
    ended: dict[str, Tensor]  # the final model in transformers
    exported: dict[str, Tensor]  # the model that mode=export took from the run, in transformers
    start: set[str]
    published: list[set[str]]  # of the final model, the exported one, and one of a checkpoint


def leave(start: Path, folder: Path, trained: str) -> Left:
    """Train, go on from the first checkpoint in a copy of the run, and export its final model."""
    whole, cut, out = folder / "whole", folder / "cut", folder / "out"
    run(start, whole, trained)
    shutil.copytree(whole, cut)
    break_off(cut)
    run(start, cut, trained, resume=True)
    do(folder / "scratch", "mode=export", f"resume={cut}", f"output_dir={out}")
    last = [place / "checkpoints" / "iteration_000002" for place in (whole, cut)]
    model = "adapter" if trained == "adapter" else "model"
    kept = [saved(place / model) | saved(place) for place in last]
    ends = [cut / "model", out]
    models = [in_transformers(place) for place in ends]
    if trained == "all":
        ends.append(folder / "again")
        save_model(load_policy(str(last[0] / "model"), max_new_tokens=2), ends[-1])
    return Left(*kept, *models, set(saved(start)), [set(saved(place)) for place in ends])


def break_off(folder: Path) -> None:
    """Leave of a run what it had after its first iteration."""
    for later in ("checkpoints/iteration_000002", "model"):
        shutil.rmtree(folder / later)


def saved(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def in_transformers(folder: Path) -> dict[str, Tensor]:
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    return model.state_dict()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with Runtime(place) as both:
        for model, trained, launch in product((place / "models").iterdir(), TRAINED, LAUNCHES):
            there = place / f"{model.name}, {trained}, {launch}"
            run(model, there, trained, ranks=2, launch=launch)
            if both.is_main:
                break_off(there)
            both.accelerator.wait_for_everyone()
            run(model, there, trained, ranks=2, launch=launch, resume=True)
        both.accelerator.wait_for_everyone()
        both.accelerator.end_training()
