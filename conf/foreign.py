"""What keys of other libraries are called here: docs/coming_from_trl.md and its like say more."""

HERE = {
    "trl": {
        "num_generations": "algorithm.group_size",
        "max_completion_length": "policy.max_new_tokens",
        "response_length": "policy.max_new_tokens",
        "generation_batch_size": "trainer.prompts_per_iteration",
        "per_device_train_batch_size": "trainer.micro_batch_tokens",
        "gradient_accumulation_steps": "algorithm.minibatches",
        "max_steps": "trainer.num_iterations",
        "num_train_epochs": "trainer.num_iterations",
        "beta": "kl.coeff",
        "kl_coef": "kl.coeff",
        "kl_estimator": "kl.estimator",
        "ref_model_sync_steps": "kl.refresh_every",
        "epsilon": "algorithm.clip_low",
        "epsilon_high": "algorithm.clip_high",
        "cliprange": "algorithm.clip_low",
        "cliprange_value": "algorithm.value_clip",
        "vf_coef": "algorithm.value_coeff",
        "lam": "algorithm.lmbda",
        "delta": "algorithm.dual_clip",
        "loss_type": "algorithm.aggregation",
        "scale_rewards": "algorithm.scale_by_std",
        "importance_sampling_level": "algorithm.ratio",
        "num_ppo_epochs": "algorithm.epochs",
        "num_mini_batches": "algorithm.minibatches",
        "entropy_coef": "algorithm.entropy_coeff",
        "reward_funcs": "env.rewards",
        "reward_weights": "env.rewards",
        "model_name_or_path": "policy.model",
        "dataset_name": "env.dataset",
        "learning_rate": "optimizer.lr",
        "lr_scheduler_type": "optimizer.schedule",
        "warmup_steps": "optimizer.warmup",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "bf16": "policy.autocast",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep_last",
        "resume_from_checkpoint": "resume",
        "eval_steps": "eval.every",
        "report_to": "tracker",
    },
    "verl": {
        "rollout.n": "algorithm.group_size",
        "train_batch_size": "trainer.prompts_per_iteration",
        "max_prompt_length": "policy.max_prompt_tokens",
        "max_response_length": "policy.max_new_tokens",
        "train_files": "env.dataset",
        "val_files": "env.eval_dataset",
        "total_epochs": "trainer.num_iterations",
        "total_training_steps": "trainer.num_iterations",
        "adv_estimator": "algorithm",
        "ppo_epochs": "algorithm.epochs",
        "ppo_mini_batch_size": "algorithm.minibatches",
        "clip_ratio_low": "algorithm.clip_low",
        "clip_ratio_high": "algorithm.clip_high",
        "clip_ratio_c": "algorithm.dual_clip",
        "loss_agg_mode": "algorithm.aggregation",
        "kl_loss_coef": "kl.coeff",
        "kl_loss_type": "kl.estimator",
        "use_kl_in_reward": "kl.where",
        "kl_penalty": "kl.estimator",
        "lora_rank": "policy.lora.r",
        "grad_clip": "optimizer.max_grad_norm",
        "n_gpus_per_node": "launch.num_processes",
        "default_local_dir": "output_dir",
        "save_freq": "checkpoint.every",
        "test_freq": "eval.every",
        "logger": "tracker",
        # OpenRLHF's, on the same page
        "pretrain": "policy.model",
        "prompt_data": "env.dataset",
        "n_samples_per_prompt": "algorithm.group_size",
        "rollout_batch_size": "trainer.prompts_per_iteration",
        "generate_max_len": "policy.max_new_tokens",
        "prompt_max_len": "policy.max_prompt_tokens",
        "actor_learning_rate": "optimizer.lr",
        "init_kl_coef": "kl.coeff",
        "eps_clip": "algorithm.clip_low",
    },
}
UNITS = {  # where the number is another one too
    "trainer.micro_batch_tokens": ", in padded tokens",
    "trainer.prompts_per_iteration": ", in prompts of all devices",
    "trainer.num_iterations": ", in batches of prompts",
}


def known_elsewhere(key: str) -> str:
    """Return a hint at the key that takes the place of another library's; "" if none is known.

    >>> known_elsewhere("--learning-rate")
    '; learning_rate is optimizer.lr here (docs/coming_from_trl.md)'
    >>> known_elsewhere("actor_rollout_ref.rollout.n"), known_elsewhere("kl.ceoff")
    ('; rollout.n is algorithm.group_size here (docs/coming_from_verl.md)', '')
    """
    parts = key.lstrip("-+").replace("-", "_").split(".")
    for page, names in HERE.items():
        for name in (parts[-1], ".".join(parts[-2:])):
            if name in names:
                where = names[name]
                unit = UNITS.get(where, "")
                return f"; {name} is {where} here{unit} (docs/coming_from_{page}.md)"
    return ""
