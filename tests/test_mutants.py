"""Every check holds on the code as it is and fails on code broken in the way it is to notice."""

import mutant_checks
import mutants
import pytest


@pytest.mark.parametrize("check", mutant_checks.CHECKS, ids=lambda check: check.__name__)
def test_check_holds(check) -> None:
    check()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant) -> None:
    assert mutant.is_killed()
