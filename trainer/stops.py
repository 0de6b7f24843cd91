"""What asks a run to end early, and how that is told. Torch-free: the parent imports it too."""

import signal


class Stopped(BaseException):
    """Raised at a safe point after a stop signal; the run can be resumed."""


def stop_reason(number: int) -> str:
    """Return what status.json says of a run that a signal stopped.

    >>> stop_reason(2), stop_reason(15)
    ('stopped by Ctrl-C', 'stopped by SIGTERM')
    """
    return f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"
