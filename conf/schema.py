"""What a configuration may hold: names and types. Torch-free; Hydra checks every file against it.

Comments and units stand in the YAML files. What goes together with what is in conf/checks.py.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf


@dataclass
class LoraConfig:
    r: int = MISSING
    alpha: float = MISSING
    target_modules: list[str] | None = None
    dropout: float = MISSING


@dataclass
class PolicyConfig:
    _target_: str = MISSING
    model: str = MISSING
    source: str = MISSING
    dtype: str = MISSING
    device: str | None = None
    autocast: str | None = None
    temperature: float = MISSING
    max_new_tokens: int = MISSING
    max_prompt_tokens: int | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    stop: list[str] = field(default_factory=list)
    lora: LoraConfig = field(default_factory=LoraConfig)
    gradient_checkpointing: bool = MISSING


@dataclass
class ColumnsConfig:
    messages: str | None = None
    question: str | None = None
    answer: str | None = None


@dataclass
class EnvConfig:
    max_turns: int = MISSING
    dataset: str | None = None
    eval_dataset: str | None = None
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    split: str = MISSING
    eval_split: str | None = None
    rewards: dict[str, Any] = field(default_factory=dict)
    task_weight: float = 1.0
    transforms: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = MISSING


@dataclass
class KLConfig:
    coeff: float = MISSING
    estimator: str = MISSING
    where: str = MISSING
    reference: str | None = None
    measure: bool = MISSING
    allow_biased: bool = MISSING
    controller: str = MISSING
    target: float | None = None
    horizon: float = MISSING
    end: float | None = None
    refresh_every: int = MISSING
    refresh_decay: float = MISSING


@dataclass
class AlgorithmConfig:
    group_size: int = MISSING
    aggregation: str = MISSING
    epochs: int = MISSING
    minibatches: int = MISSING
    source: dict[str, Any] = MISSING
    advantage: dict[str, Any] = MISSING
    objective: dict[str, Any] = MISSING
    # Of algorithms that sample replies; their files explain them.
    target_kl: float | None = None
    entropy_coeff: float = 0.0
    entropy_target: float | None = None
    after_rollout: Any = None  # a typed dict that is null would not take {...} on the command line


@dataclass
class GRPOConfig(AlgorithmConfig):
    baseline: str = MISSING
    scale_by_std: bool = MISSING
    whiten: bool = MISSING
    clip_advantage: float | None = None
    credit: str = MISSING
    surrogate: str = MISSING
    ratio: str = MISSING
    clip_low: float = MISSING
    clip_high: float = MISSING
    dual_clip: float | None = None


@dataclass
class CriticConfig:
    kind: str = MISSING
    detach: bool = MISSING
    lr_scale: float = MISSING
    warmup: int = MISSING


@dataclass
class PPOConfig(AlgorithmConfig):
    gamma: float = MISSING
    lmbda: float = MISSING
    whiten: bool = MISSING
    clip_advantage: float | None = None
    clip_low: float = MISSING
    clip_high: float = MISSING
    dual_clip: float | None = None
    value_coeff: float = MISSING
    value_clip: float | None = None
    critic: CriticConfig = field(default_factory=CriticConfig)


@dataclass
class SFTConfig(AlgorithmConfig):
    mask: str = MISSING
    packing: bool = MISSING


@dataclass
class MinorSFTConfig(SFTConfig):
    beta: float = MISSING


@dataclass
class OptimizerConfig:
    lr: float = MISSING
    weight_decay: float = MISSING
    betas: list[float] = MISSING
    eps: float = MISSING
    max_grad_norm: float = MISSING
    schedule: str = MISSING
    warmup: int = MISSING


@dataclass
class TrainerConfig:
    num_iterations: int = MISSING
    prompts_per_iteration: int = MISSING
    micro_batch_tokens: int = MISSING
    show_every: int = MISSING


@dataclass
class EvalConfig:
    every: int = MISSING
    num_samples: int = MISSING
    temperature: float = MISSING
    greedy: bool = MISSING
    max_rows: int | None = None
    prompts_per_batch: int = MISSING


@dataclass
class CheckpointConfig:
    every: int = MISSING
    keep_last: int = MISSING
    keep_best: bool = MISSING


@dataclass
class TrackerConfig:
    _target_: str = MISSING
    keep_transcripts: bool = MISSING


@dataclass
class WandbConfig(TrackerConfig):
    project: str = MISSING
    entity: str | None = None
    mode: str | None = None
    init_timeout: float = MISSING
    finish_timeout: float = MISSING
    table_every: int = MISSING


@dataclass
class TensorboardConfig(TrackerConfig):
    flush_s: int = MISSING


@dataclass
class TrackioConfig(TrackerConfig):
    project: str = MISSING


@dataclass
class LaunchConfig:
    num_processes: int = MISSING
    threads: int | None = None


@dataclass
class Config:
    policy: PolicyConfig = MISSING
    env: EnvConfig = MISSING
    kl: KLConfig = MISSING
    algorithm: AlgorithmConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    trainer: TrainerConfig = MISSING
    eval: EvalConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    tracker: TrackerConfig = MISSING
    launch: LaunchConfig = MISSING
    seed: int = MISSING
    mode: str = MISSING
    preflight: bool = MISSING
    resume: str | None = None
    output_dir: str | None = None
    allow_targets: bool = MISSING


def _open_task(node: type) -> DictConfig:
    """Return the schema with parts that take any keys; conf/task.py checks them."""
    out = OmegaConf.structured(node)
    out.task = {}
    for key in ("task", "rewards", "transforms"):
        OmegaConf.set_struct(out[key], False)
    return out


def register() -> None:
    """Make the schema known to Hydra: the root, and one entry for each group."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    groups = {
        "policy": {"schema": PolicyConfig},
        "env": {"schema": _open_task(EnvConfig)},
        "kl": {"schema": KLConfig},
        "algorithm": {
            "grpo_schema": GRPOConfig,
            "ppo_schema": PPOConfig,
            "sft_schema": SFTConfig,
            "minor_sft_schema": MinorSFTConfig,
            "reward_schema": AlgorithmConfig,
        },
        "optimizer": {"schema": OptimizerConfig},
        "trainer": {"schema": TrainerConfig},
        "eval": {"schema": EvalConfig},
        "checkpoint": {"schema": CheckpointConfig},
        "tracker": {
            "schema": TrackerConfig,
            "wandb_schema": WandbConfig,
            "tensorboard_schema": TensorboardConfig,
            "trackio_schema": TrackioConfig,
        },
        "launch": {"schema": LaunchConfig},
    }
    for group, nodes in groups.items():
        for name, node in nodes.items():
            store.store(group=group, name=name, node=node)
