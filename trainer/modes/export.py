"""mode=export: a run's model as a folder for others, with a model card and its curves.

The folder holds an ordinary model, an adapter merged into it: AutoModelForCausalLM and vLLM load
it. The card is in model_card.py.
"""

import shutil
from pathlib import Path
from typing import Any

from policies.cache import write_text
from trainer.checkpoint import save_model
from trainer.modes.model_card import card
from trainer.modes.run_weights import take_weights
from trainer.reports.report import run_svg
from trainer.runs.run_files import load_run
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Write the model folder; it is there whole or not at all."""
    chosen = take_weights(loop, settings)
    target = Path(settings["output_dir"]).expanduser()
    part = target.with_name(f".part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    trained = load_run(Path(settings["resume"]))
    try:
        save_model(loop.policy, part)
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
    return 0.0
