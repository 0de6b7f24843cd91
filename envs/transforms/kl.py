"""The KL of each token of a batch: score it with the reference, subtract.

Two transforms on dense [B, T], composed by `RetrieveKL`. A run calls the chain once per batch
(trainer/kl/reference.py); `Leash` applies the penalty. Ragged rows, other masks, KL rewards and Ray
are in envs/torchrl/kl.py, because no run needs them.
"""

import torch
from tensordict import NestedKey, TensorDictBase

from envs.transforms.transform import Compose, Transform
from policies.chat_policy import ChatPolicy

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")
RESPONSE = ("masks", "all_response_mask")


class RetrieveLogProb(Transform):
    """Write a model's log-probs [B, T] of the sampled tokens, 0 elsewhere.

    The model is a scoring policy; it uses the temperatures [B] of the batch.
    """

    def __init__(self, model: ChatPolicy, *, log_probs_full_key: NestedKey = REF) -> None:
        super().__init__([("tokens", "full")], [log_probs_full_key])
        self.model, self.log_probs_full_key = model, log_probs_full_key

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        scores = self.model.score(tensordict, "temperature")  # [B, T]
        sampled = tensordict.get(RESPONSE)  # [B, T]
        return next_td.set(self.log_probs_full_key, scores.masked_fill(~sampled, 0))


class KLComputation(Transform):
    """Write kl_key = gen - ref [B, T], the k1 estimate in nats, 0 outside the sampled tokens.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"log_probs": {"full": torch.tensor([[0.0, -1.0, -2.0]])},
    ...     "ref_log_probs": {"full": torch.tensor([[0.0, -1.5, -1.0]])},
    ...     "masks": {"all_response_mask": torch.tensor([[False, True, True]])}}, batch_size=[1])
    >>> KLComputation()(td)["kl_penalty"].tolist()
    [[0.0, 0.5, -1.0]]
    """

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = GEN,
        ref_log_probs_full_key: NestedKey = REF,
        *,
        kl_key: NestedKey = "kl_penalty",
    ) -> None:
        super().__init__([gen_log_probs_full_key, ref_log_probs_full_key], [kl_key])

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        gen, ref = (tensordict.get(key) for key in self.in_keys)  # [B, T] each
        return next_td.set(self.out_keys[0], (gen - ref).masked_fill(~tensordict.get(RESPONSE), 0))


class RetrieveKL(Compose):
    """Score a batch with the reference, and write the KL of each token.

    Reads tokens, masks, log_probs and temperature; writes `ref_log_probs_full_key`, `kl_key`.
    """

    def __init__(
        self,
        ref_model: ChatPolicy,
        *,
        ref_log_probs_full_key: NestedKey = REF,
        kl_key: NestedKey = "kl_penalty",
    ) -> None:
        super().__init__(
            RetrieveLogProb(ref_model, log_probs_full_key=ref_log_probs_full_key),
            KLComputation(GEN, ref_log_probs_full_key, kl_key=kl_key),
        )
        self.ref_model = ref_model
