"""How much of its KL a policy needed: kl/efficiency, from replies of the reference (docs/kl.md).

The samples that the limit of reward against KL is drawn from (trainer/limit.py): made before
training with eval.limit, or later by mode=limit, and kept in limit.json beside the page.
"""

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from policies.cache import write_text
from policies.placement import HERE
from policies.random import in_float64
from trainer.limit import FILE, Limit, read_limit

if TYPE_CHECKING:
    from trainer.evaluation import Evaluate


class Efficiency:
    """Sample the policy before training, `samples` replies to each eval row; judge evaluations.

    The policy as it starts is the reference: its replies say what the KL of a later one could have
    bought.
    """

    def __init__(self, samples: int, folder: Path) -> None:
        self.samples, self.path = samples, folder / FILE
        self.limit: Limit | None = None

    def begin(self, play: "Evaluate", tell: Callable[..., None] = lambda *_: None) -> None:
        """Sample the policy as it starts; `tell` hears what goes on and how far it is."""
        what = f"sampling the reference: {len(play.rows)} prompts x {self.samples} samples"
        found = sample(play, self.samples, lambda share: tell(share, what))
        self.limit = Limit.of_samples(found)
        if self.limit is not None and play.runtime.is_main:
            write_text(self.path, json.dumps({"samples": self.samples, **found}))

    def known(self) -> bool:
        """Return whether there are samples, those of a run that goes on too; damaged are none."""
        if self.limit is None and self.path.is_file():
            self.limit = read_limit(self.path)
        return self.limit is not None

    def __call__(
        self,
        iteration: int,
        scores: dict[str, float],
        play: "Evaluate",
    ) -> dict[str, float]:
        """Return kl/efficiency of what an evaluation found, if the samples reach so far."""
        if iteration:
            self.known()
        same = self.limit is not None and self.limit.asked == len(play.rows)
        share = self.limit.efficiency_of(scores) if self.limit and same else None
        return {} if share is None else {"kl/efficiency": share}


def sample(
    play: "Evaluate", samples: int, tell: Callable[[float], None] = lambda _: None
) -> dict[str, Any]:
    """Return what replies at temperature 1 are worth on all ranks: rows, reward and success.

    The last two are [rows, samples]; rows that the task dropped are left out, and none is {}.
    `asked` counts those too.
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
    player.chunk = max(1, play.chunk * 8 // samples)  # as eval.num_samples=8, at least a row
    player.placements = (play.placements[0], HERE)  # no KL is measured
    player(0, tell=tell, hear=hear)
    rows = dict(sorted(item for part in play.runtime.gather(found) for item in part.items()))
    values = {"reward": [r for r, _ in rows.values()], "success": [s for _, s in rows.values()]}
    return {"asked": len(play.rows), "rows": [*rows], **values} if rows else {}
