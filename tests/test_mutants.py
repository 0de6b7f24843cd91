"""Every contract test fails on code broken in the way it is there to notice."""

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_contract_fails_on_mutant(mutant, monkeypatch) -> None:
    original = getattr(mutant.owner, mutant.attribute)
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.broken(original))
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        mutant.contract()
