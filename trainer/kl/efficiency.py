"""Compare an evaluation with responses of the reference: kl/efficiency, its error, and the split.

The reference responded to the same rows before training (eval.frontier) or later (mode=frontier).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from policies.files import write_text
from trainer.kl.frontier import ACCURACY, EVAL_KL, Frontier, efficiency_error, read_frontier
from trainer.kl.split import split

NAMES = "reward", "success", "kl"  # scores of a response


class Efficiency:
    """Compute kl/efficiency and the split of the KL of an evaluation.

    Both compare the evaluation with `samples` responses of the reference per eval row.
    """

    def __init__(self, samples: int, path: Path) -> None:
        self.samples, self.path = samples, path
        self.frontier: Frontier | None = None
        self.responses: dict[int, dict[str, list]] = {}  # row -> scores of its sampled responses

    def begin(self, responses: dict[str, Any], *, write: bool) -> None:
        """Take the reference's responses to each row (evaluation.sample); write the file."""
        self.frontier = Frontier.of_samples(responses)
        if self.frontier is not None and write:
            write_text(self.path, json.dumps({"samples": self.samples, **responses}))

    def __call__(
        self, scores: dict[str, float], rows: int, responses: dict[int, dict[str, list]]
    ) -> dict[str, float]:
        """Return the metrics of an evaluation of `rows` rows, if the samples support them.

        Error and split are computed only if the reference responded to exactly these rows. The
        split also needs a right response of the reference.
        """
        if self.frontier is None and self.path.is_file():  # a resumed run
            self.frontier = read_frontier(self.path)
        if self.frontier is None or self.frontier.num_prompts != rows:
            return {}
        efficiency = self.frontier.efficiency_of(scores)
        if efficiency is None:
            return {}
        out = {"kl/efficiency": efficiency}
        if self.frontier.rows != [*responses]:
            return out
        table = {n: np.array([each[n] for each in responses.values()]) for n in NAMES}  # [P, m]
        metric, kl = self.frontier.metric, table["kl"]
        value = table["success" if metric == ACCURACY else "reward"]
        if len(value) > 1:
            error = efficiency_error(self.frontier.of(metric), value.mean(1), kl.mean(1))
            out["kl/efficiency_error"] = error
        if metric == ACCURACY:
            out |= split(value, kl, self.frontier.success, efficiency * scores[EVAL_KL])
        return out
