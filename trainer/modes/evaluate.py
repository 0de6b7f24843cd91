"""mode=evaluate: the eval rows of a task, a table of what the replies are worth, eval.json.

pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1), a mean over the rows.
Replies that the task dropped count nowhere, as in training. Names are those of metrics.jsonl; the
table has them in words.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from tensordict import TensorDict

from policies.cache import write_text
from trainer.modes import weights
from trainer.trainer import Trainer


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that of k samples at least one is right, from `right` of `samples`.

    1 - C(samples - right, k) / C(samples, k): a mean over all ways to pick k of them.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"expected right <= samples and 1 <= k <= samples, got {samples=}, "
                         f"{right=}, {k=}")  # fmt: skip
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


@dataclass
class Counts:
    """What one plan's replies are worth: an entry a row or a reply, in any order."""

    samples: int
    right: list[int] = field(default_factory=list)  # of each row's samples
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # sampled tokens
    truncated: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)  # nats a reply, k1
    dropped: int = 0  # rows

    def add(self, batch: TensorDict) -> None:
        """Add the replies to some rows, each row's samples after each other."""
        dropped = batch.get("dropped").view(-1, self.samples)[:, 0]  # [rows], by whole groups
        self.dropped += int(dropped.sum())
        kept = batch[~batch.get("dropped")]
        if not len(kept):
            return
        self.right += kept.get("success").view(-1, self.samples).sum(-1).tolist()
        self.rewards += kept.get("reward_raw").sum(-1).tolist()
        sampled = kept.get(("masks", "all_response_mask"))
        self.lengths += sampled.sum(-1).tolist()
        self.truncated += kept.get("truncated").tolist()
        parts = kept.get("reward_part", None)
        for name, values in () if parts is None else parts.items():
            fits = values[~values.isnan()].tolist()
            self.parts[name] = self.parts.get(name, []) + fits
        if "kl_penalty" in kept:
            self.kl += (kept.get("kl_penalty") * sampled).sum(-1).tolist()

    def join(self, others: Iterable["Counts"]) -> None:
        """Add what other ranks counted."""
        for other in others:
            for name in ("right", "rewards", "lengths", "truncated", "kl"):
                getattr(self, name).extend(getattr(other, name))
            for name, values in other.parts.items():
                self.parts[name] = self.parts.get(name, []) + values
            self.dropped += other.dropped

    def result(self, accuracy: dict[str, float]) -> dict[str, float]:
        """Return the numbers by their names, behind an accuracy that has been taken."""
        if not self.right:
            return {"rows": 0, "dropped_rows": self.dropped}
        rates = [count / self.samples for count in self.right]
        out: dict[str, float] = {"rows": len(rates), "samples": self.samples, **accuracy}
        if len(rates) > 1:  # over rows: a row's samples are not independent
            out["standard_error"] = stdev(rates) / len(rates) ** 0.5
        for k in range(1, self.samples + 1) if self.samples > 1 else ():
            out[f"eval/pass@{k}"] = fmean(pass_at_k(self.samples, n, k) for n in self.right)
        out["eval/reward"] = fmean(self.rewards)
        out |= {f"reward_part/{n}": fmean(values) for n, values in self.parts.items() if values}
        if self.kl:
            out["kl/ref_sequence"] = fmean(self.kl)
            out["kl/ref"] = sum(self.kl) / max(sum(self.lengths), 1)
        out["response/length_mean"] = fmean(self.lengths)
        out["response/length_max"] = max(self.lengths)
        out["response/truncated_fraction"] = fmean(self.truncated)
        return out | ({"dropped_rows": self.dropped} if self.dropped else {})


def measure(loop: Trainer) -> dict[str, dict[str, float]]:
    """Play the eval rows; return the numbers of each plan, "sampled" and "greedy".

    The KL is that of sampled replies at their own temperature; greedy ones have none. Accuracy, by
    the labels of the task too, is what a run logs.
    """
    counts = {name: Counts(env.group_size) for name, env, _ in loop.evaluate.plans}

    def hear(name: str, batch: TensorDict, _: list[int]) -> None:
        counts[name].add(loop.retrieve_kl(batch) if name == "sampled" else batch)

    scores, _ = loop.evaluate(0, kind="eval", hear=hear)
    gathered = loop.runtime.gather(counts)
    for name, held in gathered[0].items():
        held.join(other[name] for other in gathered[1:])
    out = {}
    for name, held in gathered[0].items():
        mine = f"eval/{name}_accuracy"
        out[name] = held.result({k: v for k, v in scores.items() if k.startswith(mine)})
    return out


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Evaluate, print the table and write eval.json."""
    if not loop.evaluate.plans:
        raise ValueError("expected replies to evaluate, got none; set eval.num_samples=8 or "
                         "eval.greedy=true")  # fmt: skip
    taken = weights.take(loop, settings)
    found = measure(loop)
    if not loop.runtime.is_main:
        return 0.0
    about = {
        "weights": taken.what,
        "iteration": taken.iteration,
        "reference": weights.reference_name(loop, settings),
        "task": settings["env"]["task"]["_target_"],
        "eval": settings["eval"],
        "max_new_tokens": settings["policy"]["max_new_tokens"],
        "seed": settings["seed"],
    }
    folder = Path(settings["output_dir"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "eval.json", json.dumps({**about, **found}, indent=1))
    console = Console(highlight=False)
    for name in ("weights", "reference"):
        console.print(f"{name:<9}  {about[name]}", markup=False, soft_wrap=True)
    console.print(f"{'rows':<9}  {loop.evaluate.about}", markup=False)
    console.print(table(found))
    console.print(f"written    {folder / 'eval.json'}", markup=False, soft_wrap=True)
    return 0.0


WORDS = {  # of the table, for names that begin so
    "rows": "rows",
    "dropped_rows": "dropped rows",
    "samples": "samples",
    "eval/sampled_accuracy/": "accuracy, ",
    "eval/greedy_accuracy/": "accuracy, ",
    "eval/sampled_accuracy": "accuracy",
    "eval/greedy_accuracy": "accuracy",
    "standard_error": "standard error",
    "eval/pass@": "pass@",
    "eval/reward": "reward",
    "reward_part/": "part ",
    "kl/ref_sequence": "KL, nats a reply",
    "kl/ref": "KL, nats a token",
    "response/length_mean": "length, mean",
    "response/length_max": "length, max",
    "response/truncated_fraction": "cut by the limit",
}


def in_words(name: str) -> str:
    """Return what a table calls a number of eval.json.

    >>> in_words("eval/pass@4"), in_words("eval/greedy_accuracy/facts"), in_words("kl/ref_sequence")
    ('pass@4', 'accuracy, facts', 'KL, nats a reply')
    """
    start = next((start for start in WORDS if name.startswith(start)), "")
    return WORDS.get(start, "") + name.removeprefix(start)


def table_rows(found: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return the numbers in words, a column a plan; of pass@k the powers of two and the last."""
    last = max((int(n) for plan in found.values() if (n := plan.get("samples", 0))), default=0)
    rows: dict[str, list[str]] = {}
    for column, plan in enumerate(found.values()):
        for name, value in plan.items():
            k = int(name.partition("@")[2] or 0)
            if k & (k - 1) == 0 or k == last:
                row = rows.setdefault(in_words(name), [""] * len(found))
                row[column] = str(value) if isinstance(value, int) else f"{value:z.3f}"
    return [[name, *row] for name, row in rows.items()]


def table(found: dict[str, dict[str, float]]) -> Table:
    """Return the numbers as a table for a terminal."""
    out = Table("", *found, box=None, pad_edge=False, header_style="bold")
    for column in out.columns[1:]:
        column.justify = "right"
    for row in table_rows(found):
        out.add_row(*row)
    return out
