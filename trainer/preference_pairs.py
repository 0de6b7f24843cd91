"""Training of a reward model on pairs of a chosen and a rejected response to one prompt.

A pair is two adjacent rows with one `group_id`, the chosen one first; a group stays in one
micro-batch. In this file P counts pairs.
"""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.tasks.task import assistant
from policies.models.reward_model import Rewards, compared_tokens, ids_to_end
from policies.protocols import Policy
from trainer.batch import batch_keys
from trainer.demonstrations import make_batch
from trainer.objectives import Terms
from trainer.runtime import Runtime
from trainer.sources import pick_rows


class PreferencePairs:
    """Render the iteration's pairs, each response up to the end of its turn.

    `loss_mask` marks the compared tokens on both rows of a pair: from the first difference to the
    end of the longer row.
    """

    reads_rows = "preferences"  # the value of algorithm.rows

    def __init__(
        self,
        *,
        task: Any,
        env: ChatEnv,
        policy: Policy,
        runtime: Runtime,
        prompts_per_iteration: int,
    ) -> None:
        self.rows = task.preferences()
        self.env, self.policy = env, policy
        self.runtime, self.size = runtime, prompts_per_iteration

    def __call__(self, iteration: int) -> TensorDict:
        """Return this rank's pairs of the iteration, [2P, T]."""
        chosen = pick_rows(iteration, size=len(self.rows), count=self.size, seed=self.runtime.seed)
        return self.batch([self.rows[i] for i in chosen[self.runtime.local_slice(self.size)]])

    def batch(self, rows: list[dict[str, Any]]) -> TensorDict:
        """Return rows with "messages", "chosen" and "rejected" as pairs, [2P, T]."""
        ids = [self._ids(row, row[name]) for row in rows for name in ("chosen", "rejected")]
        batch = make_batch(ids, self.policy.device)
        full, mask = batch.get(("tokens", "full")), batch.get(("masks", "all_attention_mask"))
        compared = compared_tokens(full[0::2], mask[0::2], full[1::2], mask[1::2])  # [P, T]
        batch.set("group_id", torch.arange(len(ids), device=mask.device) // 2)
        return batch.set("loss_mask", compared.repeat_interleave(2, 0))

    def _ids(self, row: dict[str, Any], response: str) -> Tensor:
        return ids_to_end(self.policy.renderer, [*self.env.messages(row), assistant(response)])


class PreferenceObjective:
    """-log sigmoid(chosen - rejected) of each compared token, as in `compute_reward_loss`.

    With aggregation=sequence_mean each row of a pair contributes half of its mean over tokens.
    """

    reads = batch_keys("group_id")

    def __call__(self, scores: Rewards, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        pair = batch.get("group_id")
        if len(pair) % 2 or not torch.equal(pair[0::2], pair[1::2]):
            raise ValueError("a micro-batch cuts a pair; raise trainer.micro_batch_tokens")
        chosen, rejected = scores.rewards[0::2], scores.rewards[1::2]  # [P, T]
        term = -torch.nn.functional.logsigmoid(chosen - rejected).repeat_interleave(2, 0)
        gap = (chosen - rejected).detach().repeat_interleave(2, 0)
        means = {"preference/accuracy": (gap > 0).float(), "preference/margin": gap}
        return Terms({"preference": term}, means)
