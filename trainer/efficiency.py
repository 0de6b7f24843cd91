"""How much of its KL a policy needed: kl/efficiency, from replies of the reference (docs/kl.md).

The samples that the limit of reward against KL is drawn from (trainer/limit.py): made before
training with eval.limit, or later by mode=limit, and kept in limit.json beside the page.
"""

import json
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from policies.cache import write_text
from policies.random import in_float64
from trainer.limit import Limit

if TYPE_CHECKING:
    from trainer.evaluation import Evaluate

FILE = "limit.json"


class Efficiency:
    """Sample the policy before training, `samples` replies to each eval row; judge evaluations.

    The policy as it starts is the reference: its replies say what the KL of a later one could have
    bought.
    """

    def __init__(self, samples: int, folder: Path) -> None:
        self.samples, self.path = samples, folder / FILE
        self.limit: Limit | None = None

    def __call__(self, iteration: int, scores: dict[str, float], play: "Evaluate") -> dict:
        """Return kl/efficiency of what an evaluation found, if the samples reach so far."""
        if iteration == 0:
            found = sample(play, self.samples)
            self.limit = Limit.of_samples(found)
            if found and play.runtime.is_main:
                write_text(self.path, json.dumps({"samples": self.samples, **found}))
        elif self.limit is None:  # a run that goes on
            self.limit = self._kept()
        share = self.limit and self.limit.efficiency_of(scores)
        return {} if share is None else {"kl/efficiency": share}

    def _kept(self) -> Limit | None:
        if not self.path.is_file():
            return None
        try:
            return Limit.of_samples(json.loads(self.path.read_text(encoding="utf-8")))
        except ValueError:  # damaged
            return None


def sample(play: "Evaluate", samples: int) -> dict[str, list]:
    """Return what replies at temperature 1 are worth on all ranks: rows, reward and success.

    The last two are [rows, samples]; rows that the task dropped are left out, and none is {}.
    """
    found: dict[int, list] = {}

    def hear(_: str, batch: TensorDictBase, rows: list[int]) -> None:
        rewards = in_float64(batch.get("reward_raw")).sum(-1).view(len(rows), -1)  # [rows, samples]
        right = batch.get("success").view(len(rows), -1)
        dropped = batch.get("dropped").view(len(rows), -1)[:, 0]
        each = (rewards.tolist(), right.int().tolist(), dropped.tolist())
        for row, reward, success, gone in zip(rows, *each, strict=True):
            if not gone:
                found[row] = [[round(value, 6) for value in reward], success]

    player = copy(play)
    player.plans, player.efficiency = [play.plan("limit", samples, 1.0)], None
    player(0, hear=hear)
    rows = dict(sorted(item for part in play.runtime.gather(found) for item in part.items()))
    values = {"reward": [r for r, _ in rows.values()], "success": [s for _, s in rows.values()]}
    return {"rows": [*rows], **values} if rows else {}
