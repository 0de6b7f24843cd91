"""How a server is asked that may be anybody's: by no redirect does a key go on to another one."""

import urllib.request
from typing import Any


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow none; urllib would take the headers along."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request: the answer is an HTTPError then."""


OPENER = urllib.request.build_opener(NoRedirect)
