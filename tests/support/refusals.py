"""What a configuration is refused with."""

import pytest

from conf.compose import compose_checked


def refusal(*words: str) -> str:
    """Return the one line that says why words do not compose."""
    with pytest.raises(ValueError, match=r".") as caught:
        compose_checked(words)
    message = str(caught.value)
    assert "\n" not in message
    return message
