"""Each contract of the design holds."""

import contracts
import pytest


@pytest.mark.parametrize("contract", contracts.CONTRACTS, ids=lambda c: c.__name__)
def test_contract_holds(contract) -> None:
    contract()
