"""Evaluate on held-out rows: sampled accuracy (mean over samples) and greedy accuracy.

The same env and collect as training; only the rows, the temperature and the streams differ.
Ranks share the rows, evenly or not. Accuracy is also reported per row label. Dropped responses are
excluded. The KL metrics: docs/kl.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from envs.chat_env import ChatEnv
from envs.rows import is_listed
from envs.tasks.task import Response, Task, Unrewarded
from policies.protocols import Generator
from policies.random import fold
from trainer.collect import collect
from trainer.kl import FRONTIER_FILE
from trainer.metrics import name_beside, on_host, scores_by_row
from trainer.runtime import Runtime
from trainer.transcripts import transcript

TRAIN_FILE = "frontier_train.json"  # the reference's samples on training rows, in a run folder


class Evaluate:
    """Measure the generator on the task's eval rows.

    A batch samples `prompts_per_batch` prompts; a greedy batch has as many responses. Draws depend
    only on (seed, place among the rows, sample), so that two evaluations of the same rows differ
    only by the weights.
    `retrieve_kl` measures the KL of the sampled responses. If `frontier` > 0, so many responses of
    the reference to each row give kl/efficiency. A task without rewards has only KL metrics.
    `train_rows` training rows are evaluated in the same way, with separate metrics.
    Fewer rows than there are (`max_rows`, `train_rows`) are a fixed random draw, label by label.
    If `forward_kl` > 0, so many responses of the reference to each row give the forward KL, also on
    at most `max_rows` prompts of the data set `retain`.
    """

    def __init__(
        self,
        *,
        task: Task,
        generator: Generator,
        runtime: Runtime,
        env: ChatEnv,
        retrieve_kl: Callable[[TensorDictBase], TensorDictBase] = lambda batch: batch,
        num_samples: int = 8,
        temperature: float = 1.0,
        greedy: bool = True,
        max_rows: int | None = None,
        prompts_per_batch: int = 8,
        every: int = 0,
        frontier: int = 0,
        train_rows: int = 0,
        forward_kl: int = 0,
        retain: str | Sequence[str] | None = None,
    ) -> None:
        self.task, self.env, self.generator = task, env, generator
        self.set_rows(_draw(task, task.rows("eval"), max_rows))
        self.runtime, self.prompts_per_batch, self.every = runtime, prompts_per_batch, every
        self.retrieve_kl = retrieve_kl
        wanted = ("sampled", num_samples, temperature), ("greedy", int(greedy), 0.0)
        self.plans = [self.plan(*each) for each in wanted if each[1]]
        self.efficiency = _efficiency(frontier, runtime.folder / FRONTIER_FILE)
        self.forgetting: Any = None
        self.beside: dict[str, Evaluate] = {}  # evaluations of other rows
        if forward_kl:
            from trainer.kl.forgetting import Forgetting

            options = {"samples": forward_kl, "temperature": temperature or 1.0}
            self.forgetting = Forgetting(retrieve_kl, **options)
            if retain is not None:
                from envs.tasks.dataset import prompts_to_retain

                prompts = Unrewarded(prompts_to_retain(retain))
                rows = _draw(prompts, prompts.rows("train"), max_rows)
                self.beside["retain"] = self.of_rows(rows, prompts)
        if train_rows:
            other = self.of_rows(_draw(task, task.rows("train"), train_rows))
            other.efficiency = _efficiency(frontier, runtime.folder / TRAIN_FILE)
            self.beside["train"] = other

    def of_rows(self, rows: Sequence[dict[str, Any]], task: Task | None = None) -> "Evaluate":
        """Return the same evaluation of other rows, of a `task` without rewards if one is given."""
        other = copy(self)
        if task is not None:
            other.task, other.env, other.plans = task, self.env.with_group_size(1), []
            other.env.base_env.set_task(task)
        other.set_rows(rows)
        other.efficiency, other.forgetting, other.beside = None, copy(self.forgetting), {}
        return other

    def sample_reference(
        self,
        samples: int,
        on_batch: Callable[[str, TensorDictBase, list[int]], None],
        on_progress: Callable[..., None] = lambda *_: None,
        *,
        temperature: float = 1.0,
        kind: str = "eval",
    ) -> None:
        """Sample so many responses of the generator, which is the reference, to each row."""
        player = self.of_rows(self.rows)
        player.forgetting, player.plans = None, [self.plan("reference", samples, temperature)]
        size = self.prompts_per_batch * 8 // samples  # in responses as with eval.num_samples=8
        player.prompts_per_batch = max(1, size)
        label = f"sampling the reference: {len(self.rows)} prompts x {samples} samples"
        options = {"on_progress": lambda part: on_progress(part, label), "on_batch": on_batch}
        player(0, kind=kind, **options)

    def plan(self, name: str, samples: int, temperature: float) -> tuple[str, int, Generator]:
        """Return the name, the number of responses per row, a generator at `temperature`."""
        return name, samples, self.generator.at_temperature(temperature)

    def set_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Evaluate on these rows."""
        self.rows = rows
        self.labels = [self.task.label(row) for row in rows]

    def due(self, iteration: int, last: int) -> bool:
        """Return whether to evaluate after this many finished iterations."""
        return iteration == last or bool(self.every and iteration % self.every == 0)

    @property
    def about(self) -> str:
        """Describe an evaluation: "40 prompts x 8 samples, greedy"."""
        ways = {"sampled": "x {} samples", "greedy": "greedy"}
        played = [ways[name].format(size) for name, size, _ in self.plans]
        return f"{len(self.rows)} prompts {', '.join(played)}".rstrip()

    def __call__(
        self,
        iteration: int,
        *,
        kind: str = "eval",
        on_progress: Callable[..., None] = lambda *_: None,
        on_batch: Callable[[str, TensorDictBase, list[int]], None] = lambda *_: None,
    ) -> tuple[dict[str, float], list]:
        """Return the metrics and one sampled record per row of this rank.

        `on_progress(fraction)` is called before each batch, `on_batch(plan, responses, rows)` after
        it.
        """
        efficiency = self.efficiency
        if efficiency is not None:
            if kind == "before":
                responses = sample(self, efficiency.samples, on_progress)
                efficiency.begin(responses, write=self.runtime.is_main)
            efficiency.responses = {}
        with self.generator.sampling():
            scores, records = self._play(iteration, kind, on_progress, on_batch)
        if efficiency is not None:
            responses = self.runtime.merge_rows(efficiency.responses)
            scores |= efficiency(scores, len(self.rows), responses)
        if self.forgetting is not None:
            scores["eval/kl_forward"] = self.forgetting(self, kind, on_progress)
        for rows, other in self.beside.items():
            about = f"evaluating {other.about}, {rows} rows"
            options = {"on_progress": lambda part, label=about: on_progress(part, label)}
            more, _ = other(iteration, kind=kind, **options)
            scores |= {name_beside(name, rows): value for name, value in more.items()}
        return scores, records

    def _play(self, iteration: int, kind: str, progress: Any, on_batch: Any) -> tuple[dict, list]:
        """Play all plans; return metrics over all ranks, and a record of each row of this one."""
        metrics, kls = dict[str, float](), dict[str, float]()
        records: list[dict[str, Any]] = []
        per_row = sum(size for _, size, _ in self.plans)
        done = 0  # responses to each row by earlier plans
        for name, size, generator in self.plans:
            first = done == 0

            def on_fraction(fraction: float, done: int = done, size: int = size) -> None:
                progress((done + size * fraction) / per_row)

            sums, otherwise = self._empty_sums(), Counter[str]()
            options = {"kind": kind, "on_fraction": on_fraction}
            for batch, part in self._batches(name, size, generator, **options):
                on_batch(name, batch, part)
                self._count(sums, batch, part)
                if name == "sampled" and self.efficiency is not None:
                    self.efficiency.responses |= scores_by_row(batch, part)
                if first and kind == "before":
                    otherwise.update(right_otherwise(self.task, batch))
                if first:  # the first response to each row
                    about = {"kind": kind, "rewarded": self.task.rewarded}
                    starts = range(0, len(batch), size)
                    records += [transcript(batch, i, iteration, **about) for i in starts]
            done += size
            total = self.runtime.all_reduce_sum(sums)
            if total["tokens"]:
                kls["eval/kl_ref"] = total["kl"] / total["tokens"]
                kls["eval/kl_ref_sequence"] = total["kl"] / (max(total["rows"], 1.0) * size)
            if self.task.rewarded and total["rows"]:
                metrics |= self._accuracies(name, size, total)
                if first:
                    metrics["eval/reward"] = total["reward"] / (total["rows"] * size)
                    for match, count in sum(self.runtime.gather(otherwise), Counter()).items():
                        metrics[f"eval/right_by_{match}"] = count / (total["rows"] * size)
        return metrics | kls, records

    def _batches(
        self,
        name: str,
        size: int,
        generator: Generator,
        *,
        kind: str,
        on_fraction: Callable[[float], None],
    ) -> Iterator[tuple[TensorDictBase, list[int]]]:
        """Yield the responses of a plan, `size` to a row, and their rows, batch by batch."""
        env = self.env.with_group_size(size)  # copies the current transforms
        for fraction, part in self._parts(size):
            on_fraction(fraction)
            if kind != "after":  # a trained run finishes its last evaluation
                self.runtime.stops.check()  # equally often on every rank, even without rows
            batch: Any = None
            if part:
                batch = collect(self._prompts(part), env, generator, learn=False)
            if name == "sampled":
                self.runtime.wait()  # a judge may be slow on one rank; shards score together
                batch = self.retrieve_kl(batch) if part else self.retrieve_kl.join()
            if part:
                yield on_host(batch), part

    def _accuracies(self, name: str, size: int, total: dict[str, float]) -> dict[str, float]:
        """Return the accuracy of a plan, of each label, and pass@k."""
        rows = total["rows"]
        out = {f"eval/{name}_accuracy": total["right"] / (rows * size)}
        for label in sorted(filter(None, set(self.labels))):
            fraction = total[f"right {label}"] / max(total[f"rows {label}"] * size, 1.0)
            out[f"eval/{name}_accuracy/{label}"] = fraction
        if size > 1:  # at k = all samples, the HumanEval estimator
            out[f"eval/pass@{size}"] = total["solved"] / rows
        return out

    def _empty_sums(self) -> dict[str, float]:
        """Return the sums that `_count` adds to, all 0."""
        names = ["right", "solved", "reward", "rows", "kl", "tokens"]
        names += [f"{count} {label}" for label in self.labels for count in ("right", "rows")]
        return dict.fromkeys(names, 0.0)

    def _count(self, sums: dict[str, float], batch: TensorDictBase, part: list[int]) -> None:
        """Add the scores of the responses to these rows."""
        judged = ~batch.get("dropped").view(len(part), -1)[:, 0]  # [rows], by full groups
        right = batch.get("success").view(len(part), -1).sum(-1) * judged  # [rows]
        sums["solved"] += float((right > 0).sum())
        sums["reward"] += float(batch.get("reward_raw").sum())  # 0 where dropped
        if (kl := batch.get("kl_penalty", None)) is not None:
            each = judged.repeat_interleave(len(batch) // len(part)).to(kl.device)  # [B]
            mask = batch.get(("masks", "all_response_mask")) & each.unsqueeze(-1)  # [B, T]
            sums["kl"] += float((kl * mask).sum())
            sums["tokens"] += float(mask.sum())
        for row, count, counts in zip(part, right.tolist(), judged.tolist(), strict=True):
            for suffix in ("", f" {self.labels[row]}"):
                sums[f"right{suffix}"] += count
                sums[f"rows{suffix}"] += counts

    def _parts(self, samples: int) -> Iterator[tuple[float, list[int]]]:
        """Yield (fraction done, this rank's rows) per batch, equally often on every rank.

        Plans with fewer samples per row get more rows: all batches have one size.
        """
        size = self.prompts_per_batch * max(count for _, count, _ in self.plans) // samples
        local = list(range(len(self.rows)))[self.runtime.rank :: self.runtime.ranks]
        most = math.ceil(len(self.rows) / self.runtime.ranks)
        for start in range(0, most, size):
            yield start / most, local[start : start + size]

    def _prompts(self, index: list[int]) -> TensorDict:
        place = torch.tensor(index)
        td = TensorDict(batch_size=[len(index)])
        td.set("group_id", place)
        td.set("stream", fold(self.runtime.seed, -1, place))
        rows = [deepcopy(self.rows[i]) for i in index]  # a reward may change its row
        return td.set("row", NonTensorStack(*map(NonTensorData, rows)))


def right_otherwise(task: Task, batch: TensorDictBase) -> dict[str, int]:
    """Return how many responses of a batch would be right by another `env.match`, by its name."""
    rows, chats, texts = ([x.data for x in batch.get(k)] for k in ("row", "messages", "response"))
    last = [c[-1]["content"] if c else text for c, text in zip(chats, texts, strict=True)]
    return task.right_otherwise(rows, [Response(text, True, []) for text in last])


def _draw(task: Task, rows: Sequence[dict[str, Any]], count: int | None) -> list[dict[str, Any]]:
    """Return `count` of the rows, with the shares of the labels among all rows; None: all rows."""
    if count is None or count >= len(rows):
        return list(rows)
    if not is_listed(rows):  # generated: slow to read to the end, and the first are like the others
        return [rows[place] for place in range(count)]
    places = list(range(len(rows)))
    Random(0).shuffle(places)  # kinds of rows without labels may take turns or be sorted
    if task.label(rows[0]) is not None:
        places.sort(key=lambda i: str(task.label(rows[i])))
    # The middle row of each of `count` equal parts, so that the last label loses no more.
    chosen = sorted(places[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count))
    return [rows[place] for place in chosen]


def _efficiency(samples: int, path: Path) -> Any:
    """Return the object that computes kl/efficiency; None without samples of the reference."""
    if not samples:
        return None
    from trainer.kl.efficiency import Efficiency  # few runs sample the reference

    return Efficiency(samples, path)


def sample(
    play: Evaluate,
    samples: int,
    on_progress: Callable[..., None] = lambda *_: None,
    *,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Return rows, reward and success [rows, samples] of responses at a temperature on all ranks.

    Dropped rows are left out ("asked" counts them); {} if all rows are dropped.
    """
    scores: dict[int, dict[str, list]] = {}

    def on_batch(_: str, batch: TensorDictBase, rows: list[int]) -> None:
        scores.update(scores_by_row(batch, rows))

    play.sample_reference(samples, on_batch, on_progress, temperature=temperature)
    rows = play.runtime.merge_rows(scores)
    reward = [[round(value, 6) for value in each["reward"]] for each in rows.values()]
    success = [each["success"] for each in rows.values()]
    if not rows:
        return {}
    return {"asked": len(play.rows), "rows": [*rows], "reward": reward, "success": success}
