"""Configure preflight=true and all modes except train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from conf.compose import checked, compose_checked, compose_experiment
from conf.resume import read_saved, resumed
from trainer.runs.discover import has_weights, missing_weights
from trainer.runs.experiment_models import without_training
from trainer.runs.folders import unique_folder

QUIET_TRACKER = {"_target_": "trainer.JsonlTracker", "keep_transcripts": False}
SHARED_KEYS = (
    "policy.max_new_tokens",
    "policy.system_prompt",
    "kl.reference",
    "seed",
    "policy.device",
)
OF_EVAL = ("num_samples", "temperature", "greedy", "max_rows", "prompts_per_batch")
OF_EVAL += ("forward_kl", "retain")
EVAL_KEYS = tuple(f"eval.{name}" for name in OF_EVAL)
ENGINE = ("policy.device", "policy.engine", "output_dir", "launch")
ALLOWED_OVERRIDES = {  # overrides allowed in addition to resume=, by mode
    "chat": ("policy.temperature", *SHARED_KEYS, "launch.threads"),
    "evaluate": (*EVAL_KEYS, *SHARED_KEYS, "policy.max_prompt_tokens", *ENGINE[1:], "env"),
    "export": ("output_dir", "hub", "policy.device"),
    "frontier": ("eval.num_samples", *ENGINE),
}


def configure(cfg: DictConfig, words: Sequence[str]) -> dict[str, Any]:
    """Return the checked configuration of a mode or a preflight."""
    mode = cfg.mode
    if cfg.preflight:
        if mode != "train" or cfg.resume:
            raise ValueError("preflight checks a new training run; leave mode and resume out")
        config = checked(cfg)
        config["trains_first"] = sorted({*without_training(config, compose_experiment)})
        return config | {"tracker": QUIET_TRACKER}
    if mode in ("export", "frontier") and not cfg.resume:
        raise ValueError(f"mode={mode} is about a trained run; give resume=<run folder>")
    if mode == "export" and (not cfg.output_dir or Path(cfg.output_dir).expanduser().exists()):
        raise ValueError("mode=export writes a new folder; give output_dir=<folder>, not there yet")
    trained = read_saved(Path(cfg.resume)) if cfg.resume else cfg
    if trained["policy"]["_target_"] == "policies.load_reward_model":
        raise ValueError(f"mode={mode} is for models that write responses, got a reward model")
    config = _of_run(cfg, words) if cfg.resume else checked(cfg)
    if mode == "evaluate" and not config["output_dir"]:
        config["output_dir"] = unique_folder("outputs/evaluate")
    # Drop the parts that only training needs; chat and evaluate need a reference.
    config["kl"]["measure"] = mode not in ("export", "frontier")
    config["teacher"] |= {"reference": None, "column": None, "hint": None}
    config["algorithm"]["advantage"] = {"_target_": "trainer.NoAdvantage"}
    config["algorithm"].pop("critic", None)
    config["tracker"], config["trainer"]["overlap"] = QUIET_TRACKER, 0
    config["eval"] |= {"frontier": 0, "train_rows": 0}
    if mode != "evaluate":
        config["kl"]["hint"] = None  # chat has no rows
        config["eval"] |= {"forward_kl": 0, "retain": None}
    config["launch"] |= {"strategy": "ddp", "offload": False, "shards": None}
    if mode not in ("evaluate", "frontier"):
        config["launch"]["num_processes"] = 1
        config["policy"]["engine"] = None
    return config


def _of_run(cfg: DictConfig, words: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a mode on the weights of a run."""
    folder, mode, instead = Path(cfg.resume), cfg.mode, {"output_dir": cfg.output_dir}
    if mode in ("chat", "export"):  # they use no rows, so the data may be missing
        instead["env"] = compose_checked(["env=sort_digits"])["env"]
    elif not cfg.output_dir:
        instead["output_dir"] = str(folder)
    config = resumed(str(folder), cfg, words, may=ALLOWED_OVERRIDES.get(mode, ()), **instead)
    if mode != "frontier":
        if not has_weights(folder):
            raise ValueError(missing_weights(folder))
        return config
    kl, held_out = config["kl"], config["eval"]
    measured = kl["measure"] and not kl["refresh_every"] and kl["hint"] is None
    if not measured or held_out["temperature"] != 1:
        why = "kl.measure=true, kl.refresh_every=0, kl.hint=null and eval.temperature=1"
        raise ValueError(f"{folder} has no frontier: it needs {why}")
    held_out["greedy"] = False
    if not any(word.startswith("eval.num_samples=") for word in words):
        held_out["num_samples"] = 64
    config["policy"]["model"] = kl["reference"] or config["policy"]["model"]
    kl["reference"] = None
    return config
