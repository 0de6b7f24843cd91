"""vLLM as a server of its own, `vllm serve` on this or another node: token in, token out, by HTTP.

Weights go by a folder that both sides see, which the server reloads: vLLM's /collective_rpc of
reload_weights, between /pause and /resume; by NCCL where both have GPUs and the server was started
for that (`Transfer`). Of a LoRA the adapter alone, where the server was started with
--enable-lora. What is asked of it beside OpenAI's protocol needs VLLM_SERVER_DEV_MODE=1 and
--enable-scale-out. No vllm is needed on this side, but for NCCL.
Left out on purpose: a temperature of scores.
"""

import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import httpx
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.lora import base_weights, write_adapter
from policies.wrappers.vllm_engine import Reply, VLLMEngine

VERSIONS = ("0.32.", "0.33.")  # as in pyproject.toml; what is asked here has no promise of vLLM
AT_ONCE = 256  # requests on their way; the server has a queue of its own
KNOCKS, PATIENCE = 20, 600  # seconds for a connection; for an answer or a hand-over by NCCL
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve {model} --port {port} --dtype {dtype} --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)
# What a server needs beside that to take the adapter of a LoRA alone; else it gets it merged.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that it has kernels for
ADAPTERS = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora --max-lora-rank {rank}")
NCCL_OPTION = "--weight-transfer-config"


class Server:
    """A vLLM server at `url`, for several threads; its answers as they are."""

    def __init__(self, url: str) -> None:
        # A connection a request: one that is kept may be closed by the server at any time.
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
        patience = httpx.Timeout(PATIENCE, connect=KNOCKS)
        self.client = httpx.Client(base_url=url, timeout=patience, limits=limits, trust_env=False)
        self.url = url

    def __call__(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        """Return what the server answers; RuntimeError with its words, or that it is gone."""
        try:
            answer = self.client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            words = " ".join(answer.text.split())[:300]
            raise RuntimeError(f"{path}: {answer.status_code} {words}")
        return answer.json() if answer.content.startswith((b"{", b"[")) else None


class VLLMServer(VLLMEngine):
    """Sample and score by a server with the model in `folder`; both sides see `share`."""

    shared = True  # by all ranks, which meet at each hand-over
    transfer: Any = None  # what sends weights by NCCL, where the server was started for that

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        folder: Path,
        share: Path,
        dtype: str,
        adapter: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        self.server, self.share = Server(url.rstrip("/")), share
        host, port = self.server.client.base_url.host, self.server.client.base_url.port or 80
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
        if (found := str(self.dtype).removeprefix("torch.")) != dtype:
            self._refuse(f"--dtype {dtype}, got {found} (policy.vllm.dtype={found} is to want it)")
        if adapter is not None and takes:
            if takes["max_lora_rank"] < adapter.r:
                self._refuse(f"--max-lora-rank {adapter.r} at least, got {takes['max_lora_rank']}")
            self.adapter, self.under = adapter, partial(base_weights, model)
        backend = (settings.get("weight_transfer_config") or {}).get("backend")
        both = {str((settings.get("device_config") or {}).get("device")), model.device.type}
        if backend == "nccl" and both == {"cuda"} and find_spec("vllm"):
            self.transfer = Transfer(self._ask, host=host, port=port)
            self.about += ", weights by NCCL"
        self._ask("/resume")  # a run that was killed in a hand-over left it waiting
        self.pool = ThreadPoolExecutor(AT_ONCE)

    def _facts(self) -> tuple[str, dict[str, Any]]:
        """Return the server's version and what it was started with."""
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
            f"policy.vllm.url={self.server.url}: expected {wanted}; start it by: {self.start}"
        )

    def _ask(self, path: str, body: Any = None, **how: str) -> Any:
        """Return what the server answers while a run goes on."""
        try:
            return self.server(path, body, **how)
        except (ConnectionError, RuntimeError) as error:
            raise RuntimeError(
                f"the vLLM server at {self.server.url} failed: {error}; start it again by: "
                f"{self.start}, and go on with resume=<run folder>"
            ) from error

    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Let the server load new weights; of several ranks the first hands over for all."""
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        lora = [None if self.adapter is None else f"policy-{uuid4().hex}"]  # a new name, see there
        if ranks:
            torch.distributed.barrier()  # all have scored by the old ones
        if not ranks or torch.distributed.get_rank() == 0:
            shutil.rmtree(self.share, ignore_errors=True)
            self.share.mkdir(parents=True)
            try:
                self._hand_over(dict(named), self.share.absolute(), lora[0])
            finally:
                shutil.rmtree(self.share, ignore_errors=True)
        if ranks:
            torch.distributed.broadcast_object_list(lora)
        self.lora = lora[0]

    def _hand_over(self, weights: dict[str, Tensor], share: Path, lora: str | None) -> None:
        if lora is None:
            by_folder = partial(self._reload_from, share, weights)
            by_nccl = self.transfer and partial(self.transfer.send, weights)
            return self._while_it_waits(by_nccl or by_folder)
        if self.lora is None:  # the server may have served another run: once, what is under it
            self._hand_over(self.under(), share, None)
        write_adapter({k: t.contiguous() for k, t in weights.items()}, self.adapter, share)
        self._ask("/v1/load_lora_adapter", {"lora_name": lora, "lora_path": str(share)})
        if self.lora is not None:
            self._ask("/v1/unload_lora_adapter", {"lora_name": self.lora})

    def _reload_from(self, folder: Path, weights: dict[str, Tensor]) -> None:
        # A tied head too: without its name vLLM goes on with the old one.
        copies = {name: t.detach().cpu().clone().contiguous() for name, t in weights.items()}
        save_file(copies, folder / "model.safetensors")
        where = {"weights_path": str(folder)}
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": where})

    def _while_it_waits(self, work: Callable[[], None]) -> None:
        """Do something to the server's weights while it answers nobody."""
        self._ask("/pause?mode=wait")
        work()
        self._ask("/reset_prefix_cache")
        self._ask("/resume")

    def _asked(self, **fields: Any) -> Any:
        return fields

    def _run(self, rows: Sequence[Tensor], params: list[Any]) -> list[Reply]:
        return list(self.pool.map(self._one, zip(rows, params, strict=True)))

    def _one(self, asked: tuple[Tensor, dict[str, Any]]) -> Reply:
        row, params = asked
        body = {"token_ids": row.tolist(), "sampling_params": params}
        body |= {"model": self.lora} if self.lora else {}
        done = self._ask("/inference/v1/generate", body)
        (choice,) = done["choices"]
        told = (choice.get("logprobs") or {}).get("content") or ()
        prompt = (done.get("prompt_logprobs") or ())[1:]
        scores = [next(iter(entry.values()))["logprob"] for entry in prompt]
        ended = choice["finish_reason"] == "stop"
        return Reply(choice["token_ids"], [one["logprob"] for one in told], ended, scores)

    def _tempered(self, temperature: float) -> Any:
        if temperature != 1:
            raise ValueError(f"a vLLM server scores at temperature 1, got {temperature}")
        return super()._tempered(temperature)


class Transfer:
    """Send weights to the server that `ask` reaches, from a process on a GPU: vLLM's trainer side.

    The server was started with --weight-transfer-config '{"backend": "nccl"}'. Never run on a GPU;
    the probe in trainer/weight_sync.py checks what arrives.
    """

    def __init__(self, ask: Callable[..., Any], *, host: str, port: int) -> None:
        self.ask, self.server = ask, (host, port)
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.named: Mapping[str, Tensor] = {}
        self.engine: Any = None

    def send(self, named: Mapping[str, Tensor]) -> None:
        """Replace the weights of the server; RuntimeError if that fails or does not end."""
        self.named = named
        on_gpu = self.device.type == "cuda"  # a thread has a GPU of its own choice
        start = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
        work = ThreadPoolExecutor(1, initializer=start)
        try:
            work.submit(self._send).result(PATIENCE)
        except Exception as error:
            raise RuntimeError(
                f"weights did not reach the vLLM server by NCCL: {type(error).__name__}: {error}; "
                f"start it again without {NCCL_OPTION}"
            ) from error
        finally:
            work.shutdown(wait=False)

    def _send(self) -> None:
        from vllm.distributed.weight_transfer import nccl_engine  # pyright: ignore[reportMissingImports]

        if self.engine is None:
            make = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init
            self.engine = make(self.meeting(), client=self, source=self)
        self.engine.send_weights()

    def meeting(self) -> Any:
        """Return where the server's processes and this one, the first of them, meet."""
        from vllm.distributed.weight_transfer import nccl_engine  # pyright: ignore[reportMissingImports]

        with socket.create_connection(self.server, timeout=20) as way, socket.socket() as free:
            address = way.getsockname()[0]
            free.bind(("", 0))
            port = free.getsockname()[1]
        ranks = self.ask("/get_world_size", method="GET")["world_size"]
        return nccl_engine.NCCLTrainerInitInfo(
            master_address=address, master_port=port, world_size=ranks + 1, rank=0
        )

    # The source of the weights.

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each."""
        from vllm.distributed.weight_transfer import ParamMeta  # pyright: ignore[reportMissingImports]

        return [ParamMeta(name, w.dtype, tuple(w.shape)) for name, w in self.named.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.named.items():
            yield name, weight.detach().to(self.device).contiguous()

    # The client.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the server's processes come to the meeting."""
        self.ask("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Let them leave it."""
        self.ask("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Say that weights come."""
        self.ask("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Say which; the server answers when it has them."""
        self.ask("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Say that these were all."""
        self.ask("/finish_weight_update", {"weight_version": weight_version})
