"""Where a scorer's weights are: who samples, scores in parts, copies, saves or loads asks it."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class Placement:
    """Every rank holds every weight."""

    about = ""  # what a run says of it when it starts
    held = True  # whether the weights are whole now
    device: torch.device | None = None  # of forwards, where it is not that of the weights

    def copy(self, module: nn.Module, kept: dict[int, Any] | None = None) -> nn.Module:
        """Return a copy of a module with weights of its own, but for those `kept` by their id."""
        return copy.deepcopy(module, kept or {})

    def whole(self) -> AbstractContextManager[None]:
        """Hold whole weights inside, for forwards that this rank takes on its own."""
        return nullcontext()

    def plain(self, *, here: bool = True, keep: bool = False) -> AbstractContextManager[None]:
        """Have plain weights inside, on all ranks together: to save `here`, or load and `keep`."""
        return nullcontext()

    def forwards(self, count: int) -> AbstractContextManager[int]:
        """Return how many forwards are to be taken inside by a rank that needs `count`."""
        return nullcontext(count)

    def scatter(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor that belongs to a weight."""
        return tensor.to(like.device)

    def master(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return {"master": ...} of a weight that is saved rounder than it is trained."""
        return {}


HERE = Placement()


def placement_of(part: Any) -> Placement:
    """Return where the weights of a policy are; an engine has its own, all of them."""
    return getattr(getattr(part, "scorer", None), "placement", HERE)
