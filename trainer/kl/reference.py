"""The reference of the KL, and its refresh towards the policy."""

from collections.abc import Callable
from dataclasses import replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from envs.transforms.kl import RetrieveKL
from policies.host import kept, placed
from policies.load import weights_of
from policies.padding import predicted
from policies.protocols import Policy
from policies.sampler import NO_FILTERS
from policies.scorer import LOCAL, Scorer, score_batch, score_in_parts
from trainer.batch import LEASHES, RESPONSE

MAX_BYTES = 2**28  # largest ref_states; peak memory is up to three times this


class Reference:
    """Add the reference log-probs and the KL of each token to a batch, under the leash's `name`.

    `model` comes from `policies.load_reference`. Every `every` iterations (0 = never) the weights,
    with LoRA the adapter's, become decay * reference + (1 - decay) * policy. `sha256` is the hash
    of the weights before any refresh. With a `hint` (trainer/kl/hints.py) the reference scores the
    response after the hinted prompt.
    """

    def __init__(
        self,
        policy: Policy,
        model: Policy,
        *,
        every: int = 0,
        decay: float = 0.0,
        name: str = "ref",
        hint: Callable[[TensorDictBase], TensorDictBase] | None = None,
    ) -> None:
        self.hint = hint
        self.names = LEASHES[name]
        keys = {"ref_log_probs_full_key": self.names.log_probs, "kl_key": self.names.penalty}
        self.retrieve = RetrieveKL(model, **keys)
        self.scorer: Scorer = model.scorer
        files = getattr(model, "files", None)  # None for a model built in memory
        self.sha256 = str(files.sha256) if files else ""
        self.every, self.decay = every, decay
        self.moved = False
        self.policy = policy
        if any(weight.dtype.itemsize < 4 for weight, _ in self.pairs.values()) and decay:
            raise ValueError(
                f"kl.refresh_decay={decay} would round away in half-precision weights; use "
                "policy.dtype=float32 with policy.autocast=bfloat16, or kl.refresh_decay=0"
            )

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return current (reference, policy) weights by name; {} if it is never refreshed."""
        if not self.every:
            return {}
        old, new = weights_of(self.scorer).named(), weights_of(self.policy.scorer).named()
        return {name: (old[name].detach(), new[name]) for name in new}

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase, *, keep_states: bool = False) -> TensorDictBase:
        """Return the batch with the log-probs (ref_log_probs.full) and kl_penalty, [B, T].

        `keep_states` also writes ref_states, so that the update need not run the reference again,
        unless they exceed MAX_BYTES or weights are sharded (all ranks must decide the same). With a
        hint they are kept at any size, because the update does not know the hinted prompt.
        Demonstrations are returned unchanged: the update scores them.
        """
        if batch.get(RESPONSE, None) is None:
            return batch
        if self.hint is None:
            if not keep_states or not self._fits(batch):
                return self.retrieve(batch)
            return self.retrieve[1](self._with_states(batch))  # KLComputation alone
        hinted, sampled = self.hint(batch), batch.get(RESPONSE)  # [B, T]
        hinted = self._with_states(hinted) if keep_states else self.retrieve[0](hinted)
        for key in (self.names.log_probs, *(["ref_states"] if keep_states else [])):
            value = hinted.get(key)  # [B, t] or [B, t, H]
            batch.set(key, placed(kept(value, hinted.get(RESPONSE).cpu()), sampled.cpu()))
        return self.retrieve[1](batch)

    def _fits(self, batch: TensorDictBase) -> bool:
        """Return whether ref_states may be kept for the update."""
        if self.scorer.placement is not LOCAL:
            return False
        weight, width = next(self.scorer.model.parameters()), self.scorer.head().weight.shape[1]
        return batch.get(("tokens", "full")).numel() * width * weight.itemsize <= MAX_BYTES

    def _with_states(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch with the log-probs and ref_states."""
        model, scorer, tokens = self.retrieve.ref_model, self.scorer, batch.get(("tokens", "full"))
        attention, group = batch.get(("masks", "all_attention_mask")), batch.get("group_id", None)
        limit = model.micro_batch_tokens
        states = score_in_parts(scorer.states, tokens, attention, limit=limit, group_id=group)
        sampled = predicted(attention, batch.get(RESPONSE)).cpu()
        temperature = model.scoring_temperature(batch, "temperature")
        dist = scorer.distribution(kept(states, sampled), sampled, temperature)
        batch.set(self.names.log_probs, dist.scores(tokens).log_probs)
        return batch.set("ref_states", states)

    @torch.no_grad()
    def forward_kl(self, batch: TensorDictBase) -> Tensor:
        """Return KL(reference || policy) over the vocabulary, of the state of each token, [B, T].

        Nats, 0 outside the response. All ranks must call it.
        """
        options = {"limit": self.retrieve.ref_model.micro_batch_tokens, "mixture": 0.0}
        options |= {"reference": self.scorer}
        return score_batch(self.policy.scorer.divergence, batch, batch.get(RESPONSE), **options)

    def sampler(self) -> Policy:
        """Return the reference as a generator, whose responses end where the policy's end."""
        limits = replace(self.policy.limits, eos_token_id=self.policy.stop_ids, filters=NO_FILTERS)
        return self.policy.get_new_version(model=self.scorer, limits=limits)

    @torch.no_grad()
    def join(self) -> None:
        """Join the other ranks' forwards of a sharded reference; this rank has no row."""
        with self.scorer.placement.forwards(0) as count:
            for _ in range(count):
                ids = torch.zeros(1, 2, dtype=torch.int64, device=self.scorer.placement.device)
                self.scorer(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids).bool())

    @torch.no_grad()
    def refresh(self, iteration: int) -> None:
        """Move the weights towards the policy if `iteration` is a multiple of `every`."""
        if self.every and iteration % self.every == 0:
            for old, new in self.pairs.values():
                # With decay 0 this is exactly the policy; half-precision shards round it.
                old.lerp_(new.to(old.dtype), 1 - self.decay)
            self.moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights (not copies: a resume fills them), or {} before the first refresh."""
        return {name: old for name, (old, _) in self.pairs.items()} if self.moved else {}


class NoReference:
    """Measure no KL."""

    scorer = None
    sha256 = ""
    moved = False

    def __call__(self, batch: TensorDictBase, *, keep_states: bool = False) -> TensorDictBase:
        """Return the batch."""
        return batch

    def join(self) -> None:
        """Do nothing."""

    def refresh(self, iteration: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}
