"""Every check holds on the code as it is and fails on code broken in the way it is to notice."""

import mutants
import pytest

CHECKS = [m.check for m in mutants.MUTANTS if m.check.__module__ == "mutant_checks"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_holds(check) -> None:
    check()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant) -> None:
    assert mutant.is_killed()
