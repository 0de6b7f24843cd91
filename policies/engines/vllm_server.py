"""vLLM as separate servers, `vllm serve` on this or other nodes: token in, token out, by HTTP.

Weights are written into a folder that all sides see, and each server reloads them (vLLM's
/collective_rpc of reload_weights, between /pause and /resume). With --enable-lora only the adapter
of a LoRA is sent. Requests beyond OpenAI's protocol need VLLM_SERVER_DEV_MODE=1 and
--enable-scale-out. This side does not need vllm. Not supported: scores at another temperature than
1, because vLLM has none for prompts; weights by NCCL, which need a process group with the servers.
"""

import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
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
MAX_REQUESTS = 256  # requests at a time to a server, which has its own queue
CONNECT_SECONDS = 20
REQUEST_SECONDS = 600  # time-out of a request
LONGEST = 6 * 3600  # seconds for a response, including its time in the server's queue
HEALTH_EVERY = 60  # seconds between health checks of a server that samples
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve {model} --port {{port}} --dtype {dtype} --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)
# More arguments that let a server load an adapter; otherwise leash sends merged weights.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM has kernels for
ADAPTERS = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora --max-lora-rank {rank}")


class Server:
    """Thread-safe client of the vLLM server at `url`; `start`: a shell command that starts it."""

    def __init__(self, url: str, start: str) -> None:
        # One connection per request: the server may close a kept-alive one at any time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.Client(base_url=url, limits=limits, trust_env=False)
        self.url, self.start = url, start.replace("{port}", str(self.client.base_url.port or 80))
        self.pool = ThreadPoolExecutor(MAX_REQUESTS)

    def __call__(
        self, path: str, body: Any = None, *, method: str = "POST", timeout: float = REQUEST_SECONDS
    ) -> Any:
        """Return the server's reply unchanged; `timeout`: seconds to wait for it.

        Raise RuntimeError with the server's message, or ConnectionError.
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

    def ask(self, path: str, body: Any = None, **how: Any) -> Any:
        """Return the server's reply during a run; raise ConnectionError with a remedy."""
        try:
            return self(path, body, **how)
        except (ConnectionError, RuntimeError) as error:
            raise ConnectionError(
                f"the vLLM server at {self.url} failed: {error}; start it again by: "
                f"{self.start}, and go on with resume=<run folder>"
            ) from error

    def facts(self, dtype: str) -> tuple[str, dict[str, Any]]:
        """Return version and settings; raise ValueError unless it can sample in this dtype."""
        try:
            version = str((self("/version", method="GET") or {}).get("version"))
            if not version.startswith(VERSIONS):
                self.refuse(f"vLLM {'x or '.join(VERSIONS)}x, got {version}")
            settings = self("/server_info?config_format=json", method="GET")["vllm_config"]
        except (ConnectionError, RuntimeError) as error:
            self.refuse(f"a vLLM server with VLLM_SERVER_DEV_MODE=1, got {error}")
        about = settings["model_config"]
        if (mode := about["logprobs_mode"]) != "processed_logprobs":
            self.refuse(f"one with --logprobs-mode processed_logprobs, got {mode}")
        if (actual := about["dtype"].removeprefix("torch.")) != dtype:
            self.refuse(f"--dtype {dtype}, got {actual} (or set policy.engine.dtype={actual})")
        return version, settings

    def refuse(self, wanted: str) -> NoReturn:
        """Raise ValueError with the command that starts a server as it is expected."""
        raise ValueError(
            f"policy.engine.url={self.url}: expected {wanted}; start it by: {self.start}"
        )


class VLLMServer(VLLMEngine):
    """Sample and score by servers with the model in `folder`; all sides see `exchange`.

    Each server has all weights and gets an equal block of the rows, so that the responses to a
    prompt share its cached prefix.
    """

    shared = True  # all ranks use it, so they synchronise at each transfer

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        *,
        folder: Path,
        exchange: Path,
        dtype: str,
        adapter: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        self.exchange = exchange
        start = SERVE.format(model=folder, dtype=dtype)
        if adapter is not None:
            rank = next((rank for rank in RANKS if rank >= adapter.r), adapter.r)
            start = f"{ADAPTERS[0]} {start} {ADAPTERS[1].format(rank=rank)}"
        self.servers = [Server(url.rstrip("/"), start) for url in urls]
        facts = [server.facts(dtype) for server in self.servers]
        every = [settings for _, settings in facts]
        self._keep(
            folder=str(folder),
            dtype=getattr(torch, dtype),
            limit=min(settings["model_config"]["max_model_len"] for settings in every),
            mode="processed_logprobs",
            about=f"vLLM {facts[0][0]} at {', '.join(urls)}",
            config=model.config,
            generation_config=model.generation_config,
        )
        if adapter is not None and all(settings.get("lora_config") for settings in every):
            for server, settings in zip(self.servers, every, strict=True):
                if (most := settings["lora_config"]["max_lora_rank"]) < adapter.r:
                    server.refuse(f"--max-lora-rank {adapter.r} at least, got {most}")
            self.adapter = adapter
            self.under = lambda: WeightStream(base_weights(model), model=model)
        self.group = None  # process group in which ranks wait for rank 0, which sends the weights
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            longest = timedelta(seconds=LONGEST)
            self.group = torch.distributed.new_group(backend="gloo", timeout=longest)
        self._ask("/resume")  # a run killed during a transfer leaves a server paused

    def _ask(self, path: str, body: Any = None, **how: Any) -> None:
        """Send a request to all servers at the same time; errors as in `Server.ask`."""
        for answer in [s.pool.submit(s.ask, path, body, **how) for s in self.servers]:
            answer.result()

    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Send new weights to the servers; with several ranks, rank 0 sends them."""
        ranks = self.group is not None
        lora = [None if self.adapter is None else f"policy-{uuid4().hex}"]  # see _take_adapter
        weights = named if isinstance(named, WeightStream) else WeightStream(dict(named))
        streams = [(lora[0], weights)]
        if self.adapter is not None and self.lora is None:
            # A server may hold another run's base weights: send them once.
            streams.insert(0, (None, self.under()))
        if ranks:
            torch.distributed.barrier(self.group)  # all ranks have scored with the old weights
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
                deque(stream, maxlen=0)  # take part in gathering
        if ranks:
            torch.distributed.broadcast_object_list(lora, group=self.group)
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
        """Write weights into the folder, and let the servers read them while they are paused."""
        self._ask("/pause?mode=wait")
        # Include a tied head: without its name vLLM keeps the old one.
        for number, (name, weight) in enumerate(weights):  # a file per weight, one in memory
            save_file({name: weight.cpu().contiguous()}, folder / f"{number:06}.safetensors")
        where = {"weights_path": str(folder)}
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        self._ask("/reset_prefix_cache")
        self._ask("/resume")

    def _params(self, **fields: Any) -> Any:
        return fields

    def _run(self, rows: Sequence[Tensor], params: list[Any]) -> list[EngineResponse]:
        requests = []
        for number, pair in enumerate(zip(rows, params, strict=True)):
            server = self.servers[number * len(self.servers) // len(rows)]
            requests.append(server.pool.submit(self._one, server, *pair))
        waiting = set(requests)
        try:
            while waiting:  # a request may wait in a server's queue for a long time
                done, waiting = wait(waiting, HEALTH_EVERY, return_when=FIRST_EXCEPTION)
                for request in done:
                    request.result()  # raises its error
                for server in self.servers if waiting else ():
                    server.ask("/health", method="GET")
        except BaseException:  # the threads are joined at the end of the process
            for request in waiting:
                request.cancel()
            for server in self.servers:
                server.client.close()
            raise
        return [request.result() for request in requests]

    def _one(self, server: Server, row: Tensor, params: dict[str, Any]) -> EngineResponse:
        body = {"token_ids": row.tolist(), "sampling_params": params}
        body |= {"model": self.lora} if self.lora else {}
        done = server.ask("/inference/v1/generate", body, timeout=LONGEST)
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
