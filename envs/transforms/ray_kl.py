"""The KL transforms in a Ray actor: one reference in memory for any number of environments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDictBase

from envs.transforms.kl import RetrieveKL
from envs.transforms.kl_reward import KLRewardTransform, check_call
from envs.transforms.log_probs import check_one
from envs.transforms.ray import RayTransform
from policies.specs import Composite

if TYPE_CHECKING:
    from policies.wrappers.wrapper import LLMWrapperBase


class RayRetrieveKL(RayTransform):
    """Share a `RetrieveKL`; its arguments, models or factories that make them in the actor.

    Factories are better: then no weights cross Ray. `gen_model="from_collector"` (the default
    unless there is a gen_model_factory) works as in `RetrieveKL`: the generation log-probs in the
    td are used, and where there are none the collector's policy scores, here, with the weights it
    has now; the actor holds the reference. `detach=False` is a ValueError.

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
        num_gpus: float | None = None,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if gen_model == "from_collector" and gen_model_factory is not None:
            gen_model = None
        check_one("gen", gen_model, gen_model_factory)
        check_one("ref", ref_model, ref_model_factory)
        _refuse_graph(kwargs)
        super().__init__(
            RetrieveKL,
            gen_model=gen_model,
            ref_model=ref_model,
            gen_model_factory=gen_model_factory,
            ref_model_factory=ref_model_factory,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device,
            actor_name=actor_name,
            **kwargs,
        )
        self.__dict__["_local"] = None
        if gen_model == "from_collector":
            # What scores the collector's policy: a RetrieveKL whose reference is elsewhere.
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
        return getattr(self._local, hook)(spec)  # only here is the collector known


class RayKLRewardTransform(RayTransform):
    """Share a `KLRewardTransform`; its arguments, a model or a factory that makes it in the actor.

    Deprecated, as that is: use `RayRetrieveKL`. A factory is better: then no weights cross Ray.
    `detach=False` is a ValueError.
    """

    def __init__(
        self,
        ref_model: LLMWrapperBase | None = None,
        *more: Any,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        device: torch.device | str | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_call(more)
        warnings.warn(
            "RayKLRewardTransform is deprecated; use RayRetrieveKL",
            DeprecationWarning,
            stacklevel=2,
        )
        check_one("ref", ref_model, ref_model_factory)
        _refuse_graph(kwargs)
        super().__init__(
            KLRewardTransform,
            ref_model=ref_model,
            ref_model_factory=ref_model_factory,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device,
            actor_name=actor_name,
            **kwargs,
        )


def _refuse_graph(kwargs: dict[str, Any]) -> None:
    if kwargs.get("detach") is False:
        raise ValueError("expected detach=True, got False: no gradient crosses Ray; go without it")
