"""Weights to a vLLM server on other GPUs by NCCL: vLLM's own weight transfer, the trainer's side.

A `Transfer` is what vLLM asks of a trainer: the source of the weights, and the client that tells
the server what comes. It needs vllm here too, and a server that was started for it:
--weight-transfer-config '{"backend": "nccl"}'. Written against vLLM 0.32 and checked on its CPU
build as far as that goes; never run on a GPU. Whatever arrives, the probe says (hand_over.py).
Left out on purpose: CUDA IPC, which makes the server unpickle what it is sent; in one process
weights go by reference.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PATIENCE = 600  # seconds for a hand-over: NCCL itself waits for ever
FLAG = "--weight-transfer-config"


class Transfer:
    """Send weights to the server that `ask` reaches, from a process on a GPU.

    host, port: of the server. It connects to the address that this machine has on the way there.
    """

    def __init__(self, ask: Callable[..., Any], *, host: str, port: int) -> None:
        self.ask, self.server = ask, (host, port)
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.named: Mapping[str, Tensor] = {}
        self.engine: Any = None

    def send(self, named: Mapping[str, Tensor]) -> None:
        """Replace the weights of the server; RuntimeError if that fails or does not end."""
        self.named = named
        index = torch.cuda.current_device() if self.device.type == "cuda" else None
        work = ThreadPoolExecutor(1, initializer=_on, initargs=(index,))
        try:
            work.submit(self._send).result(PATIENCE)
        except Exception as error:
            raise RuntimeError(
                f"weights did not reach the vLLM server by NCCL: {type(error).__name__}: {error}; "
                f"start it again without {FLAG}, they go by the run folder then"
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


def _on(index: int | None) -> None:
    if index is not None:  # a thread has a GPU of its own choice
        torch.cuda.set_device(index)
