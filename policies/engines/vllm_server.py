"""vLLM as a separate server, `vllm serve` on this or another node: token in, token out, by HTTP.

Weights go through a folder that both sides see and the server reloads (vLLM's /collective_rpc of
reload_weights, between /pause and /resume). With --enable-lora, the adapter of a LoRA is sent
alone. Requests beyond OpenAI's protocol need VLLM_SERVER_DEV_MODE=1 and --enable-scale-out. This
side does not need vllm.
Left out on purpose: a temperature of scores; weights by NCCL.
"""

import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import httpx
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.engines.vllm_engine import EngineResponse, VLLMEngine
from policies.models.lora import base_weights, write_adapter
from policies.models.weights import WeightStream

VERSIONS = ("0.32.", "0.33.")  # as in pyproject.toml; vLLM does not promise these calls
MAX_CONNECTIONS = 256  # concurrent requests; the server has its own queue
CONNECT_SECONDS = 20
REQUEST_SECONDS = 600  # for an answer
LONGEST = 6 * 3600  # seconds for a response, its time in the server's queue included
HEALTH_EVERY = 60  # seconds between questions about the health of a server that samples
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve {model} --port {port} --dtype {dtype} --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)
# Further words that let a server load the adapter alone; else leash sends merged weights.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM has kernels for
ADAPTERS = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora --max-lora-rank {rank}")


class Server:
    """Thread-safe client of the vLLM server at `url`; returns its answers unchanged."""

    def __init__(self, url: str) -> None:
        # One connection per request: the server may close a kept-alive one at any time.
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
        self.client = httpx.Client(base_url=url, limits=limits, trust_env=False)
        self.url = url

    def __call__(
        self, path: str, body: Any = None, *, method: str = "POST", timeout: float = REQUEST_SECONDS
    ) -> Any:
        """Return the server's answer; RuntimeError with its message, or ConnectionError.

        `timeout`: seconds to wait for the answer.
        """
        limit = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        try:
            answer = self.client.request(method, path, json=body, timeout=limit)
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            words = " ".join(answer.text.split())[:300]
            raise RuntimeError(f"{path}: {answer.status_code} {words}")
        return answer.json() if answer.content.startswith((b"{", b"[")) else None


class VLLMServer(VLLMEngine):
    """Sample and score by a server with the model in `folder`; both sides see `exchange`."""

    shared = True  # by all ranks, which synchronise at each transfer

    def __init__(
        self, url: str, model: Any, *, folder: Path, exchange: Path, dtype: str, adapter: Any = None
    ) -> None:
        nn.Module.__init__(self)
        self.server, self.exchange = Server(url.rstrip("/")), exchange
        port = self.server.client.base_url.port or 80
        self.start = SERVE.format(model=folder, port=port, dtype=dtype)
        if adapter is not None:
            rank = next((rank for rank in RANKS if rank >= adapter.r), adapter.r)
            self.start = f"{ADAPTERS[0]} {self.start} {ADAPTERS[1].format(rank=rank)}"
        version, settings = self._facts()
        about, takes = settings["model_config"], settings.get("lora_config")
        self._keep(
            folder=str(folder),
            dtype=getattr(torch, about["dtype"].removeprefix("torch.")),
            limit=about["max_model_len"],
            mode=about["logprobs_mode"],
            about=f"vLLM {version} at {url}",
            config=model.config,
            generation_config=model.generation_config,
        )
        if self.mode != "processed_logprobs":
            self._refuse(f"one with --logprobs-mode processed_logprobs, got {self.mode}")
        if (actual := str(self.dtype).removeprefix("torch.")) != dtype:
            self._refuse(f"--dtype {dtype}, got {actual} (or set policy.engine.dtype={actual})")
        if adapter is not None and takes:
            if takes["max_lora_rank"] < adapter.r:
                self._refuse(f"--max-lora-rank {adapter.r} at least, got {takes['max_lora_rank']}")
            self.adapter = adapter
            self.under = lambda: WeightStream(base_weights(model), model=model)
        self._ask("/resume")  # a run killed during a transfer leaves the server paused
        self.pool = ThreadPoolExecutor(MAX_CONNECTIONS)

    def _facts(self) -> tuple[str, dict[str, Any]]:
        """Return the server's version and settings."""
        try:
            version = str((self.server("/version", method="GET") or {}).get("version"))
            if not version.startswith(VERSIONS):
                self._refuse(f"vLLM {'x or '.join(VERSIONS)}x, got {version}")
            started = self.server("/server_info?config_format=json", method="GET")
            return version, started["vllm_config"]
        except (ConnectionError, RuntimeError) as error:
            self._refuse(f"a vLLM server with VLLM_SERVER_DEV_MODE=1, got {error}")

    def _refuse(self, wanted: str) -> NoReturn:
        raise ValueError(
            f"policy.engine.url={self.server.url}: expected {wanted}; start it by: {self.start}"
        )

    def _ask(self, path: str, body: Any = None, **how: Any) -> Any:
        """Return the server's answer during a run; RuntimeError with a remedy if it fails."""
        try:
            return self.server(path, body, **how)
        except (ConnectionError, RuntimeError) as error:
            raise RuntimeError(
                f"the vLLM server at {self.server.url} failed: {error}; start it again by: "
                f"{self.start}, and go on with resume=<run folder>"
            ) from error

    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Send new weights to the server; with several ranks, rank 0 sends them."""
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        lora = [None if self.adapter is None else f"policy-{uuid4().hex}"]  # see _take_adapter
        weights = named if isinstance(named, WeightStream) else WeightStream(dict(named))
        streams = [(lora[0], weights)]
        if self.adapter is not None and self.lora is None:
            # The server may hold another run's base weights: send them once.
            streams.insert(0, (None, self.under()))
        if ranks:
            torch.distributed.barrier()  # all ranks have scored with the old weights
        if not ranks or torch.distributed.get_rank() == 0:
            shutil.rmtree(self.exchange, ignore_errors=True)
            self.exchange.mkdir(parents=True)
            try:
                for name, stream in streams:
                    self._send_weights(stream, self.exchange.absolute(), name)
            finally:
                shutil.rmtree(self.exchange, ignore_errors=True)
        else:
            for _, stream in streams:
                deque(stream, maxlen=0)  # takes part in gathering
        if ranks:
            torch.distributed.broadcast_object_list(lora)
        self.lora = lora[0]

    def _send_weights(self, weights: WeightStream, exchange: Path, lora: str | None) -> None:
        if lora is None:
            weights.narrow(self.dtype)
            self._reload_from(exchange, weights)
            return
        write_adapter({k: t.contiguous() for k, t in weights}, self.adapter, exchange)
        self._ask("/v1/load_lora_adapter", {"lora_name": lora, "lora_path": str(exchange)})
        if self.lora is not None:
            self._ask("/v1/unload_lora_adapter", {"lora_name": self.lora})

    def _reload_from(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write weights into the folder, and let the server read them while it is paused."""
        self._ask("/pause?mode=wait")
        # Include a tied head: without its name vLLM keeps the old one.
        for number, (name, weight) in enumerate(weights):  # a file each: one weight in memory
            save_file({name: weight.cpu().contiguous()}, folder / f"{number:06}.safetensors")
        where = {"weights_path": str(folder)}
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        self._ask("/reset_prefix_cache")
        self._ask("/resume")

    def _params(self, **fields: Any) -> Any:
        return fields

    def _run(self, rows: Sequence[Tensor], params: list[Any]) -> list[EngineResponse]:
        requests = [self.pool.submit(self._one, pair) for pair in zip(rows, params, strict=True)]
        waiting = set(requests)
        try:
            while waiting:  # a request waits in the server's queue for any time
                done, waiting = wait(waiting, HEALTH_EVERY, return_when=FIRST_EXCEPTION)
                for request in done:
                    request.result()  # raises its error
                if waiting:
                    self._ask("/health", method="GET")
        except BaseException:  # the threads are joined at the end of the process
            for request in waiting:
                request.cancel()
            self.server.client.close()
            raise
        return [request.result() for request in requests]

    def _one(self, request: tuple[Tensor, dict[str, Any]]) -> EngineResponse:
        row, params = request
        body = {"token_ids": row.tolist(), "sampling_params": params}
        body |= {"model": self.lora} if self.lora else {}
        done = self._ask("/inference/v1/generate", body, timeout=LONGEST)
        (choice,) = done["choices"]
        log_probs = (choice.get("logprobs") or {}).get("content") or ()
        prompt = (done.get("prompt_logprobs") or ())[1:]
        scores = [next(iter(entry.values()))["logprob"] for entry in prompt]
        ended = choice["finish_reason"] == "stop"
        return EngineResponse(
            choice["token_ids"], [one["logprob"] for one in log_probs], ended, scores
        )

    def _tempered(self, temperature: float) -> Any:
        if temperature != 1:
            raise ValueError(f"a vLLM server scores at temperature 1, got {temperature}")
        return super()._tempered(temperature)
