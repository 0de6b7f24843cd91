"""Every statement is tried with the same seed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
