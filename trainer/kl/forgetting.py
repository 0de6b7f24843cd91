"""Forgetting: the KL of reference to policy, on responses that the reference sampled.

By the chain rule the forward KL of whole responses is a mean over responses of the reference,

    KL(reference || policy) = E[ sum_t KL(reference(. | tokens < t) || policy(. | tokens < t)) ]

of exact KLs over the vocabulary. Both models score a response in one pass. The estimate has the
mean of log reference - log policy without its noise: it is never negative, and 0 at the start.
How much a policy forgets depends on this KL (RL's Razor, arXiv 2509.04259).
"""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from envs.tasks.task import Unrewarded
from policies.padding import pad, pad_mask, unpad
from trainer.kl.reference import Reference


class Forgetting:
    """Measure the forward KL on the rows of an evaluation, nats per response.

    The first call samples `samples` responses of the frozen reference to each row, at `temperature`
    and with as many turns as the policy has, and keeps them. They use the random streams of the
    evaluation, so a resumed run samples the same responses again.
    """

    def __init__(self, reference: Reference, *, samples: int, temperature: float) -> None:
        self.reference, self.samples, self.temperature = reference, samples, temperature
        self.responses: TensorDict | None = None  # of this rank
        self.count = 0  # of this rank's responses

    def __call__(self, play: Any, kind: str, on_progress: Any) -> float:
        """Return the mean over all ranks' responses to the rows of `play`, an `Evaluate`."""
        if self.responses is None:
            self.responses = self._sample(play, kind, on_progress)
        kl = self.reference.forward_kl(self.responses)  # [B, T]
        sums = {"kl": float(kl.double().sum()), "count": float(self.count)}
        total = play.runtime.all_reduce_sum(sums)
        return total["kl"] / total["count"]

    def _sample(self, play: Any, kind: str, on_progress: Any) -> TensorDict:
        """Return this rank's responses [B, T] on the CPU; an empty one if the rank has no row."""
        rows: list[tuple[Tensor, Tensor, int]] = []  # ids [t], response mask [t], group

        def keep(_: str, batch: TensorDictBase, __: list[int]) -> None:
            real = batch.get(("masks", "all_attention_mask"))  # [b, t]
            masks = unpad(batch.get(("masks", "all_response_mask")), real)
            ids = unpad(batch.get(("tokens", "full")), real)
            rows.extend(zip(ids, masks, batch.get("group_id").tolist(), strict=True))

        other = play.of_rows(play.rows, Unrewarded(play.task))
        other.generator = self.reference.sampler()
        options = {"temperature": self.temperature * self.reference.scorer.temperature_factor}
        other.sample_reference(self.samples, keep, on_progress, kind=kind, **options)
        self.count = len(rows)
        nothing = torch.zeros(2, dtype=torch.int64)
        rows = rows or [(nothing, nothing.bool(), 0)]
        ids, masks, groups = zip(*rows, strict=True)
        masks = {"all_attention_mask": pad_mask([*map(len, ids)]), "all_response_mask": pad(masks)}
        out = TensorDict({"tokens": {"full": pad(ids)}, "masks": masks}, [len(ids)])
        out.set("temperature", torch.full((len(ids),), self.temperature))
        return out.set("group_id", torch.tensor(groups))
