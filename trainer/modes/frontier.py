"""mode=frontier: what replies of the reference to the eval rows are worth, frontier.json.

The model that training started from, or that of kl.reference, at temperature 1. Made once for a run
or a sweep and kept beside its page.
"""

import json
from pathlib import Path
from typing import Any

from policies.cache import write_text
from trainer.evaluation import FILE, sample
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Sample the reference and write frontier.json; rows that the task dropped are left out."""
    samples = settings["eval"]["num_samples"]
    path = Path(settings["output_dir"]).expanduser() / FILE
    loop.observers.say(f"sampling the reference: {loop.evaluate.about}")
    found = sample(loop.evaluate, samples)
    if not loop.runtime.is_main:
        return 0.0
    if not found:
        raise ValueError("expected replies with a reward, got none: the task dropped every row")
    about = {"model": loop.policy.found.sha256, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**about, **found}))
    return 0.0
