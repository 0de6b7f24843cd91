"""What is asked of leash beside training: preflight=true, mode=chat, evaluate, export or limit.

It runs on the same parts as a run, in a folder that is removed. Torch-free.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conf.check_limit import filtered
from conf.command_line import OUTPUTS, SWEEP, check_single, flags_and_overrides
from conf.compose import compose_checked, compose_experiment
from conf.resume import load_for_resume
from conf.start import run_folder
from trainer.runs.experiment_models import cache_folder
from trainer.runs.find import has_weights, no_weights
from trainer.runs.launch import start
from trainer.runs.run_files import PREFIX

SILENT = {"_target_": "trainer.JsonlTracker", "keep_transcripts": False}
BOTH = ("policy.max_new_tokens", "policy.system_prompt", "kl.reference", "seed", "policy.device")
MAY = {  # what may be given beside resume=, by mode
    "chat": ("policy.temperature", *BOTH, "launch.threads"),
    "evaluate": (
        "eval",
        *BOTH,
        "policy.max_prompt_tokens",
        "policy.engine",
        "policy.vllm",
        "env",
        "output_dir",
        "launch",
    ),
    "export": ("output_dir", "gguf", "hub", "policy.device"),
    "limit": (
        "eval.num_samples",
        "policy.device",
        "policy.engine",
        "policy.vllm",
        "output_dir",
        "launch",
    ),
}
LIMIT = {"num_samples": 64, "temperature": 1.0, "greedy": False}  # of eval, for mode=limit


def asked(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the checked configuration of what is asked beside training; None if it is training.

    Any fault is a ValueError. With a flag that only shows something it is left to Hydra.
    """
    flags, overrides = flags_and_overrides(words)
    given = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    mode = given.get("mode", "train")
    if (mode == "train" and "preflight" not in given) or flags - SWEEP:
        return None
    if mode not in (known := ("train", *MAY)):
        raise ValueError(f"expected mode to be one of {', '.join(known)}, got {mode!r}")
    resumed = mode != "train" and given.get("resume")
    if not resumed and given.get("resume") and "preflight" in given:
        raise ValueError("preflight checks a new run, got resume=; leave one of them out")
    if not resumed:
        check_single(overrides)
    config = {} if resumed else compose_checked(overrides)
    if mode == "train" and not config["preflight"]:
        return None
    if flags:
        what = "preflight" if config.get("preflight") else f"mode={mode}"
        raise ValueError(f"{what} is about one run, got {' '.join(flags)}; leave it out")
    return _of_run(mode, resumed, overrides) if resumed else _of_start(config, overrides)


def _of_run(mode: str, folder: str, overrides: list[str]) -> dict[str, Any]:
    """Return the configuration for a mode on what a run trained."""
    rest = [w for w in overrides if w not in (f"mode={mode}", f"resume={folder}")]
    instead = {}
    if mode in ("chat", "export"):  # they play no rows: the data of the run need not be there
        instead["env"] = compose_checked(["env=sort_digits"])["env"]
    config = load_for_resume(folder, rest, may=MAY[mode], mode=mode, **instead)
    if mode != "limit" and not has_weights(Path(folder)):
        raise ValueError(no_weights(Path(folder)))
    check_replies(config)
    named = any(word.startswith("output_dir=") for word in rest)
    if mode == "export":
        check_target(config["output_dir"] if named else None)
        check_hub(config["hub"])
    elif not named:
        config["output_dir"] = folder
    if mode == "limit":
        if config["kl"]["refresh_every"] or filtered(config["policy"]):
            why = "a reference that moved, or the tokens that top_k, top_p or min_p left"
            raise ValueError(f"{folder} has no limit: its KL is to {why}, not to one distribution")
        if not config["kl"]["measure"] or config["eval"]["temperature"] != 1:
            why = "kl.measure=false or eval.temperature other than 1"
            raise ValueError(f"{folder} has no limit: no KL of replies at temperature 1, by {why}")
        given = any(word.startswith("eval.num_samples=") for word in rest)
        config["eval"] |= LIMIT | ({"num_samples": config["eval"]["num_samples"]} if given else {})
        config["policy"]["model"] = config["kl"]["reference"] or config["policy"]["model"]
        config["kl"]["reference"] = None
    return without_training_parts(config)


def _of_start(config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return the configuration for a preflight, or for a mode on a model that no run trained."""
    mode = config["mode"]
    if config["preflight"]:
        if mode != "train":
            raise ValueError(f"preflight checks training, got mode={mode}; leave one of them out")
        config["trains_first"] = sorted(set(without_training(config, overrides)))
        config["tracker"] = SILENT
        return config
    if mode in ("export", "limit"):
        what = {"export": "writes the model of a run", "limit": "samples the reference of a run"}
        raise ValueError(f"mode={mode} {what[mode]}; give resume=<run folder>")
    if mode == "chat" and (ranks := config["launch"]["num_processes"]) > 1:
        raise ValueError(f"mode=chat is one process, got launch.num_processes={ranks}; set it to 1")
    check_replies(config)
    if mode == "evaluate" and not config["output_dir"]:
        config["output_dir"] = str(run_folder(overrides))
    return without_training_parts(config)


def without_training(node: Any, words: Sequence[str] = ()) -> Iterator[str]:
    """Put what is there in the place of each experiment:<name>; yield those not trained yet.

    A policy or a reference is then the model that its experiment starts from.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from without_training(value, words)
        elif isinstance(value, str) and value.startswith(PREFIX):
            name = value.removeprefix(PREFIX)
            config = compose_experiment(name, words)
            model = cache_folder(name, config) / "model"
            if model.is_dir():
                node[key] = str(model)
                continue
            if key not in ("model", "reference") or config["policy"]["_target_"].endswith("_model"):
                raise ValueError(
                    f"{value} is not in the cache, and a preflight trains nothing; start the run "
                    "once, it trains that first"
                )
            yield name
            yield from without_training(config["policy"], words)
            node[key] = config["policy"]["model"]


def folder_aside(config: dict[str, Any]) -> Path:
    """Make the folder that what is asked beside training runs in, and leaves nothing in."""
    home = None
    if config["policy"]["engine"] == "vllm" and config["policy"]["vllm"]["url"]:
        home = Path(config["output_dir"] or OUTPUTS).expanduser().absolute()  # the server reads it
        home.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".leash-", dir=home))


def run_aside(config: dict[str, Any], **ours: Any) -> int:
    """Run a configuration in fresh processes; return the exit code, 1 if it found problems."""
    folder, keep = folder_aside(config), False
    try:
        return int(start(config, folder, **ours) > 0)
    except RuntimeError as error:
        keep = str(folder) in str(error)  # it names the traceback there
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def without_training_parts(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only training needs; chat and evaluate compare with a reference."""
    mode = config["mode"]
    config["kl"]["measure"] = mode not in ("export", "limit")
    config["algorithm"]["advantage"] = {"_target_": "trainer.NoAdvantage"}
    config["algorithm"].pop("critic", None)
    config["tracker"], config["trainer"]["overlap"] = SILENT, 0
    config["eval"]["limit"] = 0
    config["launch"] |= {"strategy": "ddp", "offload": False}  # nothing is learnt
    if mode not in ("evaluate", "limit"):
        config["launch"]["num_processes"] = 1
        config["policy"]["engine"] = "transformers"
    return config


def check_replies(config: dict[str, Any]) -> None:
    """Raise ValueError for a model that does not reply."""
    if config["policy"]["_target_"] == "policies.load_reward_model":
        what = f"mode={config['mode']} is for models that reply"
        raise ValueError(f"{what}, got a reward model; name a run of SFT, GRPO or PPO")


def check_hub(name: str | None) -> None:
    """Raise ValueError unless there is a login to push to a hub repository of this name with."""
    if name is None:
        return
    from huggingface_hub import get_token  # here: only an export that pushes needs it
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"hub={name}: {str(error).splitlines()[0]}") from error
    if not get_token():
        raise ValueError(f"hub={name} needs a login; run hf auth login or set HF_TOKEN")


def check_target(folder: str | None) -> None:
    """Raise ValueError unless a model can be written to a folder."""
    if not folder:
        raise ValueError("mode=export needs a folder to write to; give output_dir=<folder>")
    path = Path(folder).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output_dir={folder} is there already; name a folder that is new")
