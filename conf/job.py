"""Read and check the configuration of a run or of a job of a sweep, before it starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf.compose import checked
from trainer.runs.folders import holds_run, is_main_rank

AUTO = "resume=auto (also torchrun --max-restarts)"


def read_job(
    cfg: DictConfig, folder: Path, words: Sequence[str], *, in_sweep: bool
) -> dict[str, Any]:
    """Return the checked configuration of a run or of a job of a sweep."""
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    if in_sweep and cfg.preflight:
        raise ValueError("preflight=true checks one run; leave -m out")
    if cfg.preflight or cfg.mode != "train":
        from conf import modes  # training does not need them

        return modes.configure(cfg, words)
    if in_sweep and cfg.output_dir:
        place = f"hydra.sweep.dir={cfg.output_dir}"
        raise ValueError(f"output_dir={cfg.output_dir} is for one run; a sweep goes to {place}")
    if in_sweep and cfg.resume == "auto":
        raise ValueError("resume=auto is for one run; the same sweep again resumes its jobs")
    if cfg.resume == "auto" and not cfg.output_dir:
        raise ValueError(f"{AUTO} needs output_dir=<folder>, where a start finds its run")
    if cfg.resume or in_sweep:
        from conf import resume  # a run that begins has nothing to read

        config = resume.job_config(cfg, folder, words)
    else:
        config = checked(cfg)
    if not (in_sweep or config["resume"]) and is_main_rank() and holds_run(folder):
        raise ValueError(f"{folder} already holds a run; resume it by resume={folder}")
    return config
