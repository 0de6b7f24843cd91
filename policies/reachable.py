"""Whether the hub can be reached, found out once instead of by the libraries' many attempts.

W&B's server is asked in the same way (trainer/reports/trackers/wandb.py).
"""

from threading import Thread

PATIENCE = 8  # seconds for the hub's first answer
GATEWAY = (502, 503, 504)  # said by what stands between: the libraries would ask again and again


def why_unreachable() -> str | None:
    """Return why the hub, or the mirror HF_ENDPOINT, gives no answer; None if it gives any.

    HF_HUB_OFFLINE asks nobody. Proxies are those of the libraries (HTTPS_PROXY ...).
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return why_silent(constants.ENDPOINT, PATIENCE)


def why_silent(address: str, seconds: float) -> str | None:
    """Return why a web server gives no answer within so many seconds; None if it gives any."""
    import httpx  # the hub's own session refuses under HF_HUB_OFFLINE, which is not about W&B

    said = list[str | None]()

    def ask() -> None:
        try:
            # A second more: this only ends the thread.
            status = httpx.head(address, timeout=seconds + 1).status_code
            said.append(f"{address} answers {status}" if status in GATEWAY else None)
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            said.append(f"{address} cannot be reached: {reason}")

    # A thread, since a timeout of HTTP counts anew for each address that a name has.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return said[0] if said else f"no answer of {address} within {seconds:g} s"
