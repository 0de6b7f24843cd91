"""Evaluate on held-out rows: sampled accuracy (mean over samples) and greedy accuracy.

The same env and collect as training; only the rows, the temperature and the streams differ.
Ranks share the rows; what does not divide evenly is fine.
"""

import math
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs.chat_env import ChatEnv
from envs.tasks.task import Task
from policies.random import fold
from policies.transformers_wrapper import TransformersWrapper
from trainer.collect import collect
from trainer.metrics import transcript
from trainer.runtime import Runtime


class Evaluate:
    """Measure the policy on the task's eval rows.

    `prompts_per_batch` prompts are played at a time; draws depend on (seed, row, sample) only, so
    that two evaluations differ by the weights alone.
    """

    def __init__(
        self,
        *,
        task: Task,
        policy: TransformersWrapper,
        runtime: Runtime,
        env: ChatEnv,
        num_samples: int = 8,
        temperature: float = 1.0,
        greedy: bool = True,
        max_rows: int | None = None,
        prompts_per_batch: int = 8,
        every: int = 0,
    ) -> None:
        self.rows = list(task.rows("eval"))[:max_rows]
        self.runtime, self.chunk, self.every = runtime, prompts_per_batch, every
        self.plans: list[tuple[str, ChatEnv, TransformersWrapper]] = []
        for name, samples, value in (("sampled", num_samples, temperature), ("greedy", 1, 0.0)):
            if samples == 0 or (name == "greedy" and not greedy):
                continue
            arena = ChatEnv(
                task,
                group_size=samples,
                max_turns=env.max_turns,
                system_prompt=env.system_prompt,
            )
            self.plans.append((name, arena, at_temperature(policy, value)))

    def due(self, iteration: int, last: int) -> bool:
        """Return whether to evaluate after this iteration (0-based count of finished ones)."""
        return iteration == last or bool(self.every and iteration % self.every == 0)

    def __call__(self, iteration: int, *, kind: str = "eval") -> tuple[dict[str, float], list]:
        """Return the metrics and one sampled record per row of this rank."""
        out: dict[str, float] = {}
        records: list[dict[str, Any]] = []
        for name, env, policy in self.plans:
            sums = {"success": 0.0, "reward": 0.0, "count": 0.0}
            mine = list(range(len(self.rows)))[self.runtime.rank :: self.runtime.ranks]
            for start in range(0, math.ceil(len(self.rows) / self.runtime.ranks), self.chunk):
                if kind != "after":  # a run that is trained is finished first
                    self.runtime.check_stop()  # as often on every rank, rows or not
                part = mine[start : start + self.chunk]
                if not part:
                    continue
                batch = collect(self._prompts(part), env, policy)
                sums["success"] += float(batch.get("success").sum())
                sums["reward"] += float(batch.get("reward_raw").sum())
                sums["count"] += batch.batch_size[0]
                if name == self.plans[0][0]:
                    step = env.group_size
                    records += [
                        transcript(batch, i, iteration, kind=kind)
                        for i in range(0, batch.batch_size[0], step)
                    ]
            total = self.runtime.sums(sums)
            count = max(total["count"], 1.0)
            out[f"eval/{name}_accuracy"] = total["success"] / count
            if name == self.plans[0][0]:
                out["eval/reward"] = total["reward"] / count
        return out, records

    def _prompts(self, index: list[int]) -> TensorDict:
        place = torch.tensor(index)
        td = TensorDict(batch_size=[len(index)])
        td.set("group_id", place)
        td.set("stream", fold(self.runtime.seed, -1, place))
        return td.set("row", NonTensorStack(*[NonTensorData(self.rows[i]) for i in index]))


def at_temperature(policy: TransformersWrapper, temperature: float) -> TransformersWrapper:
    """Return the same policy, by the same weights, at another temperature."""
    kwargs = {**policy.generate_kwargs, "temperature": temperature}
    return policy.get_new_version(model=policy.scorer, generate_kwargs=kwargs)
