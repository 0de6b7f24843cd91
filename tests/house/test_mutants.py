"""Contracts and checks hold on the code as it is and fail on code broken as they are to notice."""

import pytest
from support import contracts, mutants

CHECKS = [m.check for m in mutants.MUTANTS if m.check.__module__ == "support.mutant_checks"]


@pytest.mark.parametrize("check", [*contracts.CONTRACTS, *CHECKS], ids=lambda c: c.__name__)
def test_check_holds(check) -> None:
    check()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant) -> None:
    assert mutant.is_killed()
