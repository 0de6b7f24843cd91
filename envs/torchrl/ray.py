"""Share one transform in a Ray actor among many environments: its models are in memory once.

Tensordicts are sent to the actor on the CPU without a graph; the result is a new one on the device
of the input. Only this file imports Ray (`pip install -e '.[ray]'`). Not supported: gradients,
which Ray cannot send; changes of the shared transform, because other environments use it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDictBase

from envs.torchrl.hooks import SpecHooks
from envs.torchrl.kl import RetrieveKL
from envs.torchrl.kl_reward import KLRewardTransform
from envs.torchrl.log_probs import check_one
from envs.transforms.transform import Compose, Transform
from policies.optional_packages import EXTRAS
from policies.torchrl.outputs import input_device
from policies.torchrl.specs import Composite

if TYPE_CHECKING:
    from policies.torchrl.wrapper import LLMWrapperBase

NAMESPACE = "leash"  # Ray finds a name only in one namespace, by default one per process
REMEDY = "make the transform again, a new actor comes with it"


class RayTransform(SpecHooks):
    """Run a transform in a Ray actor, shared by every RayTransform of the same `actor_name`.

    `make(**kwargs)`, a class or any function, builds the transform once in the actor. Functions of
    the main script are pickled, functions of a module are imported there (PYTHONPATH). It has
    `num_cpus` (default 1; also its threads) and `num_gpus` (default 0); the transform and its
    inputs move to `device` there. An actor with a name lives until `close()` or the end of Ray; an
    actor without a name dies with its only user. Raise ValueError if users of one name pass
    different arguments (models, factories and other objects are not compared).

    Ray starts if it is not running: `ray.init()` joins the cluster of RAY_ADDRESS or `ray start`,
    or starts one on this machine. Environments in several processes share an actor only inside one
    cluster. Called on a td without "next" it returns a new one; other transforms write in place.
    The shared transform has no `container` or `parent`. Raise RuntimeError if the actor is dead,
    ValueError for `detach=False`.

        shared = RayTransform(MyTransform, factor=2, actor_name="mine")
        env = TransformedEnv(env, shared)
    """

    def __init__(
        self,
        make: Callable[..., Transform],
        *,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("detach") is False:
            raise ValueError("expected detach=True, got False: no gradient crosses Ray")
        super().__init__()
        ray = start_ray()
        resources = {"num_cpus": 1 if num_cpus is None else num_cpus, "num_gpus": num_gpus}
        self.actor_name = actor_name
        arguments = {**resources, "device": device and str(device), **kwargs}
        self._settings = {"make": getattr(make, "__qualname__", repr(make))}
        self._settings |= {k: repr(v) for k, v in arguments.items() if _plain(v)}
        options = {"name": actor_name, "get_if_exists": True, "lifetime": "detached"}
        named = {**options, "namespace": NAMESPACE} if actor_name else {}
        self._actor = ray.remote(_Host).options(**resources, **named).remote()
        self.sent_bytes = 0  # bytes sent to build the transform: many for models, few for factories
        actual = self._ask("get_settings")
        if actual is None:
            actual = self._make(partial(make, **kwargs), device)
        if actual != self._settings:
            raise ValueError(
                f"actor {actor_name!r} was made with other arguments: expected {actual}, got "
                f"{self._settings}; use the same ones or another actor_name"
            )
        self.in_keys, self.out_keys, self._inverts = self._ask("facts")

    def _make(self, make: Callable[[], Transform], device: Any) -> dict[str, str]:
        buffer = io.BytesIO()
        # torch.save, because the CPU can load weights of any device from it.
        torch.save(make, buffer, pickle_module=start_ray().cloudpickle)
        self.sent_bytes = buffer.tell()
        try:
            return self._ask("make", buffer.getvalue(), self._settings, device)
        except Exception:
            self.close()  # frees the actor's name
            raise

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        if not ray.is_initialized():
            raise RuntimeError(f"Ray was shut down, and with it the actor of {self!r}; {REMEDY}")
        try:
            return ray.get(getattr(self._actor, method).remote(*args))
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RuntimeError(f"the actor of {self!r} is dead ({reason}); {REMEDY}") from error

    def close(self) -> None:
        """End the actor, for all its users."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)

    def _run(self, hook: str, *tds: TensorDictBase | None) -> TensorDictBase:
        """Call a hook of the shared transform on tds; return the result on the first td's device.

        "next" is not sent: it is already the last of the tds.
        """
        first, last = next(td for td in tds if td is not None), tds[-1]
        packed = (None if td is None else _packed(td.exclude("next")) for td in tds)
        out = self._ask("run", hook, *packed).to(input_device(first))
        return out.clear_device_() if last is None or last.device is None else out

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._run("_step", tensordict, next_td)

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        return self._run("_reset", tensordict, td_reset)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._run("_inv_call", tensordict) if self._inverts else tensordict

    def _through(self, hook: str, spec: Composite) -> Composite:
        return self._ask("spec", hook, spec)

    def __repr__(self) -> str:
        state = self.__dict__  # works without the actor and during __init__
        settings = {"actor_name": repr(state.get("actor_name")), **state.get("_settings", {})}
        shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k != "make")
        return f"{type(self).__name__}({shown})"


class RayRetrieveKL(RayTransform):
    """Share a `RetrieveKL`; takes its arguments, models or factories that run in the actor.

    Prefer factories: then no weights cross Ray. `gen_model="from_collector"` (the default without
    a gen_model_factory) works as in `RetrieveKL`: it uses the generation log-probs in the td;
    without them the collector's policy scores in this process with its current weights. The actor
    holds the reference.

    >>> RayRetrieveKL(gen_model=None)
    Traceback (most recent call last):
        ...
    ValueError: Must provide exactly one of 'gen_model' or 'gen_model_factory'.
    """

    def __init__(
        self,
        gen_model: LLMWrapperBase | Literal["from_collector"] | None = "from_collector",
        ref_model: LLMWrapperBase | None = None,
        *,
        gen_model_factory: Callable[[], LLMWrapperBase] | None = None,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_one("gen", gen_model, gen_model_factory)
        check_one("ref", ref_model, ref_model_factory)
        models = {"gen_model": gen_model, "ref_model": ref_model}
        models |= {"gen_model_factory": gen_model_factory, "ref_model_factory": ref_model_factory}
        actor = {"num_cpus": num_cpus, "num_gpus": num_gpus, "actor_name": actor_name}
        super().__init__(RetrieveKL, device=device, **actor, **models, **kwargs)
        self.__dict__["_local"] = None
        if gen_model == "from_collector" and gen_model_factory is None:
            # A RetrieveKL that scores the collector's policy; its reference is in the actor.
            names = ("in_keys", "input_mode", "pad_output", "log_probs_key")
            facts = dict(zip(names, self._ask("read", "ref_model", names), strict=True))
            ref = SimpleNamespace(generate=False, **facts)
            self.__dict__["_local"] = RetrieveKL(ref_model=ref, **kwargs)
            self._local._hold(self)

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        if self._local is not None:
            next_td = self._local.with_generation(tensordict, next_td)
        return super()._step(tensordict, next_td)

    def _through(self, hook: str, spec: Composite) -> Composite:
        if self._local is None:
            return super()._through(hook, spec)
        return getattr(self._local, hook)(spec)  # only this process knows the collector


class RayKLRewardTransform(RayTransform):
    """Share a `KLRewardTransform`; arguments as there, a model or a factory that runs in the actor.

    Deprecated like it: use `RayRetrieveKL`. Prefer a factory: then no weights cross Ray.
    """

    def __init__(
        self,
        ref_model: LLMWrapperBase | None = None,
        *,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        warnings.warn(
            "RayKLRewardTransform is deprecated; use RayRetrieveKL",
            DeprecationWarning,
            stacklevel=2,
        )
        check_one("ref", ref_model, ref_model_factory)
        models = {"ref_model": ref_model, "ref_model_factory": ref_model_factory}
        actor = {"num_cpus": num_cpus, "num_gpus": num_gpus, "actor_name": actor_name}
        super().__init__(KLRewardTransform, device=device, **actor, **models, **kwargs)


RetrieveKL.ray_version = RayRetrieveKL
KLRewardTransform.ray_version = RayKLRewardTransform


class _Host:
    """The actor: one transform, built by its first user."""

    transform: Transform | None = None
    settings: dict[str, str] | None = None

    def get_settings(self) -> dict[str, str] | None:
        """Return the arguments of the transform, None before it is built."""
        return self.settings

    def make(self, pickled: bytes, settings: dict[str, str], device: Any) -> dict[str, str]:
        """Build the transform unless another user did; return its arguments."""
        if self.transform is None:
            load = torch.load(
                io.BytesIO(pickled), map_location="cpu", pickle_module=pickle, weights_only=False
            )
            transform, self.device = load(), device
            if device is not None:
                transform.to(device)
            self.transform, self.settings = transform, settings
        assert self.settings is not None
        return self.settings

    def facts(self) -> tuple[list, list, bool]:
        """Return the transform's in_keys and out_keys, and whether it has an inverse."""
        transform = self.transform
        assert transform is not None
        return transform.in_keys, transform.out_keys, _inverts(transform)

    def read(self, owner: str, names: tuple[str, ...]) -> list[Any]:
        """Return attributes of the transform's attribute `owner`."""
        return [getattr(getattr(self.transform, owner), name) for name in names]

    def spec(self, hook: str, spec: Composite) -> Composite:
        """Call a spec hook of the transform."""
        return getattr(self.transform, hook)(spec)

    def run(self, hook: str, *tds: TensorDictBase | None) -> TensorDictBase:
        """Call a hook of the transform on its device."""
        moved = (td if td is None or self.device is None else td.to(self.device) for td in tds)
        with torch.no_grad():
            return _packed(getattr(self.transform, hook)(*moved))


def start_ray() -> Any:
    """Return the ray module, connected to a cluster or to a new one on this machine."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(EXTRAS["ray"]) from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="warning")
    return ray


def _packed(td: TensorDictBase) -> TensorDictBase:
    """Return a td that can be sent: on the CPU, without graph and unused storage."""
    return td.detach().to("cpu").clone()


def _inverts(transform: Transform) -> bool:
    if isinstance(transform, Compose):
        return any(_inverts(part) for part in transform)
    return type(transform)._inv_call is not Transform._inv_call


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | tuple | list | dict)
