"""The TRL side of the ppo cases of benchmarks/iteration.py: PPOTrainer with leash's settings.

    <python with trl==1.12.0> -m benchmarks.ppo_trl <run of leash> <model> <its own folder>

1.12.0 is the last TRL with PPO. Prompts and their order are leash's; the reward is zero, without
a model. The critic is a second model of the same size, the reference a third. Writes log.jsonl,
a line per iteration.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from benchmarks.yardstick_trl import order, read_arguments
from conf.build import make_task


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a PPOConfig for a resolved configuration of leash."""
    policy, algorithm, optimizer = config["policy"], config["algorithm"], config["optimizer"]
    rows = config["trainer"]["prompts_per_iteration"] * algorithm["group_size"]
    names = {
        "epochs": "num_ppo_epochs", "minibatches": "num_mini_batches", "clip_low": "cliprange",
        "value_clip": "cliprange_value", "value_coeff": "vf_coef", "gamma": "gamma", "lmbda": "lam",
    }  # fmt: skip
    first, second = optimizer["betas"]
    return {
        **{name: algorithm[key] for key, name in names.items()},
        "seed": config["seed"],
        "per_device_train_batch_size": rows,  # no split
        "local_rollout_forward_batch_size": rows,
        "total_episodes": config["trainer"]["num_iterations"] * rows,
        "response_length": policy["max_new_tokens"],
        "temperature": policy["temperature"],
        "kl_coef": config["kl"]["coeff"],
        "kl_estimator": config["kl"]["estimator"],
        "learning_rate": optimizer["lr"],
        "adam_beta1": first,
        "adam_beta2": second,
        "adam_epsilon": optimizer["eps"],
        "weight_decay": optimizer["weight_decay"],
        "gradient_checkpointing": policy["gradient_checkpointing"],
        "bf16": policy["autocast"] == "bfloat16",
    }


def train(config: Mapping[str, Any], start: Path, folder: Path) -> None:
    """Train the model in the folder `start` with the configuration of a leash run."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers import AutoModelForSequenceClassification as Critic
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class Zero(torch.nn.Module):  # a reward model that costs nothing
        base_model_prefix = "body"
        tokens = 0

        def body(self, attention_mask: Any, **_: Any) -> SimpleNamespace:
            self.tokens = int(attention_mask.sum())  # of prompts and responses
            return SimpleNamespace(hidden_states=[torch.zeros(*attention_mask.shape, 1)])

        def score(self, hidden: Any) -> Any:
            return hidden

    class Log(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            line = {"seconds": now - self.begin, "tokens": zero.tokens, "reward": 0.0}
            self.begin = now
            with (folder / "log.jsonl").open("a") as out:  # closed, so that the line is written
                out.write(json.dumps(line) + "\n")

    rows, group = make_task(config["env"]).rows("train"), config["algorithm"]["group_size"]
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # the EOS is in prompts; TRL masks it
    prompts = [
        tokenizer.apply_chat_template(rows[i]["messages"], add_generation_prompt=True)["input_ids"]
        for i in order(config, len(rows))
        for _ in range(group)
    ]
    arguments = settings(config)
    if arguments["bf16"]:  # Transformers 5 no longer sets it, and TRL's Accelerator reads only it
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32) for _ in range(2)
    )
    policy.generation_config.pad_token_id = tokenizer.pad_token_id
    critic = Critic.from_pretrained(start, num_labels=1, dtype=torch.float32)
    zero, data = Zero(), Dataset.from_dict({"input_ids": prompts})
    args = PPOConfig(
        output_dir=str(folder / "trl"), lr_scheduler_type="constant", stop_token="eos",
        num_sample_generations=0, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, **arguments,
    )  # fmt: skip
    trainer = PPOTrainer(args, tokenizer, policy, reference, zero, data, critic, callbacks=[Log()])
    if arguments["bf16"]:  # TRL autocasts the update only
        policy.generate = torch.autocast("cpu", torch.bfloat16)(policy.generate)
        for model in (reference, critic.model):
            trainer.accelerator.prepare_model(model, evaluation_mode=True)
    trainer.dataloader = torch.utils.data.DataLoader(  # in the order of leash
        data, trainer.args.local_batch_size, collate_fn=trainer.data_collator
    )
    trainer.train()


def main() -> None:
    """Train and write a log."""
    args = read_arguments(__doc__)
    train(yaml.safe_load((args.run / "config.yaml").read_text()), args.start, args.folder)


if __name__ == "__main__":
    main()
