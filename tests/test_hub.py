"""The hub out of reach: asked once, for a bounded time, and told in one line."""

import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from policies import reachable
from policies.models import find_model


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reachable, "PATIENCE", 0.5)


def answering(status: int) -> HTTPServer:
    """Return a server on a free port that answers everything with a status."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_hub_that_says_nothing_is_given_up_in_time(nowhere, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        start = time.monotonic()
        with pytest.raises(ValueError, match="some/model not found") as caught:
            find_model("some/model")
    assert time.monotonic() - start < 5
    assert f"no answer of {address} within 0.5 s" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "why"), [(200, None), (404, None), (407, None), (503, "answers 503")]
)
def test_any_answer_but_a_gateways_will_do(nowhere, monkeypatch, status, why):
    monkeypatch.setattr(reachable, "PATIENCE", 5)
    server = answering(status)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    said = reachable.why_unreachable()
    server.shutdown()
    server.server_close()
    assert said is None if why is None else why in str(said)


def test_offline_asks_nobody(nowhere, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert reachable.why_unreachable() == "HF_HUB_OFFLINE is set"
        silent.settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent.accept()


def test_a_server_of_another_kind_is_asked_also_without_the_hub(monkeypatch):
    """HF_HUB_OFFLINE is about the hub: W&B's server is there all the same."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server = answering(200)
    assert reachable.why_silent(f"http://127.0.0.1:{server.server_port}", 5) is None
    server.shutdown()
    server.server_close()
