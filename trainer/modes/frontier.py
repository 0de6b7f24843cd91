"""mode=frontier: sample the reference on the eval rows and write the rewards to frontier.json.

The reference is the start model of training, or kl.reference, at temperature 1 times
kl.reference_temperature, as in the KL of an evaluation. The file is written once per run or sweep,
next to its page.
"""

import json
from pathlib import Path
from typing import Any

from policies.files import write_text
from trainer.evaluation import sample
from trainer.kl import FRONTIER_FILE
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Sample the reference and write frontier.json; dropped rows are left out."""
    samples = settings["eval"]["num_samples"]
    path = Path(settings["output_dir"]).expanduser() / FRONTIER_FILE
    loop.observers.say(f"sampling the reference: {loop.evaluate.about}")
    rewards = sample(loop.evaluate, samples, temperature=settings["kl"]["reference_temperature"])
    if not loop.runtime.is_main:
        return 0.0
    if not rewards:
        raise ValueError("expected responses with a reward, got none: the task dropped every row")
    about = {"model": loop.policy.files.sha256, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**about, **rewards}))
    loop.observers.say(f"written    {FRONTIER_FILE}")
    return 0.0
