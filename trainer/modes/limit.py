"""mode=limit: what replies of the reference to the eval rows are worth, limit.json.

The samples that the limit of a run's reward against KL is drawn from (trainer/limit.py): the model
that training started from, or that of kl.reference, at temperature 1. Made once for a run or a
sweep and kept beside its page.
"""

import json
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from policies.cache import write_text
from policies.random import in_float64
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Sample the reference and write limit.json; rows that the task dropped are left out."""
    samples, found = settings["eval"]["num_samples"], dict[int, list]()
    path = Path(settings["output_dir"]).expanduser() / "limit.json"
    if path.is_dir():  # before the work
        raise ValueError(f"expected {path} to be a file, got a folder; move it away")

    def hear(_: str, batch: TensorDictBase, rows: list[int]) -> None:
        rewards = in_float64(batch.get("reward_raw")).sum(-1).view(len(rows), -1)  # [rows, samples]
        right = batch.get("success").view(len(rows), -1)
        dropped = batch.get("dropped").view(len(rows), -1)[:, 0]
        each = (rewards.tolist(), right.int().tolist(), dropped.tolist())
        for row, reward, success, gone in zip(rows, *each, strict=True):
            if not gone:
                found[row] = [[round(value, 6) for value in reward], success]

    loop.observers.say(f"sampling the reference: {loop.evaluate.about}")
    loop.evaluate(0, kind="eval", hear=hear)
    parts = loop.runtime.gather(found)
    if not loop.runtime.is_main:
        return 0.0
    rows = dict(sorted(item for part in parts for item in part.items()))
    if not rows:
        raise ValueError("expected replies with a reward, got none: the task dropped every row")
    found_model: Any = loop.policy.found
    about = {"model": found_model.sha256, "samples": samples, "rows": [*rows]}
    values = {"reward": [r for r, _ in rows.values()], "success": [s for _, s in rows.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**about, **values}))
    return 0.0
