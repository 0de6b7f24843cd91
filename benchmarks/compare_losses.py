"""The losses and advantages of leash beside TorchRL's; benchmarks/compare_torchrl.py runs them."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn

from benchmarks.cases import Case, both
from policies import LLMMaskedCategorical
from trainer import GRPOLoss, MCAdvantage, SFTLoss


class Table(nn.Module):
    """An actor whose log-probs are those of its logits [B, T, V], for the losses of both."""

    tokenizer, in_keys = "none", [("history", "full")]

    def __init__(self, logits: Tensor, data: TensorDict, kind: type) -> None:
        super().__init__()
        self.logits, self.data, self.kind = nn.Parameter(logits.clone()), data, kind

    def get_dist(self, td: TensorDict) -> Any:
        """Return the distribution of one of the packages over the assistant's tokens."""
        return self.kind(logits=self.logits, mask=self.data["masks", "all_assistant_mask"])

    _get_sft_dist = get_dist

    def forward(self, td: TensorDict) -> TensorDict:
        """Return log-probs and masks in rows, as an unpadded actor does."""
        given = self.logits.log_softmax(-1).gather(-1, self.data["tokens", "full"][..., None])
        out = self.data.clone().set(("log_probs", "full"), given.squeeze(-1))
        return lazy_stack(list(out.unbind(0)))


def losses(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare GRPOLoss and SFTLoss, values and gradients.

    Left out: what the original averages over masked tokens too (the KL terms, clip_fraction), the
    reductions that have no effect there, and CISPOLoss, which lacks the paper's stop-gradient.
    """
    theirs = torchrl.objectives.llm
    batch, length, vocabulary = 8, 64, 5_000
    logits = torch.randn(batch, length, vocabulary, dtype=dtype)
    data = TensorDict(batch_size=[batch])
    data["tokens", "full"] = torch.randint(0, vocabulary, (batch, length))
    data["masks", "all_attention_mask"] = torch.ones(batch, length, dtype=torch.bool)
    data["masks", "all_assistant_mask"] = torch.rand(batch, length) < 0.3
    curr = logits.log_softmax(-1).gather(-1, data["tokens", "full"][..., None]).squeeze(-1)
    data["log_probs", "full"] = curr + 0.3 * torch.randn_like(curr)
    data["next", "ref_log_probs", "full"] = curr + 0.3 * torch.randn_like(curr)
    data["advantage"] = torch.randn(batch, 1, 1, dtype=dtype)
    data["history", "full"] = torch.zeros(batch)
    ref = ("next", "ref_log_probs", "full")
    masked = data.clone()  # their sum over the reference's row expects 0 outside the mask
    masked[ref] = data[ref] * data["masks", "all_assistant_mask"]
    rows = lazy_stack(list(masked.unbind(0)))
    dist = {GRPOLoss: LLMMaskedCategorical, SFTLoss: LLMMaskedCategorical}
    wishes: list[tuple[str, type, dict[str, Any]]] = [
        ("loss_objective", GRPOLoss, {"clip_epsilon": (0.2, 0.28)}),
        ("loss_objective", GRPOLoss, {"aggregation": "prompt_mean", "kl_mask_threshold": 0.1}),
        ("loss_entropy", GRPOLoss, {}),
        ("ESS", GRPOLoss, {}),
        ("loss_sft", SFTLoss, {}),
        ("loss_sft", SFTLoss, {"loss_function": "minor_sft", "normalize_by_seq_length": False}),
    ]
    for key, kind, settings in wishes:

        def run(cls, key=key, settings=settings):
            actor = Table(logits, data, dist.get(cls, torchrl.modules.LLMMaskedCategorical))
            out = getattr(cls(actor, **settings)(rows if key == "loss_sft" else data.clone()), key)
            return actor, out.reshape(())

        def value(cls, run=run):
            return run(cls)[1].detach()

        def slope(cls, run=run):
            actor, out = run(cls)
            return torch.autograd.grad(out, actor.logits)[0]

        works = {key: value} if key == "ESS" else {key: value, f"{key}, gradient": slope}
        what = ", ".join(str(v) for v in settings.values()) or "default"
        yield from both(works, kind, getattr(theirs, kind.__name__), what)


def mc_advantage(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare the advantages of a group of chats of the same and of different lengths.

    Left out: a group of one (nan there), and the top-k selector, which repeats itself.
    """
    done = torch.zeros(16, 1, dtype=torch.bool)
    done[-1] = True
    chats = []
    for _ in range(32):
        reward = torch.randn(16, 1, dtype=dtype)
        following = TensorDict({"reward": reward, "done": done}, [16])
        chats.append(TensorDict({"query": torch.zeros(16), "next": following}, [16]))
    for how in (None, "sum", "max", "mean"):

        def work(cls, how=how):
            advantage = cls(len(chats), trajectory_return=how)
            return [advantage.inv(chat) for chat in chats][-1]["advantage"]

        yield from both({"advantage": work}, MCAdvantage, torchrl.objectives.llm.MCAdvantage, how)
