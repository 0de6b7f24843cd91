"""Evaluate on held-out rows: sampled accuracy (mean over samples) and greedy accuracy.

The same env and collect as training; only the rows, the temperature and the streams differ.
Ranks share the rows, evenly or not. Accuracy is also reported per row label. Dropped replies are
excluded. kl/efficiency is how much of its KL a policy needed (docs/kl.md), from replies of the
reference: sampled before training (eval.frontier) or later (mode=frontier), see frontier.json.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from envs.chat_env import ChatEnv
from envs.tasks.task import Task
from policies.cache import write_text
from policies.random import fold, in_float64
from policies.roles import Generator
from policies.scorer import HERE, placement_of
from trainer.collect import collect
from trainer.limit import FILE, Limit, read_limit
from trainer.runtime import Runtime
from trainer.transcripts import transcript


class Evaluate:
    """Measure the generator on the task's eval rows.

    `prompts_per_batch` prompts are played at a time; draws depend on (seed, row, sample) only, so
    that two evaluations differ by the weights alone. `retrieve_kl` measures the KL of the sampled
    replies; with `frontier` replies to each row before training, kl/efficiency judges it.
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
    ) -> None:
        self.task, self.env, self.generator = task, env, generator
        self.keep(list(islice(task.rows("eval"), max_rows)))
        self.runtime, self.chunk, self.every = runtime, prompts_per_batch, every
        self.retrieve_kl = retrieve_kl
        self.placements = placement_of(generator), placement_of(retrieve_kl)
        wanted = ("sampled", num_samples, temperature), ("greedy", int(greedy), 0.0)
        self.plans = [self.plan(*each) for each in wanted if each[1]]
        self.efficiency = Efficiency(frontier, runtime.folder) if frontier else None

    def plan(self, name: str, samples: int, temperature: float) -> tuple[str, ChatEnv, Generator]:
        """Return a name, an env with that many replies to a row, a generator at a temperature."""
        kwargs = {**self.generator.generate_kwargs, "temperature": temperature}
        generator = self.generator.get_new_version(generate_kwargs=kwargs)
        return name, self.env.regrouped(samples), generator

    def keep(self, rows: Sequence[dict[str, Any]]) -> None:
        """Evaluate on these rows."""
        self.rows = rows
        self.labels = [self.task.label(row) for row in rows]

    def due(self, iteration: int, last: int) -> bool:
        """Return whether to evaluate after this iteration (0-based count of finished ones)."""
        return iteration == last or bool(self.every and iteration % self.every == 0)

    @property
    def about(self) -> str:
        """Say what one evaluation plays: "40 prompts x 8 samples, greedy"."""
        ways = {"sampled": "x {} samples", "greedy": "greedy"}
        played = [ways[name].format(env.group_size) for name, env, _ in self.plans]
        return f"{len(self.rows)} prompts {', '.join(played)}"

    def __call__(
        self,
        iteration: int,
        *,
        kind: str = "eval",
        tell: Callable[..., None] = lambda *_: None,
        hear: Callable[[str, TensorDictBase, list[int]], None] = lambda *_: None,
    ) -> tuple[dict[str, float], list]:
        """Return the metrics and one sampled record per row of this rank.

        `tell` gets the share done before each batch; `hear` gets the plan's name, the replies and
        their rows.
        """
        if self.efficiency is not None and kind == "before":
            self.efficiency.begin(self, tell)
        with self.placements[0].whole(), self.placements[1].whole():  # batches differ by rank
            scores, records = self._play(iteration, kind, tell, hear)
        if self.efficiency is not None:
            scores |= self.efficiency(scores, len(self.rows))
        return scores, records

    def _play(self, iteration: int, kind: str, tell: Any, hear: Any) -> tuple[dict, list]:
        out: dict[str, float] = {}
        records: list[dict[str, Any]] = []
        replies, done = sum(env.group_size for _, env, _ in self.plans), 0
        for name, env, generator in self.plans:
            size, first = env.group_size, not done
            env = self.env.regrouped(size)  # transforms as they are now; their copies change alone
            sums = dict.fromkeys(("right", "solved", "reward", "rows", "kl", "tokens"), 0.0)
            sums |= {f"{kind} {label}": 0.0 for label in self.labels for kind in ("right", "rows")}
            for share, part in self._parts():
                tell((done + size * share) / replies)
                if kind != "after":  # a run that is trained is finished first
                    self.runtime.check_stop()  # as often on every rank, rows or not
                if not part:
                    continue
                batch: TensorDictBase = collect(self._prompts(part), env, generator, learn=False)
                if name == "sampled":
                    batch = self.retrieve_kl(batch)
                hear(name, batch, part)
                self._count(sums, batch, part)
                for i in range(0, size * len(part), size) if first else ():  # one of each row
                    records.append(transcript(batch, i, iteration, kind=kind))
            done += size
            total = self.runtime.sums(sums)
            rows = max(total["rows"], 1.0)
            out[f"eval/{name}_accuracy"] = total["right"] / (rows * size)
            for label in sorted(filter(None, set(self.labels))):
                share = total[f"right {label}"] / max(total[f"rows {label}"] * size, 1.0)
                out[f"eval/{name}_accuracy/{label}"] = share
            if size > 1:  # of k = all samples: the HumanEval estimator is this share
                out[f"eval/pass@{size}"] = total["solved"] / rows
            if first:
                out["eval/reward"] = total["reward"] / (rows * size)
            if total["tokens"]:
                out["eval/kl_ref"] = total["kl"] / total["tokens"]
                out["eval/kl_ref_sequence"] = total["kl"] / (rows * size)
        return out, records

    def _count(self, sums: dict[str, float], batch: TensorDictBase, part: list[int]) -> None:
        """Add what the replies to these rows are worth."""
        kept = ~batch.get("dropped").view(len(part), -1)[:, 0]  # [rows], by whole groups
        right = batch.get("success").view(len(part), -1).sum(-1) * kept  # [rows]
        sums["solved"] += float((right > 0).sum())
        sums["reward"] += float(batch.get("reward_raw").sum())  # 0 where dropped
        if (kl := batch.get("kl_penalty", None)) is not None:
            each = kept.repeat_interleave(len(batch) // len(part)).to(kl.device)  # [B]
            mask = batch.get(("masks", "all_response_mask")) & each.unsqueeze(-1)  # [B, T]
            sums["kl"] += float((kl * mask).sum())
            sums["tokens"] += float(mask.sum())
        for row, count, counts in zip(part, right.tolist(), kept.tolist(), strict=True):
            for suffix in ("", f" {self.labels[row]}"):
                sums[f"right{suffix}"] += count
                sums[f"rows{suffix}"] += counts

    def _parts(self) -> Iterator[tuple[float, list[int]]]:
        """Yield the share done and this rank's rows of each batch; equally often on every rank."""
        mine = list(range(len(self.rows)))[self.runtime.rank :: self.runtime.ranks]
        most = math.ceil(len(self.rows) / self.runtime.ranks)
        for start in range(0, most, self.chunk):
            yield start / most, mine[start : start + self.chunk]

    def _prompts(self, index: list[int]) -> TensorDict:
        place = torch.tensor(index)
        td = TensorDict(batch_size=[len(index)])
        td.set("group_id", place)
        td.set("stream", fold(self.runtime.seed, -1, place))
        rows = [deepcopy(self.rows[i]) for i in index]  # a reward may change its row
        return td.set("row", NonTensorStack(*map(NonTensorData, rows)))


class Efficiency:
    """Judge evaluations by `samples` replies to each eval row of the policy before training."""

    def __init__(self, samples: int, folder: Path) -> None:
        self.samples, self.path = samples, folder / FILE
        self.limit: Limit | None = None

    def begin(self, play: Evaluate, tell: Callable[..., None] = lambda *_: None) -> None:
        """Sample the policy as it starts; `tell` gets the share done and what is done."""
        what = f"sampling the reference: {len(play.rows)} prompts x {self.samples} samples"
        found = sample(play, self.samples, lambda share: tell(share, what))
        self.limit = Limit.of_samples(found)
        if self.limit is not None and play.runtime.is_main:
            write_text(self.path, json.dumps({"samples": self.samples, **found}))

    def __call__(self, scores: dict[str, float], rows: int) -> dict[str, float]:
        """Return kl/efficiency of an evaluation of so many rows, if the samples reach so far."""
        if self.limit is None and self.path.is_file():  # of a resumed run
            self.limit = read_limit(self.path)
        if self.limit is None or self.limit.asked != rows:
            return {}
        share = self.limit.efficiency_of(scores)
        return {} if share is None else {"kl/efficiency": share}


def sample(
    play: Evaluate, samples: int, tell: Callable[[float], None] = lambda _: None
) -> dict[str, Any]:
    """Return rows, reward and success [rows, samples] of replies at temperature 1 on all ranks.

    Rows that the task dropped are left out (`asked` counts them); without any it is {}.
    """
    found: dict[int, list] = {}

    def hear(_: str, batch: TensorDictBase, rows: list[int]) -> None:
        values = (in_float64(batch.get("reward_raw")).sum(-1), batch.get("success").int())
        each = [value.view(len(rows), -1).tolist() for value in (*values, batch.get("dropped"))]
        for row, reward, success, dropped in zip(rows, *each, strict=True):
            if not dropped[0]:
                found[row] = [[round(value, 6) for value in reward], success]

    player = copy(play)
    player.plans, player.efficiency = [play.plan("limit", samples, 1.0)], None
    player.chunk = max(1, play.chunk * 8 // samples)  # as eval.num_samples=8, at least a row
    player.placements = (play.placements[0], HERE)  # no KL is measured
    player(0, tell=tell, hear=hear)
    rows = dict(sorted(item for part in play.runtime.gather(found) for item in part.items()))
    values = {"reward": [r for r, _ in rows.values()], "success": [s for _, s in rows.values()]}
    return {"asked": len(play.rows), "rows": [*rows], **values} if rows else {}
