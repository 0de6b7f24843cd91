"""The other end of the leash: the model that the KL is to, and how it follows the policy."""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from envs.transforms import RetrieveKL
from policies.protocols import Policy
from policies.scorer import Scorer
from policies.weights import weights_of


class Reference:
    """Add the reference log-probs and the KL of each token to a batch.

    `model` is what `policies.load_reference` returned. After each `every` iterations (0 = never)
    its weights become decay * theirs + (1 - decay) * the policy's: 0 is a reset to the policy. Of a
    model with LoRA those are the adapter's. `sha256` names the weights that it started from.
    """

    def __init__(
        self, policy: Policy, model: Policy, *, every: int = 0, decay: float = 0.0
    ) -> None:
        self.retrieve = RetrieveKL(ref_model=model, add_to_reward=False)
        self.scorer: Scorer = model.scorer
        found = getattr(model, "files", None)  # none of a model that was made by hand
        self.sha256 = str(found.sha256) if found else ""
        self.every, self.decay = every, decay
        self.moved = False
        self.policy = policy
        if any(theirs.dtype.itemsize < 4 for theirs, _ in self.pairs.values()) and decay:
            raise ValueError(
                f"kl.refresh_decay={decay} would round away in half-precision weights; use "
                "policy.dtype=float32 with policy.autocast=bfloat16, or kl.refresh_decay=0"
            )

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (its own, the policy's) weights by name, as they are now; {} if it never moves."""
        if not self.every:
            return {}
        theirs, mine = weights_of(self.scorer).named(), weights_of(self.policy.scorer).named()
        return {name: (theirs[name].detach(), mine[name]) for name in mine}

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch with ref_log_probs.full and kl_penalty, [B, T]."""
        return self.retrieve(batch)

    @torch.no_grad()
    def refresh(self, iteration: int) -> None:
        """Follow the policy if `iteration` finished iterations say so."""
        if self.every and iteration % self.every == 0:
            for theirs, mine in self.pairs.values():
                # With weight 1 this is exactly the policy, which half-precision shards round to.
                theirs.lerp_(mine.to(theirs.dtype), 1 - self.decay)
            self.moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights, once they are others than those that the reference started from."""
        return {name: theirs for name, (theirs, _) in self.pairs.items()} if self.moved else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what `state_dict` returned."""
        self.moved = bool(state)
        pairs = self.pairs
        for name, value in state.items():
            pairs[name][0].copy_(value)


class NoReference:
    """Measure no KL."""

    scorer = None
    sha256 = ""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch."""
        return batch

    def refresh(self, iteration: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take nothing back."""
