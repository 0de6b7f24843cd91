"""Optimisers with weight decay on matrices only, and learning-rate schedules.

An optimiser is a class with torch's arguments, `params` and `lr`. It gets the keys of optimizer.*
that are its arguments, and `model` if it has this argument. Half-precision weights are updated in
float32: bfloat16 has 8 bits of precision, so a step below 1/256 of a weight, as with lr=1e-6, would
round to 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, *, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Return the groups of the parameters that require a gradient, for any torch optimiser.

    Norms and biases (fewer than two dimensions) are not decayed. A scorer's critic has separate
    groups; trainer/update.py reads "scale" and "since" of a group.
    """
    critic = getattr(model, "critic", None)
    of_critic = set() if critic is None else set(critic.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    both: list[dict[str, Any]] = [{"params": [p for p in trained if p not in of_critic]}]
    if critic is not None:
        both[0]["since"] = critic.warmup
        both.append({"params": [p for p in trained if p in of_critic], "scale": critic.lr_scale})
    groups = []
    for group in both:
        matrices = [p for p in group["params"] if p.ndim > 1]
        others = [p for p in group["params"] if p.ndim <= 1]
        parts = ((matrices, weight_decay), (others, 0.0))
        groups += [{**group, "params": p, "weight_decay": decay} for p, decay in parts if p]
    return groups


def make_optimizer(
    model: nn.Module, *, weight_decay: float = 0.0, **settings: Any
) -> "MasterAdamW":
    """Return `MasterAdamW` on the `parameter_groups` of a model; `settings`: lr, betas, eps."""
    return MasterAdamW(parameter_groups(model, weight_decay=weight_decay), **settings)


class Masters(torch.optim.Optimizer):
    """Give an optimiser a float32 copy ("master") of each half-precision weight in its state.

    A mixin, before the optimiser's class. The weight is the rounded master; the moments are
    float32 too. Float32 weights have no copy.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step, and remove the gradients of half-precision weights."""
        half = [
            (group["params"], i, p)
            for group in self.param_groups
            for i, p in enumerate(group["params"])
            if p.grad is not None and p.dtype.itemsize < 4
        ]
        # The masters replace the weights during the step. Assigning another dtype to a weight's
        # `data` would make autograd create a new gradient accumulator without DDP's hooks: no
        # gradient would be reduced from the next step on.
        for params, i, p in half:
            state = self.state.pop(p, {})
            master = nn.Parameter(state.pop("master", p.float()))
            master.grad, p.grad = p.grad.float(), None
            params[i] = master
            if state:
                self.state[master] = state
        masters = [params[i] for params, i, _ in half]
        super().step(closure)
        for (params, i, p), master in zip(half, masters, strict=True):
            params[i] = p
            self.state[p] = {**self.state.pop(master), "master": master.data}
            p.copy_(master)


class MasterAdamW(Masters, torch.optim.AdamW):
    """Fused AdamW with masters: 12 bytes per half-precision weight, in addition to its 2.

    >>> weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    >>> optimizer = MasterAdamW([weight], lr=1e-3)
    >>> for _ in range(8):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> weight.item(), round(optimizer.state[weight]["master"].item(), 4)  # 0.999 is no bfloat16
    (0.9921875, 0.992)
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(params, betas=(betas[0], betas[1]), **options)


class MasterMuon(Masters, torch.optim.Muon):
    """Muon with masters."""


class Muon(torch.optim.Optimizer):
    """Muon on the hidden matrices, AdamW on everything else.

    AdamW updates embeddings, the output head, norms, biases and the critic. torch.optim.Muon steps
    along the orthogonalised momentum of a matrix (Jordan 2024, "Muon: An optimizer for hidden
    layers"). Its steps are scaled to the size of AdamW's (Moonlight, arXiv 2502.16982 eq. 4), so
    that both use the same learning rate and weight decay.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        model: nn.Module,
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        outer = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        for module in model.modules():
            head = getattr(module, "get_output_embeddings", lambda: None)()
            outer |= {id(head.weight)} if head is not None else set()
        hidden, others = [], []
        for group in params:
            matrices = [p for p in group["params"] if p.ndim == 2 and id(p) not in outer]
            matrices = [] if "scale" in group else matrices  # "scale": the critic's group
            chosen = {id(p) for p in matrices}
            rest = [p for p in group["params"] if id(p) not in chosen]
            hidden += [{**group, "params": matrices, "muon": True}] if matrices else []
            others += [{**group, "params": rest, "muon": False}] if rest else []
        if not hidden:
            raise ValueError("expected a model with trained matrices for Muon, got none")
        both = {"lr": lr, "weight_decay": weight_decay}
        self.muon = MasterMuon(hidden, momentum=momentum, adjust_lr_fn="match_rms_adamw", **both)
        self.adamw = MasterAdamW(others, betas=betas, eps=eps, **both) if others else None
        groups = [*self.muon.param_groups, *(self.adamw.param_groups if self.adamw else ())]
        super().__init__(groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Take a step with both optimisers."""
        for optimizer, is_muon in ((self.muon, True), (self.adamw, False)):
            if optimizer is not None:  # `load_state_dict` may have replaced groups and state
                groups = [group for group in self.param_groups if group["muon"] == is_muon]
                optimizer.param_groups, optimizer.state = groups, self.state
                optimizer.step(closure)


def make_schedule(
    schedule: str = "constant", *, lr: float, warmup: int = 0, total: int
) -> Callable[[int], float]:
    """Return the function step (0-based) -> learning rate: constant, or linear or cosine to 0.

    >>> rate = make_schedule("linear", lr=1.0, warmup=2, total=6)
    >>> [round(rate(s), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    }

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        done = (step - warmup) / max(total - warmup, 1)
        return lr * shapes[schedule](min(done, 1.0))

    return rate
