"""mode=evaluate: evaluate the eval rows of a task, print a table and write eval.json.

pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1), a mean over the rows.
Responses that the task dropped are excluded, as in training. Metrics have the same names as in
metrics.jsonl.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase

from policies.files import write_text
from trainer.modes.run_weights import reference_name, take_weights
from trainer.trainer import Trainer

FORWARD = ("eval/kl_forward", "eval_retain/")  # of responses that the reference sampled
LENGTH, TRUNCATED = "response/length_mean", "response/truncated_fraction"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return 1 - C(samples - right, k) / C(samples, k), the probability that one of k is right.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def read_responses(batch: TensorDictBase) -> list[dict[str, float]]:
    """Return the metrics of each response by name; {} for a response that the task dropped."""
    sampled = batch.get(("masks", "all_response_mask"))  # [B, T]
    values = {
        "right": batch.get("success").float(),
        "eval/reward": batch.get("reward_raw").sum(-1),
        LENGTH: sampled.sum(-1),
        TRUNCATED: batch.get("truncated").float(),
    }
    parts = batch.get("reward_part", None)
    values |= {} if parts is None else {f"reward_part/{n}": v for n, v in parts.items()}
    if "kl_penalty" in batch:
        values["eval/kl_ref_sequence"] = (batch.get("kl_penalty") * sampled).sum(-1)
    columns = {name: value.tolist() for name, value in values.items()}  # each [B]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    dropped = batch.get("dropped").tolist()
    return [{} if gone else row for row, gone in zip(rows, dropped, strict=True)]


def tally(
    responses: Sequence[dict[str, float]], samples: int, accuracy: dict[str, float]
) -> dict[str, float]:
    """Return the metrics of responses, `samples` consecutive ones per row, and their `accuracy`.

    A reward part that does not apply to a response is NaN and is excluded.
    """
    rows = [responses[i : i + samples] for i in range(0, len(responses), samples)]
    scored = [row for row in rows if all(row)]
    dropped = len(rows) - len(scored)
    if not scored:
        return {"rows": 0, "dropped_rows": dropped}
    out: dict[str, float] = {"rows": len(scored), "samples": samples, **accuracy}
    right = [int(sum(response["right"] for response in row)) for row in scored]
    if len(scored) > 1:  # errors are over rows, because a row's samples are not independent
        out["standard_error"] = stdev(count / samples for count in right) / len(scored) ** 0.5
    for k in range(1, samples + 1) if samples > 1 else ():
        out[f"eval/pass@{k}"] = fmean(pass_at_k(samples, count, k) for count in right)
    each = [response for row in scored for response in row]
    for name in dict.fromkeys(name for response in each for name in response if name != "right"):
        values = [v for response in each if not math.isnan(v := response.get(name, math.nan))]
        out |= {name: fmean(values)} if values else {}
    out["response/length_max"] = max(response[LENGTH] for response in each)
    if "eval/kl_ref_sequence" in out:
        out["eval/kl_ref"] = out["eval/kl_ref_sequence"] / max(out[LENGTH], 1e-9)
    return out | ({"dropped_rows": dropped} if dropped else {})


def measure(loop: Trainer) -> dict[str, dict[str, float]]:
    """Evaluate the eval rows; return the metrics of each plan, "sampled" and "greedy"."""
    samples = {name: size for name, size, _ in loop.evaluate.plans}
    first = next(iter(samples))
    responses: dict[str, list] = {name: [] for name in samples}

    def on_batch(name: str, batch: TensorDictBase, _: list[int]) -> None:
        responses[name] += read_responses(batch)

    scores, _ = loop.evaluate(0, kind="eval", on_batch=on_batch)
    gathered, out = loop.runtime.gather(responses), {}
    for name, count in samples.items():
        of_plan = (f"eval/{name}_accuracy", *(FORWARD if name == first else ()))
        accuracy = {k: v for k, v in scores.items() if k.startswith(of_plan)}
        each = [response for part in gathered for response in part[name]]
        out[name] = tally(each, count, accuracy)
    return out


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Evaluate, print the table and write eval.json."""
    if not loop.evaluate.plans:
        raise ValueError("no response to evaluate; set eval.num_samples=8 or eval.greedy=true")
    chosen = take_weights(loop, settings)
    metrics = measure(loop)
    if not loop.runtime.is_main:
        return 0.0
    about = {"weights": chosen.label, "reference": reference_name(loop, settings)}
    about |= {"rows": loop.evaluate.about}
    of_run = {"iteration": chosen.iteration, "task": settings["env"]["task"]["_target_"]}
    of_run |= {"eval": settings["eval"], "seed": settings["seed"]}
    path = Path(settings["output_dir"]).expanduser() / "eval.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**about, **of_run, **metrics}, indent=1))
    table = Table("", *metrics, box=None, pad_edge=False, header_style="bold")
    for row in table_rows(metrics):
        table.add_row(*row)
    console = Console(highlight=False)
    for name, text in about.items():
        console.print(f"{name:<9}  {text}", markup=False, soft_wrap=True)
    console.print(table)
    console.print(f"written    {path}", markup=False, soft_wrap=True)
    return 0.0


def table_rows(metrics: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return rows of name and value per plan; pass@k only for powers of two and the last k."""
    last = max((plan.get("samples", 0) for plan in metrics.values()), default=0)
    rows: dict[str, list[str]] = {}
    for column, (plan, values) in enumerate(metrics.items()):
        for name, value in values.items():
            k = int(name.partition("@")[2] or 0)
            if k & (k - 1) == 0 or k == last:
                name = name.replace(f"eval/{plan}_accuracy", "accuracy")  # one row for both plans
                row = rows.setdefault(name, [""] * len(metrics))
                row[column] = str(value) if isinstance(value, int) else f"{value:z.3f}"
    return [[name, *row] for name, row in rows.items()]
