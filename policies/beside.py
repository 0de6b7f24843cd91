"""The policy once more, in a process of its own: it samples with older weights while one learns.

The process has a copy of the model on the same device, and ids, log-probs and new weights cross a
pipe; chats, masks and environments stay here. With LoRA only the adapter crosses again. It ends
with the process that started it, however that ends.
Left out on purpose: several such processes, other machines (an engine served elsewhere is that).
"""

import ctypes
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.sampler import Sampled
from policies.scorer import Scorer
from policies.token_distribution import Scores
from policies.weights import weights_of
from policies.wrappers.transformers_wrapper import TransformersWrapper
from policies.wrappers.wrapper import LLMWrapperBase

ROOT = Path(__file__).parents[1]
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from policies.beside import serve; serve(int(sys.argv[1]), int(sys.argv[3]))"
)
# What makes a process a rank of the run; the one beside it is none.
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
RANK += ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "LEASH_PARENT", "LEASH_WORDS")


def process_beside(policy: TransformersWrapper) -> "PolicyBeside":
    """Return a generator with the policy's settings and a copy of its weights, in a new process.

    On a CPU the two share its threads until `close`.
    """
    return PolicyBeside.speaking_as(policy, SecondProcess(policy))


class PolicyBeside(LLMWrapperBase):
    """Generate with a model in a second process; see LLMWrapperBase for the arguments."""

    keeps_support = True
    tolerance = 1e-3  # nats: the same code on the same weights
    takes_trained = True  # it loads what training moves, of LoRA the adapter alone

    def _set_model(self, model: "SecondProcess") -> None:
        self.scorer = model

    @property
    def model(self) -> "SecondProcess":
        """Return the process, which has the model's configs as a language model does."""
        return self.scorer

    @property
    def device(self) -> torch.device:
        """Return where ids go in and come out: where the policy is."""
        return self.scorer.device

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, named as `weights_of` names what training moves."""
        self.scorer.load(dict(named))

    def close(self) -> None:
        """End the process."""
        self.scorer.close()

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        asked = {**self.generate_kwargs, "eos_token_id": sorted(self.stop_ids)}
        given = (prompts.cpu(), attention.cpu(), streams.cpu())
        drawn = self.scorer.ask("draw", asked, self.pad_token_id, *given)
        return Sampled(*(None if part is None else part.to(self.device) for part in drawn))


class SecondProcess:
    """A process that samples and scores with a copy of a policy's model.

    It stands where TransformersWrapper has its Scorer. One call at a time.
    """

    def __init__(self, policy: TransformersWrapper) -> None:
        all_threads = torch.get_num_threads()
        own = max(all_threads // 2, 1) if policy.device.type == "cpu" else all_threads
        self.config = policy.model.config
        self.generation_config = policy.model.generation_config
        self.device = policy.device
        self.pipe, far = Pipe()
        env = {name: value for name, value in os.environ.items() if name not in RANK}
        paths = json.dumps([str(ROOT), *(path or os.getcwd() for path in sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(far.fileno()), paths, str(os.getpid())],
            env=env | {"OMP_NUM_THREADS": str(own)},
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints is no output of ours
            start_new_session=True,  # a stop signal is for who asks it
        )
        far.close()
        self.close = weakref.finalize(self, _end, self.process, self.pipe, all_threads)
        if policy.device.type == "cpu":
            torch.set_num_threads(max(all_threads - own, 1))
        about = {"tokenizer": policy.tokenizer, "autocast": policy.scorer.autocast}
        skeleton, weights = _taken_apart(policy.model)
        self._send("model", about, skeleton, _shapes(weights), weights=weights)
        self._answer()

    def ask(self, call: str, *given: Any) -> Any:
        """Return what the process answers to a call; its errors are raised here."""
        self._send(call, *given)
        return self._answer()

    def load(self, named: dict[str, Tensor]) -> None:
        """Copy these weights into the model."""
        self._send("load", _shapes(named), weights=named)
        self._answer()

    def __call__(self, tokens: Tensor, attention_mask: Tensor) -> Scores:
        """Return aligned log-probs [B, T], as `Scorer` does."""
        return Scores(self.ask("score", tokens.cpu(), attention_mask.cpu()).to(tokens.device))

    def _send(self, call: str, *given: Any, weights: dict[str, Tensor] | None = None) -> None:
        try:
            self.pipe.send_bytes(pickle.dumps((call, given)))
            for weight in (weights or {}).values():
                self.pipe.send_bytes(_bytes_of(weight.detach().cpu()))
        except OSError:
            raise RuntimeError(self._last_words()) from None

    def _answer(self) -> Any:
        try:
            error, out = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError(self._last_words()) from None
        if error is not None:
            raise error
        return out

    def _last_words(self) -> str:
        """Say how the process ended; without it nothing is sampled."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.returncode
        end = "its pipe was closed" if code is None else f"exit code {code}"
        end = f"signal {signal.Signals(-code).name}" if code and code < 0 else end
        hint = ", for want of memory perhaps" if code == -signal.SIGKILL else ""
        return (
            f"the process that samples beside this one (trainer.overlap) died: {end}{hint}; go on "
            "with resume=<run folder>"
        )


class Served:
    """What the second process has, and the calls that it answers."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.about = pipe, dict[str, Any]()
        self.scorer: Any = None
        self.wrappers: dict[str, TransformersWrapper] = {}

    def model(self, about: dict[str, Any], skeleton: bytes, shapes: list[Any]) -> None:
        """Build the model from its structure; its weights follow on the pipe."""
        weights = {  # torch chooses its kernels by requires_grad too: to the bit, it is kept
            name: nn.Parameter(torch.empty(shape, dtype=kind, device=place), requires_grad=learnt)
            for name, shape, kind, place, learnt in shapes
        }
        self._receive(weights, shapes)
        network = _Unpickler(skeleton, weights).load().eval()
        self.scorer, self.about = Scorer(network, autocast=about["autocast"]), about

    @torch.no_grad()
    def load(self, shapes: list[Any]) -> None:
        """Copy weights that follow on the pipe into the model."""
        self._receive(weights_of(self.scorer).named(), shapes)

    def draw(self, asked: dict[str, Any], pad: int, *given: Tensor) -> tuple[Any, ...]:
        """Return the parts of what is `Sampled` for these generate_kwargs."""
        key = repr(asked)
        if key not in self.wrappers:
            kwargs = {**asked, "pad_token_id": pad}
            self.wrappers[key] = TransformersWrapper(
                self.scorer,
                tokenizer=self.about["tokenizer"],
                input_mode="tokens",
                generate_kwargs=kwargs,
            )
        wrapper = self.wrappers[key]
        prompts, attention, streams = given
        drawn = wrapper._draw(prompts.to(wrapper.device), attention.to(wrapper.device), streams)
        parts = (drawn.ids, drawn.log_probs, drawn.lengths, drawn.complete, drawn.support)
        return tuple(None if part is None else part.cpu() for part in parts)

    @torch.no_grad()
    def score(self, tokens: Tensor, attention: Tensor) -> Tensor:
        """Return the log-probs [B, T] of sequences at temperature 1."""
        device = next(self.scorer.parameters()).device
        return self.scorer(tokens.to(device), attention.to(device)).log_probs.cpu()

    def _receive(self, into: dict[str, Any], shapes: list[Any]) -> None:
        """Copy the weights on the pipe; all of them are read, also where one is not known."""
        strange = []
        for name, shape, kind, *_ in shapes:
            given = torch.frombuffer(bytearray(self.pipe.recv_bytes()), dtype=kind).view(shape)
            if name in into:
                into[name].detach().copy_(given)
            else:
                strange.append(name)
        if strange:
            raise ValueError(f"expected weights of this model, got {strange}")


def serve(pipe: int, owner: int) -> None:
    """Be the second process: answer calls until the pipe closes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; only Linux has it
    if os.getppid() != owner:
        return
    connection = Connection(pipe)
    served = Served(connection)
    with suppress(EOFError, ConnectionError):
        while True:
            call, given = pickle.loads(connection.recv_bytes())
            answer: tuple[Any, Any]
            try:
                answer = None, getattr(served, call)(*given)
            except (EOFError, ConnectionError):
                raise
            except Exception as error:
                answer = _portable(error), None
            connection.send_bytes(pickle.dumps(answer))


def _portable(error: Exception) -> Exception:
    """Return an error that crosses a pipe: itself, or its words."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class _Pickler(pickle.Pickler):
    """Pickle a model's structure; each weight is left out and named, a shared one once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.weights: dict[int, nn.Parameter] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Return the name of a weight."""
        if not isinstance(obj, nn.Parameter):
            return None
        self.weights.setdefault(id(obj), obj)
        return str([*self.weights].index(id(obj)))


class _Unpickler(pickle.Unpickler):
    """Put weights into the structure of a model."""

    def __init__(self, skeleton: bytes, weights: dict[str, nn.Parameter]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self.weights = weights

    def persistent_load(self, pid: Any) -> nn.Parameter:
        """Return the weight of a name."""
        return self.weights[pid]


def _taken_apart(model: nn.Module) -> tuple[bytes, dict[str, Tensor]]:
    """Return a model's structure without its weights, and them by their names in it."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.dump(model)
    return file.getvalue(), {str(i): w for i, w in enumerate(pickler.weights.values())}


def _shapes(named: dict[str, Tensor]) -> list[tuple[Any, ...]]:
    return [(k, list(w.shape), w.dtype, str(w.device), w.requires_grad) for k, w in named.items()]


def _bytes_of(weight: Tensor) -> memoryview:
    return memoryview(weight.contiguous().flatten().view(torch.uint8).numpy())


def _end(process: subprocess.Popen, pipe: Connection, threads: int) -> None:
    torch.set_num_threads(threads)  # they are this process's own again
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()
    pipe.close()
