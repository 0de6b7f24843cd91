"""mode=export: a run's model as a folder for others, with a model card and its curves.

`gguf` writes a GGUF file beside the model (gguf_file.py), `hub` pushes the folder to the hub.

The folder holds an ordinary model, an adapter merged into it: AutoModelForCausalLM and vLLM load
it. The card is in model_card.py.
"""

import shutil
from pathlib import Path
from typing import Any

from policies.cache import write_text
from trainer.checkpoint import remove, save_model
from trainer.modes.model_card import card
from trainer.modes.run_weights import take_weights
from trainer.reports.report import run_svg
from trainer.runs.run_files import load_run
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Write the model folder; it is there whole or not at all."""
    chosen, single = take_weights(loop, settings), None
    if settings["gguf"]:
        from trainer.modes.gguf_file import check, write_gguf  # rarely asked for

        check(loop.policy)
    target = Path(settings["output_dir"]).expanduser()
    part = target.with_name(f".part-{target.name}")
    remove(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    trained = load_run(Path(settings["resume"]))
    try:
        save_model(loop.policy, part)
        if settings["gguf"]:
            single = target / write_gguf(part, settings["gguf"], name=target.name).name
        try:
            write_text(part / "curves.svg", run_svg(trained.folder))
        except ValueError:  # no metrics to draw: a run of which only a checkpoint is left
            curves = ""
        else:
            curves = "![reward and KL over the iterations](curves.svg)"
        write_text(part / "README.md", card(trained, chosen, name=target.name, curves=curves))
        if target.is_dir():  # an empty one: the parent has looked
            target.rmdir()
        part.rename(target)
    except BaseException:  # a full disk keeps no half of a model
        shutil.rmtree(part, ignore_errors=True)
        raise
    print(f"exported   {chosen.what}\nmodel      {target}", flush=True)
    if single:
        print(f"gguf       {single}", flush=True)
    if settings["hub"]:
        print(f"hub        {push(target, settings['hub'])}", flush=True)
    return 0.0


def push(folder: Path, name: str) -> str:
    """Push a folder to a repository of the hub, private if it is new; return its address."""
    from huggingface_hub import HfApi  # rarely asked for

    try:
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message="A model trained by leash",
        )
    except Exception as error:  # the hub's client raises what its HTTP library does
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"{folder} is written, but not pushed to {name}: {why}; push it by "
            f"hf upload {name} {folder}"
        ) from error
    return str(repository)
