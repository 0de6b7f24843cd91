"""What a comparison of two packages is made of: the same work, once by each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One thing that both packages can do on the same input."""

    name: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]


def difference(case: Case) -> float:
    """Return the largest absolute difference of the two results from the same seed."""
    results = []
    for work in (case.ours, case.theirs):
        torch.manual_seed(0)
        results.append(work().double())
    mine, other = results
    assert mine.shape == other.shape, (case.name, mine.shape, other.shape)
    return torch.where(mine == other, 0.0, (mine - other).abs()).max().item()  # -inf twice is 0


def gradient(of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient of the sum of `of(x)`."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(of(x).sum(), x)[0]


def both(works: dict[str, Callable], ours: type, theirs: type, what: str) -> Iterator[Case]:
    """Yield a case for each work, a function of the class."""
    for name, work in works.items():
        yield Case(f"{ours.__name__}, {what}: {name}", partial(work, ours), partial(work, theirs))


def pair(ours: type, theirs: ModuleType) -> tuple[type, type]:
    """Return a class and the one of its name in a module of the other package."""
    return ours, getattr(theirs, ours.__name__)
