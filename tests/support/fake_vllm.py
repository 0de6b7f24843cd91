"""A stand-in for `vllm serve`: the requests of leash, answered by a plain transformers model.

Each row is sampled alone and by its own seed, so what it says depends on the weights alone.
"""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SETTINGS = {
    "model_config": {
        "dtype": "torch.float32",
        "max_model_len": 512,
        "logprobs_mode": "processed_logprobs",
    }
}
RESET = struct.pack("ii", 1, 0)  # linger 0: close() sends a reset


class FakeVLLM:
    """A server's state: its model, the rows it has sampled, and whether it resets connections."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.lock = threading.Lock()
        self.sampled: list[tuple[int, ...]] = []
        self.loads = 0  # transfers of weights
        self.takes_weights = True
        self.dies_at: str | None = None  # the path from which on it resets connections
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/version":
            return {"version": "0.33.0"}
        if path == "/server_info":
            return {"vllm_config": SETTINGS}
        if path == "/collective_rpc":
            self.loads += 1
            if self.takes_weights:
                self.load(Path(body["kwargs"]["weights_path"]))
        if path == "/inference/v1/generate":
            return self.generate(body["token_ids"], body["sampling_params"])
        return {}

    def load(self, folder: Path) -> None:
        named = {}
        for path in folder.glob("*.safetensors"):
            named |= load_file(path)
        assert not self.model.load_state_dict(named, strict=False).unexpected_keys

    @torch.no_grad()
    def generate(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        row, log_probs = torch.tensor([ids]), []  # [1, T]
        scores = None
        if "prompt_logprobs" in params:
            every = self.model(row).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
            values = every.gather(-1, row[0, 1:, None])[:, 0].tolist()  # [T - 1]
            pairs = zip(ids[1:], values, strict=True)
            scores = [None, *({str(k): {"logprob": v}} for k, v in pairs)]
        else:
            self.sampled.append(tuple(ids))
        draw = torch.Generator().manual_seed(params.get("seed") or 0)
        ended = False
        while len(log_probs) < params["max_tokens"] and not ended:
            logits = self.model(row).logits[0, -1] / (params["temperature"] or 1)  # [V]
            new = torch.multinomial(logits.softmax(-1), 1, generator=draw)  # [1]
            log_probs.append({"logprob": logits.log_softmax(-1)[new].item()})
            row = torch.cat([row, new[None]], dim=1)  # [1, T + 1]
            ended = new.item() in params.get("stop_token_ids", ())
        choice = {
            "token_ids": row[0, len(ids) :].tolist(),
            "logprobs": {"content": log_probs},
            "finish_reason": "stop" if ended else "length",
        }
        return {"choices": [choice], "prompt_logprobs": scores}


@contextmanager
def serve(folder: Path) -> Iterator[FakeVLLM]:
    """Serve the model in a folder from threads of this process."""
    state = FakeVLLM(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size, path = int(self.headers.get("Content-Length") or 0), self.path.partition("?")[0]
            body = json.loads(self.rfile.read(size) or "{}")
            if path == state.dies_at:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.connection.close()
                return
            with state.lock:
                content = json.dumps(state.answer(path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # of connections that were reset
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
