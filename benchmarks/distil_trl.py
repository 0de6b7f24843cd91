"""The TRL side of benchmarks/distil.py: DistillationTrainer with the settings of a leash run.

    .venv-trl/bin/python -m benchmarks.distil_trl <run of leash> <model> <its own folder>

Model, teacher, prompts and their order are those of the run. Writes what yardstick_trl.py writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.yardstick_trl import SAME, check, main, parts_of_trainer, shared_settings
from conf.build import make_task
from policies.models.find import find_model

OTHERS = {
    "algorithm.objective._target_": "trainer.DistilObjective",
    "algorithm.group_size": 1,
    "algorithm.aggregation": "token_mean",
    "algorithm.epochs": 1,
    "algorithm.minibatches": 1,
    "kl.coeff": 1.0,
    "kl.controller": "constant",
    "kl.cap": None,
    "kl.reference_temperature": 1.0,
}
SHARED = {k: v for k, v in SAME.items() if k.split(".")[0] not in ("algorithm", "kl")}


def train(config: Mapping[str, Any], start: Path, folder: Path) -> None:
    """Train the model in the folder `start` with the configuration of a leash run."""
    from transformers import AutoModelForCausalLM
    from trl import DistillationConfig, DistillationTrainer

    check(config, SHARED | OTHERS)
    kl, steps = config["kl"], config["trainer"]["num_iterations"]
    args = DistillationConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=config["trainer"]["prompts_per_iteration"],
        max_steps=steps,
        beta={"full": 1.0, "forward": 0.0, "jsd": kl["jsd_weight"]}[kl["estimator"]],
        **shared_settings(config),
    )
    teacher = find_model(kl["reference"]).folder
    trainer = DistillationTrainer(
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        args=args,
        **parts_of_trainer(config, make_task(config["env"]), start, folder, steps=steps),
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))


if __name__ == "__main__":
    main(train)
